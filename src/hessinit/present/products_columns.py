"""A further table of a report: the Jacobian products of each layer, and the bounds beside the truth."""

from __future__ import annotations

import math
from collections.abc import Callable

from hessinit.present.grid import Column
from hessinit.present.words import (
    begin_sentence,
    call_layer,
    format_estimate,
    format_number,
    format_times,
    join_names,
    printable,
)
from hessinit.results.curvature_report import CurvatureReport, JacobianBounds, LayerCurvature
from hessinit.results.estimates import Estimate


def products_columns(report: CurvatureReport) -> list[Column]:
    """Build the columns; none at all for a report without Jacobian products."""
    if all(row.jacobians is None for row in report):
        return []

    def column(
        heading: str, write: Callable[[JacobianBounds], Estimate | float | None], importance: int
    ) -> Column:
        cells = ["" if row.jacobians is None else _write(write(row.jacobians)) for row in report]
        return Column(heading, tuple(cells), importance)

    norms = tuple(format_estimate(_gauss_newton(row) or row.estimate) for row in report)
    columns = [
        Column("layer", tuple(printable(row.name) for row in report), 9, is_number=False),
        column("forward", lambda found: found.forward, 8),
        column("‖A‖", lambda found: found.activation, 4),
        column("backward", lambda found: found.backward, 8),
        Column("‖H‖" if report.curvature != "both" else "‖H‖ (GN)", norms, 8),
        column("rigorous", lambda found: found.rigorous_bound, 7),
        column("paper", lambda found: found.paper_bound, 6),
        column("Lipschitz", lambda found: found.lipschitz_bound, 5),
    ]
    reasons = tuple(printable(row.jacobians.reason) if row.jacobians else "" for row in report)
    if any(reasons):
        columns.append(Column("why not", reasons, 3, is_number=False))
    return columns


def conclude_products(report: CurvatureReport) -> str:
    """Say what the bounds are worth here; "" without them."""
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
        sentences.append(f"The rigorous bound is {_range(tight)} times {what}: no layer is above its bound.")
    below = [name for name, norm, found in rows if found.paper_bound is not None and found.paper_bound < norm]
    if below:
        verb = "is" if len(below) == 1 else "are"
        names = begin_sentence(join_names(below))
        sentences.append(f"{names} {verb} above the paper's bound, which leaves out biases and f(0).")
    return " ".join(sentences)


def _gauss_newton(row: LayerCurvature) -> Estimate | None:
    """What the bounds bound: the Gauss-Newton norm; None where only the exact one was measured."""
    return row.estimate if row.curvature == "gauss-newton" else row.approximation


def _range(ratios: list[float]) -> str:
    low, high = format_times(min(ratios)), format_times(max(ratios))
    return low if low == high else f"{low} to {high}"


def _write(value: Estimate | float | None) -> str:
    if value is None:
        return "–"
    return format_estimate(value) if isinstance(value, Estimate) else format_number(value)
