"""A reproduced experiment of the paper: tables beside the printed numbers, figures, the record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from hessinit.reporting import Document, Result

Plain: TypeAlias = Any  # what json.loads returns: None, bool, int, float, str, lists and dicts


@dataclass(frozen=True, kw_only=True)
class PaperCell:
    """One number of a table: ours over `n` seeds, the printed one, and whether its claim holds.

    `rule` is the claimed tolerance in words. Where nothing is claimed it is empty, and `within` is
    None. `error` is the standard error of the mean; None where there is none, as for one seed.
    """

    row: str
    column: str
    ours: float
    error: float | None = None
    n: int
    paper: float | None = None
    rule: str = ""
    within: bool | None = None
    unit: str = ""  # "%" or nothing


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """Cells by row and column; some combinations may have none."""

    title: str
    corner: str  # what the row names are
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[PaperCell, ...]
    note: str = ""

    def cell(self, row: str, column: str) -> PaperCell | None:
        """Return the number in that row and column, if there is one."""
        return next((cell for cell in self.cells if (cell.row, cell.column) == (row, column)), None)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line, or points, of a figure; `error` is a standard error for each point."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    error: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class PaperFigure:
    """A picture as plain numbers."""

    name: str  # "figure-1"; of letters, digits and hyphens, for a file's name
    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    log_x: bool = False
    log_y: bool = False
    style: str = "lines"  # or "points"


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What an experiment concludes from its results."""

    tables: tuple[PaperTable, ...] = ()
    figures: tuple[PaperFigure, ...] = ()
    sentences: tuple[str, ...] = ()  # what was found, in words; each a whole sentence


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Reproduction(Result):
    """An experiment on one data set in one variant, with everything needed to check it.

    `results` are the raw values of every job, by its key.
    """

    KIND: ClassVar[str] = "hessinit reproduction"
    SCHEMA: ClassVar[int] = 2

    name: str  # "table-4-mnist"; of letters, digits and hyphens, for a file's name
    experiment: str  # "table-4"
    title: str
    data: str
    variant: str
    about_variant: str  # the variant in a sentence
    findings: Findings
    seeds: tuple[int, ...]
    configuration: dict[str, Plain]
    source: str  # of the data
    revision: str  # of hessinit
    versions: dict[str, str]
    hardware: dict[str, str]
    seconds: float  # of all jobs together, on one core each
    results: dict[str, Plain]

    def describe(self) -> Document:
        """Return the document that print, plots and pages show."""
        return self.describe_several([self])

    @classmethod
    def describe_several(cls, results: Sequence[Reproduction]) -> Document:
        """Return one document of several experiments, in the order of the paper."""
        from hessinit_paper.reproduction_page import describe_reproductions

        return describe_reproductions(results)

    @property
    def judged(self) -> tuple[PaperCell, ...]:
        """The cells about which a claim is made."""
        cells = [cell for table in self.findings.tables for cell in table.cells]
        return tuple(cell for cell in cells if cell.within is not None)

    @property
    def within(self) -> int:
        """How many of the claims hold."""
        return sum(cell.within is True for cell in self.judged)
