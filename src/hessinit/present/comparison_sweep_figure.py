"""The pictures of a sweep: a curve for each std, and the loss over the curvature at the start."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hessinit.present.comparison_colours import Stroke, ramp
from hessinit.present.comparison_curves import LOGARITHMIC_FROM, curves_at, heights_of
from hessinit.present.comparison_lines import draw_curves, mark_breaks, set_heights, tidy, write_plainly
from hessinit.present.figure import GREY, LABEL_POINTS, is_drawable
from hessinit.present.words import format_number
from hessinit.results.comparison import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (3.3, 2.4)  # inches: a column of a two-column paper
LEGEND: dict[str, Any] = {
    "title": "std", "loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "frameon": False,
    "fontsize": LABEL_POINTS, "title_fontsize": LABEL_POINTS, "labelspacing": 0.4,
}  # fmt: skip
EDGE = 2.0  # lr·‖H‖, above which gradient descent leaves a quadratic bowl; other optimizers have other edges


def draw_sweep(comparison: Comparison, curves_axes: Axes, norms_axes: Axes) -> None:
    """Curves from dark (small std) to light on the first axes, the final loss over lr·‖H‖ on the second."""
    (rate,) = comparison.learning_rates
    colours = dict(zip(comparison.schemes, ramp(comparison.stds), strict=True))
    look = {start: Stroke(color, "-", 1.5) for start, color in colours.items()}
    labels = {start: f"{std:g}" for start, std in zip(comparison.schemes, comparison.stds, strict=True)}
    curves = curves_at(comparison, rate)
    draw_curves(curves_axes, curves, look, labels)
    set_heights([curves_axes], heights_of([curves], comparison))
    mark_breaks(curves_axes, curves, look)
    curves_axes.set_xlabel("step", fontsize=LABEL_POINTS + 1)
    tidy(curves_axes)
    curves_axes.set_ylabel("training loss", fontsize=LABEL_POINTS + 1)
    curves_axes.set_title(f"lr {format_number(rate)}", fontsize=LABEL_POINTS + 1, loc="left")
    curves_axes.legend(**LEGEND)  # between the panels: its colours are those of both
    _draw_norms(norms_axes, comparison, colours)


def draw_sweep_losses(comparison: Comparison, ax: Axes | None = None) -> Axes:
    """The final loss over lr·‖H‖ alone, with a legend of its own."""
    from matplotlib.lines import Line2D

    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=SIZE, layout="constrained")
    colours = dict(zip(comparison.schemes, ramp(comparison.stds), strict=True))
    _draw_norms(ax, comparison, colours)
    marks: dict[str, Any] = {"marker": "o", "linestyle": "none", "markersize": 5}
    handles = [
        Line2D([], [], color=colours[start], label=f"{std:g}", **marks)
        for start, std in zip(comparison.schemes, comparison.stds, strict=True)
    ]
    ax.legend(handles=handles, handletextpad=0.2, **LEGEND)
    return ax


def _draw_norms(ax: Axes, comparison: Comparison, colours: dict[str, str]) -> None:
    (rate,) = comparison.learning_rates
    points = []
    for start in comparison.schemes:
        product = rate * comparison.norm(start, rate)
        if is_drawable(product):
            points.append((start, product, comparison.loss(start, rate)))
    trained = [loss for start, _, loss in points if comparison.trains(start, rate)]
    is_logarithmic = bool(trained) and 0 < LOGARITHMIC_FROM * min(trained) < max(trained)
    ax.set_xscale("log")
    ax.set_yscale("log" if is_logarithmic else "linear")
    small: dict[str, Any] = {"fontsize": LABEL_POINTS, "textcoords": "offset points"}
    for start, product, loss in points:
        drawn: dict[str, Any] = {"color": colours[start], "linestyle": "none", "markersize": 6}
        if comparison.trains(start, rate):
            error = comparison.error(start, rate)
            ax.errorbar(product, loss, None if math.isnan(error) else error, marker="o", capsize=2, **drawn)
        else:
            edge = ax.get_xaxis_transform()
            ax.plot(product, 0.97, marker="X", transform=edge, clip_on=False, **drawn)
            below: dict[str, Any] = {"xycoords": edge, "xytext": (0, -6), "ha": "center", "va": "top"}
            ax.annotate("diverged", (product, 0.97), **below, **small)
    if points and comparison.optimizer == "sgd":
        ax.axvline(EDGE, color=GREY, linestyle="--", linewidth=0.9, zorder=0)
        place: dict[str, Any] = {
            "xycoords": ax.get_xaxis_transform(),
            "xytext": (0, 2),
            "ha": "center",
            "va": "bottom",
        }
        ax.annotate(f"lr·‖H‖ = {EDGE:g}", (EDGE, 1.0), color=GREY, **place, **small)
    if not points:
        middle: dict[str, Any] = {"ha": "center", "va": "center", "transform": ax.transAxes}
        ax.text(0.5, 0.5, "‖H‖ was not measured", fontsize=LABEL_POINTS + 1, color=GREY, **middle)
    ax.margins(x=0.12, y=0.2)
    ax.autoscale_view()
    write_plainly(ax.xaxis)
    if is_logarithmic:
        write_plainly(ax.yaxis)
    ax.set_xlabel("lr·‖H‖ at the start", fontsize=LABEL_POINTS + 1)
    ax.set_ylabel("final loss", fontsize=LABEL_POINTS + 1)
    tidy(ax)
