"""Spearman's ρ against scipy, and permutation p-values against counting."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from hessinit.paper.rank_correlation import rank_correlation


@pytest.mark.parametrize("n", [5, 7, 21])
def test_rho_is_scipys(n: int) -> None:
    random = np.random.default_rng(n)
    first = random.normal(size=n)
    second = np.round(first + random.normal(size=n), 0)  # with ties
    found = rank_correlation(first.tolist(), second.tolist())
    assert found.rho == pytest.approx(stats.spearmanr(first, second).statistic, abs=1e-10)
    assert found.n == n


def test_p_counts_every_order_of_few_points_and_is_near_the_asymptotic_one_of_many() -> None:
    first, second = [1, 2, 3, 4, 5, 6], [2, 1, 4, 3, 6, 5.5]
    truth = stats.permutation_test(
        (first,),
        lambda x: stats.spearmanr(x, second).statistic,
        permutation_type="pairings",
        n_resamples=math.inf,
    )
    assert rank_correlation(first, second).p == pytest.approx(truth.pvalue, rel=1e-12)
    random = np.random.default_rng(4)
    many = random.normal(size=60)
    related = 0.25 * many + random.normal(size=60)
    asymptotic = stats.spearmanr(many, related).pvalue
    assert 0.01 < asymptotic < 0.5
    assert rank_correlation(many.tolist(), related.tolist()).p == pytest.approx(asymptotic, rel=0.15)


def test_repeated_blocks_add_no_evidence() -> None:
    once = rank_correlation([1, 2, 3, 4], [1, 2, 3, 4])
    blocks = rank_correlation([1, 2, 3, 4] * 3, [1, 2, 3, 4] * 3, blocks=3)
    naive = rank_correlation([1, 2, 3, 4] * 3, [1, 2, 3, 4] * 3)
    assert once.p == blocks.p == 2 / 24
    assert naive.p < 0.001
    assert blocks.rho == 1


def test_infinite_losses_rank_last_and_nothing_to_rank_is_nan() -> None:
    assert rank_correlation([1, 2, 3], [5, 6, math.inf]).rho == 1
    assert math.isnan(rank_correlation([1, 1, 1], [1, 2, 3]).rho)
    assert math.isnan(rank_correlation([1, 2], [1, 2]).p)


@pytest.mark.parametrize(("second", "blocks"), [([1, 2], 1), ([1, 2, 3], 2)])
def test_unequal_lists_are_refused(second: list[float], blocks: int) -> None:
    with pytest.raises(ValueError, match=f"3 values cannot be paired with {len(second)} in {blocks} equal"):
        rank_correlation([1, 2, 3], second, blocks=blocks)
