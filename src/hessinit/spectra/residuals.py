"""How far a Ritz value can be from an eigenvalue, read from residuals."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hessinit.spectra.krylov import Array


@dataclass(frozen=True)
class RitzEnd:
    """An extreme Ritz value, its residual ‖A y − θ y‖, the Kato–Temple bound, its growth in recent steps."""

    value: float
    residual: float
    bound: float
    change: float

    def is_converged(self, tolerance: float, norm: float) -> bool:
        """Within `tolerance · norm`, by everything that can be known.

        The bound trusts the gap. In a cluster that Lanczos has not yet split, or while a larger eigenvalue is
        still growing out of the start vector, the gap is not known and the error can be of the order of r: so
        r has to be small, too, and three more steps must not have moved the value. That costs about two steps
        and avoids nine in ten of the failures on spectra with clustered ends. No rule sees an eigenvector of
        which the start holds almost nothing; another seed does.
        """
        return (
            self.bound <= tolerance * norm
            and self.change <= tolerance * norm
            and self.residual <= 0.03 * math.sqrt(tolerance) * norm
        )

    def error(self, tolerance: float, norm: float) -> float:
        """An honest half-width: the residual until it has converged, at most `tolerance · norm` after."""
        if not self.is_converged(tolerance, norm):
            return self.residual
        return max(self.bound, self.change, min(self.residual, tolerance * norm))


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
