"""Describe what a report holds besides norms: spectra, Jacobian norms and bounds, diagnostics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hessinit.present import document as doc
from hessinit.present import words as w
from hessinit.results.curvature_report import CurvatureReport, Diagnostics, LayerCurvature
from hessinit.results.estimates import Estimate

MOST_CHARTS = 9  # of spectra on a page: those of the sharpest layers
DECADES = 1e-6  # of a density: what is below that fraction of its peak is noise of the estimate
# A unit that is dead initially may never learn: one in ten is worth a word. Saturated entries recover,
# slowly: one in four. A hundredfold over the depth is beyond what any scheme intends.
DEAD_FROM, SATURATED_FROM, UNEVEN_FROM = 0.1, 0.25, 100.0
MOST_SENTENCES = 2
UNREMARKABLE = (
    "No layer has 10 % dead units or 25 % saturated entries, and standard deviations after activations stay "
    "within a factor of 100."
)


def layer_chart(
    name: str,
    caption: str,
    description: str,
    series: Sequence[doc.Series],
    layers: Sequence[str],
    **more: Any,
) -> doc.LineChart:
    """Return a chart of ‖H‖, or of another quantity, over the layers on a logarithmic axis."""
    usual = {"y_label": "curvature ‖H‖", "layers": layers, "log_y": True}
    known = [one for one in series if any(value is not None for value in one.y)]
    return doc.LineChart(name, caption, description, known, **{**usual, **more})


def detail_sections(report: CurvatureReport) -> list[doc.Section]:
    """Return a section for each thing that was measured besides the norms."""
    sections = []
    if spectra := spectrum_charts(report):
        text = f"The spectra of the sharpest of {len(spectra)} layers; plot('spectrum:NAME') draws any."
        many = [doc.Paragraph(text, "small", page_only=True)] if len(spectra) > MOST_CHARTS else []
        sections.append(doc.Section("Spectrum", [*many, *spectra[:MOST_CHARTS]], "spectrum"))
    if any(layer.jacobians for layer in report):
        blocks: list[doc.Block] = [_jacobian_chart(report), _bounds_chart(report), _jacobian_table(report)]
        sections.append(doc.Section("Jacobian norms and bounds", blocks, "jacobians"))
    if any(layer.diagnostics for layer in report):
        sections.append(doc.Section("Activations and gradients", _diagnostics_blocks(report), "activations"))
    return sections


def conclude_details(report: CurvatureReport) -> list[str]:
    """Return a sentence on the bounds and one on activations and gradients, where they were measured."""
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
    has_curve = 0 < peak < math.inf
    values = [value if value > peak * DECADES else None for value in density.values] if has_curve else []
    series = [doc.Series("density", values, density.grid if has_curve else [])]
    if found := [one.value for one in row.eigenvalues]:
        name, floor = f"the {len(found)} largest in size", [peak * DECADES if has_curve else 1.0] * len(found)
        series.append(doc.Series(name, floor, found, "vermilion", points=True, symbol="triangle"))
    top = w.format_number(row.top_eigenvalue)
    description = (
        f"Density of the eigenvalues of {row.name} on a logarithmic axis; the largest is {top}, the smallest "
        f"{w.format_number(row.bottom_eigenvalue)}. Estimated with "
        f"{w.count(density.probes, 'random vector')}."
    )
    largest = doc.ReferenceLine(row.top_eigenvalue, f"largest {top}", "vermilion", upright=True)
    names = f"spectrum:{row.name}", f"Spectral density: {row.name}", description
    return doc.LineChart(*names, series, "density", "eigenvalue", log_y=True, rules=[largest])


def _eigenvalue_chart(row: LayerCurvature) -> doc.LineChart:
    values = [one.value for one in row.eigenvalues]
    details = ["" if one.converged else "not converged" for one in row.eigenvalues]
    series = doc.Series("eigenvalues", values, range(1, len(values) + 1), details=details)
    description = f"In order of size: {', '.join(map(w.format_number, values))}."
    name, caption = f"spectrum:{row.name}", f"Largest eigenvalues: {row.name}"
    return doc.LineChart(name, caption, description, [series], "eigenvalue", "rank", log_y=min(values) > 0)


def _jacobian_chart(report: CurvatureReport) -> doc.LineChart:
    series = []
    for name, color in (("forward", "orange"), ("backward", "purple")):
        means = [None if mean is None else mean.value for mean in _jacobians(report, name)]
        largest = _jacobians(report, f"{name}_largest")
        details = ["" if value is None else f"largest {w.format_number(value)}" for value in largest]
        series.append(doc.Series(name, means, None, color, low=means, high=largest, details=details))
    description = (
        "Norms of the Jacobian from the input to each layer (forward) and from there to the output "
        "(backward), means over the examples, bars up to the largest. Near 1 signals neither vanish nor "
        "explode."
    )
    caption, more = "Jacobian norms before and after each layer", {"rules": [doc.ReferenceLine(1.0, "1")]}
    return layer_chart("jacobians", caption, description, series, report.names, y_label="‖Jacobian‖", **more)


def _bounds_chart(report: CurvatureReport) -> doc.LineChart:
    series = [
        doc.Series("paper's bound", _jacobians(report, "paper_bound"), color="vermilion"),
        doc.Series("rigorous bound", _jacobians(report, "rigorous_bound"), color="green"),
    ]
    # The bounds are on the Gauss-Newton norm; an exact one may be above them.
    norms: list[float | None] = [layer.norm for layer in report]
    if report.curvature != "gauss-newton":
        series.append(doc.Series("exact ‖H‖", norms, hollow=True))
        norms = [None if row.approximation is None else abs(row.approximation.value) for row in report]
    series.append(doc.Series("Gauss-Newton ‖H‖", norms))
    description = f"Each layer's norm and the bounds on it. {_conclude_bounds(report)}".strip()
    return layer_chart("bounds", "‖H‖ and its bounds", description, series, report.names)


def _jacobian_table(report: CurvatureReport) -> doc.Table:
    def column(heading: str, field: str, importance: int) -> doc.Column:
        return doc.Column(heading, list(map(_write, _jacobians(report, field))), importance)

    norms = [w.format_estimate(_gauss_newton(row) or row.estimate) for row in report]
    columns = [
        w.name_column("layer", report.names),
        column("forward", "forward", 8),
        column("‖A‖", "activation", 4),
        column("backward", "backward", 8),
        doc.Column("‖H‖" if report.curvature != "both" else "‖H‖ (GN)", norms, 8),
        column("rigorous", "rigorous_bound", 7),
        column("paper", "paper_bound", 6),
        w.name_column("reason", [one or "" for one in _jacobians(report, "reason")], 3, wraps=True),
    ]
    caption = (
        "Jacobian norms from the input to the layer (forward), of its activation (‖A‖) and from there to the "
        "output (backward), means over the examples; then ‖H‖ and its bounds (the paper's omits biases and "
        "f(0))."
    )
    return doc.Table(caption, [one for one in columns if any(one.cells)], show_caption=True)


def _conclude_bounds(report: CurvatureReport) -> str:
    what = "‖H‖" if report.curvature == "gauss-newton" else "the Gauss-Newton ‖H‖"
    sentences, tight, below = [], [], []
    for row in report:
        norm, found = _gauss_newton(row), row.jacobians
        if found is None or norm is None or not 0 < norm.value < math.inf:
            continue
        if found.rigorous_bound is not None and math.isfinite(found.rigorous_bound):
            tight.append(found.rigorous_bound / norm.value)
        if found.paper_bound is not None and found.paper_bound < norm.value:
            below.append(w.call_layer(row.name))
    if tight:
        times = " to ".join(dict.fromkeys(map(w.format_times, (min(tight), max(tight)))))
        sentences.append(f"The rigorous bound is {times} times {what}: no layer is above its bound.")
    if below:
        names, verb = w.begin_sentence(w.join_names(below)), w.agree(below, "is", "are")
        sentences.append(f"{names} {verb} above the paper's bound, which omits biases and f(0).")
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
    stds = [
        doc.Series(
            "activation std", [row.activation_std for row in rows], details=[r.activation for r in rows]
        ),
        doc.Series("gradient std", [row.gradient_std for row in rows], color="vermilion"),
    ]
    told = f"Over the layers, on a logarithmic axis. {_conclude_diagnostics(report)}"
    caption, axis = "Standard deviation of activations and gradients", {"y_label": "standard deviation"}
    sizes = layer_chart("activations", caption, told, stds, report.names, **axis)
    fractions = (("dead units", "dead", "orange"), ("saturated entries", "saturated", "sky"))
    percents = [
        doc.Series(
            name, [None if (x := getattr(row, field)) is None else 100 * x for row in rows], None, color
        )
        for name, field, color in fractions
    ]
    told = "Percentage of units that are 0 for every example, and of saturated entries."
    caption = "Dead units and saturated entries"
    idle = layer_chart("idle", caption, told, percents, report.names, y_label="%", log_y=False)
    caption = (
        "Activations of each layer (mean, std; std before the activation), their loss gradient, and the "
        "fraction of dead units and saturated entries."
    )
    columns = _diagnostics_columns(rows)
    table = doc.Table(caption, [w.name_column("layer", report.names), *columns], show_caption=True)
    return [sizes, *([idle] if idle.series else []), *([table] if columns else [])]


def _diagnostics_columns(rows: Sequence[Diagnostics]) -> list[doc.Column]:
    def column(
        heading: str, field: str, importance: int, write: Callable[[float], str] = _write
    ) -> doc.Column:
        found = [getattr(row, field) for row in rows]
        return doc.Column(heading, ["" if value is None else write(value) for value in found], importance)

    columns = [
        w.name_column("activation", [row.activation for row in rows], 6),
        column("mean", "activation_mean", 4),
        column("std", "activation_std", 8),
        column("std before", "preactivation_std", 3),
        column("grad mean", "gradient_mean", 1),
        column("grad std", "gradient_std", 8),
        column("dead", "dead", 7, format_fraction),
        column("saturated", "saturated", 7, format_fraction),
    ]
    return [one for one in columns if any(one.cells)]


def _conclude_diagnostics(report: CurvatureReport) -> str:
    """Return what is wrong with activations and gradients, if anything; "" without diagnostics."""
    rows = [(w.call_layer(layer.name), layer.diagnostics or Diagnostics()) for layer in report]
    if all(row.activation_std is None for _, row in rows):
        return ""
    said = [w.begin_sentence(sentence) for sentence in _name_problems(rows)]
    return " ".join(said[:MOST_SENTENCES]) or UNREMARKABLE


def _name_problems(rows: Sequence[tuple[str, Diagnostics]]) -> Iterator[str]:
    if names := [name for name, row in rows if row.weight_gradient_norm == 0]:
        verb, pronoun = w.agree(names, "gets", "get"), w.agree(names, "it", "they")
        yield f"{w.join_names(names)} {verb} no gradient: {pronoun} cannot learn from this batch."
    for field, limit in (("dead", DEAD_FROM), ("saturated", SATURATED_FROM)):
        found = [(value, name, row) for name, row in rows if (value := getattr(row, field)) is not None]
        value, name, row = max(found, default=(0.0, "", Diagnostics()), key=lambda one: one[0])
        if value >= limit:
            others = sum(other >= limit for other, _, _ in found) - 1
            more = f"; {format_fraction(limit)} or more in {w.count(others, 'other layer')}" if others else ""
            what = f"{row.activation} entries are saturated"
            if field == "dead":
                what = f"{'ReLUs' if row.activation == 'relu' else 'units'} are dead on this batch"
            yield f"{name}: {format_fraction(value)} of its {what}{more}."
    # Compare the layers that an activation follows; the others give logits or residuals.
    for what, field in (("activations", "activation_std"), ("gradients", "gradient_std")):
        sizes = [(getattr(row, field), name) for name, row in rows if row.activation]
        finite = [(size, name) for size, name in sizes if size is not None and 0 < size < math.inf]
        if len(finite) > 1 and max(finite)[0] >= UNEVEN_FROM * min(finite)[0]:
            (least, smallest), (most, largest) = min(finite), max(finite)
            times = w.format_times(most / least)
            yield f"{largest}'s {what} are {times} times as large as {smallest}'s."


def format_fraction(value: float) -> str:
    """Write a fraction in percent; what is neither nothing nor all is never rounded to it: "<1 %"."""
    if 0 < value < 0.005:
        return "<1 %"
    return ">99 %" if 0.995 <= value < 1 else f"{100 * value:.0f} %"
