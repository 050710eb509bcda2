"""Whether a training went wrong, or a low first mini-batch only makes it look so."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# A final loss above the first by more than this share of it means that the run diverged,
WORSE = 0.05
# if it is also above by so many standard deviations of what mini-batches differ by.
DEVIATIONS = 3.0


def has_diverged(losses: Sequence[float], last: int) -> bool:
    """Whether the mean of the `last` losses is above the first by 5 %, and by more than chance allows.

    One mini-batch may be an easy one, so a run that does not move can end 5 % above its first loss. The noise
    is what neighbouring losses differ by, in logarithms, since losses that are larger differ by more.

    >>> has_diverged([2.0, 2.6, 2.3, 2.7, 2.4, 2.5, 2.2, 2.6, 2.3, 2.6, 2.4, 2.5], last=10)
    False
    >>> has_diverged([2.0, 2.1, 2.1, 2.6, 2.6, 2.7, 2.9, 3.0, 3.0, 3.2, 3.3, 3.5], last=10)
    True
    """
    if not math.isfinite(losses[-1]):
        return True
    final = statistics.fmean(losses[-last:])
    if not final > losses[0] + WORSE * abs(losses[0]):
        return False
    early = max(1, min(last, len(losses) - last))
    in_logarithms = min(losses) > 0
    heights = [math.log(loss) for loss in losses] if in_logarithms else list(losses)
    noise = max(_noise(heights[: last + 1]), _noise(heights[-last:]))
    # Against the first loss alone, for a training that jumps at once; and against the first few, whose mean
    # is known better, for one that climbs slowly.
    return any(_is_above(losses[:many], final, last, noise, in_logarithms) for many in {1, early})


def _is_above(first: Sequence[float], final: float, last: int, noise: float, in_logarithms: bool) -> bool:
    reference = statistics.fmean(first)
    by_chance = DEVIATIONS * noise * math.sqrt(1 / len(first) + 1 / last)
    if in_logarithms:
        return math.log(final / reference) > math.log1p(WORSE) + by_chance
    return final - reference > WORSE * abs(reference) + by_chance


def _noise(heights: Sequence[float]) -> float:
    """The standard deviation from neighbour to neighbour; the median, so that a jump or two do not count."""
    apart = [abs(after - before) for before, after in zip(heights, heights[1:], strict=False)]
    return statistics.median(apart) / (0.6745 * math.sqrt(2)) if apart else 0.0
