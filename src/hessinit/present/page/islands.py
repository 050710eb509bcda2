"""Charts as JSON inside a page: what the script draws. Safe wherever a name comes from."""

from __future__ import annotations

import json
from dataclasses import dataclass

from hessinit.present.page.content import Chart, DepthChart, HeatMap, LineChart, RateLine
from hessinit.present.page.palette import css_color
from hessinit.present.words import printable, shorten
from hessinit.results.result import Plain, to_plain

KINDS: dict[type[Chart], str] = {
    DepthChart: "depth",
    LineChart: "lines",
    HeatMap: "heat",
    RateLine: "rates",
}
# With this many layers a chart wants the whole width.
WIDE_FROM = 25


@dataclass(frozen=True)
class LegendItem:
    """A name and how it is drawn: "line", "dashed", "points", "ring", "cross", "band" or "rule"."""

    name: str
    shape: str
    color: str

    @property
    def shown(self) -> str:
        """The name, as far as a legend has room for it."""
        return shorten(printable(self.name), 48)


def write_island(chart: Chart) -> str:
    r"""Write a chart as JSON that no text in it can leave, as `</script>` or `<!--` would.

    >>> rates = RateLine(caption="</script><!--", description="a\u2028b", best=1.0, stable=float("inf"))
    >>> write_island(rates)[:52]
    '{"kind":"rates","best":1.0,"stable":"inf","marks":[]'
    >>> "<" in write_island(rates)
    False
    """
    data = {"kind": KINDS[type(chart)], **_for_the_script(to_plain(chart))}
    for told in ("caption", "description"):  # these are in the page itself
        del data[told]
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII: U+2028 is escaped as well
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def legend(chart: Chart) -> list[tuple[str, str, str]]:
    """What the reader must be told about lines, marks and bands; nothing where there is but one series."""
    if not isinstance(chart, DepthChart | LineChart):
        return []
    items = []
    for series in chart.series:
        if isinstance(chart, DepthChart):
            shape = "ring" if getattr(series, "hollow", False) else "line"
        elif getattr(series, "in_legend", True):
            points = getattr(series, "points", False)
            cross = getattr(series, "symbol", "circle") == "cross"
            dashed = getattr(series, "dashed", False)
            shape = ("cross" if cross else "points") if points else "dashed" if dashed else "line"
        else:
            continue
        items.append(LegendItem(series.name, shape, css_color(series.color)))
    items += [LegendItem(band.label, "band", css_color(band.color)) for band in chart.bands]
    return [(item.name, item.shape, item.color) for item in items] if len(items) > 1 else []


def is_wide(chart: Chart) -> bool:
    """Whether the chart stands alone in its row."""
    if isinstance(chart, DepthChart):
        return len(chart.layers) >= WIDE_FROM
    return isinstance(chart, HeatMap | RateLine)


def _for_the_script(value: Plain) -> Plain:
    if isinstance(value, dict):
        return {
            name: css_color(item) if name == "color" else _for_the_script(item)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [_for_the_script(item) for item in value]
    return printable(value) if isinstance(value, str) else value
