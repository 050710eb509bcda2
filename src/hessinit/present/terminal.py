"""Documents as text: tables that fit the terminal, the verdict, and the texts below."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import table as rich_table
from rich.box import Box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.text import Text

from hessinit.present.document import Column, Document
from hessinit.present.words import printable, shorten, text_if


@dataclass(frozen=True)
class Widths:
    """The widths of tables, in columns of a terminal.

    Names fold, but other columns are left out before names fold narrower than `names`, and even
    those of the importance `stays` before names fold narrower than `least`.
    """

    without_terminal: int = 100
    names: int = 16
    least: int = 6
    words: int = 24  # the narrowest column of sentences
    gutter: int = 3  # a space of padding on both sides and one between
    stays: int = 8


WIDTHS = Widths()
MARK_STYLES = {"best": "bold green", "diverged": "red", "yes": "green", "no": "bold red"}

# A rule under the headings and one between sections; no other lines.
RULES = Box("    \n    \n ── \n    \n ── \n    \n    \n    \n")


def render_text(document: Document, width: int | None = None, *, color: bool = False) -> str:
    """Return the document as text of at most `width` columns (None: the terminal's)."""
    page = io.StringIO()
    columns = width or terminal_width()
    # In a notebook rich would display the text, not write it. Without a height it may ignore the
    # width.
    console = Console(
        file=page,
        width=columns,
        height=25,
        color_system="standard" if color else None,
        force_terminal=color,
        force_jupyter=False,
    )
    for part in renderables(document, columns):
        console.print(part)
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines())


def terminal_width() -> int:
    """Return the terminal's width, or 100 without one."""
    return shutil.get_terminal_size((WIDTHS.without_terminal, 24)).columns


def renderables(document: Document, width: int) -> Iterator[RenderableType]:
    """Yield what a rich console of that width prints: answer, tables, verdict and texts."""
    if document.answer:
        yield from (_text(document.answer, "bold"), Text())
    left_out: list[Column] = []
    for table in document.tables:
        columns, dropped = fit_columns(table.shown, width)
        left_out += dropped
        yield from [_text(table.caption), Text()] * table.show_caption
        yield from (build_grid(columns, width, table.fixed), Text())
    yield from map(_text, document.verdict)
    for paragraph in document.paragraphs:
        yield _text(paragraph.text, text_if(paragraph.tone == "strong", "bold"))
    if left_out:
        headings = ", ".join(column.heading for column in left_out)
        yield _text(f"Left out of {width} columns: {headings}.")


def _text(text: str, style: str = "") -> Text:
    # Never str: rich would read a layer called "[red]" as markup.
    return Text(printable(text), style)


def fit_columns(columns: Sequence[Column], width: int) -> tuple[list[Column], list[Column]]:
    """Leave out the least important columns until the others fit.

    The first column and one more stay in any case.
    """
    shown = list(columns)
    left_out = []
    while len(shown) > 2:
        least = min(reversed(shown[1:]), key=lambda column: column.importance)
        narrowest = WIDTHS.names if least.importance < WIDTHS.stays else WIDTHS.least
        if _table_width(shown, narrowest) <= width:
            break
        left_out.append(least)
        shown.remove(least)
    return shown, left_out


def build_grid(columns: Sequence[Column], width: int, fixed: int = 0) -> rich_table.Table:
    """Return the table for rich, with a rule before the last `fixed` rows."""
    table = rich_table.Table(box=RULES, show_edge=False, padding=(0, 1))
    widths = _least_widths(columns)
    spare = width - _table_width(columns)
    widths[0] = max(1, widths[0] + min(0, spare))
    for column, least_width in zip(columns, widths, strict=True):
        # What is spare goes to the names, then to sentences.
        extra = max(0, min(spare, _width(column) - least_width))
        spare -= extra
        table.add_column(
            _text(column.heading),
            justify="right" if column.is_number else "left",
            overflow="fold",
            width=least_width + extra,
        )
    rows = len(columns[0].cells)
    for position in range(rows):
        if fixed and position == rows - fixed:
            table.add_section()
        name = _text(shorten(columns[0].cells[position]))
        table.add_row(name, *(_cell(column, position) for column in columns[1:]))
    return table


def _cell(column: Column, position: int) -> Text:
    mark = column.marks[position] if column.marks else ""
    return _text(column.cells[position], MARK_STYLES.get(mark, ""))


def _width(column: Column) -> int:
    texts = [printable(text) for text in column.cells]
    shown = texts if column.wraps else map(shorten, texts)
    return max(cell_len(text) for text in (printable(column.heading), *shown))


def _least_widths(columns: Sequence[Column], narrowest: int = WIDTHS.names) -> list[int]:
    """Return the width below which each column would break.

    Names fold and sentences wrap; numbers stay whole, also where they name the rows, as steps do.
    """
    widths = [
        min(_width(column), WIDTHS.words) if column.wraps else _width(column) for column in columns
    ]
    if not columns[0].is_number:
        widths[0] = min(widths[0], narrowest)
    return widths


def _table_width(columns: Sequence[Column], narrowest: int = WIDTHS.names) -> int:
    return sum(_least_widths(columns, narrowest)) + WIDTHS.gutter * len(columns) - 1
