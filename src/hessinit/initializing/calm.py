"""How large the pre-activations of a deep chain may be before its gradients explode.

A start of unit variance keeps the signal's size, not the gradient's: with each layer of an activation f at
the size s, its square grows by χ = s²·E f'(s·z)² / E f(s·z)². For ReLU that is 1 at any size. For tanh it is
1.18 at s = 1, so that thirty layers multiply it by 100, and the first ones are as much too sharp. Smaller
pre-activations bring χ back to 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from hessinit.errors import ProblemError
from hessinit.schemes.gains import second_moment, slope_moment
from hessinit.schemes.site import Site

# So much may the square of the gradient grow over a chain; the smallest size that is tried against more.
MOST_GROWTH = 5.0
SMALLEST = 0.25

Function = Callable[[Tensor], Tensor]


def calm_stds(sites: Sequence[Site]) -> dict[str, float]:
    """By parameter, the std that a weight's output shall have where 1 would let the gradient explode."""
    by_step = {site.step: site for site in sites}
    chains: dict[int, list[Site]] = {}  # by the step of the site at its end
    for site in sites:
        chains[site.step] = [*chains.pop(site.before.feeder, []), site]
    # What is called the same is the same: one integral for all layers of tanh.
    functions = {site.before.words: site.before.function for site in sites}
    found: dict[str, float] = {}
    for chain in chains.values():
        counts = Counter(site.before.words for site in chain[1:])
        std = _calm_std({function: counts[words] for words, function in functions.items() if function})
        if std < 1:
            for site in chain[1:]:
                feeder = by_step[site.before.feeder].parameter
                found[feeder] = min(found.get(feeder, 1.0), std)
    return found


def _calm_std(functions: Mapping[Function, int]) -> float:
    """The largest size up to 1 at which the whole chain grows by no more than it may."""

    def is_calm(std: float) -> bool:
        grown = sum(count * _growth(function, std) for function, count in functions.items() if count)
        return grown <= math.log(MOST_GROWTH)

    if is_calm(1.0):
        return 1.0
    low, high = SMALLEST, 1.0
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (middle, high) if is_calm(middle) else (low, middle)
    return low


def _growth(function: Function, std: float) -> float:
    """log χ at that size; 0 where it has none, as where a function is not elementwise."""
    try:
        signal = second_moment(lambda value: function(std * value))
        slope = slope_moment(lambda value: function(std * value))
    except ProblemError:
        return 0.0
    return math.log(slope / signal) if 0 < slope < math.inf and 0 < signal < math.inf else 0.0
