"""Charts of a document as matplotlib figures, as wide as a column or a page of a paper."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib import colormaps, colors, patches, pyplot, text, ticker
from matplotlib.axes import Axes
from matplotlib.axis import Axis

from hessinit.present.document import (
    COLORS,
    Chart,
    HeatMap,
    LineChart,
    RateLine,
    ReferenceLine,
    Series,
)
from hessinit.present.words import format_number, printable, shorten

DRAWABLE = (1e-100, 1e100)  # far beyond this the ticks and margins of a logarithmic axis overflow
POINTS = 7  # of the letters
LETTER = 0.6 * POINTS / 72  # inches: the width of a letter, about
LONGEST_NAME = 36
# inches: the widths of a column and of a page of a paper
COLUMN = 3.5
PAGE = 7.0
HEIGHT = 2.6
MARKERS = {"circle": "o", "cross": "X", "square": "s", "diamond": "D", "triangle": "^"}
FEW = 25  # a curve of fewer points has marks on them


def draw_charts(charts: Sequence[Chart], axes: Axes | Sequence[Axes] | None = None) -> list[Axes]:
    """Draw each chart on its axes, or on those of a new figure, and return the axes."""
    if axes is None:
        found = _new_axes(charts)
    else:
        found = list(axes) if hasattr(axes, "__len__") else [axes]  # type: ignore[arg-type]
    if len(found) != len(charts):
        raise ValueError(
            f"there are {len(charts)} charts for {len(found)} axes; pass one for each."
        )
    for chart, ax in zip(charts, found, strict=True):
        draw: Any = {LineChart: _draw_lines, HeatMap: _draw_heat_map, RateLine: _draw_rates}[
            type(chart)
        ]
        draw(ax, chart)
        _finish(ax, chart)
    return found


def _new_axes(charts: Sequence[Chart]) -> list[Axes]:
    sizes = [_size(chart) for chart in charts]
    is_stacked = len(charts) == 1 or any(getattr(chart, "layers", None) for chart in charts)
    across = 1 if is_stacked else min(3, len(charts))
    down = math.ceil(len(charts) / across)
    heights = [max(height for _, height in sizes[row * across :][:across]) for row in range(down)]
    width = max(width for width, _ in sizes) if is_stacked else PAGE
    figure = pyplot.figure(figsize=(width, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(down, across, height_ratios=heights)
    return [figure.add_subplot(grid[at // across, at % across]) for at in range(len(charts))]


def _size(chart: Chart) -> tuple[float, float]:
    if isinstance(chart, RateLine):
        return PAGE, 1.4
    if isinstance(chart, HeatMap):
        longest = max((len(_brief(name)) for name in chart.rows), default=0)
        wide = 1.2 + LETTER * longest + 0.42 * len(chart.columns)
        return min(max(COLUMN, wide), 2 * PAGE), 1.0 + 0.32 * len(chart.rows)
    if not chart.layers:
        return COLUMN, HEIGHT
    names = list(map(_brief, chart.layers))
    width = min(max(COLUMN, 0.175 * len(names)), PAGE)
    return width, HEIGHT + (0.0 if _fit(names, width - 0.7) else LETTER * max(map(len, names)))


def _draw_lines(ax: Axes, chart: LineChart) -> None:
    ax.set_xscale("log" if chart.log_x else "linear")
    ax.set_yscale("log" if chart.log_y else "linear")
    for band in chart.bands:
        if _held(band.low, chart.log_y) and _held(band.high, chart.log_y):
            color = _color(band.color)
            ax.axhspan(band.low, band.high, label=band.label, color=color, alpha=0.15, linewidth=0)
    for rule in chart.rules:
        if _held(rule.value, chart.log_x if rule.upright else chart.log_y):
            draw: Any = ax.axvline if rule.upright else ax.axhline
            draw(
                rule.value, label=rule.label, color=_color(rule.color), linestyle="--", linewidth=1
            )
    for series in chart.series:
        _draw_series(ax, chart, series)
    places = [x for one in chart.series for x in positions(one) if _held(x, chart.log_x)]
    ax.update_datalim(
        [(x, 1.0) for x in places], updatey=False
    )  # also those without a number to draw
    ax.autoscale_view()
    if any(one.symbol == "cross" for one in chart.series):
        ax.plot(
            [],
            [],
            marker="X",
            color=COLORS["grey"],
            linestyle="none",
            markersize=6,
            label="diverged",
        )
    if chart.layers:
        ax.set_xlim(-0.6, max(len(chart.layers), 1) - 0.4)
        _name_layers(ax, chart.layers)
    ax.set_ylim(chart.y_range or ax.get_ylim())
    limits = [
        end for band in chart.bands for end in (band.low, band.high) if _held(end, chart.log_y)
    ]
    if limits and not chart.y_range:  # the whole band, and some room around it
        low, high = ax.get_ylim()
        ax.set_ylim(min(low, min(limits) / (3 if chart.log_y else 1)), max(high, max(limits) * 1.5))
    for series in chart.series:
        _name_beyond(ax, chart, series)


def _draw_series(ax: Axes, chart: LineChart, series: Series) -> None:
    x = positions(series)
    y = [_or_nan(value, chart.log_y) for value in series.y]
    color = _color(series.color)
    if series.low is not None and series.high is not None:
        low, high = (
            [_or_nan(value, chart.log_y) for value in one] for one in (series.low, series.high)
        )
        if chart.layers or series.points:
            ax.vlines(x, low, high, color=color, alpha=0.4, linewidth=3)
        else:
            ax.fill_between(x, low, high, color=color, alpha=0.16, linewidth=0)
    has_line = not series.hollow and not series.points
    has_marks = bool(chart.layers) or not has_line or len(x) < FEW
    if series.symbol == "cross":
        style: dict[str, Any] = {
            "clip_on": False,
            "zorder": 6,
            "markersize": 6,
            "markeredgecolor": "white",
        }
    else:
        size = 6 if series.hollow else 4 if chart.layers else 3.5
        style = {"markersize": size, "markerfacecolor": "none" if series.hollow else color}
    ax.plot(
        x,
        y,
        color=color,
        linestyle="none" if not has_line else "--" if series.dashed else "-",
        linewidth=0.7 if chart.layers else 1.4,
        marker=MARKERS[series.symbol] if has_marks else "",
        label=series.name if series.in_legend else "_",
        **style,
    )


def positions(series: Series) -> list[float]:
    if series.x is None:
        return [float(place) for place in range(len(series.y))]
    return [math.nan if value is None else float(value) for value in series.x]


def _name_beyond(ax: Axes, chart: LineChart, series: Series) -> None:
    """Mark numbers that the axis cannot hold at its edge; over layers, name them."""
    for x, value in zip(positions(series), series.y, strict=True):
        if value is None or _held(value, chart.log_y) or not _held(x, chart.log_x):
            continue
        low = value <= 0 or value < DRAWABLE[0]
        edge: dict[str, Any] = {
            "transform": ax.get_xaxis_transform(),
            "color": _color(series.color),
        }
        marker = "X" if series.symbol == "cross" else "v" if low else "^"
        ax.plot(x, 0.03 if low else 0.97, marker=marker, markersize=6, clip_on=False, **edge)
        if chart.layers:
            ax.text(
                x,
                0.08 if low else 0.92,
                format_number(value),
                ha="center",
                va="bottom" if low else "top",
                fontsize=POINTS,
                **edge,
            )


def _draw_heat_map(ax: Axes, chart: HeatMap) -> None:
    values = [[_or_nan(value, chart.log_color) for value in row] for row in chart.values]
    known = [value for row in values for value in row if not math.isnan(value)] or [1.0]
    low = min(known)
    high = max(known)
    kind = colors.LogNorm if chart.log_color else colors.Normalize
    scale = kind(low, high if high > low else low * 1.01 + 1e-12)
    palette = colormaps["YlGnBu_r"]  # dark is low
    image = ax.imshow(values, norm=scale, cmap=palette, aspect="auto")
    for down, row in enumerate(values):
        for across, value in enumerate(row):
            if chart.marked and chart.marked[down][across]:
                ax.add_patch(
                    patches.Rectangle(
                        (across - 0.48, down - 0.48),
                        0.96,
                        0.96,
                        fill=False,
                        linewidth=1.8,
                        edgecolor=COLORS["vermilion"],
                    )
                )
            red, green, blue, _ = palette(scale(value)) if not math.isnan(value) else (1, 1, 1, 1)
            ink = "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"
            text = printable(chart.texts[down][across])
            ax.text(across, down, text, ha="center", va="center", fontsize=POINTS, color=ink)
    ax.set_xticks(range(len(chart.columns)), list(map(_brief, chart.columns)))
    ax.set_yticks(range(len(chart.rows)), list(map(_brief, chart.rows)))
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    bar = ax.figure.colorbar(image, ax=ax, shrink=0.9, pad=0.02, aspect=18)
    bar.set_label(chart.value_label, fontsize=POINTS)
    bar.outline.set_visible(False)
    _write_numbers(bar.ax.yaxis, chart.log_color)
    bar.ax.tick_params(labelsize=POINTS, which="both")


def _draw_rates(ax: Axes, chart: RateLine) -> None:
    best = ReferenceLine(chart.best, chart.best_label, "green")
    limit = ReferenceLine(chart.stable, chart.stable_label, "vermilion")
    marks = [mark for mark in (best, limit, *chart.marks) if _held(mark.value, True)]
    ax.set_xscale("log")
    if marks:
        ax.set_xlim(min(mark.value for mark in marks) / 3, max(mark.value for mark in marks) * 3)
    for mark in marks:
        label = f"{mark.label}: {format_number(mark.value)}"
        ax.axvline(mark.value, color=_color(mark.color), linewidth=1.6, label=label)
    ax.set_yticks([])


def _finish(ax: Axes, chart: Chart) -> None:
    """Label the axes and place caption and legend above, where they hide nothing."""
    ax.set_xlabel(getattr(chart, "x_label", "learning rate"), fontsize=POINTS + 1)
    ax.set_ylabel(getattr(chart, "y_label", ""), fontsize=POINTS + 1)
    if isinstance(chart, LineChart):
        _write_numbers(ax.yaxis, chart.log_y)
    if isinstance(chart, LineChart) and not chart.layers:
        is_whole = all(
            value is None or value % 1 == 0 for one in chart.series for value in one.x or ()
        )
        _write_numbers(ax.xaxis, chart.log_x, is_whole)
    elif isinstance(chart, RateLine):
        _write_numbers(ax.xaxis, True)
    ax.tick_params(labelsize=POINTS, which="both")
    inches = float(ax.get_window_extent().width / ax.figure.dpi)
    caption = textwrap.fill(printable(chart.caption), max(20, int(inches / LETTER)))
    handles, labels = ax.get_legend_handles_labels()
    if len(handles) > 1 or isinstance(chart, RateLine):
        shown = list(map(_brief, labels))
        columns = max(1, int(inches / (LETTER * (max(map(len, shown)) + 5))))
        ax.legend(
            handles,
            shown,
            ncols=columns,
            title=caption,
            alignment="left",
            loc="lower left",
            bbox_to_anchor=(0, 1.0),
            borderaxespad=0.2,
            fontsize=POINTS,
            title_fontsize=POINTS + 1,
            frameon=False,
        )
    else:
        ax.set_title(caption, fontsize=POINTS + 1, loc="left")
    for part in ax.findobj(text.Text):
        part.set_parse_math(False)  # a "$" in a name is a "$"


def _write_numbers(axis: Axis, is_log: bool, is_whole: bool = False) -> None:
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: format_number(value)))
    axis.set_minor_formatter(ticker.NullFormatter())
    low, high = sorted(axis.get_view_interval())
    if not is_log or high / low < 5:  # ticks of whole decades would stand alone
        axis.set_major_locator(ticker.MaxNLocator(nbins=5, integer=is_whole))
    elif high / low < 1000:
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))


def _name_layers(ax: Axes, layers: Sequence[str]) -> None:
    inches = float(ax.get_window_extent().width / ax.figure.dpi)
    step = max(1, math.ceil(len(layers) / max(1, int(inches * 72 / (POINTS * 1.15)))))
    names = list(map(_brief, layers[::step]))
    ax.set_xticks(range(0, len(layers), step), names, rotation=0 if _fit(names, inches) else 90)


def _brief(name: str) -> str:
    return shorten(printable(name), LONGEST_NAME)


def _fit(names: Sequence[str], inches: float) -> bool:
    return not names or (max(map(len, names)) + 1) * LETTER * len(names) <= inches


def _color(color: str) -> Any:
    if color in COLORS:
        return COLORS[color]
    return colormaps["viridis"](0.85 * float(color.removeprefix("ramp:")))


def _held(value: float | None, is_log: bool) -> bool:
    if value is None or math.isnan(value):
        return False
    return DRAWABLE[0] <= value <= DRAWABLE[1] if is_log else abs(value) <= DRAWABLE[1]


def _or_nan(value: float | None, is_log: bool) -> float:
    return float(value) if value is not None and _held(value, is_log) else math.nan
