"""The heat map of a comparison: start × learning rate."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hessinit.present.comparison_colours import PAPER, readable_on
from hessinit.present.comparison_columns import write_cell
from hessinit.present.comparison_lines import write_plainly
from hessinit.present.comparison_standing import best_start, guessing, ordered_starts
from hessinit.present.figure import GREY, LABEL_POINTS, LETTER, VERMILION, inches_wide, shorten
from hessinit.present.words import format_number, printable
from hessinit.results.comparison import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize

# Dark is low: what trains well stands out. Blue to yellow is told apart by every common kind of vision.
COLOURS = "YlGnBu_r"
CELL_POINTS, SMALL_POINTS = 7.5, 6.0
CELL_INCHES = 0.78  # a cell that holds "diverged 2/3"; a narrower one has a cross instead
BESIDE_THE_CELLS = 0.75  # inches: the bar of colours with its numbers
RATES_FOR_ONE_LINE = 4  # so many columns are as wide as the title


def draw_heatmap(comparison: Comparison, ax: Axes | None = None) -> Axes:
    """Draw the final losses as colours, on one scale for all rates, the loss written in each cell.

    Below it, small, lr·‖H‖ at the start. The best start of each rate has a frame; what diverged is hatched.
    One scale, and not one for each rate, because a forgiving start then shows as a long dark row.
    """
    if comparison.kind == "sweep":
        raise ValueError(
            "a sweep has one learning rate, so there is no map of starts and rates; plot_losses() draws its "
            "curves, and the loss against ‖H‖."
        )
    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=heatmap_size(comparison), layout="constrained")
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable

    starts, rates = ordered_starts(comparison), comparison.learning_rates
    scale, palette = _choose_scale(comparison), colormaps[COLOURS]
    wide = _inches_for_cells(ax, comparison)
    is_narrow = wide / len(rates) < CELL_INCHES
    for across, rate in enumerate(rates):
        best = best_start(comparison, rate)
        for down, start in enumerate(starts):
            color = None
            if scale is not None and comparison.trains(start, rate):
                color = palette(float(scale(comparison.loss(start, rate))))
            _draw_cell(ax, comparison, start, rate, (across, down), color, "✗" if is_narrow else "diverged")
        if best is not None:
            _frame(ax, across, starts.index(best))
    ax.set_xlim(-0.5, len(rates) - 0.5)
    ax.set_ylim(len(starts) - 0.5, -0.5)
    ax.set_xticks(range(len(rates)), [format_number(rate) for rate in rates])
    ax.set_yticks(range(len(starts)), shorten_names(starts))
    for tick in ax.get_yticklabels():
        tick.set_parse_math(False)  # a "$" in a name is a "$"
    ax.tick_params(labelsize=LABEL_POINTS + 1, length=0)
    ax.set_xlabel("learning rate", fontsize=LABEL_POINTS + 1)
    ax.spines[:].set_visible(False)
    ax.set_title(_title(comparison, wide, is_narrow), fontsize=LABEL_POINTS + 1, loc="left")
    if scale is not None:
        bar = ax.figure.colorbar(ScalarMappable(scale, palette), ax=ax, shrink=0.9, pad=0.02, aspect=18)
        if scale.vmin is not None and scale.vmin > 0:
            write_plainly(bar.ax.yaxis)
        bar.ax.tick_params(labelsize=LABEL_POINTS, which="both")
        bar.outline.set_visible(False)
        bar.set_label("final loss, dark is low", fontsize=LABEL_POINTS)
    return ax


def heatmap_size(comparison: Comparison) -> tuple[float, float]:
    """Inches: room for "diverged 2/3" in every cell, for the names beside them and the title above."""
    names = LETTER * 1.15 * max(map(len, shorten_names(comparison.schemes)))
    rates = len(comparison.learning_rates)
    title = 0.0 if rates >= RATES_FOR_ONE_LINE else 0.13
    return 1.2 + min(names, 2.5) + max(0.85 * rates, 1.9), 0.9 + title + 0.44 * len(comparison.schemes)


def _inches_for_cells(ax: Axes, comparison: Comparison) -> float:
    """About how wide the cells are together, once the names and the bar have their place."""
    if len(ax.figure.axes) > 1:
        return inches_wide(ax) - BESIDE_THE_CELLS
    names = LETTER * 1.15 * max(map(len, shorten_names(comparison.schemes)))
    return float(ax.figure.bbox.width / ax.figure.dpi) - min(names, 2.5) - BESIDE_THE_CELLS - 0.2


def _title(comparison: Comparison, inches: float, is_narrow: bool) -> str:
    """It goes on to the right of its axes, so it is folded before it leaves a narrow picture."""
    parts = ["framed: lowest at that rate"]
    parts += ["small: lr·‖H‖ at the start"] if comparison.layers else []
    is_crossed = is_narrow and any(run.diverged for run in comparison.runs)
    parts += ["✗\u00a0diverged"] if is_crossed else []
    return textwrap.fill(
        f"final loss ({'; '.join(parts)})", max(24, int((inches + BESIDE_THE_CELLS) / LETTER))
    )


def shorten_names(starts: Sequence[str]) -> list[str]:
    """The names as pictures show them."""
    return shorten([printable(start) for start in starts])


def _choose_scale(comparison: Comparison) -> Normalize | None:
    """From the lowest loss to guessing; logarithmic where all are positive; None where nothing trains."""
    from matplotlib.colors import LogNorm, Normalize

    losses = [
        comparison.loss(start, rate)
        for start in comparison.schemes
        for rate in comparison.learning_rates
        if comparison.trains(start, rate)
    ]
    if not losses:
        return None
    low = min(losses)
    high = max(min(max(losses), guessing(comparison)), low)
    if high == low:
        high = low + (abs(low) or 1.0)
    return LogNorm(low, high, clip=True) if low > 0 else Normalize(low, high, clip=True)


def _draw_cell(
    ax: Axes,
    comparison: Comparison,
    start: str,
    rate: float,
    at: tuple[int, int],
    color: tuple[float, float, float, float] | None,
    word: str,
) -> None:
    from matplotlib.patches import Rectangle

    across, down = at
    text = write_cell(comparison, start, rate, short=True)
    diverged = comparison.diverged(start, rate)
    corner = (across - 0.48, down - 0.47)
    if color is not None:
        ax.add_patch(Rectangle(corner, 0.96, 0.94, facecolor=color, linewidth=0))
    elif diverged:
        hatched = Rectangle(corner, 0.96, 0.94, facecolor="none", edgecolor=GREY, linewidth=0, hatch="/////")
        hatched.set_alpha(0.5)
        ax.add_patch(hatched)
        text = text.replace("✗", word)
    ink = GREY if color is None else readable_on(color)
    product = rate * comparison.norm(start, rate)
    is_known = not math.isnan(product)
    plate = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.2, "alpha": 0.85} if diverged else None
    ax.text(across, down - 0.1 * is_known, text, ha="center", va="center", fontsize=CELL_POINTS, color=ink,
            bbox=plate)  # fmt: skip
    if is_known:
        small = format_number(product, 2)
        ax.text(across, down + 0.27, small, ha="center", va="center", fontsize=SMALL_POINTS, color=ink,
                bbox=plate)  # fmt: skip


def _frame(ax: Axes, across: int, down: int) -> None:
    from matplotlib.patches import Rectangle

    corner = (across - 0.48, down - 0.47)
    ax.add_patch(Rectangle(corner, 0.96, 0.94, facecolor="none", edgecolor=VERMILION, linewidth=1.8))
