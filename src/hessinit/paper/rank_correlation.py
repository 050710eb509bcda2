"""Spearman's rank correlation, with a permutation p-value that needs no large sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

MOST_ENUMERATED = 8  # 8! = 40,320 orders; of more points a sample is drawn
SAMPLE = 9_999


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman's ρ over n points, and the fraction of all orders whose |ρ| is as large."""

    rho: float
    p: float
    n: int


def rank_correlation(first: Sequence[float], second: Sequence[float], *, blocks: int = 1) -> RankCorrelation:
    """ρ with its two-sided permutation p-value: every order of up to 8 places, else 9,999 drawn ones.

    Points in `blocks` of equal length, one after another, whose places mean the same (the same standard
    deviation in another dimension) are not independent: their order is changed in all blocks alike.

    Infinite values rank last. With fewer than three points, or all of one kind equal, ρ and p are nan.

    >>> rank_correlation([1, 2, 3, 4], [10, 20, 30, 400])  # 2 of 24 orders are as extreme
    RankCorrelation(rho=1.0, p=0.08333333333333333, n=4)
    """
    n = len(first)
    if n != len(second) or n % blocks:
        raise ValueError(f"{n} values cannot be paired with {len(second)} in {blocks} equal blocks.")
    if n < 3 or len(set(first)) < 2 or len(set(second)) < 2:
        return RankCorrelation(math.nan, math.nan, n)
    left, right = _standardized_ranks(first), _standardized_ranks(second)
    rho = float(left @ right)
    places = n // blocks
    if places <= MOST_ENUMERATED:
        orders = np.array(list(permutations(range(places))))
    else:
        orders = np.random.default_rng(0).permuted(np.tile(np.arange(places), (SAMPLE, 1)), axis=1)
    everywhere = np.concatenate([orders + block * places for block in range(blocks)], axis=1)
    # Rounding must not tell apart orders that are equally extreme.
    extreme = int(np.count_nonzero(np.abs(right[everywhere] @ left) >= abs(rho) - 1e-9))
    # The order found is one of those listed; among drawn ones it has to be counted in.
    p = extreme / len(orders) if places <= MOST_ENUMERATED else (1 + extreme) / (1 + SAMPLE)
    return RankCorrelation(round(rho, 12) + 0.0, p, n)  # + 0.0 for a -0.0


def _standardized_ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Ranks, the mean rank among equals, centred and of length 1."""
    array = np.asarray(values, dtype=np.float64)
    ranks = (array < array[:, None]).sum(1) + ((array == array[:, None]).sum(1) + 1) / 2
    centred = ranks - ranks.mean()
    return np.asarray(centred / np.linalg.norm(centred))
