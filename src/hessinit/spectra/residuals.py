"""How far a Ritz value can be from an eigenvalue, read from residuals."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hessinit.spectra.krylov import Array

# The residual must be below this share of √tolerance: a smaller one misses fewer eigenvectors, in
# proportion, at a step per factor of 2 to 3.
CAUTION = 0.03


@dataclass(frozen=True)
class RitzEnd:
    """An extreme Ritz value, its residual ‖A y − θ y‖, the Kato–Temple bound, its growth in recent steps."""

    value: float
    residual: float
    bound: float
    change: float
    bounded: bool = False  # from both sides, so that the residual does not matter

    def is_converged(self, tolerance: float, norm: float, caution: float = CAUTION) -> bool:
        """Within `tolerance · norm`, as far as one start vector can tell.

        The bound trusts the gap. In a cluster that Lanczos has not yet split, or while a larger eigenvalue is
        still growing out of the start vector, the gap is not known: so the residual has to be small, too, and
        the last steps must not have moved the value. An eigenvector of which the start holds almost nothing
        escapes any such rule: docs/measuring.md counts how often, on spectra with crowded ends.
        """
        if self.bounded:
            return self.bound <= tolerance * norm
        return (
            self.bound <= tolerance * norm
            and self.change <= tolerance * norm
            and self.residual <= caution * math.sqrt(tolerance) * norm
        )

    def error(self, tolerance: float, norm: float, caution: float = CAUTION) -> float:
        """A half-width: the residual until it has converged, at most `tolerance · norm` after."""
        if not self.is_converged(tolerance, norm, caution):
            return self.residual
        # In an unsplit cluster the largest eigenvalue is off by the residual or a little more, not by the
        # bound.
        return max(self.bound, self.change, min(3 * self.residual, tolerance * norm))


def read_end(values: Array, residuals: Array, index: int, change: float = 0.0) -> RitzEnd:
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
    return RitzEnd(value, residual, bound, change)


def spectral_norm(values: Array) -> float:
    """The largest |value| of ascending values.

    >>> import numpy as np
    >>> spectral_norm(np.array([-3.0, 2.0]))
    3.0
    """
    return max(abs(float(values[0])), abs(float(values[-1])))
