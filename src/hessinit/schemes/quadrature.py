"""E f(z)² for z ~ N(0, 1), by Gauss–Legendre panels that are split until two rules agree."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy
import torch
from torch import Tensor

REACH = 12.0  # the normal density has fallen to 1e-32 of its peak there
WIDTH = 0.5  # puts the usual kinks (0, ±1/2, ±1, ±3, 6) on the edges of panels, where they do no harm
SPLIT = 16
LEVELS = 11  # down to panels of 5e-13: a jump inside one of them no longer matters
MOST_PANELS = 20_000
TOLERANCE = 1e-12  # of the whole, for one panel
ACCEPTED = 1e-7  # of the whole, for all panels together that could be split no further


def normal_mean_square(function: Callable[[Tensor], Tensor]) -> float:
    """E function(z)² for z ~ N(0, 1), where `function` maps fp64 vectors elementwise.

    Right to 1e-9, also across kinks and jumps; to 1e-7 for a function that computes in fp32. Costs one call
    on 1248 points, and about ten more for a kink that lies in an odd place. Raises `ArithmeticError` when
    there is no finite answer, or none can be found.

    >>> round(normal_mean_square(torch.relu), 12), round(normal_mean_square(torch.exp) / math.e**2, 9)
    (0.5, 1.0)
    """
    left = torch.arange(-REACH, REACH, WIDTH, dtype=torch.float64, device="cpu")
    width, settled = WIDTH, 0.0
    for level in range(LEVELS):
        coarse, fine = _integrals(function, left, width)
        whole = settled + float(fine.sum())
        if level == 0 and float(fine[0] + fine[-1]) > 1e-9 * whole:
            raise ArithmeticError(f"it grows so fast that values beyond |z| = {REACH:g} rule the mean")
        error = (fine - coarse).abs()
        unsettled = error > TOLERANCE * whole
        last = level == LEVELS - 1 or SPLIT * int(unsettled.sum()) > MOST_PANELS
        if last or not unsettled.any():
            break
        settled += float(fine[~unsettled].sum())
        width /= SPLIT
        left = (left[unsettled, None] + width * torch.arange(SPLIT, device="cpu")).flatten()
    if float(error[unsettled].sum()) > ACCEPTED * whole:
        raise ArithmeticError("its integral does not settle (a pole, too many jumps, half precision inside?)")
    return whole


def _two_rules() -> tuple[Tensor, Tensor]:
    """Nodes in (0, 1) of a coarse and a finer rule; a column of weights for each, zero at the other's."""
    (coarse, coarse_weights), (fine, fine_weights) = (
        numpy.polynomial.legendre.leggauss(count) for count in (10, 16)
    )
    weights = numpy.zeros((26, 2))
    weights[:10, 0], weights[10:, 1] = coarse_weights / 2, fine_weights / 2
    return torch.from_numpy((numpy.concatenate([coarse, fine]) + 1) / 2), torch.from_numpy(weights)


_NODES, _WEIGHTS = _two_rules()


def _integrals(function: Callable[[Tensor], Tensor], left: Tensor, width: float) -> tuple[Tensor, Tensor]:
    """The integral over each panel, by the coarse rule and by the fine one."""
    points = (left[:, None] + width * _NODES).flatten()
    # Weighted before it is squared: exp(z) and its like overflow later.
    amplitude = function(points) * torch.exp(points.square() / -4)
    density = amplitude.square() / math.sqrt(2 * math.pi)
    if not density.isfinite().all():
        worst = points[~density.isfinite()]
        raise ArithmeticError(f"it is not finite at z = {float(worst[worst.abs().argmin()]):.3g}")
    coarse, fine = (width * density.view(-1, 26) @ _WEIGHTS).unbind(1)
    return coarse, fine
