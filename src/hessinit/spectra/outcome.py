"""From a Ritz value to an estimate with a reason."""

from __future__ import annotations

import math
from typing import Protocol

import torch

from hessinit.results.estimates import Estimate
from hessinit.spectra.residuals import RitzEnd

# A value has settled when it has not moved over this many steps; see RitzEnd.is_converged.
SETTLING_STEPS = 3
# So small an operator is searched to the end: the few steps cost little, and a start that hardly sees the
# leading eigenvector, which takes the second one for it, is not rare among so few dimensions.
SMALL = 16


class Run(Protocol):
    """What has to be known about a Lanczos run to judge its values."""

    @property
    def steps(self) -> int: ...
    @property
    def scale(self) -> float: ...
    @property
    def exhausted(self) -> bool: ...
    @property
    def dtype(self) -> torch.dtype: ...


def conclude(end: RitzEnd, run: Run, norm: float, tolerance: float, max_steps: int) -> Estimate:
    """The end in the operator's own units, with its error and why the run stopped."""
    steps, scale = run.steps, run.scale
    if scale == 0:
        return Estimate(0.0, 0.0, True, "the operator is zero on a random vector", steps)
    if math.isinf(scale):
        return not_finite(steps)
    # Products and basis carry rounding errors of a few units in the last place of the norm.
    rounding = 8 * torch.finfo(run.dtype).eps
    converged = True
    if tolerance < rounding:
        converged = False
        reason = (
            f"tolerance={tolerance:g} is below the rounding level {rounding:.0e} "
            f"of {run.dtype}; use torch.float64 or a larger tolerance"
        )
    elif run.exhausted:
        reason = f"exact up to rounding: {steps} steps span all that the operator reaches"
    elif end.is_converged(tolerance, norm):
        share = end.error(tolerance, norm) / norm
        reason = f"settled, error {share:.0e} of the norm, within tolerance={tolerance:g}"
    else:
        converged = False
        reason = (
            f"stopped at max_steps={max_steps} with residual {end.residual / norm:.0e} of the norm; "
            "raise max_steps or tolerance"
        )
    error = end.error(tolerance, norm) + rounding * norm
    return Estimate(end.value * scale, error * scale, converged, reason, steps)


def not_finite(products: int, sign: float = 1.0) -> Estimate:
    """A product was inf or nan: that is "too sharp", never zero."""
    reason = (
        f"product {products} was not finite (inf or nan); look for inf or nan in the weights and inputs, "
        "or use torch.float64"
    )
    return Estimate(sign * math.inf, math.inf, False, reason, products)
