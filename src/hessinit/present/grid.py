"""Columns of text as a table that fits a terminal: what every table of the project is made with."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

WIDTH_WITHOUT_TERMINAL = 100
NARROWEST_NAMES = 16  # names fold, but other columns give way before they fold narrower than this
NARROWEST_OF_ALL = 6  # and even those that stay otherwise, before they fold narrower than this
GUTTER = 3  # a space of padding on both sides and one between
STAYS = 8  # a column of this importance is left out only where the numbers would break without it

# A rule under the headings and one between sections; no other lines.
RULES = Box("    \n    \n ── \n    \n ── \n    \n    \n    \n")


@dataclass(frozen=True)
class Column:
    """A heading and one cell for each row; the first column of a table holds the names, which may fold.

    `importance` decides what a narrow terminal leaves out: the lowest goes first, 8 and 9 only from one of
    some twenty columns. `styles` gives a colour to cells by their text.
    """

    heading: str
    cells: tuple[str, ...]
    importance: int
    is_number: bool = True
    styles: Mapping[str, str] = field(default_factory=dict)


def fit(columns: list[Column], width: int) -> tuple[list[Column], list[Column]]:
    """Leave out the least important columns until the rest fits; names fold, so they need little.

    The first column and one more stay in any case.
    """
    kept, left_out = list(columns), []

    def leave_out(least: Column) -> None:
        kept.remove(least)
        left_out.append(least)

    while _table_width(kept) > width and min(column.importance for column in kept) < STAYS:
        leave_out(min(kept, key=lambda column: column.importance))
    while len(kept) > 2 and _table_width(kept, NARROWEST_OF_ALL) > width:
        leave_out(min(reversed(kept[1:]), key=lambda column: column.importance))
    return kept, left_out


def build_grid(columns: list[Column], width: int, *, rule_before: int | None = None) -> Table:
    """The table, with a rule before the row of that number."""
    table = Table(box=RULES, show_edge=False, padding=(0, 1))
    name_width = max(1, width - _table_width(columns) + _least_width(columns[0], NARROWEST_NAMES))
    for column in columns:
        is_name = column is columns[0]
        table.add_column(
            Text(column.heading),
            justify="right" if column.is_number else "left",
            overflow="fold",
            width=min(name_width, _width(column)) if is_name else _width(column),
        )
    for position in range(len(columns[0].cells)):
        if position == rule_before:
            table.add_section()
        # Text, never str: rich would read a layer called "[red]" as markup.
        name = Text(_fold(columns[0].cells[position], name_width))
        table.add_row(name, *(_cell(column, position) for column in columns[1:]))
    return table


def render(parts: Iterable[RenderableType], width: int, *, color: bool = False) -> str:
    """The parts as text of at most `width` columns."""
    page = io.StringIO()
    system: Literal["standard"] | None = "standard" if color else None
    # In a notebook rich would display the text, not write it; without a height it may ignore the width.
    console = Console(
        file=page, width=width, height=25, color_system=system, force_terminal=color, force_jupyter=False
    )
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines())


def terminal_width() -> int:
    """The terminal's width, or 100 without one."""
    return shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 24)).columns


def name_left_out(left_out: list[Column], width: int) -> list[Text]:
    """The sentence that names what did not fit, if anything did not."""
    headings = ", ".join(column.heading for column in left_out)
    return [Text(f"Left out of {width} columns: {headings}.")] if left_out else []


def _cell(column: Column, position: int) -> Text:
    text = column.cells[position]
    return Text(text, style=column.styles.get(text, ""))


def _fold(name: str, width: int) -> str:
    """Break a long name after dots where possible, so that its parts stay whole."""
    lines = [""]
    for part in re.findall(r"[^.]*\.?", name):
        if cell_len(lines[-1]) + cell_len(part) > width and lines[-1]:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _width(column: Column) -> int:
    return max(cell_len(text) for text in (column.heading, *column.cells))


def _least_width(names: Column, narrowest: int) -> int:
    """Numbers do not fold, also where they come first, as steps do."""
    return _width(names) if names.is_number else min(_width(names), narrowest)


def _table_width(columns: list[Column], narrowest: int = NARROWEST_NAMES) -> int:
    widths = [_least_width(columns[0], narrowest), *map(_width, columns[1:])]
    return sum(widths) + GUTTER * len(columns) - 1
