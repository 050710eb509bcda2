"""The extreme eigenvalues of a symmetric operator, with a bound on their error."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hessinit.results.estimates import Estimate
from hessinit.spectra.krylov import LanczosProcess, worth_checking
from hessinit.spectra.outcome import SETTLING_STEPS, SMALL, conclude, not_finite
from hessinit.spectra.probes import random_start
from hessinit.spectra.protocol import Operator, operator_size, require_at_least, require_tolerance
from hessinit.spectra.residuals import RitzEnd, reach_of_unseen, read_end, spectral_norm

Ends = Literal["both", "top"]

# An end of the spectrum counts for the norm from this share of it on.
_MAKES_THE_NORM = 0.9


@dataclass(frozen=True)
class Extremes:
    """The ends of a spectrum; `norm` is the largest |eigenvalue|. Products are shared: do not add them up.

    `ritz` holds all Ritz values in ascending order: the ends are eigenvalues to within their error, the inner
    ones a rough picture of the spectrum. `bottom` is None when only the top was asked for.
    """

    top: Estimate
    bottom: Estimate | None
    norm: Estimate
    steps: int
    ritz: tuple[float, ...]


def lanczos(
    operator: Operator,
    *,
    ends: Ends = "both",
    tolerance: float = 1e-3,
    max_steps: int = 200,
    seed: int = 0,
    semidefinite: bool = False,
    on_step: Callable[[int], object] | None = None,
) -> Extremes:
    """The largest and the smallest eigenvalue, each to `tolerance` times the spectral norm.

    Lanczos with full reorthogonalization, stopped by a bound on the error that is relative to the norm, hence
    the same for 1e-30·A and 1e30·A. Costs one product per step (typically 10 to 60) and keeps one vector per
    step. With ends="top" only the largest eigenvalue has to converge (enough for a positive semidefinite
    operator). `on_step` is called with the number of products so far. Not converging is a value: see
    `converged` and `reason`.

    >>> import torch
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
    process = LanczosProcess(operator, random_start(operator, seed))
    limit = min(max_steps, size)
    checks: list[tuple[int, float, float]] = []
    while process.steps < limit:
        process.step()
        if not process.finite:
            return _not_finite(process.steps + 1, ends)
        if on_step is not None:
            on_step(process.steps)
        if process.steps == 1:
            checks.append((1, process.alphas[0], process.alphas[0]))
        last = process.exhausted or process.steps == limit
        if not last and (size <= SMALL or not worth_checking(process.steps)):
            continue
        values, small_vectors = process.ritz()
        residuals = process.residuals(small_vectors)
        norm = spectral_norm(values)
        earlier = [check for check in checks if check[0] <= process.steps - SETTLING_STEPS]
        _, low, high = earlier[-1] if earlier else (0, -math.inf, math.inf)
        top, bottom = (
            read_end(
                values,
                residuals,
                index,
                0.0 if process.exhausted else abs(float(values[index]) - before),
                # Only an end that may be the norm has to be beyond doubt.
                reach_of_unseen(float(residuals[index]), abs(float(small_vectors[0, index])), size)
                if abs(float(values[index])) > _MAKES_THE_NORM * norm
                else 0.0,
            )
            for index, before in ((-1, high), (0, low))
        )
        checks.append((process.steps, bottom.value, top.value))
        # A semidefinite operator has no negative eigenvalue: a small Ritz value bounds the smallest one.
        if semidefinite and 0 <= bottom.value <= tolerance * norm:
            bottom = RitzEnd(bottom.value, bottom.value, bottom.value, 0.0, bounded=True)
        needed = (top, bottom) if ends == "both" else (top,)
        if last or all(end.is_converged(tolerance, norm) for end in needed):
            break

    top_estimate = conclude(top, process, norm, tolerance, max_steps)
    bottom_estimate = conclude(bottom, process, norm, tolerance, max_steps)
    return Extremes(
        top=top_estimate,
        bottom=bottom_estimate if ends == "both" else None,
        norm=_larger(top_estimate, bottom_estimate, tolerance),
        steps=process.steps,
        ritz=tuple(float(value) * process.scale for value in values),
    )


def _larger(top: Estimate, bottom: Estimate, tolerance: float) -> Estimate:
    """The norm: the larger of |top| and |bottom|, and no more than the larger of their upper bounds."""
    other, winner = sorted((bottom, top), key=lambda end: abs(end.value))
    value = abs(winner.value)
    error = max(winner.error, abs(other.value) + other.error - value)
    settled = winner.converged and error <= winner.error + tolerance * value
    reason = winner.reason
    if winner.converged and not settled:
        reason = "the other end of the spectrum may be larger in size; ask for ends='both'"
    return Estimate(value, error, settled, reason, winner.products)


def _not_finite(products: int, ends: Ends) -> Extremes:
    top, bottom = not_finite(products), not_finite(products, -1.0)
    return Extremes(top, bottom if ends == "both" else None, top, products, ())
