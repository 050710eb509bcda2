"""Sharpness over the steps, and its limit. `python -m hessinit.present.tracking_figure [FILE]` draws one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hessinit.present.figure import BLUE, GREY, LABEL_POINTS, VERMILION, is_drawable
from hessinit.present.words import format_number
from hessinit.results.track_record import Tracking

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

_SPANS_MUCH = 5.0
_SAME = 1.02  # the limit is one number to the eye
_FEW_TICKS, _MANY_TICKS = 6.0, 500.0  # ratios of the ends of an axis


def draw_tracking(tracking: Tracking, ax: Axes | None = None) -> Axes:
    """Draw ‖H‖ over the steps, the largest that is stable at the rate, and the loss on an axis of its own.

    What a logarithmic axis cannot hold (0, inf, nan) is left out.
    """
    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=(3.5, 2.6), layout="constrained")
    ax.set_yscale("log")
    steps = [point.step for point in tracking.points]
    norms = [_drawn(point.norm) for point in tracking.points]
    marker = "o" if len(steps) <= 40 else ""
    ax.plot(steps, norms, color=BLUE, marker=marker, markersize=3, linewidth=1.2, label="‖H‖", zorder=3)
    _draw_limit(ax, tracking, steps)
    _write_plainly(ax)
    handles, labels = ax.get_legend_handles_labels()
    if drawn := _draw_losses(ax, tracking):
        handles, labels = [*handles, drawn], [*labels, "loss"]
    ax.set_xlabel("step", fontsize=LABEL_POINTS + 1)
    ax.set_ylabel("sharpness ‖H‖", fontsize=LABEL_POINTS + 1)
    ax.tick_params(labelsize=LABEL_POINTS, which="both")
    ax.legend(
        handles, labels, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, borderaxespad=0.2, frameon=False,
        fontsize=LABEL_POINTS, handlelength=1.6, columnspacing=1.0,
    )  # fmt: skip
    return ax


def _draw_limit(ax: Axes, tracking: Tracking, steps: list[int]) -> None:
    limits = [_drawn(point.stable_norm) for point in tracking.points]
    known = [limit for limit in limits if not math.isnan(limit)]
    if not known:
        return
    constant = max(known) <= _SAME * min(known)
    label = f"stable up to {format_number(known[0])}" if constant else "stable up to"
    ax.plot(steps, limits, color=VERMILION, linestyle="--", linewidth=1, label=label)
    if constant and len(steps) == 1:
        ax.axhline(known[0], color=VERMILION, linestyle="--", linewidth=1)


def _draw_losses(ax: Axes, tracking: Tracking) -> Line2D | None:
    """The training losses where they were given, else those of the tracked batch."""
    given = tracking.losses or tuple((point.step, point.loss) for point in tracking.points)
    losses = [(step, loss) for step, loss in given if math.isfinite(loss)]
    if not losses:
        return None
    other = ax.twinx()
    values = [loss for _, loss in losses]
    (line,) = other.plot([step for step, _ in losses], values, color=GREY, linewidth=0.7, alpha=0.7)
    if min(values) > 0 and max(values) > _SPANS_MUCH * min(values):
        other.set_yscale("log")
        _write_plainly(other)
    other.set_ylabel("loss", fontsize=LABEL_POINTS + 1, color=GREY)
    other.tick_params(labelsize=LABEL_POINTS, which="both", colors=GREY)
    ax.set_zorder(other.get_zorder() + 1)  # the sharpness is what it is about
    ax.patch.set_visible(False)
    return line


def _write_plainly(ax: Axes) -> None:
    """Plain numbers at the ticks of a logarithmic axis, where it spans little or much."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

    low, high = sorted(ax.get_ylim())
    if high < _FEW_TICKS * low:  # 1, 2 and 5 might all lie outside
        ax.yaxis.set_major_locator(MaxNLocator(nbins=5))
        ax.yaxis.set_minor_locator(NullLocator())
    else:
        # Over many decades a locator with 2 and 5 gives no tick at all.
        steps = (1.0, 2.0, 5.0) if high < _MANY_TICKS * low else (1.0,)
        ax.yaxis.set_major_locator(LogLocator(subs=steps, numticks=9))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _drawn(norm: float) -> float:
    return norm if is_drawable(norm) else math.nan


if __name__ == "__main__":
    import sys

    import matplotlib

    from hessinit.present.tracking_example import example_tracking

    matplotlib.use("Agg")
    path = sys.argv[1] if len(sys.argv) > 1 else "tracking.png"
    figure = example_tracking().plot().figure
    figure.savefig(path, dpi=200)  # type: ignore[union-attr]
    sys.stdout.write(f"{path}\n")
