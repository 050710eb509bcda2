"""A reproduction in a terminal. `python -m hessinit.present.reproduction_table` shows one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import table as rich_table
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.text import Text

from hessinit.present.grid import GUTTER, NARROWEST_NAMES, RULES, render, terminal_width
from hessinit.present.reproduction_cells import WITHIN, CellText, ColumnText, column_texts
from hessinit.present.reproduction_sentences import (
    conclude_claims,
    describe_claims,
    describe_counts,
    describe_setting,
    explain_numbers,
)
from hessinit.present.words import printable
from hessinit.results.reproduction import Reproduction, Table

QUESTION = "ok?"
STYLES = {WITHIN[True]: "green", WITHIN[False]: "bold red"}
APART = "  "


@dataclass(frozen=True)
class Group:
    """A column of the table as the terminal shows it: a heading of a line or two, and a text for each row."""

    heading: str
    cells: tuple[Text, ...]

    @property
    def width(self) -> int:
        return max(
            cell_len(line) for line in (*self.heading.split("\n"), *(cell.plain for cell in self.cells))
        )


def render_reproduction(reproduction: Reproduction, width: int | None = None, color: bool = False) -> str:
    """Write the reproduction as text of at most `width` columns (None: the terminal's)."""
    columns = width or terminal_width()
    return render(print_reproduction(reproduction, columns), columns, color=color)


def print_reproduction(reproduction: Reproduction, width: int) -> Iterator[RenderableType]:
    """Give the parts to a rich console of that width: the tables, what was found, how many claims hold."""
    # Text, never str: rich would read a row called "[red]" as markup.
    yield Text(printable(reproduction.title), style="bold")
    yield Text(describe_setting(reproduction))
    for table in reproduction.findings.tables:
        yield Text()
        yield from print_table(table, width)
    yield Text()
    for sentence in reproduction.findings.sentences:
        yield Text(printable(sentence))
    if reproduction.findings.sentences:
        yield Text()
    explanation = explain_numbers([reproduction], QUESTION)
    if explanation:
        yield Text(explanation)
    yield Text(conclude_claims(reproduction), style="bold")


def render_table(table: Table, width: int | None = None) -> str:
    """Write one table as text of at most `width` columns (None: the terminal's)."""
    columns = width or terminal_width()
    return render(print_table(table, columns), columns)


def print_table(table: Table, width: int) -> Iterator[RenderableType]:
    """Its title, its numbers, and below what is claimed of them."""
    yield Text(printable(table.title), style="bold")
    yield from _print_columns(table, width)
    below = [describe_counts(table), describe_claims(table), printable(table.note)]
    yield Text(" ".join(part for part in below if part))


def _print_columns(table: Table, width: int) -> Iterator[RenderableType]:
    """The columns side by side; those that do not fit follow below, with the names of the rows again."""
    columns = column_texts(table)
    compares = any(column.has_paper or column.has_claim for column in columns)
    groups = [_group(column, compares) for column in columns]
    corner = printable(table.corner)
    names = [printable(row) for row in table.rows]
    longest = max(map(cell_len, (corner, *names)))
    name_width = min(longest, max(NARROWEST_NAMES, width // 3))
    for position, block in enumerate(_blocks(groups, width - name_width - GUTTER + 1)):
        if position:
            yield Text()
        yield _build_grid(f"\n{corner}" if compares else corner, names, name_width, block)


def _blocks(groups: Sequence[Group], room: int) -> list[list[Group]]:
    blocks: list[list[Group]] = []
    left = 0
    for group in groups:
        needed = group.width + GUTTER
        if not blocks or needed > left:
            blocks.append([])
            left = room
        blocks[-1].append(group)
        left -= needed
    return blocks


def _build_grid(
    corner: str, names: Sequence[str], name_width: int, groups: Sequence[Group]
) -> RenderableType:
    grid = rich_table.Table(box=RULES, show_edge=False, padding=(0, 1))
    grid.add_column(Text(corner), overflow="fold", width=name_width)
    for group in groups:
        grid.add_column(Text(group.heading), overflow="fold")
    for position, name in enumerate(names):
        grid.add_row(Text(name), *(group.cells[position] for group in groups))
    return grid


def _group(column: ColumnText, compares: bool) -> Group:
    """The printed number, ours with its error, the verdict: so far as the column has them."""
    if not compares:  # whose the numbers are needs no line of its own
        heading, *texts = _right(_ours(column.cells), column.name)
        return Group(heading, tuple(map(Text, texts)))
    paper = _right([cell.paper for cell in column.cells], "paper") if column.has_paper else None
    ours = _right(_ours(column.cells), "ours")
    within = [QUESTION, *(cell.within for cell in column.cells)] if column.has_claim else None
    lines = [
        APART.join(part[position] for part in (paper, ours, within) if part is not None).rstrip()
        for position in range(len(column.cells) + 1)
    ]
    return Group(f"{column.name}\n{lines[0]}", tuple(map(_coloured, lines[1:])))


def _ours(cells: Sequence[CellText]) -> list[str]:
    """Numbers and errors aligned where they meet."""
    wide = max((cell_len(cell.ours) for cell in cells), default=0)
    tails = [f" ± {cell.error}" if cell.error else "" for cell in cells]
    tails = [f"{tail} {cell.unit}" if cell.unit else tail for tail, cell in zip(tails, cells, strict=True)]
    long = max(map(cell_len, tails), default=0)
    return [cell.ours.rjust(wide) + tail.ljust(long) for cell, tail in zip(cells, tails, strict=True)]


def _right(cells: Sequence[str], heading: str) -> list[str]:
    wide = max(map(cell_len, (heading, *cells)))
    return [text.rjust(wide) for text in (heading, *cells)]


def _coloured(line: str) -> Text:
    """The verdict at the end of the line has its colour."""
    text = Text(line)
    for word, style in STYLES.items():
        if line.endswith(APART + word):
            text.stylize(style, len(line) - len(word))
    return text


if __name__ == "__main__":
    from hessinit.present.reproduction_example import example_reproduction

    Console().print(example_reproduction())
