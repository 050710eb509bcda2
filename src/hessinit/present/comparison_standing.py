"""Who stands where in a comparison: the order of the starts, ties, and how much a wrong rate costs each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hessinit.report.comparison import Comparison


@dataclass(frozen=True)
class Result:
    """A mean over seeds and its standard error (nan for one seed)."""

    mean: float
    error: float

    def ties_with(self, other: Result) -> bool:
        """Whether the two differ by at most two standard errors of their difference; never for one seed.

        >>> Result(1.0, 0.1).ties_with(Result(1.2, 0.1)), Result(1.0, 0.1).ties_with(Result(1.3, 0.1))
        (True, False)
        """
        if not (math.isfinite(self.mean) and math.isfinite(other.mean)):
            return False
        # nan compares as False: without an error nothing is called a tie.
        return abs(self.mean - other.mean) <= 2 * math.hypot(self.error, other.error)


def trains(comparison: Comparison, start: str, learning_rate: float) -> bool:
    """Whether every seed came down to a finite loss."""
    is_finite = math.isfinite(comparison.loss(start, learning_rate))
    return is_finite and comparison.diverged(start, learning_rate) == 0


def best_rate(comparison: Comparison, start: str) -> float:
    """The rate of the lowest loss among those at which the start trains; nan where there is none."""
    rates = [rate for rate in comparison.learning_rates if trains(comparison, start, rate)]
    return min(rates, key=lambda rate: comparison.loss(start, rate), default=math.nan)


def best_start(comparison: Comparison, learning_rate: float) -> str | None:
    """The start of the lowest loss at that rate among those that train there."""
    starts = [start for start in comparison.starts if trains(comparison, start, learning_rate)]
    return min(starts, key=lambda start: comparison.loss(start, learning_rate), default=None)


def at_best_rate(comparison: Comparison, start: str) -> Result:
    """The start's loss at its own best rate; inf where it trains at none."""
    rate = best_rate(comparison, start)
    if math.isnan(rate):
        return Result(math.inf, math.nan)
    return Result(comparison.loss(start, rate), comparison.error(start, rate))


def ordered_starts(comparison: Comparison) -> tuple[str, ...]:
    """Best first by the loss at the own best rate; last those that never train, and that do not apply.

    >>> from hessinit.present.comparison_example import example_comparison
    >>> ordered_starts(example_comparison())
    ('hessinit', 'lsuv', 'default', 'he', 'fixup')
    """
    return tuple(
        sorted(
            comparison.starts,
            key=lambda start: (not comparison.applies(start), at_best_rate(comparison, start).mean),
        )
    )


def guessing(comparison: Comparison) -> float:
    """The loss before any training of the start that begins lowest: about that of guessing."""
    firsts = [
        [run.first_loss for run in comparison.runs if run.start == start and math.isfinite(run.first_loss)]
        for start in comparison.starts
    ]
    return min((statistics.fmean(losses) for losses in firsts if losses), default=math.nan)


def regrets(comparison: Comparison) -> dict[str, Result]:
    """The logarithm of each start's loss over the best start's at that rate, on average over the rates.

    Logarithms, because one rate at which the best loss is nearly 0 would outweigh all others. A run that ends
    above `guessing`, or in no number, counts as guessing; rates at which no start trains are left out, and
    so are starts that do not apply. Empty where nothing can be compared, or a loss is not positive.
    """
    worst = guessing(comparison)
    winners = {rate: best_start(comparison, rate) for rate in comparison.learning_rates}
    best = {rate: comparison.loss(start, rate) for rate, start in winners.items() if start is not None}
    found = {}
    for start in comparison.starts:
        by_seed = []
        for seed in comparison.seeds:
            losses = {
                run.learning_rate: run.final_loss if run.final_loss < worst else worst  # nan is not below
                for run in comparison.runs
                if (run.start, run.seed) == (start, seed) and run.applies
            }
            if not best or any(losses.get(rate, 1.0) <= 0 or low <= 0 for rate, low in best.items()):
                return {}
            if all(rate in losses for rate in best):
                by_seed.append(statistics.fmean(math.log(losses[rate] / low) for rate, low in best.items()))
        if by_seed:
            found[start] = _summarize(by_seed)
    return found


def _summarize(values: Sequence[float]) -> Result:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Result(statistics.fmean(values), error)
