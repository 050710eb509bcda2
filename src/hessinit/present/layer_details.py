"""Describe what a report holds besides norms: spectra, Jacobian norms and bounds, diagnostics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from hessinit.present import document as doc
from hessinit.present.words import (
    begin_sentence,
    call_layer,
    count,
    format_estimate,
    format_number,
    format_times,
    join_names,
)
from hessinit.results.curvature_report import CurvatureReport, Diagnostics, JacobianBounds, LayerCurvature
from hessinit.results.estimates import Estimate

MOST_CHARTS = 9  # of single densities on a page: those of the sharpest layers
DECADES = 1e-6  # of a density: what is below that fraction of its peak is noise of the estimate
# A unit that is dead initially may never learn: one in ten is worth a word. Saturated entries recover,
# slowly: one in four. A hundredfold over the depth is beyond what any scheme intends.
DEAD_FROM, SATURATED_FROM, UNEVEN_FROM = 0.1, 0.25, 100.0
MOST_SENTENCES = 2


def detail_sections(report: CurvatureReport) -> list[doc.Section]:
    """Return a section for each thing that was measured besides the norms."""
    found = (_spectrum_section(report), _jacobians_section(report), _diagnostics_section(report))
    return [section for section in found if section is not None]


def conclude_details(report: CurvatureReport) -> list[str]:
    """Return a sentence on the bounds and one on activations and gradients, where they were measured."""
    return [one for one in (conclude_bounds(report), conclude_diagnostics(report)) if one]


def spectrum_charts(report: CurvatureReport) -> list[doc.LineChart]:
    """Return a chart "spectrum:<layer>" for each spectrum that was measured, the sharpest first."""
    shown = [row for row in _sharpest_first(report) if row.density is not None or row.eigenvalues]
    return [_density_chart(row) if row.density else _rank_chart([row], row.name) for row in shown]


def _sharpest_first(report: CurvatureReport) -> list[LayerCurvature]:
    """The network, then the layers; nan counts as the sharpest."""
    layers = sorted(report.layers, key=lambda row: -math.inf if math.isnan(row.norm) else -row.norm)
    return [report.network, *layers]


def _spectrum_section(report: CurvatureReport) -> doc.Section | None:
    rows = _sharpest_first(report)
    densities = [row for row in rows if row.density is not None]
    listed = [row for row in rows if row.eigenvalues]
    if not densities and not listed:
        return None
    blocks: list[doc.Block] = []
    if len(densities) > MOST_CHARTS:
        text = f"The densities of the sharpest of {len(densities)} layers; plot('spectrum:NAME') draws any."
        blocks.append(doc.Text(text, "small", page_only=True))
    blocks += [_density_chart(row) for row in densities[:MOST_CHARTS]]
    if listed:
        blocks.append(_rank_chart(listed[: MOST_CHARTS - 2]))
    return doc.Section("Spectrum", blocks, "spectrum")


def _density_chart(row: LayerCurvature) -> doc.LineChart:
    density = row.density
    assert density is not None  # only those with one are drawn
    peak = max(density.values, default=1.0)
    has_curve = 0 < peak < math.inf
    values = [value if value > peak * DECADES else None for value in density.values] if has_curve else []
    series = [doc.Series(name="density", x=density.grid if has_curve else [], y=values)]
    if row.eigenvalues:
        found = [one.value for one in row.eigenvalues]
        marks = {"color": "vermilion", "points": True, "symbol": "triangle"}
        name, floor = f"the {len(found)} largest in size", peak * DECADES if has_curve else 1.0
        series.append(doc.Series(name=name, x=found, y=[floor] * len(found), **marks))  # type: ignore[arg-type]
    top, bottom = format_number(row.top_eigenvalue), format_number(row.bottom_eigenvalue)
    return doc.LineChart(
        name=f"spectrum:{row.name}",
        caption=f"Spectral density: {row.name}",
        description=(
            f"Density of the eigenvalues of {row.name} on a logarithmic axis; the largest is {top}, the "
            f"smallest {bottom}. Estimated with {count(density.probes, 'random vector')}."
        ),
        series=series,
        x_label="eigenvalue",
        y_label="density",
        log_y=True,
        rules=[doc.Rule(row.top_eigenvalue, f"largest {top}", "vermilion", upright=True)],
    )


def _rank_chart(rows: Sequence[LayerCurvature], name: str = "") -> doc.LineChart:
    series = [
        doc.Series(
            name=row.name,
            x=list(range(1, len(row.eigenvalues) + 1)),
            y=[one.value for one in row.eigenvalues],
            color="blue" if name else f"ramp:{place / max(1, len(rows) - 1):.3g}",
            details=["" if one.converged else "not converged" for one in row.eigenvalues],
        )
        for place, row in enumerate(rows)
    ]
    first = [
        f"{row.name} {', '.join(format_number(one.value) for one in row.eigenvalues[:3])}" for row in rows
    ]
    return doc.LineChart(
        name=f"spectrum:{name}" if name else "eigenvalues",
        caption=f"Largest eigenvalues{f': {name}' if name else ''}",
        description=f"Eigenvalues in order of size, the first three of each: {'; '.join(first)}.",
        series=series,
        x_label="rank",
        y_label="eigenvalue",
        log_y=all(one.value > 0 for row in rows for one in row.eigenvalues),
    )


def _jacobians_section(report: CurvatureReport) -> doc.Section | None:
    found = [row.jacobians for row in report]
    if not any(found):
        return None
    caption = (
        "Jacobian norms from the input to the layer (forward), of its activation (‖A‖) and from there to the "
        "output (backward), means over the examples; then ‖H‖ and its bounds (the paper's omits biases and "
        "f(0))."
    )
    table = doc.Table(caption, _jacobian_columns(report))
    charts = [_jacobian_chart(report, found), _bounds_chart(report, found)]
    return doc.Section("Jacobian norms and bounds", [*charts, table], "jacobians")


def _jacobian_chart(report: CurvatureReport, found: Sequence[JacobianBounds | None]) -> doc.LineChart:
    series = []
    for name, color in (("forward", "orange"), ("backward", "purple")):
        means = [None if one is None else getattr(one, name) for one in found]
        largest = [None if one is None else getattr(one, f"{name}_largest") for one in found]
        values = [None if mean is None else mean.value for mean in means]
        details = ["" if value is None else f"largest {format_number(value)}" for value in largest]
        series.append(doc.Series(name=name, y=values, low=values, high=largest, color=color, details=details))
    return doc.LineChart(
        name="jacobians",
        caption="Jacobian norms before and after each layer",
        description=(
            "Norms of the Jacobian from the input to each layer (forward) and from there to the output "
            "(backward): means over the examples, bars up to the largest. Signals neither vanish nor explode "
            "near 1."
        ),
        layers=report.names,
        series=series,
        y_label="‖Jacobian‖",
        log_y=True,
        rules=[doc.Rule(1.0, "1")],
    )


def _bounds_chart(report: CurvatureReport, found: Sequence[JacobianBounds | None]) -> doc.LineChart:
    series = []
    for name, field, color in (
        ("paper's bound", "paper_bound", "vermilion"),
        ("rigorous bound", "rigorous_bound", "green"),
    ):
        values = [None if one is None else getattr(one, field) for one in found]
        if any(value is not None for value in values):
            series.append(doc.Series(name=name, y=values, color=color))
    # The bounds are on the Gauss-Newton norm; an exact one may be above them.
    norms: list[float | None] = [layer.norm for layer in report]
    if report.curvature != "gauss-newton":
        series.append(doc.Series(name="exact ‖H‖", y=norms, hollow=True))
        norms = [None if row.approximation is None else abs(row.approximation.value) for row in report]
    if report.curvature != "hessian":
        series.append(doc.Series(name="Gauss-Newton ‖H‖", y=norms))
    return doc.LineChart(
        name="bounds",
        caption="‖H‖ and its bounds",
        description=f"Each layer's norm and the bounds on it. {conclude_bounds(report)}".strip(),
        layers=report.names,
        series=series,
        y_label="curvature ‖H‖",
        log_y=True,
    )


def _jacobian_columns(report: CurvatureReport) -> list[doc.Column]:
    def column(heading: str, field: str, importance: int) -> doc.Column:
        found = [None if row.jacobians is None else getattr(row.jacobians, field) for row in report]
        return doc.Column(heading, list(map(_write, found)), importance)

    norms = [format_estimate(_gauss_newton(row) or row.estimate) for row in report]
    columns = [
        doc.Column("layer", report.names, 9, is_number=False),
        column("forward", "forward", 8),
        column("‖A‖", "activation", 4),
        column("backward", "backward", 8),
        doc.Column("‖H‖" if report.curvature != "both" else "‖H‖ (GN)", norms, 8),
        column("rigorous", "rigorous_bound", 7),
        column("paper", "paper_bound", 6),
    ]
    reasons = [row.jacobians.reason if row.jacobians else "" for row in report]
    if any(reasons):
        columns.append(doc.Column("reason", reasons, 3, is_number=False, wraps=True))
    return columns


def conclude_bounds(report: CurvatureReport) -> str:
    """Return how tight the bounds are; "" without them."""
    what = "‖H‖" if report.curvature == "gauss-newton" else "the Gauss-Newton ‖H‖"
    rows = [
        (call_layer(row.name), norm.value, row.jacobians)
        for row in report
        if row.jacobians is not None
        and (norm := _gauss_newton(row)) is not None
        and 0 < norm.value < math.inf
    ]
    sentences = []
    bounds = [(norm, found.rigorous_bound) for _, norm, found in rows if found.rigorous_bound is not None]
    tight = [bound / norm for norm, bound in bounds if math.isfinite(bound)]
    if tight:
        low, high = format_times(min(tight)), format_times(max(tight))
        times = low if low == high else f"{low} to {high}"
        sentences.append(f"The rigorous bound is {times} times {what}: no layer is above its bound.")
    below = [name for name, norm, found in rows if found.paper_bound is not None and found.paper_bound < norm]
    if below:
        names = begin_sentence(join_names(below))
        verb = "is" if len(below) == 1 else "are"
        sentences.append(f"{names} {verb} above the paper's bound, which omits biases and f(0).")
    return " ".join(sentences)


def _gauss_newton(row: LayerCurvature) -> Estimate | None:
    """The norm that the bounds bound; None where only the exact one was measured."""
    return row.estimate if row.curvature == "gauss-newton" else row.approximation


def _write(value: Estimate | float | None) -> str:
    if value is None:
        return "–"
    return format_estimate(value) if isinstance(value, Estimate) else format_number(value)


def _diagnostics_section(report: CurvatureReport) -> doc.Section | None:
    if not any(layer.diagnostics for layer in report):
        return None
    rows = [layer.diagnostics or Diagnostics() for layer in report]
    activation = doc.Series(
        name="activation std",
        y=[row.activation_std for row in rows],
        details=[row.activation for row in rows],
    )
    gradient = doc.Series(name="gradient std", y=[row.gradient_std for row in rows], color="vermilion")
    blocks: list[doc.Block] = [
        doc.LineChart(
            name="activations",
            caption="Standard deviation of activations and gradients",
            description=f"Over the layers, on a logarithmic axis. {conclude_diagnostics(report)}",
            layers=report.names,
            series=[activation, gradient],
            y_label="standard deviation",
            log_y=True,
        )
    ]
    idle = [
        doc.Series(
            name=name,
            y=[None if value is None else 100 * value for value in values],
            color=color,
            details=list(map(format_fraction, values)),
        )
        for name, color, values in (
            ("dead units", "orange", [row.dead for row in rows]),
            ("saturated entries", "sky", [row.saturated for row in rows]),
        )
        if any(value is not None for value in values)
    ]
    if idle:
        blocks.append(
            doc.LineChart(
                name="idle",
                caption="Dead units and saturated entries",
                description="Fraction of units that are 0 for every example, and of saturated entries.",
                layers=report.names,
                series=idle,
                y_label="%",
            )
        )
    columns = _diagnostics_columns(rows)
    if columns:
        caption = (
            "Activations of each layer (mean, std; std before the activation), their loss gradient, and the "
            "fraction of dead units and saturated entries."
        )
        blocks.append(doc.Table(caption, [doc.Column("layer", report.names, 9, is_number=False), *columns]))
    return doc.Section("Activations and gradients", blocks, "activations")


def _diagnostics_columns(rows: Sequence[Diagnostics]) -> list[doc.Column]:
    columns = [doc.Column("activation", [row.activation for row in rows], 6, is_number=False)]
    for heading, field, importance in (
        ("mean", "activation_mean", 4),
        ("std", "activation_std", 8),
        ("std before", "preactivation_std", 3),
        ("grad mean", "gradient_mean", 1),
        ("grad std", "gradient_std", 8),
        ("dead", "dead", 7),
        ("saturated", "saturated", 7),
    ):
        write = format_fraction if field in ("dead", "saturated") else _write_known
        columns.append(doc.Column(heading, [write(getattr(row, field)) for row in rows], importance))
    return [column for column in columns if any(column.cells)]


def _write_known(number: float | None) -> str:
    return "" if number is None else format_number(number)


def conclude_diagnostics(report: CurvatureReport) -> str:
    """Return what is wrong with activations and gradients, if anything; "" without diagnostics."""
    rows = [(call_layer(layer.name), layer.diagnostics or Diagnostics()) for layer in report]
    if all(row.activation_std is None for _, row in rows):
        return ""
    found = [
        *_name_without_gradient(rows),
        *_name_most(rows, "dead", DEAD_FROM),
        *_name_most(rows, "saturated", SATURATED_FROM),
        *_name_uneven(rows),
    ]
    if found:
        return " ".join(map(begin_sentence, found[:MOST_SENTENCES]))
    judged = [
        f"no layer has {format_fraction(limit)} {what}"
        for what, field, limit in (
            ("dead units", "dead", DEAD_FROM),
            ("saturated entries", "saturated", SATURATED_FROM),
        )
        if any(getattr(row, field) is not None for _, row in rows)
    ]
    spread = "standard deviations after activations stay within a factor of 100 over the depth"
    sentence = "; ".join([*judged, spread])
    return f"{sentence[0].upper()}{sentence[1:]}."


def _name_without_gradient(rows: Sequence[tuple[str, Diagnostics]]) -> Iterator[str]:
    names = [name for name, row in rows if row.weight_gradient_norm == 0]
    if names:
        verb, pronoun = ("gets", "it") if len(names) == 1 else ("get", "they")
        yield f"{join_names(names)} {verb} no gradient: {pronoun} cannot learn from this batch."


def _name_most(rows: Sequence[tuple[str, Diagnostics]], field: str, limit: float) -> Iterator[str]:
    found = [(value, name, row) for name, row in rows if (value := getattr(row, field)) is not None]
    value, name, row = max(found, default=(0.0, "", Diagnostics()), key=lambda one: one[0])
    if value < limit:
        return
    others = sum(other >= limit for other, _, _ in found) - 1
    more = f"; {format_fraction(limit)} or more in {count(others, 'other layer')}" if others else ""
    units = "ReLUs" if row.activation == "relu" else "units"
    what = f"{units} are dead on this batch" if field == "dead" else f"{row.activation} entries are saturated"
    yield f"{name}: {format_fraction(value)} of its {what}{more}."


def _name_uneven(rows: Sequence[tuple[str, Diagnostics]]) -> Iterator[str]:
    """Compare the layers that an activation follows; the others give logits or residuals."""
    for what, field in (("activations", "activation_std"), ("gradients", "gradient_std")):
        sizes = [(getattr(row, field), name) for name, row in rows if row.activation]
        finite = [(size, name) for size, name in sizes if size is not None and 0 < size < math.inf]
        if len(finite) < 2:
            continue
        (least, where_least), (most, where_most) = min(finite), max(finite)
        if most / least >= UNEVEN_FROM:
            yield f"{where_most}'s {what} are {format_times(most / least)} times as large as {where_least}'s."


def format_fraction(value: float | None) -> str:
    """Write a fraction in percent; what is neither nothing nor all is never rounded to it.

    >>> [format_fraction(value) for value in (0.0, 0.0004, 0.613, 0.9999, 1.0, None)]
    ['0 %', '<1 %', '61 %', '>99 %', '100 %', '']
    """
    if value is None:
        return ""
    if 0 < value < 0.005:
        return "<1 %"
    if 0.995 <= value < 1:
        return ">99 %"
    return f"{100 * value:.0f} %"
