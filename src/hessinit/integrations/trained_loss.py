"""Whether what is trained is what is measured: their losses side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable

# The same examples and weights, up to the rounding of 16 bits; other examples or another dropout mask.
SAME, ALIKE = 1.05, 1.5


def is_another_loss(trained: float, measured: float, times: float) -> bool:
    """Whether one is more than so many `times` the other; what is not finite tells nothing.

    >>> is_another_loss(2.30, 2.31, SAME), is_another_loss(230.0, 2.3, ALIKE)
    (False, True)
    """
    if not (math.isfinite(trained) and math.isfinite(measured)):
        return False
    low, high = sorted((trained, measured))
    return high - low > (times - 1) * abs(low) + 1e-6


def is_beyond(logged: float, measured: Iterable[float], *, also_below: bool) -> bool:
    """Whether an average over some steps is far from all that was measured before, between and after them.

    >>> is_beyond(1.0, [2.3, 0.4], also_below=True), is_beyond(0.2, [2.3, 0.4], also_below=True)
    (False, True)
    """
    known = [value for value in measured if math.isfinite(value)]
    if not known or not math.isfinite(logged):
        return False
    if logged > max(known):
        return is_another_loss(logged, max(known), ALIKE)
    return also_below and logged < min(known) and is_another_loss(logged, min(known), ALIKE)
