"""The figures of a reproduction. `python -m hessinit.present.reproduction_figure [FILE] [FILE]` draws two."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any

from hessinit.present.comparison_colours import PAPER, Stroke, strokes
from hessinit.present.comparison_lines import tidy, write_plainly
from hessinit.present.figure import DRAWABLE, GREY, LABEL_POINTS, LETTER, shorten
from hessinit.present.words import printable
from hessinit.results.reproduction import Curve, Figure

if TYPE_CHECKING:
    from matplotlib import figure as matplotlib_figure
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

WIDTH, HEIGHT = 3.5, 2.3  # inches: a column of a two-column paper; the legend comes on top
BESIDE = 0.55  # inches: numbers and label of the height
LEGEND_LINE, HANDLE = 0.135, 0.38  # inches
# Colours repeat after seven, and vanish in grey print: markers tell the curves apart as well.
MARKERS = ("o", "s", "^", "D", "v", "P", "<", ">", "p", "h")
MARKS = 5  # on a line
DIVERGED = "diverged"


def draw_figure(figure: Figure, ax: Axes | None = None) -> Axes:
    """Draw the curves with a band, or the points with bars, of one standard error; the legend lies above.

    A cross ends a line that goes on as inf or nan; of a point it stands at the upper edge.
    """
    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=figure_size(figure), layout="constrained")
    _draw_on(ax, figure, titled=True)
    return ax


def draw_figure_apart(figure: Figure, *, titled: bool = True) -> matplotlib_figure.Figure:
    """The same in a figure of its own, apart from pyplot; without a title where a caption says it."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=figure_size(figure), layout="constrained")
    _draw_on(canvas.subplots(), figure, titled)
    return canvas


def figure_size(figure: Figure) -> tuple[float, float]:
    """Inches; each line of the legend, and of the title after its first, needs some."""
    title = len(textwrap.wrap(printable(figure.title), _letters_in_title(WIDTH - BESIDE)))
    entries = len(figure.curves) + any(_breaks(curve) for curve in figure.curves)
    legend = math.ceil(entries / _legend_columns(figure, WIDTH - BESIDE))
    return WIDTH, HEIGHT + LEGEND_LINE * (legend + max(0, title - 1))


def _draw_on(ax: Axes, figure: Figure, titled: bool) -> None:
    ax.set_xscale("log" if figure.log_x else "linear")
    ax.set_yscale("log" if figure.log_y else "linear")
    look = strokes([curve.name for curve in figure.curves])
    names = shorten([printable(curve.name) for curve in figure.curves])
    handles = []
    for place, (curve, name) in enumerate(zip(figure.curves, names, strict=True)):
        draw = _draw_points if figure.style == "points" else _draw_line
        handles.append(draw(ax, figure, curve, look[curve.name], place))
        handles[-1].set_label(name)
    ax.autoscale_view()
    for name, axis, is_logarithmic in (("x", ax.xaxis, figure.log_x), ("y", ax.yaxis, figure.log_y)):
        if is_logarithmic:
            write_plainly(axis)
        axis.set_label_text(printable(getattr(figure, f"{name}_label")), fontsize=LABEL_POINTS + 1)
        axis.label.set_parse_math(False)
    tidy(ax)
    _draw_legend(ax, figure, handles, titled)


def _draw_line(ax: Axes, figure: Figure, curve: Curve, stroke: Stroke, place: int) -> Line2D:
    x, y, error = _drawable(figure, curve)
    # Marks of different curves stand at different steps, or those of close curves would cover each other.
    every = max(1, len(y) // MARKS)
    marks: dict[str, Any] = {
        "marker": MARKERS[place % len(MARKERS)],
        "markersize": 3.8,
        "markevery": (place * every // max(1, len(figure.curves)), every),
        "markeredgewidth": 0,
    }
    lines: dict[str, Any] = {
        "color": stroke.color,
        "linestyle": stroke.linestyle,
        "zorder": 2 + stroke.linewidth,
    }
    (line,) = ax.plot(x, y, linewidth=stroke.linewidth, **lines, **marks)
    low = [_lowered(value, by, figure.log_y) for value, by in zip(y, error, strict=True)]
    high = [value + by for value, by in zip(y, error, strict=True)]
    ax.fill_between(x, low, high, color=stroke.color, alpha=0.18, linewidth=0)
    if _breaks(curve):
        finite = [at for at, value in enumerate(y) if math.isfinite(value)]
        if finite:
            _cross(ax, x[finite[-1]], y[finite[-1]], stroke.color)
        else:
            _cross(ax, x[0] if x else 0.5, None, stroke.color)
    return line


def _draw_points(ax: Axes, figure: Figure, curve: Curve, stroke: Stroke, place: int) -> Line2D:
    x, y, error = _drawable(figure, curve)
    marker = MARKERS[place % len(MARKERS)]
    shared: dict[str, Any] = {"color": stroke.color, "linestyle": "none", "zorder": 2 + stroke.linewidth}
    (points,) = ax.plot(
        x, y, marker=marker, markersize=5.2, markeredgecolor=PAPER, markeredgewidth=0.5, **shared
    )
    low = [_lowered(value, by, figure.log_y) for value, by in zip(y, error, strict=True)]
    ax.vlines(
        x, low, [value + by for value, by in zip(y, error, strict=True)], color=stroke.color, linewidth=0.9
    )
    for at, value in zip(x, curve.y, strict=True):
        if _is_broken(value):
            _cross(ax, at, None, stroke.color)
    return points


def _cross(ax: Axes, x: float, y: float | None, color: str) -> None:
    """Where something broke off; without a height, at the upper edge."""
    shared: dict[str, Any] = {"color": color, "linestyle": "none", "clip_on": False, "zorder": 6}
    shared |= {"marker": "X", "markersize": 6, "markeredgecolor": PAPER, "markeredgewidth": 0.6}
    if not math.isfinite(x):
        return
    if y is None:
        ax.plot(x, 1.0, transform=ax.get_xaxis_transform(), **shared)
    else:
        ax.plot(x, y, **shared)


def _drawable(figure: Figure, curve: Curve) -> tuple[list[float], list[float], list[float]]:
    """x, y and the error, nan where an axis has no place for them."""
    x = [_on_axis(value, figure.log_x) for value in curve.x]
    y = [_on_axis(value, figure.log_y) for value in curve.y]
    error = [value if 0 <= value <= DRAWABLE[1] else 0.0 for value in curve.error or [0.0] * len(y)]
    return x, y, error


def _on_axis(value: float, is_logarithmic: bool) -> float:
    low = DRAWABLE[0] if is_logarithmic else -DRAWABLE[1]
    return value if low <= value <= DRAWABLE[1] else math.nan


def _lowered(value: float, by: float, is_logarithmic: bool) -> float:
    return max(value - by, 1e-3 * value) if is_logarithmic else value - by


def _is_broken(value: float) -> bool:
    return not abs(value) <= DRAWABLE[1]


def _breaks(curve: Curve) -> bool:
    """Whether its end is no number, or for points any of it."""
    return any(map(_is_broken, curve.y))


def _legend_columns(figure: Figure, inches: float) -> int:
    longest = max(
        (len(name) for name in shorten([printable(curve.name) for curve in figure.curves])), default=1
    )
    return max(1, int(inches / (HANDLE + LETTER * longest)))


def _inches(ax: Axes) -> float:
    """How wide the axes are; before the layout is made, those that fill a figure are taken as it will be."""
    drawn = ax.get_window_extent().width / ax.figure.dpi
    return max(drawn, WIDTH - BESIDE) if len(ax.figure.axes) == 1 else drawn


def _draw_legend(ax: Axes, figure: Figure, handles: list[Line2D], titled: bool) -> None:
    from matplotlib.lines import Line2D as Handle

    if any(map(_breaks, figure.curves)):
        cross: dict[str, Any] = {"marker": "X", "linestyle": "none", "markersize": 6, "label": DIVERGED}
        handles = [*handles, Handle([], [], color=GREY, **cross)]
    columns = _legend_columns(figure, _inches(ax))
    if len(handles) > 1:
        above: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.04), "borderaxespad": 0.0}
        spaced: dict[str, Any] = {
            "columnspacing": 1.0,
            "handlelength": 2.0,
            "labelspacing": 0.3,
            "borderpad": 0.0,
        }
        legend = ax.legend(
            handles=handles, ncols=columns, frameon=False, fontsize=LABEL_POINTS, **above, **spaced
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
    if titled:
        lines = math.ceil(len(handles) / columns) if len(handles) > 1 else 0
        words = textwrap.fill(printable(figure.title), _letters_in_title(_inches(ax)))
        title = ax.set_title(words, fontsize=LABEL_POINTS + 1, loc="left", pad=9 + 72 * LEGEND_LINE * lines)
        title.set_parse_math(False)


def _letters_in_title(inches: float) -> int:
    return max(20, int(inches / LETTER))


if __name__ == "__main__":
    import sys

    from hessinit.present.reproduction_example import example_reproduction

    paths = [*sys.argv[1:], "lines.png", "points.png"][:2]
    for made_up, path in zip(example_reproduction().findings.figures, paths, strict=True):
        draw_figure_apart(made_up).savefig(path, dpi=200)
        sys.stdout.write(f"{path}\n")
