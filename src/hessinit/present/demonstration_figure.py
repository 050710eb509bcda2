"""The demo's picture: both loss curves, and lr·‖H‖ through both trainings."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hessinit.present.comparison_lines import write_plainly
from hessinit.present.demonstration import SMOOTHED, average_losses
from hessinit.present.figure import BLUE, GREY, LABEL_POINTS, VERMILION
from hessinit.present.words import format_number
from hessinit.results.track_record import Tracking

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STROKES: tuple[dict[str, Any], ...] = (
    {"color": VERMILION, "linestyle": (0, (4, 1.5))},
    {"color": BLUE, "linestyle": "-"},
)
EDGE = 2.0


def draw_demonstration(trackings: Sequence[tuple[str, Tracking]], lr: float) -> Figure:
    """Two panels, each with a line for both starts; the figure belongs to no window."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 2.9), layout="constrained")
    losses, sharpness = figure.subplots(1, 2)
    for (label, tracking), stroke in zip(trackings, STROKES, strict=True):
        _draw_losses(losses, label, tracking, stroke)
        points = [point for point in tracking.points if (point.lr_times_norm or 0.0) > 0]
        sharpness.plot(
            [point.step for point in points], [point.lr_times_norm for point in points], linewidth=1.4,
            label=label, **stroke,
        )  # fmt: skip
    sharpness.axhline(EDGE, color=GREY, linewidth=0.8, linestyle=":", label="edge of stability: 2")
    for ax, title, height in (
        (losses, f"training loss, lr = {format_number(lr)}", f"loss (mean of {SMOOTHED} steps)"),
        (sharpness, "the step against the curvature", "lr·‖H‖"),
    ):
        ax.set_yscale("log")
        write_plainly(ax.yaxis)
        ax.set_title(title, fontsize=LABEL_POINTS + 2, loc="left")
        ax.set_xlabel("step", fontsize=LABEL_POINTS + 1)
        ax.set_ylabel(height, fontsize=LABEL_POINTS + 1)
        ax.tick_params(labelsize=LABEL_POINTS, which="both")
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(fontsize=LABEL_POINTS, frameon=False)
    return figure


def demonstration_png(trackings: Sequence[tuple[str, Tracking]], lr: float) -> bytes:
    """The picture as the content of a PNG file."""
    content = io.BytesIO()
    draw_demonstration(trackings, lr).savefig(content, format="png", dpi=200)
    return content.getvalue()


def _draw_losses(ax: Axes, label: str, tracking: Tracking, stroke: dict[str, Any]) -> None:
    averaged = average_losses(tracking)
    steps, means = [step for step, _ in averaged], [loss for _, loss in averaged]
    ax.plot(steps, means, linewidth=1.4, label=label, **stroke)
    if means and not math.isfinite(tracking.losses[-1][1]):  # it broke off there
        ax.plot(steps[-1], means[-1], marker="X", markersize=6, color=stroke["color"], clip_on=False)
