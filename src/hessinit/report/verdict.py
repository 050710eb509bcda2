"""The five verdicts on a curvature, and the thresholds between them (the only place they are written)."""

from __future__ import annotations

import math
from typing import Literal

Verdict = Literal["vanishing", "flat", "ok", "sharp", "exploding"]

# The principle is ‖H‖ ≈ 1, and the best guaranteed step of gradient descent is 1/‖H‖. So the thresholds are
# statements about steps, a decade around 1 first:
VANISHING_BELOW = 1e-3  # the best step is over 1000: the layer hardly moves the loss
FLAT_BELOW = 0.1  # the best step is 10 to 1000
SHARP_ABOVE = 10.0  # gradient descent is unstable above lr = 0.2, or less
EXPLODING_ABOVE = 1000.0  # unstable above lr = 2/1000 = 0.002, which is under the rates in common use


def judge(norm: float) -> Verdict:
    """Say in one word what a curvature norm means for the first step; a threshold itself is the milder word.

    >>> [judge(norm) for norm in (0.0, 0.05, 1.0, 64.0, float("inf"))]
    ['vanishing', 'flat', 'ok', 'sharp', 'exploding']
    """
    if math.isnan(norm) or norm > EXPLODING_ABOVE:
        return "exploding"
    if norm > SHARP_ABOVE:
        return "sharp"
    if norm >= FLAT_BELOW:
        return "ok"
    return "flat" if norm >= VANISHING_BELOW else "vanishing"
