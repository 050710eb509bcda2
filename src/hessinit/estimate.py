"""A number together with how far to trust it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A computed value, its error, whether it is good enough, and what it cost.

    `error` is an absolute half-width: the truth is expected within `value ± error`. `products` counts the
    matrix-vector products that were spent; 0 means the value came for free with another one.

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
