"""What a page holds, as plain data: words, charts and tables in sections. Nothing here is HTML yet.

Numbers may be nan or infinite: a chart draws these at the edge of its axis and names them. None is a number
that there is not: nothing is drawn for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Numbers = Sequence[float | None]
# One of the names in render.COLORS: "blue", "vermilion", "green", "sky", "orange", "purple", "grey";
# or "ramp:0.25", a number from 0 (dark) to 1 (light), for curves that have an order.
Color = str


@dataclass(frozen=True, kw_only=True)
class Band:
    """A stretch of the value axis that means something: what counts as ok, the target's tolerance."""

    low: float
    high: float
    label: str
    color: Color = "green"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A line at one value: of the y axis, or of the x axis where `upright`."""

    value: float
    label: str
    color: Color = "grey"
    upright: bool = False


@dataclass(frozen=True, kw_only=True)
class DepthSeries:
    """A number for every layer; `details` is what hovering shows besides name and value, one text a layer."""

    name: str
    values: Numbers
    color: Color = "blue"
    hollow: bool = False  # a ring without a line, for what stands beside another series
    low: Numbers | None = None  # error bars
    high: Numbers | None = None
    details: Sequence[str] | None = None


@dataclass(frozen=True, kw_only=True)
class DepthChart:
    """Numbers over the layers in the order they run; sizes on a logarithmic axis, shares on a plain one."""

    caption: str
    description: str  # the text alternative: what a reader who cannot see it must know
    layers: Sequence[str]
    series: Sequence[DepthSeries]
    y_label: str
    bands: Sequence[Band] = ()
    rules: Sequence[Rule] = ()
    log: bool = True


@dataclass(frozen=True, kw_only=True)
class LineSeries:
    """A curve, with a band from `low` to `high` where there are several seeds."""

    name: str
    x: Numbers
    y: Numbers
    color: Color = "blue"
    dashed: bool = False
    points: bool = False  # marks instead of a line
    symbol: str = "circle"  # of the marks: or "cross", "square", "diamond", "triangle"
    in_legend: bool = True
    low: Numbers | None = None
    high: Numbers | None = None
    details: Sequence[str] | None = None


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """Curves over a number: steps, a learning rate, an eigenvalue, a standard deviation."""

    caption: str
    description: str
    series: Sequence[LineSeries]
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = False
    x_range: tuple[float, float] | None = None  # for charts side by side; what is beyond is cut off
    y_range: tuple[float, float] | None = None
    bands: Sequence[Band] = ()
    rules: Sequence[Rule] = ()


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """A number for each row and column; `texts` is what the cells say, `details` what hovering adds."""

    caption: str
    description: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Numbers]
    texts: Sequence[Sequence[str]]
    x_label: str
    y_label: str
    value_label: str
    log_color: bool = False
    low_is_good: bool = True
    details: Sequence[Sequence[str]] | None = None
    marked: Sequence[Sequence[bool]] | None = None  # cells with a frame


@dataclass(frozen=True, kw_only=True)
class RateMark:
    """A learning rate worth naming."""

    value: float
    label: str
    color: Color = "grey"


@dataclass(frozen=True, kw_only=True)
class RateLine:
    """A line of learning rates, logarithmic: stable up to `stable`, best guaranteed at `best`, and marks."""

    caption: str
    description: str
    best: float
    stable: float
    marks: Sequence[RateMark] = ()


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    """`cells` is what is shown; `keys` is what sorting goes by, where the shown text would sort wrongly."""

    heading: str
    cells: Sequence[str]
    is_number: bool = True
    keys: Sequence[float | str] | None = None
    # A class for each cell: vanishing … exploding, best, diverged, yes, no; "" for none.
    marks: Sequence[str] | None = None
    group: str = ""  # neighbours of the same group have this heading above their own
    links: Sequence[str] | None = None  # places in the page, "#table-1"; "" for none


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table that sorts by any column; the last `fixed` rows (a network, a mean) stay at the bottom."""

    caption: str
    columns: Sequence[TableColumn]
    fixed: int = 0
    show_caption: bool = True  # the caption is always there for those who hear the page


@dataclass(frozen=True, kw_only=True)
class Words:
    """A paragraph; `tone` is "plain", "strong", "small" or "note"; or "heading", of what follows."""

    text: str
    tone: str = "plain"


@dataclass(frozen=True, kw_only=True)
class Details:
    """Pairs of name and value, folded away until asked for."""

    summary: str
    pairs: Sequence[tuple[str, str]]


Chart = DepthChart | LineChart | HeatMap | RateLine
Block = Words | Details | Table | Chart


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading and what is under it; an empty heading has none."""

    heading: str
    blocks: Sequence[Block]
    subtitle: str = ""
    anchor: str = ""  # where links lead; of letters, digits and hyphens, and no two alike


@dataclass(frozen=True, kw_only=True)
class KeyNumber:
    """One of the few numbers that stand large beside the verdict; `text` is the number as it is shown."""

    label: str
    text: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Page:
    """The title, the verdict in words on top, the sections, and where the numbers come from.

    `tone` colours the verdict: "good", "fair" or "bad"; "plain" leaves it without.
    """

    title: str
    verdict: Sequence[str]
    sections: Sequence[Section]
    footer: str = ""
    numbers: Sequence[KeyNumber] = ()
    tone: str = "plain"
