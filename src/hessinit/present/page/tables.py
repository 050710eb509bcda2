"""A table of the content as rows of cells: what the template writes and what the script sorts by."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from hessinit.present.page.content import Table, TableColumn
from hessinit.present.words import shorten

LONG_FROM = 25  # rows: more scroll inside their frame, under headings that stay
_NUMBER = re.compile(r"[-−]?(?:\d[\d,]*\.?\d*(?:e[-+]?\d+)?|inf)", re.IGNORECASE)
WORDS_FROM = 40  # letters: longer texts may break into lines
DOTS = ("vanishing", "flat", "ok", "sharp", "exploding")
TONES = ("best", "diverged", "yes", "no")


@dataclass(frozen=True)
class Cell:
    """A text, its classes, what to sort it by ("" at the end), and where it leads."""

    text: str
    classes: str
    key: str
    dot: str
    link: str
    whole: str = ""  # of a name that is cut


@dataclass(frozen=True)
class Heading:
    """A cell of the head: of one column, or (`column` None) of a group of them."""

    text: str
    classes: str
    column: int | None
    across: int = 1
    down: int = 1
    whole: str = ""  # of a name that is cut


def headings(table: Table) -> list[list[Heading]]:
    """The rows of the head: a second one where columns have a group's heading above them."""
    grouped = any(column.group for column in table.columns)
    upper: list[Heading] = []
    lower: list[Heading] = []
    for name, members in groupby(enumerate(table.columns), key=lambda numbered: numbered[1].group):
        together = list(members)
        first = together[0][0]
        if name:
            upper.append(Heading(name, "group begins" if first else "group", None, across=len(together)))
        for number, column in together:
            begins = "begins" if name and number == first and first else ""
            classes = " ".join(filter(None, ("number" if column.is_number else "", begins)))
            down = 2 if grouped and not name else 1
            short, whole = _cut(column.heading)
            (lower if name else upper).append(Heading(short, classes, number, down=down, whole=whole))
    return [upper, lower] if lower else [upper]


def _first_of_groups(table: Table) -> set[int]:
    """The columns with a line to their left."""
    groups = [column.group for column in table.columns]
    return {
        number for number in range(1, len(groups)) if groups[number] and groups[number] != groups[number - 1]
    }


def rows(table: Table) -> list[list[Cell]]:
    """The cells of each row, the fixed ones last."""
    begins = _first_of_groups(table)
    columns = [
        _cells(column, position in begins, is_name=position == 0)
        for position, column in enumerate(table.columns)
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def _cells(column: TableColumn, begins: bool, is_name: bool) -> list[Cell]:
    marks: Sequence[str] = column.marks or [""] * len(column.cells)
    links: Sequence[str] = column.links or [""] * len(column.cells)
    keys: Sequence[float | str] = column.keys or [
        number_in(text) if column.is_number else text for text in column.cells
    ]
    found = []
    for text, key, mark, link in zip(column.cells, keys, marks, links, strict=True):
        known = mark if mark in TONES else ""
        shape = "number" if column.is_number else "words" if len(text) > WORDS_FROM else ""
        classes = " ".join(filter(None, (shape, known, "begins" * begins)))
        dot = mark if mark in DOTS else ""
        short, whole = _cut(text) if is_name else (text, "")
        place = link if link.startswith("#") else ""
        found.append(Cell(short, classes, _write_key(key), dot, place, whole))
    return found


def _cut(name: str) -> tuple[str, str]:
    """The name as it is shown, and the whole of it where that is more."""
    short = shorten(name)
    return short, "" if short == name else name


def number_in(text: str) -> float:
    """The first number of a cell; nan, which is sorted to the end, where there is none.

    >>> [number_in(text) for text in ("~1,230", "× 0.21", "1.2e-07 ± 3", "inf", "–", "(256, 784)")]
    [1230.0, 0.21, 1.2e-07, inf, nan, 256.0]
    """
    found = _NUMBER.search(text)
    # A "nan" in the text is no number; the "inf" in "information" would be one, but words are no numbers.
    return float(found[0].replace(",", "").replace("−", "-")) if found else math.nan


def _write_key(key: float | str) -> str:
    if isinstance(key, str):
        return key
    return "" if math.isnan(key) else repr(float(key))
