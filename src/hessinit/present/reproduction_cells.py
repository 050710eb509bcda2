"""The cells of a reproduced table as text, column by column: what the terminal and the page both show."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hessinit.present.words import format_number, printable
from hessinit.results.reproduction import Cell, Table

# Words, and not ✓ and ✗: a terminal without Unicode would show the same question mark for both.
WITHIN = {True: "yes", False: "NO", None: ""}


@dataclass(frozen=True)
class CellText:
    """One place of a table; all empty where there is no cell."""

    paper: str = ""
    ours: str = ""
    error: str = ""
    unit: str = ""
    within: str = ""


@dataclass(frozen=True)
class ColumnText:
    """A column of the table: what it is called, what it has, and its cells in the order of the rows."""

    name: str
    has_paper: bool
    has_claim: bool
    cells: tuple[CellText, ...]


def column_texts(table: Table) -> list[ColumnText]:
    """Every column, top to bottom; a printed number or a claim in one cell makes room for them in all."""
    places: dict[tuple[str, str], Cell] = {}
    for cell in table.cells:
        places.setdefault((cell.row, cell.column), cell)
    columns = []
    for name in table.columns:
        found = [places.get((row, name)) for row in table.rows]
        texts = tuple(CellText() if cell is None else cell_text(cell) for cell in found)
        has_paper, has_claim = any(text.paper for text in texts), any(text.within for text in texts)
        columns.append(ColumnText(printable(name), has_paper, has_claim, texts))
    return columns


def cell_text(cell: Cell) -> CellText:
    """Three figures at most, and no more decimals than the error's first figure has; percentages whole.

    >>> text = cell_text(Cell(row="0.100", column="Hessian 1", ours=1.8523, error=0.0614, n=5, paper=2.34))
    >>> text.paper, text.ours, text.error
    ('2.34', '1.85', '0.06')
    """
    is_share = cell.unit == "%"
    ours, error = (_write_share if is_share else _write_mean)(cell.ours, cell.error)
    paper = "" if cell.paper is None else (f"{cell.paper:.0f} %" if is_share else format_number(cell.paper))
    return CellText(paper, ours, error, printable(cell.unit), WITHIN[cell.within])


def _write_share(ours: float, error: float | None) -> tuple[str, str]:
    whole = "" if error is None else f"{error:.0f}"
    return f"{ours:.0f}", _write_error(error) if whole == "0" else whole


def _write_mean(ours: float, error: float | None) -> tuple[str, str]:
    rounded = float(f"{ours:.2e}")
    if error is None or not math.isfinite(error) or not 1e-4 <= abs(rounded) < 1e5:
        return format_number(ours), _write_error(error)
    decimals = most = max(0, 2 - _magnitude(rounded))
    if error:
        decimals = min(most, max(0, -_magnitude(error), -_magnitude(rounded)))
    written = f"{error:.{decimals}f}"
    if not 0 < float(written) <= abs(rounded):  # it would show as 0, or have too many figures
        written = _write_error(error)
    # Rounded once: 0.9854 is 0.985 with three figures and 0.99 with two.
    return f"{ours if most else rounded:.{decimals}f}", written


def _write_error(error: float | None) -> str:
    return "" if error is None else format_number(error, 1)


def _magnitude(number: float) -> int:
    """The power of ten of the first figure, once rounded to it."""
    return math.floor(math.log10(abs(float(f"{number:.0e}"))))
