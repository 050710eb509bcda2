"""Loss curves over seeds, as numbers: what the pictures and the page both draw."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from hessinit.present.comparison_standing import guessing
from hessinit.results.comparison import MOST_POINTS, Comparison, Run

LOGARITHMIC_FROM = 5.0  # ratio of the largest to the smallest loss shown
HEADROOM = 3.0  # curves are shown up to so many times the loss of guessing
# Large weights begin far above guessing, and coming down is what the curves of a sweep show.
SWEEP_HEADROOM = 30.0
LEAST = 1e-12  # a loss of exactly 0 has a place on a logarithmic axis


@dataclass(frozen=True)
class Break:
    """Where seeds stopped before the end: the step and the loss of the last number, and how many did."""

    step: float
    loss: float
    seeds: int


@dataclass(frozen=True)
class Curve:
    """Median, least and largest loss at the middle of each chunk of steps, over the seeds that reach the end.

    Where none does, over all of them, as far as all go.
    """

    steps: tuple[float, ...]
    median: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    seeds: int
    stopped: Break | None = None
    rose: int = 0  # seeds that came to the end, above where they began


@dataclass(frozen=True)
class Heights:
    """The ends of a loss axis."""

    low: float
    high: float
    logarithmic: bool


@dataclass(frozen=True)
class Cross:
    """Where some of the seeds diverged."""

    step: float
    loss: float
    diverged: int
    seeds: int


def curve_of(runs: Sequence[Run], steps: int) -> Curve:
    """The curves of some seeds as one.

    >>> from hessinit.present.comparison_example import example_comparison
    >>> comparison = example_comparison()
    >>> curve = curve_of(comparison.runs_of("lsuv", 0.3), comparison.steps)
    >>> len(curve.median), curve.stopped.seeds, curve.seeds
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
        tuple(map(statistics.median, columns)),
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
    for start in comparison.schemes:
        runs = [run for run in comparison.runs_of(start, learning_rate) if run.applies]
        if runs:
            found[start] = curve_of(runs, comparison.steps)
    return found


def heights_of(drawn: Sequence[dict[str, Curve]], comparison: Comparison) -> Heights | None:
    """One axis for all panels, logarithmic where the losses span much; None where there is no loss to show.

    It ends at some times the loss of guessing: what explodes would hide the rest.
    """
    level = guessing(comparison)
    headroom = SWEEP_HEADROOM if comparison.kind == "sweep" else HEADROOM
    top = math.inf if math.isnan(level) else level + (headroom - 1) * abs(level)
    medians = [loss for curves in drawn for curve in curves.values() for loss in curve.median]
    shown = [loss for loss in medians if loss <= top]
    if not shown:
        return None
    low, high = min(shown), max(shown)
    if low >= 0 and high > LOGARITHMIC_FROM * low:
        return Heights(max(low, LEAST) / 1.15, max(high, LEAST) * 1.15, True)
    room = 0.05 * (high - low or abs(high) or 1.0)
    return Heights(low - room, high + room, False)


def crosses_of(curve: Curve, heights: Heights) -> list[Cross]:
    """Where seeds stopped, at the upper edge where they left the panel; where the line ends for those that
    came to the end and diverged all the same.
    """
    low, high = heights.low, heights.high
    found = []
    if curve.stopped is not None:
        at = curve.stopped.step, curve.stopped.loss
        if curve.stopped.seeds == curve.seeds and curve.median:
            at = end_of_line(curve, heights)  # the line is that of those seeds
        found.append(Cross(at[0], min(max(at[1], low), high), curve.stopped.seeds, curve.seeds))
    if curve.rose and curve.median:
        step, loss = end_of_line(curve, heights)
        found.append(Cross(step, min(max(loss, low), high), curve.rose, curve.seeds))
    return found


def end_of_line(curve: Curve, heights: Heights) -> tuple[float, float]:
    """The last point, or where the line leaves the panel at the top for good."""
    high = heights.high
    points = list(zip(curve.steps, curve.median, strict=True))
    inside = [at for at, (_, loss) in enumerate(points) if loss <= high]
    if not inside or inside[-1] == len(points) - 1:
        return points[-1] if inside else (points[0][0], high)
    (before, low), (after, top) = points[inside[-1]], points[inside[-1] + 1]
    if heights.logarithmic:
        low, top, high_at = math.log(max(low, LEAST)), math.log(top), math.log(high)
    else:
        high_at = high
    share = (high_at - low) / (top - low)
    return before + share * (after - before), high
