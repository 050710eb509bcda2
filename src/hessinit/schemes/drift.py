"""Examples drift apart on their way through the layers; what that does to the mean size of the signal.

A gain keeps E f(z)² for z of variance 1. But the mean square of the pre-activations differs from example to
example: a layer of n units that keeps a share q of them under dropout adds a relative variance of about
(κ/q − 1)/n to it, κ being the kurtosis of the activations. A homogeneous activation such as ReLU does not
care: the mean stays. GELU and SiLU let the large grow more than the small shrink, so the mean grows with
depth: 20 layers of 1024 GELUs under a dropout of 0.8 end at 3 times the variance, of SiLUs at 22 times. Here
the mean and the relative variance are followed through chains of dense layers, the mean square of an example
taken to be log-normal, and every gain is corrected so that the mean stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hessinit.schemes.geometry import fans_of
from hessinit.schemes.site import Site

# Below this drift at the end of a chain of layers the textbook's formula is kept as it is.
NOTEWORTHY = 1.1

_STEP = 1e-3


@dataclass(frozen=True)
class _State:
    """Of the pre-activations of a site: the relative variance over examples of their mean square.

    `drift` is the logarithm of the mean square that plain gains would have led to; `chain` is the site
    that the chain began with, and `factor` the correction of the gain.
    """

    spread: float
    drift: float
    chain: int
    factor: float


def drift_factors(sites: Sequence[Site]) -> dict[int, float]:
    """For each site that needs it, by its order, what to multiply its gain by."""
    states: dict[int, _State] = {}
    worst: dict[int, float] = {}
    by_step = {site.step: site for site in sites}
    for site in sites:
        feeder = by_step.get(site.before.feeder)
        # The units of a dense layer share the size of their example. Those of a convolution see their own
        # surroundings each, and average the spread of others away: followed like this, it is overrated.
        dense = feeder is not None and feeder.kind == site.kind == "dense"
        state = _follow(site, states.get(site.before.feeder) if dense else None)
        states[site.step] = state
        worst[state.chain] = max(worst.get(state.chain, 0.0), abs(state.drift))
    return {
        site.order: states[site.step].factor
        for site in sites
        if worst[states[site.step].chain] > math.log(NOTEWORTHY)
    }


def _follow(site: Site, feeder: _State | None) -> _State:
    function = site.before.function or _identity
    came = _State(0.0, 0.0, site.step, 1.0) if feeder is None else feeder
    units = max(1.0, fans_of(site)[0].inputs)
    mean, square, slope = _moments(function, came.spread, units, site.before.keep or 1.0)
    if site.kind == "embedding" or not 0 < mean < math.inf or not 0 < square < math.inf:
        return _State(0.0, 0.0, site.step, 1.0)
    ratio = mean / _moments(function, 0.0, units, 1.0)[0]
    spread = max(0.0, square / mean**2 - 1)
    drift = slope * came.drift + math.log(ratio)
    return _State(spread, drift, came.chain, 1 / math.sqrt(ratio))


def _moments(
    function: Callable[[Tensor], Tensor], spread: float, units: float, keep: float
) -> tuple[float, float, float]:
    """Of the mean square over `units` of what comes out: its mean, its mean square over examples, its slope.

    The slope is d log g / d log s at 1, g(s) = E f(√s z)²: how a deviation grows (above 1) or heals.
    """
    width = math.sqrt(math.log1p(spread))
    sizes = np.exp(width * _NODES - width**2 / 2)
    sizes = np.concatenate([sizes, [1 - _STEP, 1 + _STEP]])
    with torch.no_grad():
        values = function(torch.from_numpy(np.sqrt(sizes)[:, None] * _POINTS)).double().numpy()
    squares, fourths = values**2 @ _DENSITY, values**4 @ _DENSITY
    slope = (math.log(squares[-1]) - math.log(squares[-2])) / (2 * _STEP) if squares[-2] > 0 else 1.0
    squares, fourths = squares[:-2], fourths[:-2]
    mean = float(_WEIGHTS @ squares)
    return mean, float(_WEIGHTS @ (squares**2 * (1 - 1 / units) + fourths / (keep * units))), slope


def _identity(value: Tensor) -> Tensor:
    return value


# A rough quadrature is enough: a correction of some per cent need not be right to many digits.
_POINTS, _legendre = np.polynomial.legendre.leggauss(400)
_POINTS = 12 * _POINTS
_DENSITY = 12 * _legendre * np.exp(-(_POINTS**2) / 2) / math.sqrt(2 * math.pi)
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(31)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()
