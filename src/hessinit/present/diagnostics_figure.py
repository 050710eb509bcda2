"""The diagnostics as a picture: size of activations and gradients over depth, and idle units as bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hessinit.present.diagnostics_columns import diagnosed_layers
from hessinit.present.figure import (
    BLUE,
    DRAWABLE,
    GREY,
    LABEL_POINTS,
    VERMILION,
    draw_points,
    figure_size,
    is_drawable,
    label_axes,
)
from hessinit.present.words import format_number
from hessinit.results.curvature_report import CurvatureReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SKY, ORANGE = "#56B4E9", "#E69F00"  # of the same palette; lighter, for areas


def draw_diagnostics(report: CurvatureReport, ax: Axes | None = None) -> Axes:
    """Draw the standard deviation of each layer's activations and gradients over depth, logarithmically.

    Bars, on an axis of their own to the right, show the shares of dead units and of saturated entries. A size
    that a logarithmic axis cannot hold (0, inf, nan) is named at its edge.
    """
    if not any(layer.diagnostics for layer in report):
        raise ValueError(
            "the report holds no diagnostics to draw; ask for them: measure(..., diagnostics=True)."
        )
    if ax is None:
        from matplotlib import pyplot

        size = figure_size(report, 2.9, inches_a_layer=0.3, margins=1.2)
        _, ax = pyplot.subplots(figsize=size, layout="constrained")
    ax.set_yscale("log")
    rows = [row for _, row in diagnosed_layers(report)]
    for values, label, color, marker in (
        ([row.activation_std for row in rows], "activation std", BLUE, "o"),
        ([row.gradient_std for row in rows], "gradient std", VERMILION, "D"),
    ):
        sizes = [math.nan if value is None else value for value in values]
        draw_points(ax, sizes, label, color, marker)
        _name_beyond(ax, values, color)
    _draw_shares(ax, [row.dead for row in rows], [row.saturated for row in rows])
    ax.set_xlim(-0.6, max(len(report), 1) - 0.4)
    label_axes(ax, report)
    ax.set_ylabel("standard deviation", fontsize=LABEL_POINTS + 1)
    return ax


def _draw_shares(ax: Axes, dead: Sequence[float | None], saturated: Sequence[float | None]) -> None:
    kinds = [
        (shares, label, color)
        for shares, label, color in ((dead, "dead units", ORANGE), (saturated, "saturated entries", SKY))
        if any(share is not None for share in shares)
    ]
    if not kinds:
        return
    # The bars get the lower third of the height, the lines the rest.
    low, high = ax.get_ylim()
    ax.set_ylim(max(low * math.sqrt(low / high), DRAWABLE[0]), high)
    bars = ax.twinx()
    bars.set_zorder(ax.get_zorder() - 1)
    ax.patch.set_visible(False)
    width = 0.7 / len(kinds)
    for place, (shares, label, color) in enumerate(kinds):
        at = [position - 0.35 + width * (place + 0.5) for position in range(len(shares))]
        heights = [0.0 if share is None else share for share in shares]
        bars.bar(at, heights, width, color=color, alpha=0.45, linewidth=0)
        ax.bar([math.nan], [math.nan], color=color, alpha=0.45, label=label)  # for the one legend
    bars.set_ylim(0, 3)
    bars.set_yticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    bars.tick_params(labelsize=LABEL_POINTS, colors=GREY)
    bars.set_ylabel("share", fontsize=LABEL_POINTS + 1, color=GREY, y=1 / 6)


def _name_beyond(ax: Axes, values: Sequence[float | None], color: str) -> None:
    for position, value in enumerate(values):
        if value is None or is_drawable(value):
            continue
        low = value < 1
        ax.annotate(
            format_number(value),
            (position, 0.01 if low else 0.99),
            xycoords=ax.get_xaxis_transform(),
            ha="right" if color == BLUE else "left",
            va="bottom" if low else "top",
            fontsize=LABEL_POINTS,
            color=color,
        )
