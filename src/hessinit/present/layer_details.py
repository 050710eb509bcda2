"""Describe what a report holds besides norms: spectra, Jacobian norms and bounds, diagnostics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from hessinit.present import document as doc
from hessinit.present import words as w
from hessinit.results.curvature_report import CurvatureReport, Diagnostics, Estimate, LayerCurvature

MOST_CHARTS = 9  # of spectra on a page: those of the sharpest layers
DECADES = 1e-6  # of a density: what is below that fraction of its peak is noise of the estimate
# A unit that is dead initially may never learn: one in ten is worth a word. Saturated entries
# recover, slowly: one in four. A hundredfold over the depth is beyond what any scheme intends.
DEAD_FROM = 0.1
SATURATED_FROM = 0.25
UNEVEN_FROM = 100.0
UNREMARKABLE = (
    "No layer has 10 % dead units, 25 % saturated entries or activations 100 times another's."
)


def layer_chart(
    name: str,
    caption: str,
    told: str,
    series: Sequence[doc.Series],
    layers: Sequence[str],
    y_label: str = "curvature ‖H‖",
    **more: Any,
) -> doc.LineChart:
    """Return a chart of ‖H‖, or of another quantity, over the layers on a logarithmic axis."""
    known = [one for one in series if any(value is not None for value in one.y)]
    return doc.LineChart(name, caption, told, known, y_label, layers=layers, log_y=True, **more)


def detail_sections(report: CurvatureReport) -> list[doc.Section]:
    """Return a section for each thing that was measured besides the norms."""
    sections = []
    if spectra := spectrum_charts(report):
        sections.append(doc.Section("Spectrum", spectra[:MOST_CHARTS], "spectrum"))
    if any(layer.jacobians for layer in report):
        blocks: list[doc.Block] = [
            _jacobian_chart(report),
            _bounds_chart(report),
            _jacobian_table(report),
        ]
        sections.append(doc.Section("Jacobian norms and bounds", blocks, "jacobians"))
    if any(layer.diagnostics for layer in report):
        sections.append(
            doc.Section("Activations and gradients", _diagnostics_blocks(report), "activations")
        )
    return sections


def conclude_details(report: CurvatureReport) -> list[str]:
    return [one for one in (_conclude_bounds(report), _conclude_diagnostics(report)) if one]


def spectrum_charts(report: CurvatureReport) -> list[doc.LineChart]:
    """Return a chart "spectrum:<layer>" for each spectrum that was measured, the sharpest first."""
    rows = sorted(report.layers, key=lambda row: -math.inf if math.isnan(row.norm) else -row.norm)
    shown = [row for row in (report.network, *rows) if row.density is not None or row.eigenvalues]
    return [_eigenvalue_chart(row) if row.density is None else _density_chart(row) for row in shown]


def _density_chart(row: LayerCurvature) -> doc.LineChart:
    density = row.density
    assert density is not None  # only those with one are drawn
    peak = max(density.values, default=1.0)
    values = [value if value > peak * DECADES else None for value in density.values]
    series = [doc.Series("density", values, density.grid)]
    top = w.format_number(row.top_eigenvalue)
    bottom = w.format_number(row.bottom_eigenvalue)
    probes = w.count(density.probes, "random vector")
    description = f"Density of the eigenvalues, from {bottom} to {top}, estimated with {probes}."
    largest = doc.ReferenceLine(row.top_eigenvalue, f"largest {top}", "vermilion", upright=True)
    return doc.LineChart(
        f"spectrum:{row.name}",
        f"Spectral density: {row.name}",
        description,
        series,
        "density",
        "eigenvalue",
        log_y=True,
        rules=[largest],
    )


def _eigenvalue_chart(row: LayerCurvature) -> doc.LineChart:
    values = [one.value for one in row.eigenvalues]
    details = ["" if one.converged else "not converged" for one in row.eigenvalues]
    series = doc.Series("eigenvalues", values, range(1, len(values) + 1), details=details)
    description = f"In order of size: {', '.join(map(w.format_number, values))}."
    name = f"spectrum:{row.name}"
    caption = f"Largest eigenvalues: {row.name}"
    return doc.LineChart(
        name, caption, description, [series], "eigenvalue", "rank", log_y=min(values) > 0
    )


def _jacobian_chart(report: CurvatureReport) -> doc.LineChart:
    series = []
    for name, color in (("forward", "orange"), ("backward", "purple")):
        means = [None if mean is None else mean.value for mean in _jacobians(report, name)]
        largest = _jacobians(report, f"{name}_largest")
        series.append(doc.Series(name, means, None, color, low=means, high=largest))
    description = (
        "Norms of the Jacobian from the input to each layer (forward) and from there to the output "
        "(backward), means over the examples, bars up to the largest. Near 1 signals neither vanish nor "
        "explode."
    )
    return layer_chart(
        "jacobians",
        "Jacobian norms before and after each layer",
        description,
        series,
        report.names,
        y_label="‖Jacobian‖",
        rules=[doc.ReferenceLine(1.0, "1")],
    )


def _bounds_chart(report: CurvatureReport) -> doc.LineChart:
    norms = [None if (norm := _gauss_newton(row)) is None else abs(norm.value) for row in report]
    series = [
        doc.Series("paper's bound", _jacobians(report, "paper_bound"), color="vermilion"),
        doc.Series("rigorous bound", _jacobians(report, "rigorous_bound"), color="green"),
        doc.Series("Gauss-Newton ‖H‖", norms),
    ]
    description = f"Each layer's norm and the bounds on it. {_conclude_bounds(report)}".strip()
    return layer_chart("bounds", "‖H‖ and its bounds", description, series, report.names)


def _jacobian_table(report: CurvatureReport) -> doc.Table:
    columns = [w.name_column("layer", report.names)]
    for heading, field, importance in (
        ("forward", "forward", 8),
        ("‖A‖", "activation", 4),
        ("backward", "backward", 8),
        ("‖H‖", "", 8),
        ("rigorous", "rigorous_bound", 7),
        ("paper", "paper_bound", 6),
    ):
        found = _jacobians(report, field) if field else [_gauss_newton(row) for row in report]
        columns.append(doc.Column(heading, list(map(_write, found)), importance))
    reasons = [one or "" for one in _jacobians(report, "reason")]
    columns += [w.name_column("reason", reasons, 3, wraps=True)] if any(reasons) else []
    caption = (
        "Jacobian norms from the input to the layer (forward), of its activation (‖A‖) and from there to the "
        "output (backward), means over the examples; then the Gauss-Newton ‖H‖ and its bounds (the paper's "
        "omits biases and f(0))."
    )
    return doc.Table(caption, columns, show_caption=True)


def _conclude_bounds(report: CurvatureReport) -> str:
    sentences = []
    tight = []
    below = []
    for row in report:
        norm = _gauss_newton(row)
        found = row.jacobians
        if found is None or norm is None or not 0 < norm.value < math.inf:
            continue
        if found.rigorous_bound is not None and math.isfinite(found.rigorous_bound):
            tight.append(found.rigorous_bound / norm.value)
        if found.paper_bound is not None and found.paper_bound < norm.value:
            below.append(w.call_layer(row.name))
    if tight:
        times = w.format_range(tight)
        sentences.append(f"The rigorous bound is {times} times ‖H‖: no layer is above its bound.")
    if below:
        sentences.append(
            f"{w.join_names(below)} {w.agree(below, 'is', 'are')} above the paper's bound, which omits "
            "biases and f(0)."
        )
    return " ".join(sentences)


def _jacobians(report: CurvatureReport, field: str) -> list[Any]:
    return [None if row.jacobians is None else getattr(row.jacobians, field) for row in report]


def _gauss_newton(row: LayerCurvature) -> Estimate | None:
    """Return the norm that the bounds bound; None where only the exact one was measured."""
    return row.estimate if row.curvature == "gauss-newton" else row.approximation


def _write(value: Estimate | float | None) -> str:
    if value is None:
        return "–"
    return w.format_estimate(value) if isinstance(value, Estimate) else w.format_number(value)


def _diagnostics_blocks(report: CurvatureReport) -> list[doc.Block]:
    rows = [layer.diagnostics or Diagnostics() for layer in report]
    names = report.names
    kinds = [row.activation for row in rows]
    stds = [
        doc.Series("activation std", [row.activation_std for row in rows], details=kinds),
        doc.Series("gradient std", [row.gradient_std for row in rows], color="vermilion"),
    ]
    told = f"Over the layers, on a logarithmic axis. {_conclude_diagnostics(report)}"
    caption = "Standard deviation of activations and gradients"
    chart = layer_chart("activations", caption, told, stds, names, y_label="standard deviation")
    columns = [w.name_column("activation", kinds, 6)]
    for heading, field, importance in (
        ("mean", "activation_mean", 4),
        ("std", "activation_std", 8),
        ("std before", "preactivation_std", 3),
        ("grad mean", "gradient_mean", 1),
        ("grad std", "gradient_std", 8),
        ("dead", "dead", 7),
        ("saturated", "saturated", 7),
    ):
        write = w.format_percent if field in ("dead", "saturated") else w.format_number
        values = [getattr(row, field) for row in rows]
        cells = ["" if value is None else write(value) for value in values]
        columns.append(doc.Column(heading, cells, importance))
    known = [column for column in columns if any(column.cells)]
    caption = (
        "Activations of each layer (mean, std; std before the activation), their loss gradient, and the "
        "fraction of dead units and saturated entries."
    )
    return [chart, doc.Table(caption, [w.name_column("layer", names), *known], show_caption=True)]


def _conclude_diagnostics(report: CurvatureReport) -> str:
    """Return what is wrong with activations and gradients, if anything; "" without diagnostics."""
    rows = [(w.call_layer(layer.name), layer.diagnostics or Diagnostics()) for layer in report]
    if all(row.activation_std is None for _, row in rows):
        return ""
    return " ".join(_name_problems(rows)) or UNREMARKABLE


def _name_problems(rows: Sequence[tuple[str, Diagnostics]]) -> Iterator[str]:
    if names := [name for name, row in rows if row.weight_gradient_norm == 0]:
        yield f"{w.join_names(names)} {w.agree(names, 'gets', 'get')} no gradient from this batch."
    for field, limit, what in (
        ("dead", DEAD_FROM, "units are dead on this batch"),
        ("saturated", SATURATED_FROM, "entries are saturated"),
    ):
        if found := {
            name: value for name, row in rows if (value := getattr(row, field) or 0) >= limit
        }:
            most = w.format_percent(max(found.values()), 2)
            yield f"Up to {most} of the {what} in {w.join_names(list(found))}."
    # Compare the layers that an activation follows; the others give logits or residuals.
    for what, field in (("activations", "activation_std"), ("gradients", "gradient_std")):
        sizes = [(getattr(row, field), name) for name, row in rows if row.activation]
        finite = [(size, name) for size, name in sizes if size is not None and 0 < size < math.inf]
        if len(finite) > 1 and max(finite)[0] >= UNEVEN_FROM * min(finite)[0]:
            (least, smallest) = min(finite)
            (most, largest) = max(finite)
            times = w.format_times(most / least)
            yield f"{largest}'s {what} are {times} times as large as {smallest}'s."
