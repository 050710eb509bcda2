"""Loss curves drawn: a line for each start, a band over seeds, a cross where some diverged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hessinit.present.comparison_colours import PAPER, Stroke
from hessinit.present.comparison_curves import Cross, Curve, Heights, crosses_of
from hessinit.present.figure import LABEL_POINTS
from hessinit.present.words import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis


def draw_curves(ax: Axes, curves: dict[str, Curve], look: dict[str, Stroke], labels: dict[str, str]) -> None:
    """Draw the lines, and a band from the least to the largest seed; `set_heights` cuts off what explodes."""
    for start, curve in curves.items():
        stroke = look[start]
        shared: dict[str, Any] = {"color": stroke.color, "zorder": 2 + stroke.linewidth}
        ax.plot(curve.steps, curve.median, linestyle=stroke.linestyle, linewidth=stroke.linewidth,
                label=labels[start], **shared)  # fmt: skip
        ax.fill_between(curve.steps, curve.low, curve.high, color=stroke.color, alpha=0.15, linewidth=0)


def set_heights(axes: Sequence[Axes], heights: Heights | None) -> None:
    """The same heights for all panels."""
    if heights is None:
        return
    for ax in axes:
        if heights.logarithmic:
            ax.set_yscale("log")
        ax.set_ylim(heights.low, heights.high)
        if heights.logarithmic:
            write_plainly(ax.yaxis)


def mark_breaks(ax: Axes, curves: dict[str, Curve], look: dict[str, Stroke]) -> None:
    """A cross where seeds diverged, with how many, if not all."""
    low, high = ax.get_ylim()
    heights = Heights(low, high, ax.get_yscale() == "log")
    for start, curve in curves.items():
        for cross in crosses_of(curve, heights):
            _draw_cross(ax, cross, look[start].color)


def _draw_cross(ax: Axes, cross: Cross, color: str) -> None:
    shared: dict[str, Any] = {"color": color, "linestyle": "none", "clip_on": False, "zorder": 6}
    shared |= {"marker": "X", "markersize": 6, "markeredgecolor": PAPER, "markeredgewidth": 0.6}
    ax.plot(cross.step, cross.loss, **shared)
    if cross.diverged < cross.seeds:
        beside: dict[str, Any] = {"xytext": (5, -1), "textcoords": "offset points", "va": "center"}
        small: dict[str, Any] = {"color": color, "fontsize": LABEL_POINTS, "annotation_clip": False}
        ax.annotate(f"{cross.diverged}/{cross.seeds}", (cross.step, cross.loss), **small, **beside)


def tidy(ax: Axes) -> None:
    ax.tick_params(labelsize=LABEL_POINTS, which="both")
    ax.spines[["top", "right"]].set_visible(False)


def write_plainly(axis: Axis) -> None:
    """0.01 and not 10⁻² at the ticks of a logarithmic axis; more of them where it spans little."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    if not 1e-4 <= low < high <= 1e6:
        return  # powers of ten are plainer there
    several = high / low > 100
    axis.set_major_locator(LogLocator(subs=(1.0,) if several else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
    axis.set_minor_formatter(NullFormatter())
