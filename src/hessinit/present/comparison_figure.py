"""A comparison as pictures. `python -m hessinit.present.comparison_figure [FILE] [FILE]` draws both kinds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hessinit.present.comparison_colours import Stroke, strokes
from hessinit.present.comparison_curves import curves_at, heights_of
from hessinit.present.comparison_heatmap import draw_heatmap, heatmap_size, shorten_names
from hessinit.present.comparison_lines import draw_curves, mark_breaks, set_heights, tidy
from hessinit.present.comparison_standing import ordered_starts
from hessinit.present.comparison_sweep_figure import draw_sweep, draw_sweep_losses
from hessinit.present.figure import GREY, LABEL_POINTS, LETTER
from hessinit.present.words import format_number
from hessinit.results.comparison import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

__all__ = ["draw_comparison", "draw_heatmap", "draw_losses", "draw_sweep_losses"]

PANEL = (2.5, 2.2)  # inches
PANELS_IN_A_ROW = 3
LEGEND_LINE = 0.155  # inches


def draw_losses(
    comparison: Comparison, learning_rate: float | None = None, axes: Sequence[Axes] | None = None
) -> tuple[Axes, ...]:
    """Draw the loss curves, one panel for each rate or for the one given; a sweep has one, and loss over ‖H‖.

    Lines are medians over seeds, bands reach from the least to the largest, a cross ends what diverged.
    """
    rates = comparison.learning_rates if learning_rate is None else (learning_rate,)
    panels = 2 if comparison.kind == "sweep" else len(rates)
    if axes is not None:
        if len(axes) != panels:
            raise ValueError(f"axes holds {len(axes)} axes; {panels} are drawn, so give {panels}, or None.")
        return _draw_on(comparison, rates, tuple(axes))
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=_losses_size(comparison, panels), layout="constrained")
    return _draw_on(comparison, rates, _panels(figure, panels, shared=comparison.kind != "sweep"))


def draw_comparison(comparison: Comparison) -> Figure:
    """Everything in one picture, apart from pyplot: the heat map above the curves; a sweep's two panels."""
    from matplotlib.figure import Figure

    if comparison.kind == "sweep":
        return draw_losses_apart(comparison)
    rates = comparison.learning_rates
    above, below = heatmap_size(comparison), _losses_size(comparison, len(rates))
    figure = Figure(figsize=(max(above[0], below[0]), above[1] + below[1]), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[above[1], below[1]])
    top, bottom = parts
    draw_heatmap(comparison, top.subplots())
    _draw_on(comparison, rates, _panels(bottom, len(rates)))
    return figure


def draw_losses_apart(comparison: Comparison) -> Figure:
    """The curves in a figure of their own, apart from pyplot."""
    from matplotlib.figure import Figure

    panels = 2 if comparison.kind == "sweep" else len(comparison.learning_rates)
    figure = Figure(figsize=_losses_size(comparison, panels), layout="constrained")
    _draw_on(
        comparison, comparison.learning_rates, _panels(figure, panels, shared=comparison.kind != "sweep")
    )
    return figure


def _draw_on(comparison: Comparison, rates: Sequence[float], axes: tuple[Axes, ...]) -> tuple[Axes, ...]:
    if comparison.kind == "sweep":
        draw_sweep(comparison, axes[0], axes[1])
        return axes
    starts = [start for start in ordered_starts(comparison) if comparison.applies(start)]
    look = strokes(comparison.schemes)
    labels = dict(zip(starts, shorten_names(starts), strict=True))
    drawn = [curves_at(comparison, rate) for rate in rates]
    for ax, rate, curves in zip(axes, rates, drawn, strict=True):
        draw_curves(ax, curves, look, labels)
        ax.set_title(f"lr {format_number(rate)}", fontsize=LABEL_POINTS + 1, loc="left")
        ax.set_xlabel("step", fontsize=LABEL_POINTS + 1)
        tidy(ax)
    set_heights(axes, heights_of(drawn, comparison))
    for ax, curves in zip(axes, drawn, strict=True):
        mark_breaks(ax, curves, look)
    for ax in axes[::PANELS_IN_A_ROW]:
        ax.set_ylabel("training loss", fontsize=LABEL_POINTS + 1)
    crossed = any(curve.stopped is not None or curve.rose for curves in drawn for curve in curves.values())
    _draw_legend(axes, starts, look, labels, crossed)
    return axes


def _draw_legend(
    axes: tuple[Axes, ...],
    starts: Sequence[str],
    look: dict[str, Stroke],
    labels: dict[str, str],
    crossed: bool,
) -> None:
    """One for all panels, in the order of the table, beside the last panel."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=look[start].color, linestyle=look[start].linestyle,
               linewidth=look[start].linewidth, label=labels[start])
        for start in starts
    ]  # fmt: skip
    if crossed:
        handles.append(
            Line2D([], [], color=GREY, marker="X", linestyle="none", markersize=6, label="diverged")
        )
    legend = axes[-1].legend(
        handles=handles,
        fontsize=LABEL_POINTS,
        frameon=False,
        loc="upper left",
        bbox_to_anchor=(1.02, 1.0),
        borderaxespad=0.0,
        handlelength=2.4,
    )
    # Where the last row has a place free, the legend lies there, and must not push the columns apart.
    legend.set_in_layout(len(axes) <= PANELS_IN_A_ROW or len(axes) % PANELS_IN_A_ROW == 0)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _panels(figure: FigureBase, many: int, *, shared: bool = True) -> tuple[Axes, ...]:
    """Rows of three; with a shared height, only the first of each row needs numbers beside it."""
    across = min(many, PANELS_IN_A_ROW)
    panels: list[Axes] = []
    for at in range(many):
        panel = figure.add_subplot(math.ceil(many / across), across, at + 1)
        panel.tick_params(labelleft=not shared or at % across == 0, which="both")
        panels.append(panel)
    return tuple(panels)


def _losses_size(comparison: Comparison, panels: int) -> tuple[float, float]:
    """Inches; a legend that has no free place in the last row needs some beside it."""
    across = min(panels, PANELS_IN_A_ROW)
    names = 0.5 + LETTER * max(map(len, shorten_names(comparison.schemes)))
    beside = max(1.1, names) if panels % PANELS_IN_A_ROW in (0, panels) else 0.0
    tallest = LEGEND_LINE * (len(comparison.schemes) + 3) if panels <= PANELS_IN_A_ROW else 0.0
    return PANEL[0] * across + beside, max(PANEL[1] * math.ceil(panels / across), tallest)


if __name__ == "__main__":
    import sys

    from hessinit.present.comparison_example import example_comparison, example_sweep

    paths = [*sys.argv[1:], "comparison.png", "sweep.png"][:2]
    for made_up, path in zip((example_comparison(), example_sweep()), paths, strict=True):
        draw_comparison(made_up).savefig(path, dpi=200)
        sys.stdout.write(f"{path}\n")
