"""The second table of a report: what first-order users look at, a row for each layer."""

from __future__ import annotations

from collections.abc import Callable

from hessinit.present.grid import Column
from hessinit.present.words import format_number, printable
from hessinit.results.curvature_report import CurvatureReport, Diagnostics

_NOTHING = Diagnostics()


def diagnosed_layers(report: CurvatureReport) -> list[tuple[str, Diagnostics]]:
    """Every layer's name, as it is shown, and its diagnostics (empty ones where it has none)."""
    return [(printable(layer.name), layer.diagnostics or _NOTHING) for layer in report.layers]


def diagnostics_columns(report: CurvatureReport) -> list[Column]:
    """Build the columns that have something to say; none at all for a report without diagnostics."""
    rows = diagnosed_layers(report)
    if all(row == _NOTHING for _, row in rows):
        return []

    def column(
        heading: str, write: Callable[[Diagnostics], str], importance: int, is_number: bool = True
    ) -> Column:
        return Column(heading, tuple(write(row) for _, row in rows), importance, is_number)

    names = Column("layer", tuple(name for name, _ in rows), 9, is_number=False)
    columns = [
        column("activation", lambda row: printable(row.activation) or "–", 6, is_number=False),
        column("mean", lambda row: _write(row.activation_mean), 4),
        column("std", lambda row: _write(row.activation_std), 8),
        column("std before", lambda row: _write(row.preactivation_std) if row.activation else "", 3),
        column("grad mean", lambda row: _write(row.gradient_mean), 1),
        column("grad std", lambda row: _write(row.gradient_std), 8),
        column("dead", lambda row: format_share(row.dead), 7),
        column("saturated", lambda row: format_share(row.saturated), 7),
        column("corr", lambda row: _write(row.correlation), 2),
        column("dependent", lambda row: format_share(row.correlated), 5),
    ]
    return [names, *(one for one in columns if any(cell not in ("", "–") for cell in one.cells))]


def format_share(share: float | None) -> str:
    """Write a share in percent; what is neither nothing nor all is never rounded to it.

    >>> [format_share(share) for share in (0.0, 0.0004, 0.613, 0.9999, 1.0, None)]
    ['0 %', '<1 %', '61 %', '>99 %', '100 %', '']
    """
    if share is None:
        return ""
    if 0 < share < 0.005:
        return "<1 %"
    if 0.995 <= share < 1:
        return ">99 %"
    return f"{100 * share:.0f} %"


def _write(number: float | None) -> str:
    return "" if number is None else format_number(number)
