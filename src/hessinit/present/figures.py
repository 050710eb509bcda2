"""Charts of a document as matplotlib figures, as wide as a column or a page of a paper."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import colormaps, colors, patches, pyplot, text, ticker
from matplotlib.axes import Axes
from matplotlib.axis import Axis

from hessinit.present.document import (
    COLORS,
    Chart,
    HeatMap,
    LineChart,
    Numbers,
    RateLine,
    ReferenceLine,
    Series,
)
from hessinit.present.words import format_number, map_known, printable, shorten

MARKERS = {"circle": "o", "cross": "X", "square": "s", "diamond": "D", "triangle": "^"}


@dataclass(frozen=True)
class Layout:
    """Sizes as papers have them: letters in points, all else in inches."""

    points: int = 7
    letter: float = 0.6 * 7 / 72  # the width of a letter, about
    longest_name: int = 36  # letters
    column: float = 3.5
    page: float = 7.0
    height: float = 2.6
    few_points: int = 25  # a curve of fewer points has marks on them
    least: float = 1e-100  # far beyond these the ticks and margins of a logarithmic axis overflow
    most: float = 1e100


LAYOUT = Layout()


def draw_charts(charts: Sequence[Chart], axes: Axes | Sequence[Axes] | None = None) -> list[Axes]:
    """Draw each chart on its axes, or on those of a new figure, and return the axes."""
    if axes is None:
        all_axes = _new_axes(charts)
    elif isinstance(axes, Axes):
        all_axes = [axes]
    else:
        all_axes = list(axes)
    if len(all_axes) != len(charts):
        raise ValueError(
            f"there are {len(charts)} charts for {len(all_axes)} axes; pass one for each."
        )
    drawings: Any = {LineChart: _draw_lines, HeatMap: _draw_heat_map, RateLine: _draw_rates}
    for chart, ax in zip(charts, all_axes, strict=True):
        drawings[type(chart)](ax, chart)
        _finish(ax, chart)
    return all_axes


def _new_axes(charts: Sequence[Chart]) -> list[Axes]:
    sizes = [_size(chart) for chart in charts]
    is_stacked = len(charts) == 1 or any(getattr(chart, "layers", None) for chart in charts)
    across = 1 if is_stacked else min(3, len(charts))
    down = math.ceil(len(charts) / across)
    heights = [max(height for _, height in sizes[row * across :][:across]) for row in range(down)]
    width = max(width for width, _ in sizes) if is_stacked else LAYOUT.page
    figure = pyplot.figure(figsize=(width, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(down, across, height_ratios=heights)
    positions_in_grid = [divmod(number, across) for number in range(len(charts))]
    return [figure.add_subplot(grid[row, column]) for row, column in positions_in_grid]


def _size(chart: Chart) -> tuple[float, float]:
    if isinstance(chart, RateLine):
        return LAYOUT.page, 1.4
    if isinstance(chart, HeatMap):
        longest = max((len(_brief(name)) for name in chart.rows), default=0)
        wide = 1.2 + LAYOUT.letter * longest + 0.42 * len(chart.columns)
        return min(max(LAYOUT.column, wide), 2 * LAYOUT.page), 1.0 + 0.32 * len(chart.rows)
    if not chart.layers:
        return LAYOUT.column, LAYOUT.height
    names = list(map(_brief, chart.layers))
    width = min(max(LAYOUT.column, 0.175 * len(names)), LAYOUT.page)
    height = LAYOUT.height
    if not _fit_side_by_side(names, width - 0.7):
        height += LAYOUT.letter * max(map(len, names))
    return width, height


def _draw_lines(ax: Axes, chart: LineChart) -> None:
    for set_scale, is_log in ((ax.set_xscale, chart.log_x), (ax.set_yscale, chart.log_y)):
        set_scale("log" if is_log else "linear")
    _draw_references(ax, chart)
    for series in chart.series:
        _draw_series(ax, chart, series)
    # Also the positions that have no number to draw.
    everywhere = [x for series in chart.series for x in positions(series)]
    drawable = [(x, 1.0) for x in everywhere if _is_drawable(x, chart.log_x)]
    ax.update_datalim(drawable, updatey=False)
    ax.autoscale_view()
    if any(series.symbol == "cross" for series in chart.series):
        grey = COLORS["grey"]
        ax.plot([], [], marker="X", label="diverged", color=grey, linestyle="none", markersize=6)
    if chart.layers:
        ax.set_xlim(-0.6, len(chart.layers) - 0.4)
        _name_layers(ax, chart.layers)
    ax.set_ylim(chart.y_range or ax.get_ylim())
    if not chart.y_range:
        _show_bands(ax, chart)
    for series in chart.series:
        _name_beyond(ax, chart, series)


def _draw_references(ax: Axes, chart: LineChart) -> None:
    for band in chart.bands:
        if _is_drawable(band.low, chart.log_y) and _is_drawable(band.high, chart.log_y):
            color = _color(band.color)
            ax.axhspan(band.low, band.high, label=band.label, color=color, alpha=0.15, linewidth=0)
    for rule in chart.rules:
        draw, is_log = (ax.axvline, chart.log_x) if rule.upright else (ax.axhline, chart.log_y)
        if _is_drawable(rule.value, is_log):
            color = _color(rule.color)
            draw(rule.value, label=rule.label, color=color, linestyle="--", linewidth=1)


def _show_bands(ax: Axes, chart: LineChart) -> None:
    """Widen the axis to the whole bands, and some room around them."""
    ends = [end for band in chart.bands for end in (band.low, band.high)]
    if ends := [end for end in ends if _is_drawable(end, chart.log_y)]:
        low, high = ax.get_ylim()
        lowest = min(ends) / 3 if chart.log_y else min(ends)
        ax.set_ylim(min(low, lowest), max(high, max(ends) * 1.5))


def _draw_series(ax: Axes, chart: LineChart, series: Series) -> None:
    x = positions(series)
    color = _color(series.color)
    if series.low is not None and series.high is not None:
        low = _drawable(series.low, chart.log_y)
        high = _drawable(series.high, chart.log_y)
        if chart.layers or series.points:
            ax.vlines(x, low, high, color=color, alpha=0.4, linewidth=3)
        else:
            ax.fill_between(x, low, high, color=color, alpha=0.16, linewidth=0)
    has_line = not series.hollow and not series.points
    has_marks = bool(chart.layers) or not has_line or len(x) < LAYOUT.few_points
    dashes = "--" if series.dashed else "-"
    ax.plot(
        x,
        _drawable(series.y, chart.log_y),
        color=color,
        linestyle=dashes if has_line else "none",
        linewidth=0.7 if chart.layers else 1.4,
        marker=MARKERS[series.symbol] if has_marks else "",
        label=series.name if series.in_legend else "_",
        **_marker_style(chart, series, color),
    )


def _marker_style(chart: LineChart, series: Series, color: Any) -> dict[str, Any]:
    if series.symbol == "cross":
        return {"clip_on": False, "zorder": 6, "markersize": 6, "markeredgecolor": "white"}
    if series.hollow:
        return {"markersize": 6, "markerfacecolor": "none"}
    return {"markersize": 4 if chart.layers else 3.5, "markerfacecolor": color}


def positions(series: Series) -> list[float]:
    if series.x is None:
        return [float(number) for number in range(len(series.y))]
    return map_known(series.x, float, math.nan)


def _name_beyond(ax: Axes, chart: LineChart, series: Series) -> None:
    """Mark numbers that the axis cannot hold at its edge; over layers, name them."""
    for x, value in zip(positions(series), series.y, strict=True):
        if value is None or _is_drawable(value, chart.log_y) or not _is_drawable(x, chart.log_x):
            continue
        edge = (0.97, 0.92, "top", "^")
        if value < LAYOUT.least:
            edge = (0.03, 0.08, "bottom", "v")
        height, text_height, alignment, arrow = edge
        marker = "X" if series.symbol == "cross" else arrow
        ax.plot(
            x,
            height,
            marker=marker,
            markersize=6,
            clip_on=False,
            transform=ax.get_xaxis_transform(),
            color=_color(series.color),
        )
        if chart.layers:
            ax.text(
                x,
                text_height,
                format_number(value),
                ha="center",
                va=alignment,
                fontsize=LAYOUT.points,
                transform=ax.get_xaxis_transform(),
                color=_color(series.color),
            )


def _draw_heat_map(ax: Axes, chart: HeatMap) -> None:
    values = [_drawable(row, chart.log_color) for row in chart.values]
    numbers = [value for row in values for value in row if not math.isnan(value)] or [1.0]
    low = min(numbers)
    high = max(numbers)
    if high <= low:
        high = low * 1.01 + 1e-12
    scale = colors.LogNorm(low, high) if chart.log_color else colors.Normalize(low, high)
    palette = colormaps["YlGnBu_r"]  # dark is low
    image = ax.imshow(values, norm=scale, cmap=palette, aspect="auto")
    for down, row in enumerate(values):
        for across, value in enumerate(row):
            if chart.marked and chart.marked[down][across]:
                ax.add_patch(_frame(down, across))
            red, green, blue, _ = palette(scale(value))
            is_light = math.isnan(value) or 0.3 * red + 0.59 * green + 0.11 * blue > 0.5
            cell = printable(chart.texts[down][across])
            ink = "black" if is_light else "white"
            ax.text(across, down, cell, color=ink, ha="center", va="center", fontsize=LAYOUT.points)
    ax.set_xticks(range(len(chart.columns)), list(map(_brief, chart.columns)))
    ax.set_yticks(range(len(chart.rows)), list(map(_brief, chart.rows)))
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    bar = ax.figure.colorbar(image, ax=ax, shrink=0.9, pad=0.02, aspect=18)
    bar.set_label(chart.value_label, fontsize=LAYOUT.points)
    bar.outline.set_visible(False)
    _write_numbers(bar.ax.yaxis, chart.log_color)
    bar.ax.tick_params(labelsize=LAYOUT.points, which="both")


def _frame(down: int, across: int) -> patches.Rectangle:
    corner = (across - 0.48, down - 0.48)
    color = COLORS["vermilion"]
    return patches.Rectangle(corner, 0.96, 0.96, fill=False, linewidth=1.8, edgecolor=color)


def _draw_rates(ax: Axes, chart: RateLine) -> None:
    best = ReferenceLine(chart.best, chart.best_label, "green")
    limit = ReferenceLine(chart.stable, chart.stable_label, "vermilion")
    marks = [mark for mark in (best, limit, *chart.marks) if _is_drawable(mark.value, True)]
    ax.set_xscale("log")
    if marks:
        ax.set_xlim(min(mark.value for mark in marks) / 3, max(mark.value for mark in marks) * 3)
    for mark in marks:
        label = f"{mark.label}: {format_number(mark.value)}"
        ax.axvline(mark.value, color=_color(mark.color), linewidth=1.6, label=label)
    ax.set_yticks([])


def _finish(ax: Axes, chart: Chart) -> None:
    """Label the axes and place caption and legend above, where they hide nothing."""
    ax.set_xlabel(getattr(chart, "x_label", "learning rate"), fontsize=LAYOUT.points + 1)
    ax.set_ylabel(getattr(chart, "y_label", ""), fontsize=LAYOUT.points + 1)
    if isinstance(chart, LineChart):
        _write_numbers(ax.yaxis, chart.log_y)
    if isinstance(chart, LineChart) and not chart.layers:
        values = [value for series in chart.series for value in series.x or ()]
        is_whole = all(value is None or value % 1 == 0 for value in values)
        _write_numbers(ax.xaxis, chart.log_x, is_whole)
    elif isinstance(chart, RateLine):
        _write_numbers(ax.xaxis, True)
    ax.tick_params(labelsize=LAYOUT.points, which="both")
    inches = float(ax.get_window_extent().width / ax.figure.dpi)
    caption = textwrap.fill(printable(chart.caption), max(20, int(inches / LAYOUT.letter)))
    handles, labels = ax.get_legend_handles_labels()
    if len(handles) > 1 or isinstance(chart, RateLine):
        shown = list(map(_brief, labels))
        ax.legend(
            handles,
            shown,
            ncols=max(1, int(inches / (LAYOUT.letter * (max(map(len, shown)) + 5)))),
            title=caption,
            alignment="left",
            loc="lower left",
            bbox_to_anchor=(0, 1.0),
            borderaxespad=0.2,
            fontsize=LAYOUT.points,
            title_fontsize=LAYOUT.points + 1,
            frameon=False,
        )
    else:
        ax.set_title(caption, fontsize=LAYOUT.points + 1, loc="left")
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
    step = max(1, math.ceil(len(layers) / max(1, int(inches * 72 / (LAYOUT.points * 1.15)))))
    names = list(map(_brief, layers[::step]))
    ax.set_xticks(
        range(0, len(layers), step), names, rotation=0 if _fit_side_by_side(names, inches) else 90
    )


def _brief(name: str) -> str:
    return shorten(printable(name), LAYOUT.longest_name)


def _fit_side_by_side(names: Sequence[str], inches: float) -> bool:
    return not names or (max(map(len, names)) + 1) * LAYOUT.letter * len(names) <= inches


def _color(color: str) -> Any:
    if color in COLORS:
        return COLORS[color]
    return colormaps["viridis"](0.85 * float(color.removeprefix("ramp:")))


def _is_drawable(value: float | None, is_log: bool) -> bool:
    if value is None or math.isnan(value):
        return False
    if is_log:
        return LAYOUT.least <= value <= LAYOUT.most
    return abs(value) <= LAYOUT.most


def _drawable(values: Numbers, is_log: bool) -> list[float]:
    """Return the values, with nan for what the axis cannot hold."""
    return [
        math.nan if value is None or not _is_drawable(value, is_log) else float(value)
        for value in values
    ]
