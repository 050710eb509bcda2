"""Documents as text: tables that fit the terminal, the verdict, and the texts below."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator, Sequence
from typing import Literal

from rich import table as rich_table
from rich.box import Box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.text import Text

from hessinit.present.document import Column, Document, Paragraph, Table
from hessinit.present.words import printable, shorten

WIDTH_WITHOUT_TERMINAL = 100
NARROWEST_NAMES = (
    16  # names fold, but other columns are left out before they fold narrower than this
)
NARROWEST_OF_ALL = 6  # and even important columns before they fold narrower than this
NARROWEST_WORDS = 24  # of a column of sentences
GUTTER = 3  # a space of padding on both sides and one between
STAYS = 8  # columns of this importance are left out only where the numbers would break without it
STYLES = {"best": "bold green", "diverged": "red", "yes": "green", "no": "bold red"}

# A rule under the headings and one between sections; no other lines.
RULES = Box("    \n    \n ── \n    \n ── \n    \n    \n    \n")


def render_text(document: Document, width: int | None = None, *, color: bool = False) -> str:
    """Return the document as text of at most `width` columns (None: the terminal's)."""
    page = io.StringIO()
    columns = width or terminal_width()
    system: Literal["standard"] | None = "standard" if color else None
    # In a notebook rich would display the text, not write it; without a height it may ignore the
    # width.
    console = Console(
        file=page,
        width=columns,
        height=25,
        color_system=system,
        force_terminal=color,
        force_jupyter=False,
    )
    for part in renderables(document, columns):
        console.print(part)
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines())


def terminal_width() -> int:
    """Return the terminal's width, or 100 without one."""
    return shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 24)).columns


def renderables(document: Document, width: int) -> Iterator[RenderableType]:
    """Yield what a rich console of that width prints: the answer, the tables, the verdict, the texts."""
    yield from [_text(document.answer, "bold"), Text()] if document.answer else []
    left_out: list[Column] = []
    tables = [
        one
        for one in document.blocks
        if isinstance(one, Table) and not one.page_only and one.columns
    ]
    for number, table in enumerate(tables):
        kept, dropped = fit_columns(table.shown, width)
        left_out += dropped
        yield from [Text()] * bool(number)
        yield from [_text(table.caption), Text()] * table.show_caption
        yield build_grid(kept, width, table.fixed)
    yield from [Text()] * bool(tables)
    yield from map(_text, document.verdict)
    for block in document.blocks:
        if isinstance(block, Paragraph) and not block.page_only:
            yield _text(block.text, "bold" if block.tone == "strong" else "")
    if left_out:
        yield _text(
            f"Left out of {width} columns: {', '.join(column.heading for column in left_out)}."
        )


def _text(text: str, style: str = "") -> Text:
    return Text(
        printable(text), style
    )  # never str: rich would read a layer called "[red]" as markup


def fit_columns(columns: Sequence[Column], width: int) -> tuple[list[Column], list[Column]]:
    """Leave out the least important columns until the rest fits; the first and one more always stay."""
    kept = list(columns)
    left_out = []
    while len(kept) > 2:
        least = min(reversed(kept[1:]), key=lambda column: column.importance)
        if (
            _table_width(kept, NARROWEST_NAMES if least.importance < STAYS else NARROWEST_OF_ALL)
            <= width
        ):
            break
        left_out.append(least)
        kept.remove(least)
    return kept, left_out


def build_grid(columns: Sequence[Column], width: int, fixed: int = 0) -> rich_table.Table:
    """Return the table for rich, with a rule before the last `fixed` rows."""
    table = rich_table.Table(box=RULES, show_edge=False, padding=(0, 1))
    widths = _least_widths(columns)
    spare = width - _table_width(columns)
    widths[0] = max(1, widths[0] + min(0, spare))
    for place, column in enumerate(columns):  # what is left goes to the names, then to sentences
        more = max(0, min(spare, _width(column) - widths[place]))
        widths[place], spare = widths[place] + more, spare - more
        justify: Literal["right", "left"] = "right" if column.is_number else "left"
        table.add_column(
            _text(column.heading), justify=justify, overflow="fold", width=widths[place]
        )
    rows = len(columns[0].cells)
    for position in range(rows):
        if fixed and position == rows - fixed:
            table.add_section()
        name = _text(shorten(columns[0].cells[position]))
        styles = [STYLES.get(one.marks[position], "") if one.marks else "" for one in columns[1:]]
        table.add_row(name, *map(_text, [column.cells[position] for column in columns[1:]], styles))
    return table


def _width(column: Column) -> int:
    texts = [printable(text) for text in column.cells]
    shown = texts if column.wraps else map(shorten, texts)
    return max(cell_len(text) for text in (printable(column.heading), *shown))


def _least_widths(columns: Sequence[Column], narrowest: int = NARROWEST_NAMES) -> list[int]:
    """Names fold and sentences wrap; numbers stay whole, also where they name the rows, as steps do."""
    widths = [min(_width(one), NARROWEST_WORDS) if one.wraps else _width(one) for one in columns]
    return widths if columns[0].is_number else [min(widths[0], narrowest), *widths[1:]]


def _table_width(columns: Sequence[Column], narrowest: int = NARROWEST_NAMES) -> int:
    return sum(_least_widths(columns, narrowest)) + GUTTER * len(columns) - 1
