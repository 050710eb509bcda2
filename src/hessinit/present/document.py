"""The document that describes a result, as plain data: sentences, tables and charts in sections.

`describe(result)` builds it once; `terminal`, `page` and `figures` render it, and escape every
text. A number in a chart may be nan or infinite (it is drawn at the edge of the axis and named) or
None (nothing is drawn).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Numbers: TypeAlias = Sequence[float | None]
# A key of `COLORS`, or "ramp:0.25": a position between 0 (dark) and 1 (light), for ordered curves.
Color: TypeAlias = str

# Okabe & Ito (2008): distinguishable with every common kind of colour vision. Those of dark pages
# are in colors.css.
COLORS = {
    "blue": "#0072b2",
    "vermilion": "#d55e00",
    "green": "#009e73",
    "sky": "#56b4e9",
    "orange": "#e69f00",
    "purple": "#cc79a7",
    "grey": "#5f6670",
}
# Marks of a table's cells, which colour the text.
TONES = ("best", "diverged", "yes", "no")


@dataclass(frozen=True)
class Band:
    """A labelled range of the y axis."""

    low: float
    high: float
    label: str
    color: Color = "green"


@dataclass(frozen=True)
class ReferenceLine:
    """A labelled line at one value of the y axis, or of the x axis where `upright`."""

    value: float
    label: str
    color: Color = "grey"
    upright: bool = False


@dataclass(frozen=True)
class Series:
    """One curve: `y` over `x`, or over the layers; error bars (or a band) span `low` to `high`."""

    name: str
    y: Numbers
    x: Numbers | None = None  # None in a chart over layers
    color: Color = "blue"
    dashed: bool = False
    hollow: bool = False  # rings without a line
    points: bool = False  # marks without a line
    symbol: str = "circle"  # of the marks; or "cross", "square", "diamond", "triangle"
    in_legend: bool = True
    low: Numbers | None = None
    high: Numbers | None = None
    details: Sequence[str] | None = None  # for each point, shown when the pointer is on it


@dataclass(frozen=True)
class _Drawn:
    """What every chart has."""

    name: str  # to ask for the chart: report.plot("norms")
    caption: str
    description: str  # the text alternative


@dataclass(frozen=True)
class LineChart(_Drawn):
    """Curves over a number, or over the layers in the order they run where `layers` names these."""

    series: Sequence[Series]
    y_label: str
    x_label: str = "layer, in the order they run"
    layers: Sequence[str] | None = None
    log_x: bool = False
    log_y: bool = False
    y_range: tuple[float, float] | None = None
    bands: Sequence[Band] = ()
    rules: Sequence[ReferenceLine] = ()


@dataclass(frozen=True)
class HeatMap(_Drawn):
    """A number for each row and column, dark where it is low; `texts` is written in the cells."""

    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Numbers]
    texts: Sequence[Sequence[str]]
    x_label: str
    y_label: str
    value_label: str
    log_color: bool = False
    details: Sequence[Sequence[str]] | None = None  # shown when the pointer is on a cell
    marked: Sequence[Sequence[bool]] | None = None  # cells with a frame


@dataclass(frozen=True)
class RateLine(_Drawn):
    """A logarithmic axis of learning rates: the `best`, the largest `stable` one, further marks."""

    best: float
    stable: float
    marks: Sequence[ReferenceLine] = ()
    best_label: str = "1/‖H‖"
    stable_label: str = "stability limit 2/‖H‖"


@dataclass(frozen=True)
class Column:
    """A heading and a text for each row.

    The first column of a table names the rows. A narrow terminal leaves out the columns of the
    lowest importance first, those of 8 and 9 if nothing else helps.
    """

    heading: str
    cells: Sequence[str]
    importance: int = 5
    is_number: bool = True
    wraps: bool = False  # sentences, which a terminal may break into lines
    keys: Sequence[float | str] | None = None  # to sort by, where the texts would sort wrongly
    marks: Sequence[str] | None = None  # of TONES; "" for none


@dataclass(frozen=True)
class Table:
    """A table that a page sorts by any column.

    The last `fixed` rows (a network, a mean) stay at the end. Columns without a text are not shown.
    """

    caption: str
    columns: Sequence[Column]
    fixed: int = 0
    show_caption: bool = False  # screen readers get it in any case
    page_only: bool = False
    text_only: bool = False

    @property
    def shown(self) -> list[Column]:
        """The first column, and those with something in a cell."""
        return [
            *self.columns[:1],
            *(column for column in self.columns[1:] if not set(column.cells) <= {"", "–"}),
        ]


@dataclass(frozen=True)
class Paragraph:
    """A paragraph; `tone` is "plain", "strong", "small" or "note"."""

    text: str
    tone: str = "plain"
    page_only: bool = False
    text_only: bool = False


@dataclass(frozen=True)
class Facts:
    """Pairs of name and value, folded on a page and left out elsewhere."""

    summary: str
    pairs: Sequence[tuple[str, str]]


Chart: TypeAlias = LineChart | HeatMap | RateLine
Block: TypeAlias = Paragraph | Facts | Table | Chart


@dataclass(frozen=True)
class Section:
    """A heading ("" for none) and the blocks below it.

    The table of contents links to `anchor`, which must be unique.
    """

    heading: str
    blocks: Sequence[Block]
    anchor: str = ""


def filled(*sections: Section) -> list[Section]:
    """Return the sections that have something in them."""
    return [section for section in sections if section.blocks]


@dataclass(frozen=True)
class KeyNumber:
    """A number that a page shows large beside the verdict."""

    label: str
    text: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Document:
    """A result in words, tables and charts.

    A terminal and a notebook show the answer to what was asked, as "learning rate: 0.1", then
    tables, verdict and texts.
    """

    title: str
    verdict: Sequence[str]
    sections: Sequence[Section]
    answer: str = ""
    footer: str = ""
    numbers: Sequence[KeyNumber] = ()
    tone: str = "plain"  # of the verdict: or "good", "fair", "bad"
    more_charts: Sequence[Chart] = ()  # drawn on request only
    picture: Sequence[str] = ()  # names of the charts of a figure in a file; () for the first chart
    further: str = ""  # how to get other charts

    @property
    def blocks(self) -> list[Block]:
        return [block for section in self.sections for block in section.blocks]

    @property
    def tables(self) -> list[Table]:
        """The tables of a terminal and of a notebook."""
        tables = [block for block in self.blocks if isinstance(block, Table)]
        return [table for table in tables if table.columns and not table.page_only]

    @property
    def paragraphs(self) -> list[Paragraph]:
        """The paragraphs of a terminal and of a notebook."""
        paragraphs = [block for block in self.blocks if isinstance(block, Paragraph)]
        return [paragraph for paragraph in paragraphs if not paragraph.page_only]

    @property
    def charts(self) -> list[Chart]:
        """All charts, those that are drawn on request only at the end."""
        shown = [block for block in self.blocks if isinstance(block, _Drawn)]
        return [*shown, *self.more_charts]

    def chart(self, name: str) -> Chart:
        """Return the chart of that name; a ValueError says which there are, or how to get it."""
        charts = {chart.name: chart for chart in reversed(self.charts)}
        if name in charts:
            return charts[name]
        names = ", ".join(repr(chart.name) for chart in self.charts) or "none"
        raise ValueError(
            f"there is no chart {name!r} here; there are: {names}. {self.further}".strip()
        )
