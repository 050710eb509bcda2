"""The columns of the report's table, as plain text: what the terminal and the notebook both show."""

from __future__ import annotations

import math
from collections.abc import Callable

from hessinit.present.grid import Column
from hessinit.present.words import format_estimate, format_number, format_ratio, printable, shorten
from hessinit.results.curvature_report import CurvatureReport, LayerCurvature
from hessinit.results.estimates import Estimate

COLOURS = {"vanishing": "blue", "flat": "cyan", "ok": "green", "sharp": "yellow", "exploding": "bold red"}


def build_columns(report: CurvatureReport, *, whole_names: bool = False) -> list[Column]:
    """Build the columns that have something to say about this report; long names are cut, or whole."""
    rows = (*report.layers, report.network)

    def column(
        heading: str, write: Callable[[LayerCurvature], str], importance: int, is_number: bool = True
    ) -> Column:
        return Column(heading, tuple(write(row) for row in rows), importance, is_number)

    def weight(row: LayerCurvature) -> str:
        return f"{row.parameters:,}" if row is report.network else str(row.shape)

    def is_bound(row: LayerCurvature) -> bool:
        return row is report.network and not report.network_measured

    def norm(row: LayerCurvature) -> str:
        return f"≥ {format_number(row.norm)}" if is_bound(row) else format_estimate(row.estimate)

    def ends(row: LayerCurvature) -> str:
        return "" if is_bound(row) else _write_ends(row)

    def name(row: LayerCurvature) -> str:
        names = [printable(name) for name in (row.name, *row.aliases)]
        return " = ".join(names if whole_names else map(shorten, names))

    columns = [
        column("layer", name, 9, is_number=False),
        column("weight", weight, 4, is_number=False),
        column("‖H‖", norm, 9),
    ]
    if any(row.indefinite for row in rows):
        columns.append(column("λmin … λmax", ends, 6))
    if any(row.approximation is not None for row in rows):
        columns.append(column("gap", _write_gap, 7))
    if any(row.spread is not None and len(row.spread.norms) > 1 for row in rows):
        columns.append(column("per batch", _write_spread, 5))
    if any(row.trace is not None for row in rows):
        columns.append(column("trace", lambda row: _write_optional(row.trace), 3))
    if any(row.frobenius is not None for row in rows):
        columns.append(column("‖H‖F", lambda row: _write_optional(row.frobenius), 2))
    # A bound has no verdict: above a norm that is ok there may be one that is not.
    verdicts = tuple("" if is_bound(row) else row.verdict for row in rows)
    columns.append(Column("verdict", verdicts, 8, is_number=False, styles=COLOURS))
    return columns


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
