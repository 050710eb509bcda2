"""Loss curves: one panel for each learning rate, one line for each start."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from hessinit.present.comparison_colours import Stroke
from hessinit.present.comparison_standing import guessing
from hessinit.present.figure import LABEL_POINTS
from hessinit.present.numbers import format_number
from hessinit.report.comparison import Comparison
from hessinit.report.run import MOST_POINTS, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

LOGARITHMIC_FROM = 5.0  # ratio of the largest to the smallest loss shown
HEADROOM = 3.0  # curves are shown up to so many times the loss of guessing
LEAST = 1e-12  # a loss of exactly 0 has a place on a logarithmic axis


@dataclass(frozen=True)
class Break:
    """Where seeds stopped before the end: the step and the loss of the last number, and how many did."""

    step: float
    loss: float
    seeds: int


@dataclass(frozen=True)
class Curve:
    """Mean, least and largest loss at the middle of each chunk of steps, over the seeds that reach the end.

    Where none does, over all of them, as far as all go.
    """

    steps: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    seeds: int
    stopped: Break | None = None
    rose: int = 0  # seeds that came to the end, above where they began


def curve_of(runs: Sequence[Run], steps: int) -> Curve:
    """Average the curves of some seeds.

    >>> from hessinit.present.comparison_example import example_comparison
    >>> comparison = example_comparison()
    >>> curve = curve_of(comparison.runs_of("lsuv", 0.3), comparison.steps)
    >>> len(curve.mean), curve.stopped.seeds, curve.seeds
    (50, 1, 3)
    """
    chunk = math.ceil(steps / MOST_POINTS)
    whole = [run for run in runs if run.finite]
    columns = list(zip(*(_numbers(run) for run in whole or runs), strict=False))
    middles = [(at * chunk + min(steps, (at + 1) * chunk)) / 2 for at in range(MOST_POINTS)]
    broken = [run for run in runs if not run.finite]
    stopped = None
    if broken:
        longest = max((_numbers(run) for run in broken), key=len)
        last = (middles[len(longest) - 1], longest[-1]) if longest else (0.0, math.inf)
        stopped = Break(*last, seeds=len(broken))
    return Curve(
        tuple(middles[: len(columns)]),
        tuple(map(statistics.fmean, columns)),
        tuple(map(min, columns)),
        tuple(map(max, columns)),
        len(runs),
        stopped,
        rose=sum(run.diverged for run in whole),
    )


def _numbers(run: Run) -> list[float]:
    """The losses before the first that is no number."""
    return list(takewhile(math.isfinite, run.losses[:MOST_POINTS]))


def curves_at(comparison: Comparison, learning_rate: float) -> dict[str, Curve]:
    """The curve of every start that applies, at that rate."""
    found = {}
    for start in comparison.starts:
        runs = [run for run in comparison.runs_of(start, learning_rate) if run.applies]
        if runs:
            found[start] = curve_of(runs, comparison.steps)
    return found


def draw_curves(ax: Axes, curves: dict[str, Curve], look: dict[str, Stroke], labels: dict[str, str]) -> None:
    """Draw the lines, and a band from the least to the largest seed; `set_heights` cuts off what explodes."""
    for start, curve in curves.items():
        stroke = look[start]
        shared: dict[str, Any] = {"color": stroke.color, "zorder": 2 + stroke.linewidth}
        ax.plot(curve.steps, curve.mean, linestyle=stroke.linestyle, linewidth=stroke.linewidth,
                label=labels[start], **shared)  # fmt: skip
        ax.fill_between(curve.steps, curve.low, curve.high, color=stroke.color, alpha=0.15, linewidth=0)


def set_heights(axes: Sequence[Axes], drawn: Sequence[dict[str, Curve]], top: float) -> None:
    """The same heights for all panels, up to `top`; logarithmic where the losses span much."""
    means = [loss for curves in drawn for curve in curves.values() for loss in curve.mean]
    shown = [loss for loss in means if loss <= top]
    if not shown:
        return
    low, high = min(shown), max(shown)
    logarithmic = low >= 0 and high > LOGARITHMIC_FROM * low
    for ax in axes:
        if logarithmic:
            ax.set_yscale("log")
            ax.set_ylim(max(low, LEAST) / 1.15, max(high, LEAST) * 1.15)
            write_plainly(ax.yaxis)
        else:
            room = 0.05 * (high - low or abs(high) or 1.0)
            ax.set_ylim(low - room, high + room)


def mark_breaks(ax: Axes, curves: dict[str, Curve], look: dict[str, Stroke]) -> None:
    """A cross where seeds stopped, at the upper edge where they left the panel; with how many, if not all.

    Seeds that came to the end and diverged have theirs where the line ends.
    """
    low, high = ax.get_ylim()
    for start, curve in curves.items():
        color = look[start].color
        if curve.stopped is not None:
            at = curve.stopped.step, curve.stopped.loss
            if curve.stopped.seeds == curve.seeds and curve.mean:
                at = _end_of_line(curve, high, ax.get_yscale() == "log")  # the line is that of those seeds
            _cross(ax, at[0], min(max(at[1], low), high), color, curve.stopped.seeds, curve.seeds)
        if curve.rose and curve.mean:
            step, loss = _end_of_line(curve, high, ax.get_yscale() == "log")
            _cross(ax, step, min(max(loss, low), high), color, curve.rose, curve.seeds)


def _end_of_line(curve: Curve, high: float, logarithmic: bool) -> tuple[float, float]:
    """The last point, or where the line leaves the panel at the top for good."""
    points = list(zip(curve.steps, curve.mean, strict=True))
    inside = [at for at, (_, loss) in enumerate(points) if loss <= high]
    if not inside or inside[-1] == len(points) - 1:
        return points[-1] if inside else (points[0][0], high)
    (before, low), (after, top) = points[inside[-1]], points[inside[-1] + 1]
    if logarithmic:
        low, top, high_at = math.log(max(low, LEAST)), math.log(top), math.log(high)
    else:
        high_at = high
    share = (high_at - low) / (top - low)
    return before + share * (after - before), high


def _cross(ax: Axes, step: float, height: float, color: str, many: int, seeds: int) -> None:
    shared: dict[str, Any] = {"color": color, "linestyle": "none", "clip_on": False, "zorder": 6}
    ax.plot(step, height, marker="X", markersize=6, markeredgecolor="white", markeredgewidth=0.6, **shared)
    if many < seeds:
        beside: dict[str, Any] = {"xytext": (5, -1), "textcoords": "offset points", "va": "center"}
        text = f"{many}/{seeds}"
        ax.annotate(text, (step, height), color=color, fontsize=LABEL_POINTS, annotation_clip=False, **beside)


def ceiling(comparison: Comparison, headroom: float = HEADROOM) -> float:
    """The largest loss that is drawn."""
    level = guessing(comparison)
    return math.inf if math.isnan(level) else level + (headroom - 1) * abs(level)


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
