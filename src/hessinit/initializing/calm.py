"""How large the pre-activations of a deep chain may be before its gradients explode.

A start of unit variance keeps the signal's size, not the gradient's: with each layer of an activation f at the
size s that grows by χ = s²·E f'(s·z)² / E f(s·z)². For ReLU that is 1 at any size. For tanh it is 1.17 at
s = 1, so that thirty layers multiply the gradient's square by 100, and the first ones are as much too sharp.
Smaller pre-activations bring χ back to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from hessinit.errors import ProblemError
from hessinit.schemes.gains import second_moment, slope_moment
from hessinit.schemes.site import Site

# So much may the square of the gradient grow over a chain; the smallest size that is tried against more.
MOST_GROWTH = 4.0
SMALLEST = 0.25

Function = Callable[[Tensor], Tensor]


def calm_stds(sites: Sequence[Site]) -> dict[str, float]:
    """By parameter, the std that a weight's output shall have where 1 would let the gradient explode."""
    by_step = {site.step: site for site in sites}
    chains: dict[int, list[Site]] = {}  # by the step of the site at its end
    for site in sites:
        chains[site.step] = [*chains.get(site.before.feeder, []), site]
    found: dict[str, float] = {}
    for chain in chains.values():
        functions = [site.before.function for site in chain[1:] if site.before.function is not None]
        std = _calm_std(functions)
        if std < 1:
            for site in chain[1:]:
                feeder = by_step[site.before.feeder].parameter
                found[feeder] = min(found.get(feeder, 1.0), std)
    return found


def _calm_std(functions: Sequence[Function]) -> float:
    """The largest size up to 1 at which the whole chain grows by no more than it may."""
    most = math.log(MOST_GROWTH)
    if sum(_growth(function, 1.0) for function in functions) <= most:
        return 1.0
    low, high = SMALLEST, 1.0
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (
            (middle, high) if sum(_growth(one, middle) for one in functions) <= most else (low, middle)
        )
    return low


def _growth(function: Function, std: float) -> float:
    """log χ at that size; 0 where it has none, as where a function is not elementwise."""
    try:
        signal = second_moment(lambda value: function(std * value))
        slope = slope_moment(lambda value: function(std * value))
    except ProblemError:
        return 0.0
    return math.log(slope / signal) if 0 < slope < math.inf and 0 < signal < math.inf else 0.0
