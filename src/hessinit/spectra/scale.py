"""A power of two near a vector's size, so that squares neither overflow nor underflow."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def power_of_two_scale(vector: Tensor) -> float:
    """The power of two just below the largest |entry|; 0 for a zero vector, inf when an entry is not finite.

    Dividing by a power of two is exact. Costs one host synchronisation.

    >>> power_of_two_scale(torch.tensor([3.0, -5.0])), power_of_two_scale(torch.zeros(2))
    (4.0, 0.0)
    >>> power_of_two_scale(torch.tensor([1.0, float("nan")]))
    inf
    """
    largest = float(vector.detach().abs().max())
    if not math.isfinite(largest):
        return math.inf
    if largest == 0:
        return 0.0
    # The scale and its inverse must both be normal numbers of the dtype, also for subnormal entries.
    limit = 126 if vector.dtype == torch.float32 else 1000
    return math.ldexp(1.0, max(-limit, min(limit, math.frexp(largest)[1] - 1)))
