"""The extreme eigenvalues of a symmetric operator, with a bound on their error."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hessinit.estimate import Estimate
from hessinit.spectra.krylov import LanczosProcess, worth_checking
from hessinit.spectra.protocol import Operator, operator_size, require_at_least, require_tolerance
from hessinit.spectra.residuals import RitzEnd, read_end, spectral_norm
from hessinit.spectra.start import random_start

Ends = Literal["both", "top"]

# A value has settled when it has not moved over this many steps; see RitzEnd.is_converged.
_SETTLING_STEPS = 3


@dataclass(frozen=True)
class Extremes:
    """The ends of a spectrum; `norm` is the largest |eigenvalue|. Products are shared: do not add them up.

    `ritz` holds all Ritz values in ascending order: the ends are eigenvalues to within their error, the inner
    ones a rough picture of the spectrum. `bottom` is None when only the top was asked for; vectors are None
    unless asked for.
    """

    top: Estimate
    bottom: Estimate | None
    norm: Estimate
    top_vector: Tensor | None
    bottom_vector: Tensor | None
    steps: int
    ritz: tuple[float, ...]


def lanczos(
    operator: Operator,
    *,
    ends: Ends = "both",
    tolerance: float = 1e-3,
    max_steps: int = 200,
    seed: int = 0,
    start: Tensor | None = None,
    vectors: bool = False,
    on_step: Callable[[int], object] | None = None,
) -> Extremes:
    """The largest and the smallest eigenvalue, each to `tolerance` times the spectral norm.

    Lanczos with full reorthogonalization, stopped by a bound on the error that is relative to the norm, hence
    the same for 1e-30·A and 1e30·A. Costs one product per step (typically 10 to 60) and keeps one vector per
    step. With ends="top" only the largest eigenvalue has to converge (enough for a positive semidefinite
    operator). `start` is a first guess, of any length; a tenth of a random vector is mixed in, so that no
    eigenvector stays unseen. `on_step` is called with the number of products so far. Not converging is a
    value: see `converged` and `reason`.

    >>> extremes = lanczos(torch.diag(torch.linspace(-2.0, 3.0, 50, dtype=torch.float64)))
    >>> abs(extremes.top.value - 3) <= extremes.top.error <= 3e-3
    True
    >>> abs(extremes.bottom.value + 2) <= extremes.bottom.error <= 3e-3
    True
    >>> extremes.norm.value == extremes.top.value, extremes.norm.converged
    (True, True)
    """
    size = operator_size(operator)
    if ends not in ("both", "top"):
        raise ValueError(
            f"ends={ends!r} is unknown; choose from 'both', 'top'. For the bottom alone pass -operator."
        )
    require_tolerance(tolerance)
    require_at_least("max_steps", max_steps, 1, "every step is one product")
    process = LanczosProcess(operator, random_start(operator, seed=seed, guess=start))
    limit = min(max_steps, size)
    checks: list[tuple[int, float, float]] = []
    while process.steps < limit:
        process.step()
        if not process.finite:
            return _not_finite(process.steps + 1, ends)
        if on_step is not None:
            on_step(process.steps)
        last = process.exhausted or process.steps == limit
        if not last and not worth_checking(process.steps):
            continue
        values, small_vectors = process.ritz()
        residuals = process.residuals(small_vectors)
        norm = spectral_norm(values)
        earlier = [check for check in checks if check[0] <= process.steps - _SETTLING_STEPS]
        _, low, high = earlier[-1] if earlier else (0, -math.inf, math.inf)
        exact = process.exhausted
        top = read_end(values, residuals, -1, 0.0 if exact else abs(float(values[-1]) - high))
        bottom = read_end(values, residuals, 0, 0.0 if exact else abs(float(values[0]) - low))
        checks.append((process.steps, bottom.value, top.value))
        needed = (top, bottom) if ends == "both" else (top,)
        if last or all(end.is_converged(tolerance, norm) for end in needed):
            break

    def vector_of(index: int) -> Tensor:
        return process.ritz_vectors(small_vectors[:, [index]])[:, 0]

    top_estimate = _estimate(process, top, norm, tolerance, max_steps)
    bottom_estimate = _estimate(process, bottom, norm, tolerance, max_steps)
    return Extremes(
        top=top_estimate,
        bottom=bottom_estimate if ends == "both" else None,
        norm=_larger(top_estimate, bottom_estimate, tolerance),
        top_vector=vector_of(-1) if vectors else None,
        bottom_vector=vector_of(0) if vectors and ends == "both" else None,
        steps=process.steps,
        ritz=tuple(float(value) * process.scale for value in values),
    )


def _estimate(
    process: LanczosProcess, end: RitzEnd, norm: float, tolerance: float, max_steps: int
) -> Estimate:
    steps, scale = process.steps, process.scale
    if scale == 0:
        return Estimate(0.0, 0.0, True, "the operator is zero on a random vector", steps)
    # Products and basis carry rounding errors of a few units in the last place of the norm.
    rounding = 8 * torch.finfo(process.operator.dtype).eps
    converged = True
    if tolerance < rounding:
        converged = False
        reason = (
            f"tolerance={tolerance:g} is below the rounding level {rounding:.0e} "
            f"of {process.operator.dtype}; use torch.float64 or a larger tolerance"
        )
    elif process.exhausted:
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


def _larger(top: Estimate, bottom: Estimate, tolerance: float) -> Estimate:
    """The norm: the larger of |top| and |bottom|, and no more than the larger of their upper bounds."""
    winner = max(top, bottom, key=lambda end: abs(end.value))
    value = abs(winner.value)
    error = max(abs(end.value) + end.error for end in (top, bottom)) - value
    error = max(error, winner.error)
    settled = winner.converged and error <= winner.error + tolerance * value
    reason = winner.reason
    if winner.converged and not settled:
        reason = "the other end of the spectrum may be larger in size; ask for ends='both'"
    return Estimate(value, error, settled, reason, winner.products)


def _not_finite(products: int, ends: Ends) -> Extremes:
    reason = (
        f"product {products} was not finite (inf or nan); look for inf or nan in the weights and inputs, "
        "or use torch.float64"
    )
    top, bottom = (Estimate(value, math.inf, False, reason, products) for value in (math.inf, -math.inf))
    return Extremes(top, bottom if ends == "both" else None, top, None, None, products, ())
