"""Who stands where in a comparison: the order of the starts, ties, and how much a wrong rate costs each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hessinit.results.comparison import Comparison


@dataclass(frozen=True)
class Result:
    """A mean over seeds and its standard error (nan for one seed)."""

    mean: float
    error: float

    def ties_with(self, other: Result) -> bool:
        """Whether the two differ by at most two standard errors of their difference; with one seed, by 0.

        >>> Result(1.0, 0.1).ties_with(Result(1.2, 0.1)), Result(1.0, 0.1).ties_with(Result(1.3, 0.1))
        (True, False)
        """
        if not (math.isfinite(self.mean) and math.isfinite(other.mean)):
            return False
        if self.mean == other.mean:
            return True
        # nan compares as False: without an error nothing else is called a tie.
        return abs(self.mean - other.mean) <= 2 * math.hypot(self.error, other.error)


def best_start(comparison: Comparison, learning_rate: float) -> str | None:
    """The start of the lowest loss at that rate among those that train there."""
    starts = [start for start in comparison.schemes if comparison.trains(start, learning_rate)]
    return min(starts, key=lambda start: comparison.loss(start, learning_rate), default=None)


def at_best_rate(comparison: Comparison, start: str) -> Result:
    """The start's loss at its own best rate; inf where it trains at none."""
    rate = comparison.best_rate(start)
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
            comparison.schemes,
            key=lambda start: (not comparison.applies(start), at_best_rate(comparison, start).mean),
        )
    )


def guessing(comparison: Comparison) -> float:
    """The loss before any training of the start that begins lowest: about that of guessing."""
    firsts = [
        [run.first_loss for run in comparison.runs if run.scheme == start and math.isfinite(run.first_loss)]
        for start in comparison.schemes
    ]
    return min((statistics.fmean(losses) for losses in firsts if losses), default=math.nan)


def regrets(comparison: Comparison) -> dict[str, Result]:
    """The logarithm of each start's loss over the best start's at that rate, on average over the rates.

    Logarithms, because one rate at which the best loss is nearly 0 would outweigh all others. A run that
    diverges counts as guessing, or as the highest loss of a start that trains there, where that is above: to
    diverge is never better than to train. Rates at which no start trains are left out, and so are starts that
    do not apply. Empty where nothing can be compared, or a loss is not positive.
    """
    best = _best_losses(comparison)
    worst = {rate: _worst_loss(comparison, rate) for rate in best}
    found = {}
    for start in comparison.schemes:
        by_seed = []
        for seed in comparison.seeds:
            losses = {
                run.learning_rate: worst[run.learning_rate] if run.diverged else run.final_loss
                for run in comparison.runs
                if (run.scheme, run.seed) == (start, seed) and run.applies and run.learning_rate in best
            }
            if not best or any(losses.get(rate, 1.0) <= 0 or low <= 0 for rate, low in best.items()):
                return {}
            if all(rate in losses for rate in best):
                by_seed.append(statistics.fmean(math.log(losses[rate] / low) for rate, low in best.items()))
        if by_seed:
            found[start] = _summarize(by_seed)
    return found


def diverges_at(comparison: Comparison, start: str) -> tuple[float, ...]:
    """The rates at which the start diverges with some seed, and another start does not."""
    return tuple(rate for rate in _best_losses(comparison) if comparison.diverged(start, rate))


def _best_losses(comparison: Comparison) -> dict[float, float]:
    winners = {rate: best_start(comparison, rate) for rate in comparison.learning_rates}
    return {rate: comparison.loss(start, rate) for rate, start in winners.items() if start is not None}


def _worst_loss(comparison: Comparison, rate: float) -> float:
    trained = [comparison.loss(start, rate) for start in comparison.schemes if comparison.trains(start, rate)]
    return max(guessing(comparison), *trained)


def _summarize(values: Sequence[float]) -> Result:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Result(statistics.fmean(values), error)
