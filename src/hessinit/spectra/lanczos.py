"""The extreme eigenvalues of a symmetric operator, with a bound on their error."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from hessinit.estimate import Estimate
from hessinit.spectra.krylov import LanczosProcess, worth_checking
from hessinit.spectra.outcome import SETTLING_STEPS, SMALL, conclude, not_finite
from hessinit.spectra.protocol import Operator, operator_size, require_at_least, require_tolerance
from hessinit.spectra.residuals import CAUTION, RitzEnd, read_end, spectral_norm
from hessinit.spectra.start import random_start

Ends = Literal["both", "top"]

# How many of the largest Ritz pairs stand in for the operator where a rough picture of it is enough.
LEADING = 4


@dataclass(frozen=True)
class Extremes:
    """The ends of a spectrum; `norm` is the largest |eigenvalue|. Products are shared: do not add them up.

    `ritz` holds all Ritz values in ascending order: the ends are eigenvalues to within their error, the inner
    ones a rough picture of the spectrum; `leading` holds the vectors of the largest few. `bottom` is None
    when only the top was asked for; vectors are None unless asked for.
    """

    top: Estimate
    bottom: Estimate | None
    norm: Estimate
    top_vector: Tensor | None
    bottom_vector: Tensor | None
    steps: int
    ritz: tuple[float, ...]
    leading: Tensor | None = None


def lanczos(
    operator: Operator,
    *,
    ends: Ends = "both",
    tolerance: float = 1e-3,
    max_steps: int = 200,
    seed: int = 0,
    start: Tensor | None = None,
    vectors: bool = False,
    semidefinite: bool = False,
    on_step: Callable[[int], object] | None = None,
) -> Extremes:
    """The largest and the smallest eigenvalue, each to `tolerance` times the spectral norm.

    Lanczos with full reorthogonalization, stopped by a bound on the error that is relative to the norm, hence
    the same for 1e-30·A and 1e30·A. Costs one product per step (typically 10 to 60) and keeps one vector per
    step. With ends="top" only the largest eigenvalue has to converge (enough for a positive semidefinite
    operator). `start` is a first guess, of any length; a tenth of a random vector is mixed in, so that no
    eigenvector stays unseen. `on_step` is called with the number of products so far. Not converging is a
    value: see `converged` and `reason`.

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
    process = LanczosProcess(operator, random_start(operator, seed=seed, guess=start))
    limit = min(max_steps, size)
    # A good guess leaves less to settle.
    settling, caution = (SETTLING_STEPS, CAUTION) if start is None else (1, 3 * CAUTION)
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
        earlier = [check for check in checks if check[0] <= process.steps - settling]
        _, low, high = earlier[-1] if earlier else (0, -math.inf, math.inf)
        exact = process.exhausted
        top = read_end(values, residuals, -1, 0.0 if exact else abs(float(values[-1]) - high))
        bottom = read_end(values, residuals, 0, 0.0 if exact else abs(float(values[0]) - low))
        checks.append((process.steps, bottom.value, top.value))
        # A semidefinite operator has no negative eigenvalue: a small Ritz value bounds the smallest one.
        if semidefinite and 0 <= bottom.value <= tolerance * norm:
            bottom = RitzEnd(bottom.value, bottom.value, bottom.value, 0.0, bounded=True)
        needed = (top, bottom) if ends == "both" else (top,)
        if last or all(end.is_converged(tolerance, norm, caution) for end in needed):
            break

    def vector_of(index: int) -> Tensor:
        return process.ritz_vectors(small_vectors[:, [index]])[:, 0]

    top_estimate = conclude(top, process, norm, tolerance, max_steps, caution)
    bottom_estimate = conclude(bottom, process, norm, tolerance, max_steps, caution)
    return Extremes(
        top=top_estimate,
        bottom=bottom_estimate if ends == "both" else None,
        norm=_larger(top_estimate, bottom_estimate, tolerance),
        top_vector=vector_of(-1) if vectors else None,
        bottom_vector=vector_of(0) if vectors and ends == "both" else None,
        steps=process.steps,
        ritz=tuple(float(value) * process.scale for value in values),
        leading=process.ritz_vectors(small_vectors[:, -LEADING:]) if vectors else None,
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
    return Extremes(top, bottom if ends == "both" else None, top, None, None, products, ())
