"""The columns of the report's table, as plain text: what the terminal and the notebook both show."""

from __future__ import annotations

import math
from collections.abc import Callable

from hessinit.estimate import Estimate
from hessinit.present.grid import Column
from hessinit.present.numbers import format_estimate, format_number, format_ratio, printable
from hessinit.report.layer import LayerCurvature
from hessinit.report.report import CurvatureReport

COLOURS = {"vanishing": "blue", "gentle": "cyan", "ok": "green", "sharp": "yellow", "exploding": "bold red"}


def build_columns(report: CurvatureReport) -> list[Column]:
    """Build the columns that have something to say about this report."""
    rows = (*report.layers, report.network)

    def column(
        heading: str, write: Callable[[LayerCurvature], str], importance: int, is_number: bool = True
    ) -> Column:
        return Column(heading, tuple(write(row) for row in rows), importance, is_number)

    def weight(row: LayerCurvature) -> str:
        return f"{row.parameters:,}" if row is report.network else str(row.shape)

    columns = [
        column("layer", _write_name, 9, is_number=False),
        column("weight", weight, 4, is_number=False),
        column("‖H‖", lambda row: format_estimate(row.estimate), 9),
    ]
    if any(row.indefinite for row in rows):
        columns.append(column("λmin … λmax", _write_ends, 6))
    if any(row.approximation is not None for row in rows):
        columns.append(column("gap", _write_gap, 7))
    if any(row.spread is not None and len(row.spread.norms) > 1 for row in rows):
        columns.append(column("per batch", _write_spread, 5))
    if any(row.trace is not None for row in rows):
        columns.append(column("trace", lambda row: _write_optional(row.trace), 3))
    if any(row.frobenius is not None for row in rows):
        columns.append(column("‖H‖F", lambda row: _write_optional(row.frobenius), 2))
    columns.append(Column("verdict", tuple(row.verdict for row in rows), 8, is_number=False, styles=COLOURS))
    return columns


def _write_name(row: LayerCurvature) -> str:
    return " = ".join(printable(name) for name in (row.name, *row.aliases))


def _write_ends(row: LayerCurvature) -> str:
    # An end within its own error of 0 is a 0: of a matrix without full rank, say.
    ends = (row.bottom, row.top)
    return " … ".join(
        "0" if one.converged and abs(one.value) <= one.error else format_estimate(one) for one in ends
    )


def _write_gap(row: LayerCurvature) -> str:
    if row.gap is None or row.approximation is None:
        return ""
    return ("" if row.converged and row.approximation.converged else "~") + format_ratio(row.gap)


def _write_spread(row: LayerCurvature) -> str:
    if row.spread is None:
        return ""
    error = row.spread.standard_error
    mean = format_number(row.spread.mean)
    return mean if math.isnan(error) else f"{mean} ± {format_number(error, 2)}"


def _write_optional(estimate: Estimate | None) -> str:
    return "" if estimate is None else format_estimate(estimate)
