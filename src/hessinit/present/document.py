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
# A key of `COLORS`, or "ramp:0.25": a place between 0 (dark) and 1 (light), for curves that have an
# order.
Color: TypeAlias = str

# Okabe & Ito (2008): distinguishable with every common kind of colour vision. For dark pages:
# colors.css.
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
    """One curve: `y` over `x`, or over the layers, with error bars (or a band) from `low` to `high`."""

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
    """A logarithmic axis of learning rates: the `best` one, unstable above `stable`, and further marks."""

    best: float
    stable: float
    marks: Sequence[ReferenceLine] = ()
    best_label: str = "1/‖H‖"
    stable_label: str = "stability limit 2/‖H‖"


@dataclass(frozen=True)
class Column:
    """A heading and a text for each row; the first column of a table holds the names of the rows."""

    heading: str
    cells: Sequence[str]
    importance: int = (
        5  # a narrow terminal leaves out the lowest first, 8 and 9 if nothing else helps
    )
    is_number: bool = True
    wraps: bool = False  # sentences, which a terminal may break into lines
    keys: Sequence[float | str] | None = None  # to sort by, where the texts would sort wrongly
    marks: Sequence[str] | None = None  # of TONES; "" for none


@dataclass(frozen=True)
class Table:
    """A table that a page sorts by any column; the last `fixed` rows (a network, a mean) stay at the end."""

    caption: str
    columns: Sequence[Column]
    fixed: int = 0
    show_caption: bool = False  # screen readers get it in any case
    page_only: bool = False
    text_only: bool = False

    @property
    def shown(self) -> list[Column]:
        """The first column, and those with something in a cell."""
        filled = [
            one for one in self.columns[1:] if any(text not in ("", "–") for text in one.cells)
        ]
        return [*self.columns[:1], *filled]


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
    """A heading ("" for none) and what is below it; the contents link to `anchor`, which must be unique."""

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
    """A result in words, tables and charts; a terminal and a notebook show tables, verdict and texts."""

    title: str
    verdict: Sequence[str]
    sections: Sequence[Section]
    answer: str = (
        ""  # what was asked for, as "learning rate: 0.1": a terminal shows it before the tables
    )
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
    def charts(self) -> list[Chart]:
        shown = [block for block in self.blocks if isinstance(block, _Drawn)]
        return [*shown, *self.more_charts]

    def chart(self, name: str) -> Chart:
        """Return the chart of that name; a ValueError says which there are, or how to get it."""
        found = {chart.name: chart for chart in reversed(self.charts)}
        if name in found:
            return found[name]
        known = ", ".join(repr(chart.name) for chart in self.charts) or "none"
        raise ValueError(
            f"there is no chart {name!r} here; there are: {known}. {self.further}".strip()
        )
