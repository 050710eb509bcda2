"""The report in a terminal: a table, a verdict, the cost. `python -m hessinit.present.table` shows one."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterator
from typing import Literal

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from hessinit.present.columns import Column, build_columns
from hessinit.present.numbers import printable
from hessinit.present.sentences import describe_cost
from hessinit.report.report import CurvatureReport

COLOURS = {"vanishing": "blue", "gentle": "cyan", "ok": "green", "sharp": "yellow", "exploding": "bold red"}
WIDTH_WITHOUT_TERMINAL = 100
NARROWEST_NAMES = 16  # names fold, but other columns give way before they fold narrower than this
GUTTER = 3  # a space of padding on both sides and one between

# A rule under the headings and one above the network; no other lines.
RULES = Box("    \n    \n ── \n    \n ── \n    \n    \n    \n")


def render_text(report: CurvatureReport, width: int | None = None, color: bool = False) -> str:
    """Write the report as text of at most `width` columns (None: the terminal's)."""
    columns = width or shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 24)).columns
    page = io.StringIO()
    system: Literal["standard"] | None = "standard" if color else None
    # In a notebook rich would display the text, not write it; without a height it may ignore the width.
    console = Console(
        file=page, width=columns, height=25, color_system=system, force_terminal=color, force_jupyter=False
    )
    console.print(*renderables(report, columns), sep="\n", end="")
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines())


def renderables(report: CurvatureReport, width: int) -> Iterator[RenderableType]:
    """Give the parts of the report to a rich console of that width: the table, then the sentences."""
    columns, left_out = _fit(build_columns(report), width)
    yield _build_table(columns, len(report), width)
    # Text, never str: rich would read a layer called "[red]" as markup.
    yield Text()
    yield Text(report.verdict)
    yield Text(describe_cost(report))
    for note in report.notes:
        yield Text(f"Note: {printable(note)}")
    if left_out:
        yield Text(f"Left out of {width} columns: {', '.join(column.heading for column in left_out)}.")


def _build_table(columns: list[Column], layers: int, width: int) -> Table:
    table = Table(box=RULES, show_edge=False, padding=(0, 1))
    name_width = max(1, width - _table_width(columns) + _least_width(columns[0]))
    for column in columns:
        is_name = column is columns[0]
        table.add_column(
            Text(column.heading),
            justify="right" if column.is_number else "left",
            overflow="fold",
            width=min(name_width, _width(column)) if is_name else _width(column),
        )
    for position in range(layers + 1):
        if position == layers:
            table.add_section()
        name, *cells = (column.cells[position] for column in columns)
        verdict = cells.pop()
        table.add_row(Text(_fold(name, name_width)), *map(Text, cells), Text(verdict, style=COLOURS[verdict]))
    return table


def _fold(name: str, width: int) -> str:
    """Break a long name after dots where possible, so that its parts stay whole."""
    lines = [""]
    for part in re.findall(r"[^.]*\.?", name):
        if cell_len(lines[-1]) + cell_len(part) > width and lines[-1]:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _fit(columns: list[Column], width: int) -> tuple[list[Column], list[Column]]:
    """Leave out the least important columns until the rest fits; names fold, so they need little."""
    kept, left_out = list(columns), []
    while _table_width(kept) > width and min(column.importance for column in kept) < 8:
        least = min(kept, key=lambda column: column.importance)
        kept.remove(least)
        left_out.append(least)
    return kept, left_out


def _width(column: Column) -> int:
    return max(cell_len(text) for text in (column.heading, *column.cells))


def _least_width(column: Column) -> int:
    return min(_width(column), NARROWEST_NAMES) if column.heading == "layer" else _width(column)


def _table_width(columns: list[Column]) -> int:
    return sum(map(_least_width, columns)) + GUTTER * len(columns) - 1


if __name__ == "__main__":
    from hessinit.present.example import example_report

    Console().print(example_report())
