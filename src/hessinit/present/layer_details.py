"""Describe what a report holds besides norms: spectra, Jacobian norms and bounds, diagnostics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from hessinit.present import document as doc
from hessinit.present import words as w
from hessinit.results.curvature_report import CurvatureReport, Diagnostics, Estimate, LayerCurvature


@dataclass(frozen=True)
class Remarkable:
    """From where on a diagnostic is worth a sentence.

    A unit that is dead initially may never learn: one in ten is worth a word. Saturated entries
    recover, slowly: one in four. A hundredfold over the depth is beyond what any scheme intends.
    """

    dead: float = 0.1
    saturated: float = 0.25
    uneven: float = 100.0


REMARKABLE = Remarkable()
UNREMARKABLE = (
    "No layer has 10 % dead units, 25 % saturated entries or activations 100 times another's."
)
MOST_CHARTS = 9  # of spectra on a page: those of the sharpest layers
DECADES = 1e-6  # of a density: what is below that fraction of its peak is noise of the estimate


def layer_chart(
    name: str,
    caption: str,
    description: str,
    series: Sequence[doc.Series],
    layers: Sequence[str],
    y_label: str = "curvature ‖H‖",
    **marks: Any,
) -> doc.LineChart:
    """Return a chart over the layers on a logarithmic axis, of the curves that have a number."""
    curves = [curve for curve in series if any(value is not None for value in curve.y)]
    return doc.LineChart(
        name, caption, description, curves, y_label, layers=layers, log_y=True, **marks
    )


def detail_sections(report: CurvatureReport) -> list[doc.Section]:
    """Return a section for each thing that was measured besides the norms."""
    return doc.filled(
        doc.Section("Spectrum", spectrum_charts(report)[:MOST_CHARTS], "spectrum"),
        doc.Section("Jacobian norms and bounds", _jacobian_blocks(report), "jacobians"),
        doc.Section("Activations and gradients", _diagnostics_blocks(report), "activations"),
    )


def conclude_details(report: CurvatureReport) -> Iterator[str]:
    """Return the sentences on bounds and diagnostics, where these were measured."""
    return filter(None, (_conclude_bounds(report), _conclude_diagnostics(report)))


def spectrum_charts(report: CurvatureReport) -> list[doc.LineChart]:
    """Return a chart "spectrum:<layer>" for each spectrum that was measured, the sharpest first."""
    rows = sorted(report.layers, key=lambda row: (not math.isnan(row.norm), -row.norm))
    shown = [row for row in (report.network, *rows) if row.density is not None or row.eigenvalues]
    return [_eigenvalue_chart(row) if row.density is None else _density_chart(row) for row in shown]


def _density_chart(row: LayerCurvature) -> doc.LineChart:
    density = row.density
    assert density is not None  # only those with one are drawn
    peak = max(density.values, default=1.0)
    values = [value if value > peak * DECADES else None for value in density.values]
    top = w.format_number(row.top_eigenvalue)
    bottom = w.format_number(row.bottom_eigenvalue)
    probes = w.count(density.probes, "random vector")
    return doc.LineChart(
        f"spectrum:{row.name}",
        f"Spectral density: {row.name}",
        f"Density of the eigenvalues, from {bottom} to {top}, estimated with {probes}.",
        [doc.Series("density", values, density.grid)],
        "density",
        "eigenvalue",
        log_y=True,
        rules=[doc.ReferenceLine(row.top_eigenvalue, f"largest {top}", "vermilion", upright=True)],
    )


def _eigenvalue_chart(row: LayerCurvature) -> doc.LineChart:
    values = [eigenvalue.value for eigenvalue in row.eigenvalues]
    details = [
        w.text_if(not eigenvalue.converged, "not converged") for eigenvalue in row.eigenvalues
    ]
    return doc.LineChart(
        f"spectrum:{row.name}",
        f"Largest eigenvalues: {row.name}",
        f"In order of size: {', '.join(map(w.format_number, values))}.",
        [doc.Series("eigenvalues", values, range(1, len(values) + 1), details=details)],
        "eigenvalue",
        "rank",
        log_y=min(values) > 0,
    )


def _jacobian_blocks(report: CurvatureReport) -> list[doc.Block]:
    if not any(layer.jacobians for layer in report):
        return []
    return [_jacobian_chart(report), _bounds_chart(report), _jacobian_table(report)]


def _jacobian_chart(report: CurvatureReport) -> doc.LineChart:
    series = []
    for name, color in (("forward", "orange"), ("backward", "purple")):
        means = w.map_known(_jacobians(report, name), lambda mean: mean.value, None)
        largest = _jacobians(report, f"{name}_largest")
        series.append(doc.Series(name, means, None, color, low=means, high=largest))
    return layer_chart(
        "jacobians",
        "Jacobian norms before and after each layer",
        "Norms of the Jacobian from the input to each layer (forward) and from there to the output "
        "(backward), means over the examples, bars up to the largest. Near 1 signals neither "
        "vanish nor explode.",
        series,
        report.names,
        y_label="‖Jacobian‖",
        rules=[doc.ReferenceLine(1.0, "1")],
    )


def _bounds_chart(report: CurvatureReport) -> doc.LineChart:
    norms = w.map_known(map(_gauss_newton, report), lambda norm: abs(norm.value), None)
    series = [
        doc.Series("paper's bound", _jacobians(report, "paper_bound"), color="vermilion"),
        doc.Series("rigorous bound", _jacobians(report, "rigorous_bound"), color="green"),
        doc.Series("Gauss-Newton ‖H‖", norms),
    ]
    description = f"Each layer's norm and the bounds on it. {_conclude_bounds(report)}".strip()
    return layer_chart("bounds", "‖H‖ and its bounds", description, series, report.names)


def _jacobian_table(report: CurvatureReport) -> doc.Table:
    columns = [w.name_column("layer", report.names)]
    for heading, values, importance in (
        ("forward", _jacobians(report, "forward"), 8),
        ("‖A‖", _jacobians(report, "activation"), 4),
        ("backward", _jacobians(report, "backward"), 8),
        ("‖H‖", map(_gauss_newton, report), 8),
        ("rigorous", _jacobians(report, "rigorous_bound"), 7),
        ("paper", _jacobians(report, "paper_bound"), 6),
    ):
        columns.append(doc.Column(heading, w.map_known(values, _write_bound, "–"), importance))
    reasons = [reason or "" for reason in _jacobians(report, "reason")]
    caption = (
        "Jacobian norms from the input to the layer (forward), of its activation (‖A‖) and from "
        "there to the output (backward), means over the examples; then the Gauss-Newton ‖H‖ and "
        "its bounds (the paper's omits biases and f(0))."
    )
    columns.append(w.name_column("reason", reasons, 3, wraps=True))
    return doc.Table(caption, columns, show_caption=True)


def _conclude_bounds(report: CurvatureReport) -> str:
    ratios = []
    below = []
    for row in report:
        norm = _gauss_newton(row)
        bounds = row.jacobians
        if bounds is None or norm is None or not 0 < norm.value < math.inf:
            continue
        if bounds.rigorous_bound is not None and math.isfinite(bounds.rigorous_bound):
            ratios.append(bounds.rigorous_bound / norm.value)
        if bounds.paper_bound is not None and bounds.paper_bound < norm.value:
            below.append(w.call_layer(row.name))
    sentences = []
    if ratios:
        times = w.format_range(ratios)
        sentences.append(f"The rigorous bound is {times} times ‖H‖: no layer is above its bound.")
    if below:
        sentences.append(
            f"{w.join_names(below)} {w.inflect(below, 'is', 'are')} above the paper's bound, which "
            "omits biases and f(0)."
        )
    return " ".join(sentences)


def _jacobians(report: CurvatureReport, field: str) -> list[Any]:
    return w.map_known([row.jacobians for row in report], attrgetter(field), None)


def _gauss_newton(row: LayerCurvature) -> Estimate | None:
    """Return the norm that the bounds bound; None where only the exact one was measured."""
    return row.estimate if row.curvature == "gauss-newton" else row.approximation


def _write_bound(value: Estimate | float) -> str:
    return w.format_estimate(value) if isinstance(value, Estimate) else w.format_number(value)


def _diagnostics_blocks(report: CurvatureReport) -> list[doc.Block]:
    if not any(layer.diagnostics for layer in report):
        return []
    rows = [layer.diagnostics or Diagnostics() for layer in report]
    kinds = [row.activation for row in rows]
    series = [
        doc.Series("activation std", [row.activation_std for row in rows], details=kinds),
        doc.Series("gradient std", [row.gradient_std for row in rows], color="vermilion"),
    ]
    description = f"Over the layers, on a logarithmic axis. {_conclude_diagnostics(report)}"
    caption = "Standard deviation of activations and gradients"
    chart = layer_chart(
        "activations", caption, description, series, report.names, y_label="standard deviation"
    )
    columns = [w.name_column("layer", report.names), w.name_column("activation", kinds, 6)]
    for heading, field, importance, write in (
        ("mean", "activation_mean", 4, w.format_number),
        ("std", "activation_std", 8, w.format_number),
        ("std before", "preactivation_std", 3, w.format_number),
        ("grad mean", "gradient_mean", 1, w.format_number),
        ("grad std", "gradient_std", 8, w.format_number),
        ("dead", "dead", 7, w.format_percent),
        ("saturated", "saturated", 7, w.format_percent),
    ):
        cells = w.map_known([getattr(row, field) for row in rows], write, "")
        columns.append(doc.Column(heading, cells, importance))
    caption = (
        "Activations of each layer (mean, std; std before the activation), their loss gradient, "
        "and the fraction of dead units and saturated entries."
    )
    return [chart, doc.Table(caption, columns, show_caption=True)]


def _conclude_diagnostics(report: CurvatureReport) -> str:
    """Return what is wrong with activations and gradients, if anything; "" without diagnostics."""
    rows = [(w.call_layer(layer.name), layer.diagnostics or Diagnostics()) for layer in report]
    if all(row.activation_std is None for _, row in rows):
        return ""
    return " ".join(_name_problems(rows)) or UNREMARKABLE


def _name_problems(rows: Sequence[tuple[str, Diagnostics]]) -> Iterator[str]:
    if names := [name for name, row in rows if row.weight_gradient_norm == 0]:
        verb = w.inflect(names, "gets", "get")
        yield f"{w.join_names(names)} {verb} no gradient from this batch."
    for field, subject in (
        ("dead", "units are dead on this batch"),
        ("saturated", "entries are saturated"),
    ):
        fractions = {name: getattr(row, field) or 0.0 for name, row in rows}
        limit = getattr(REMARKABLE, field)
        if names := [name for name, fraction in fractions.items() if fraction >= limit]:
            most = w.format_percent(max(fractions.values()), 2)
            yield f"Up to {most} of the {subject} in {w.join_names(names)}."
    # Compare the layers that an activation follows; the others give logits or residuals.
    for noun, field in (("activations", "activation_std"), ("gradients", "gradient_std")):
        sizes = [(getattr(row, field), name) for name, row in rows if row.activation]
        finite = [(size, name) for size, name in sizes if size is not None and 0 < size < math.inf]
        if len(finite) > 1 and max(finite)[0] >= REMARKABLE.uneven * min(finite)[0]:
            least, smallest = min(finite)
            most, largest = max(finite)
            times = w.format_times(most / least)
            yield f"{largest}'s {noun} are {times} times as large as {smallest}'s."
