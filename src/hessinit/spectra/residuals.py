"""How far a Ritz value can be from an eigenvalue, read from residuals."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hessinit.spectra.krylov import Array

# The residual must be below this share of √tolerance, so that the gap to the next Ritz value means something.
CAUTION = 0.03
# An eigenvalue beyond the value by this many tolerances would have been seen, unless the start holds less of
# its eigenvector than a random vector does one time in a hundred. Chosen for its cost, a tenth more products
# than without (benchmarks/unseen_eigenvalues.py counts what is still missed).
MOST_UNSEEN = 5.0
_RARE = 0.01


@dataclass(frozen=True)
class RitzEnd:
    """An extreme Ritz value, its residual ‖A y − θ y‖, the Kato–Temple bound, its growth in recent steps.

    `unseen` is how far beyond the value an eigenvalue may lie that the start vector holds almost nothing of.
    """

    value: float
    residual: float
    bound: float
    change: float
    unseen: float = 0.0
    bounded: bool = False  # from both sides, so that the residual does not matter

    def is_converged(self, tolerance: float, norm: float) -> bool:
        """Within `tolerance · norm`, as far as one start vector can tell.

        The bound trusts the gap. In a cluster that Lanczos has not yet split, or while a larger eigenvalue is
        still growing out of the start vector, the gap is not known: so the residual has to be small, too, the
        last steps must not have moved the value, and an eigenvalue further out must be unlikely.
        """
        if self.bounded:
            return self.bound <= tolerance * norm
        return (
            self.bound <= tolerance * norm
            and self.change <= tolerance * norm
            and self.residual <= CAUTION * math.sqrt(tolerance) * norm
            and self.unseen <= MOST_UNSEEN * tolerance * norm
        )

    def error(self, tolerance: float, norm: float) -> float:
        """A half-width: the residual until it has converged, at most `tolerance · norm` after."""
        if not self.is_converged(tolerance, norm):
            return self.residual
        # In an unsplit cluster the largest eigenvalue is off by the residual or a little more, not by the
        # bound. What may be unseen counts where it is more than a trifle.
        unseen = self.unseen if self.unseen > 1e-3 * tolerance * norm else 0.0
        return max(self.bound, self.change, min(max(3 * self.residual, unseen), tolerance * norm))


def read_end(
    values: Array, residuals: Array, index: int, change: float = 0.0, unseen: float = 0.0
) -> RitzEnd:
    """The first (index 0) or last (index -1) of the ascending Ritz values.

    Always |θ − λ| ≤ r for some eigenvalue λ, and |θ − λ| ≤ r²/gap, gap being the distance from θ to the other
    eigenvalues (Kato–Temple; Parlett, The Symmetric Eigenvalue Problem, theorem 11.7.1), here taken from the
    next Ritz value less its own residual.

    >>> import numpy as np
    >>> read_end(np.array([0.0, 1.0]), np.array([0.1, 0.1]), -1).bound < 0.0112
    True
    """
    value, residual = float(values[index]), float(residuals[index])
    bound = residual
    if len(values) > 1:
        neighbour = 1 if index == 0 else -2
        gap = abs(value - float(values[neighbour])) - float(residuals[neighbour])
        if gap > residual:
            bound = residual * (residual / gap)
    return RitzEnd(value, residual, bound, change, unseen)


def reach_of_unseen(residual: float, share: float, size: int) -> float:
    """How far above a Ritz value θ an eigenvalue can lie unseen, for 99 of 100 random start vectors.

    `share` is the component of the start along the Ritz vector. The Lanczos vectors are p_j(A) times the
    start, with polynomials p_j that the recurrence gives. If the start has the component γ along an
    eigenvector with eigenvalue λ, the next Lanczos vector has the component γ·p(λ), which is at most 1. Above
    θ the polynomial grows at least as (λ − θ) / (residual · share). A random start in `size` dimensions has γ
    below 0.01·√(π / 2 size) once in a hundred times (van Dorsselaer, Hochstenbach, van der Vorst, Computing
    probabilistic bounds for extreme eigenvalues of symmetric matrices with the Lanczos method, 2000).

    >>> round(reach_of_unseen(1e-5, 0.1, 100), 5)
    0.0008
    """
    return residual * share * math.sqrt(2 * size / math.pi) / _RARE


def spectral_norm(values: Array) -> float:
    """The largest |value| of ascending values.

    >>> import numpy as np
    >>> spectral_norm(np.array([-3.0, 2.0]))
    3.0
    """
    return max(abs(float(values[0])), abs(float(values[-1])))
