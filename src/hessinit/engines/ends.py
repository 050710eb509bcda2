"""The two ends of a spectrum, and what an engine is: something that finds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hessinit.estimate import Estimate
from hessinit.operators.base import LinearOperator


@dataclass(frozen=True)
class Ends:
    """The largest and the smallest eigenvalue, and who found them."""

    top: Estimate
    bottom: Estimate
    engine: str
    reason: str

    @property
    def norm(self) -> Estimate:
        """The larger of the two in size, as a size."""
        larger = self.top if abs(self.top.value) >= abs(self.bottom.value) else self.bottom
        return Estimate(abs(larger.value), larger.error, larger.converged, larger.reason, larger.products)


@dataclass(frozen=True)
class Effort:
    """How hard to try."""

    tolerance: float
    max_steps: int
    seed: int

    @property
    def options(self) -> dict[str, Any]:
        """As keyword arguments of the iterations in `spectra`."""
        return {"tolerance": self.tolerance, "max_steps": self.max_steps, "seed": self.seed}


class Engine(Protocol):
    """Finds the ends of the curvature of some leaves together (one layer, or the whole network)."""

    name: str
    reason: str

    def ends_of_each(self, names: Sequence[str]) -> dict[str, Ends]:
        """Both ends for every leaf on its own."""
        ...

    def ends(self, names: Sequence[str]) -> Ends:
        """Both ends for these leaves together."""
        ...

    def operator(self, names: Sequence[str]) -> LinearOperator:
        """The block itself, acting on flat weights."""
        ...


UNUSED = Estimate(0.0, 0.0, True, "the forward does not use this weight", 0)


def scaled(estimate: Estimate, factor: float) -> Estimate:
    """The same estimate of `factor` times the operator."""
    return dataclasses.replace(estimate, value=estimate.value * factor, error=estimate.error * factor)
