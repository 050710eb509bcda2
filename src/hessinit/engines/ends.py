"""The two ends of a spectrum, and what an engine is: something that finds them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hessinit.operators.base import LinearOperator
from hessinit.operators.rounding import CAUTION, RoundingError
from hessinit.results.estimates import Estimate


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


def with_rounding(ends: Ends, rounding: RoundingError, tolerance: float) -> Ends:
    """Add the rounding error of the operator to both errors.

    The stated error is a multiple of what is likely. Where already the likely one exceeds `tolerance`, the
    estimates no longer count as converged.
    """
    norm, share = ends.norm.value, CAUTION * rounding.relative
    if not share or not math.isfinite(norm):
        return ends
    if rounding.is_all:
        reason = "zero, up to the rounding of float32"
        nothing = Estimate(0.0, (1 + share) * norm + ends.norm.error, True, reason, ends.top.products)
        return dataclasses.replace(ends, top=nothing, bottom=dataclasses.replace(nothing, products=0))

    def widen(end: Estimate) -> Estimate:
        wider = dataclasses.replace(end, error=math.hypot(end.error, share * norm))
        if rounding.relative <= tolerance:
            return wider
        reason = f"rounding in float32 leaves an error of {share:.0e} of the norm; pass dtype=torch.float64"
        return dataclasses.replace(wider, converged=False, reason=reason if end.converged else end.reason)

    return dataclasses.replace(ends, top=widen(ends.top), bottom=widen(ends.bottom))


UNUSED = Estimate(0.0, 0.0, True, "the forward does not use this weight", 0)


def scaled(estimate: Estimate, factor: float) -> Estimate:
    """The same estimate of `factor` times the operator."""
    return dataclasses.replace(estimate, value=estimate.value * factor, error=estimate.error * factor)
