"""Estimated numbers: one value with its error, norms over batches, and a spectral density."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A computed value, its error, whether it is good enough, and what it cost.

    `error` is an absolute half-width: the truth is expected within `value ± error`. `products` counts the
    matrix-vector products that were spent; 0 means that the value came for free with another one.

    >>> round(Estimate(2.0, 0.001, True, "residual below tolerance", 9).relative_error, 6)
    0.0005
    """

    value: float
    error: float
    converged: bool
    reason: str
    products: int = 0

    @property
    def relative_error(self) -> float:
        """`error / |value|`; 0 when both are 0."""
        if self.error == 0:
            return 0.0
        return self.error / abs(self.value) if self.value else float("inf")


@dataclass(frozen=True)
class Spread:
    """The norm of each batch. For equal batches the norm over all examples is at most their mean.

    >>> spread = Spread((1.0, 2.0, 3.0))
    >>> spread.mean, spread.standard_deviation, round(spread.standard_error, 3)
    (2.0, 1.0, 0.577)
    """

    norms: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over the batches; inf or nan when a norm is."""
        return math.fsum(norm / len(self.norms) for norm in self.norms)

    @property
    def standard_deviation(self) -> float:
        """The standard deviation of the sample (divided by batches − 1); nan for one batch."""
        scale, mean = max(map(abs, self.norms)) or 1.0, self.mean  # the squares of 1e200 would overflow
        if len(self.norms) < 2 or not math.isfinite(mean):
            return math.nan
        squares = math.fsum(((norm - mean) / scale) ** 2 for norm in self.norms)
        return scale * math.sqrt(squares / (len(self.norms) - 1))

    @property
    def standard_error(self) -> float:
        """The standard error of the mean: the standard deviation over √batches."""
        return self.standard_deviation / math.sqrt(len(self.norms))


@dataclass(frozen=True)
class Density:
    """An estimated spectral density: a quadrature rule, and the smooth curve drawn from it.

    `nodes` and `weights` are the rule (the weights add up to 1), `grid` and `values` the curve, `error` its
    estimated error. It took `probes` random vectors and `steps` Lanczos steps for each.
    """

    nodes: tuple[float, ...]
    weights: tuple[float, ...]
    grid: tuple[float, ...]
    values: tuple[float, ...]
    error: float
    probes: int
    steps: int
