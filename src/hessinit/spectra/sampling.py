"""From independent samples to a mean with its error."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Half-widths are two standard errors: about 95 % for normal samples, a little less for a handful of them.
STANDARD_ERRORS = 2.0


def mean_and_error(samples: Sequence[float]) -> tuple[float, float]:
    """The mean and two standard errors of it, without overflow; a single sample has an unknown error, inf.

    >>> mean_and_error([1.0, 3.0])
    (2.0, 2.0)
    >>> mean_and_error([-1e300, 1e300])
    (0.0, 2e+300)
    """
    count = len(samples)
    if not all(math.isfinite(sample) for sample in samples):
        return math.inf, math.inf
    largest = max(abs(sample) for sample in samples)
    if largest == 0:
        return 0.0, 0.0 if count > 1 else math.inf
    scaled = [sample / largest for sample in samples]
    mean = math.fsum(scaled) / count
    if count == 1:
        return mean * largest, math.inf
    variance = math.fsum((sample - mean) ** 2 for sample in scaled) / (count - 1)
    return mean * largest, STANDARD_ERRORS * math.sqrt(variance / count) * largest
