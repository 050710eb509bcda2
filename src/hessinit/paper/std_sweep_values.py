"""The numbers of one row of a std sweep, and what follows from them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Values:
    """Norms of the first and the second weight over all starts, and training losses over the seeds."""

    approximate: tuple[tuple[float, ...], ...]
    exact: tuple[tuple[float, ...], ...]
    network: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def loss(self) -> float:
        """The mean; infinite if a training broke off, so that it ranks last."""
        mean = statistics.fmean(self.losses)
        return mean if math.isfinite(mean) else math.inf

    @property
    def norms(self) -> tuple[float, float]:
        """The means of both weights, by Theorem 1."""
        return statistics.fmean(self.approximate[0]), statistics.fmean(self.approximate[1])


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The error is nan where there is none: for one value, or one that is not finite.

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    """
    mean = statistics.fmean(values)
    known = len(values) > 1 and math.isfinite(mean)
    return mean, statistics.stdev(values) / math.sqrt(len(values)) if known else math.nan


def power_of_std(values: Mapping[str, Values], rows: Sequence[str], weight: int) -> list[float]:
    """The power a of norm ∝ std^a by least squares in logarithms, for each start by itself.

    The starts of different rows are the same random numbers, scaled; one without curvature is left out.
    """
    logarithms = [math.log(float(row)) for row in rows]
    starts = zip(*(values[row].approximate[weight] for row in rows), strict=True)
    slopes = [
        statistics.linear_regression(logarithms, [math.log(norm) for norm in norms]).slope
        for norms in starts
        if min(norms) > 0
    ]
    return slopes or [math.nan]


def largest_gap(values: Mapping[str, Values]) -> float:
    """How far the exact norms are from those by Theorem 1 at most, relative to these."""
    pairs = (
        pair
        for found in values.values()
        for approximate, exact in zip(found.approximate, found.exact, strict=True)
        for pair in zip(approximate, exact, strict=True)
    )
    return max((abs(exact / approximate - 1) for approximate, exact in pairs if approximate), default=0.0)
