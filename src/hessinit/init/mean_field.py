"""How the signal's variance and the gradient's size change with depth (mean-field theory).

Variance correction. A gain keeps E f(z)² for z of variance 1, but the mean square of the
pre-activations differs from example to example: a layer of n units of which dropout keeps a
fraction q adds a relative variance of about (κ/q − 1)/n, κ being the kurtosis of the activations.
GELU and SiLU let the large grow more than the small shrink, so the mean grows with depth. The mean
and the relative variance are followed through chains of dense layers, the mean square of an example
taken to be log-normal, and every gain is corrected.

Gradient-explosion cap. Unit variance keeps the signal's size, not the gradient's: with each layer
of an activation f at the size s, the gradient's square grows by χ = s²·E f'(s·z)² / E f(s·z)². For
ReLU that is 1; for tanh it is 1.18 at s = 1, so that thirty layers multiply it by 100. Smaller
pre-activations bring it to 1.

Divergence of examples. A layer raises the ratio of two examples' mean squares to the power d log
g/d log s², g(s) = E f(s·z)²: 1 for ReLU, below 1 for tanh, 1.14 for GELU and 1.17 for SiLU at s =
1. After thirty layers one example is huge and another one vanishes. Larger pre-activations make
such functions act as ReLU.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from hessinit.init.gain import Function
from hessinit.init.trace import WeightUse, moment_of
from hessinit.init.weights import fans_of


@dataclass(frozen=True)
class _Limits:
    """Where a correction begins, and what it leaves.

    Chosen with benchmarks/deep_schemes.py and benchmarks/deep_chains.py. Below `noteworthy` growth
    at the end of a chain of layers the textbook's formula is kept as it is. `growth` is that of the
    square of the gradient over a chain. `divergence` is the power to which a chain raises the ratio
    of two examples' mean squares: where it is larger with pre-activations of size 1, they are
    enlarged until it is `small_divergence`. Sizes from `smallest` to `largest` are tried. `step` is
    that of difference quotients.
    """

    noteworthy: float = 1.1
    growth: float = 5.0
    divergence: float = 10.0
    small_divergence: float = 1.25
    smallest: float = 0.25
    largest: float = 16.0
    step: float = 1e-3


LIMITS = _Limits()


class _State(NamedTuple):
    """Of the pre-activations of a use, and the correction `factor` of its gain."""

    spread: float  # the relative variance over examples of their mean square
    growth: float  # the logarithm of the mean square that plain gains would have led to
    chain: int  # the use that the chain began with
    factor: float


def variance_corrections(uses: Sequence[WeightUse]) -> dict[int, float]:
    """For each use that needs it, by its order, the factor on its gain."""
    states: dict[int, _State] = {}
    worst: dict[int, float] = {}
    kinds = {use.step: use.kind for use in uses}
    for use in uses:
        # The units of a dense layer share the size of their example. Those of a convolution see
        # their own neighbourhood each, and average the spread of others away: followed like this,
        # it is overrated.
        dense = kinds.get(use.upstream.feeder) == use.kind == "dense"
        start = _State(0.0, 0.0, use.step, 1.0)
        states[use.step] = state = _follow(
            use, states[use.upstream.feeder] if dense else start, start
        )
        worst[state.chain] = max(worst.get(state.chain, 0.0), abs(state.growth))
    noteworthy = {chain for chain, growth in worst.items() if growth > math.log(LIMITS.noteworthy)}
    return {
        use.order: states[use.step].factor for use in uses if states[use.step].chain in noteworthy
    }


def _follow(use: WeightUse, previous: _State, start: _State) -> _State:
    """The state of a use, from that of the use that feeds it."""
    function = use.upstream.function or (lambda value: value)
    units = max(1.0, fans_of(use)[0].inputs)
    mean, square, slope = _moments(function, previous.spread, units, use.upstream.keep or 1.0)
    if use.kind == "embedding" or not 0 < mean < math.inf or not 0 < square < math.inf:
        return start
    ratio = mean / _moments(function, 0.0, units, 1.0)[0]
    growth = slope * previous.growth + math.log(ratio)
    return _State(max(0.0, square / mean**2 - 1), growth, previous.chain, 1 / math.sqrt(ratio))


def _moments(
    function: Function, spread: float, units: float, keep: float
) -> tuple[float, float, float]:
    """The mean square over `units` of the outputs: its mean, its mean square, its slope.

    The slope is d log g / d log s at 1, g(s) = E f(√s z)²: how a deviation grows (above 1) or
    shrinks.
    """
    width = math.sqrt(math.log1p(spread))
    sizes = np.exp(width * _NODES - width**2 / 2)
    sizes = np.concatenate([sizes, [1 - LIMITS.step, 1 + LIMITS.step]])
    with torch.no_grad():
        values = function(torch.from_numpy(np.sqrt(sizes)[:, None] * _POINTS)).double().numpy()
    squares = values**2 @ _DENSITY
    fourths = values**4 @ _DENSITY
    slope = 1.0
    if squares[-2] > 0:
        slope = (math.log(squares[-1]) - math.log(squares[-2])) / (2 * LIMITS.step)
    squares = squares[:-2]
    fourths = fourths[:-2]
    square = float(_WEIGHTS @ (squares**2 * (1 - 1 / units) + fourths / (keep * units)))
    return float(_WEIGHTS @ squares), square, slope


# A rough quadrature is enough: a correction of some per cent need not be right to many digits.
_POINTS, _legendre = np.polynomial.legendre.leggauss(400)
_POINTS *= 12
_DENSITY = 12 * _legendre * np.exp(-(_POINTS**2) / 2) / math.sqrt(2 * math.pi)
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(31)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


def preactivation_stds(uses: Sequence[WeightUse]) -> dict[str, float]:
    """The standard deviation of each weight's output where 1 does not suit a deep chain."""
    by_step = {use.step: use for use in uses}
    chains: dict[int, list[WeightUse]] = {}  # by the step of the use at its end
    for use in uses:
        chains[use.step] = [*chains.pop(use.upstream.feeder, []), use]
    # Activations are cached by name, so each integral is computed once.
    functions = {use.upstream.words: use.upstream.function for use in uses}
    stds: dict[str, float] = {}
    for chain in chains.values():
        counts = Counter(use.upstream.words for use in chain[1:])
        std = _best_std(
            {function: counts[words] for words, function in functions.items() if function}
        )
        if std != 1:
            for use in chain[1:]:
                feeder = by_step[use.upstream.feeder].parameter
                stds[feeder] = min(stds.get(feeder, std), std)
    return stds


def _best_std(functions: Mapping[Function, int]) -> float:
    """The size nearest to 1 at which neither examples diverge nor gradients explode."""

    def total(log: Callable[[Function, float], float], std: float) -> float:
        return sum(count * log(function, std) for function, count in functions.items() if count)

    if total(_log_divergence, 1.0) > math.log(LIMITS.divergence):
        return _nearest_to_one(
            lambda std: total(_log_divergence, std) <= math.log(LIMITS.small_divergence),
            LIMITS.largest,
        )
    return _nearest_to_one(
        lambda std: total(_log_chi, std) <= math.log(LIMITS.growth), LIMITS.smallest
    )


def _nearest_to_one(is_admissible: Callable[[float], bool], far: float) -> float:
    """The admissible size nearest to 1 on the way to `far`, or `far`, to 1 %."""
    near = 1.0
    if is_admissible(near):
        return near
    while abs(far / near - 1) > 0.01:
        middle = math.sqrt(near * far)
        if is_admissible(middle):
            far = middle
        else:
            near = middle
    return far


def _log_chi(function: Function, std: float) -> float:
    """log χ at that size; 0 where it is not defined, as for a function that is not elementwise."""
    signal = moment_of(((1.0, function),), std)
    slope = moment_of(((1.0, function),), std, slope=True)
    return math.log(slope / signal) if _are_finite(slope, signal) else 0.0


def _log_divergence(function: Function, std: float) -> float:
    """log of d log g / d log s² at that size; 0 where it is not defined."""
    low = moment_of(((1.0, function),), std * (1 - LIMITS.step))
    high = moment_of(((1.0, function),), std * (1 + LIMITS.step))
    power = math.log(high / low) / (4 * LIMITS.step) if _are_finite(low, high) else 1.0
    return math.log(power) if power > 0 else 0.0


def _are_finite(*moments: float) -> bool:
    return all(0 < moment < math.inf for moment in moments)
