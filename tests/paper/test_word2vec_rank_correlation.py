"""Spearman's ρ against scipy, and permutation p-values against counting."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from hessinit.paper.rank_correlation import rank_correlation


@pytest.mark.parametrize("n", [5, 7, 21])
def test_rho_is_scipys(n):
    random = np.random.default_rng(n)
    first = random.normal(size=n)
    second = np.round(first + random.normal(size=n), 0)  # with ties
    found = rank_correlation(first.tolist(), second.tolist())
    assert found.rho == pytest.approx(stats.spearmanr(first, second).statistic, abs=1e-10)
    assert found.n == n


def test_p_of_few_points_counts_every_order():
    first, second = [1, 2, 3, 4, 5, 6], [2, 1, 4, 3, 6, 5.5]
    truth = stats.permutation_test(
        (first,),
        lambda x: stats.spearmanr(x, second).statistic,
        permutation_type="pairings",
        n_resamples=math.inf,
    )
    assert rank_correlation(first, second).p == pytest.approx(truth.pvalue, rel=1e-12)


def test_p_of_many_points_is_near_the_asymptotic_one():
    random = np.random.default_rng(4)
    first = random.normal(size=60)
    second = 0.25 * first + random.normal(size=60)
    truth = stats.spearmanr(first, second).pvalue
    assert 0.01 < truth < 0.5
    assert rank_correlation(first.tolist(), second.tolist()).p == pytest.approx(truth, rel=0.15)


def test_repeated_blocks_add_no_evidence():
    once = rank_correlation([1, 2, 3, 4], [1, 2, 3, 4])
    blocks = rank_correlation([1, 2, 3, 4] * 3, [1, 2, 3, 4] * 3, blocks=3)
    naive = rank_correlation([1, 2, 3, 4] * 3, [1, 2, 3, 4] * 3)
    assert once.p == blocks.p == 2 / 24
    assert naive.p < 0.001
    assert blocks.rho == 1


def test_false_alarms_of_blocks_are_as_rare_as_p_says():
    random = np.random.default_rng(0)
    found = []
    for _ in range(300):
        distance, loss = random.normal(size=6), random.normal(size=6)
        near = [
            np.concatenate([one, one + 0.01 * random.normal(size=6)]).tolist() for one in (distance, loss)
        ]
        found.append((rank_correlation(*near, blocks=2).p <= 0.05, stats.spearmanr(*near).pvalue <= 0.05))
    honest, naive = np.mean(found, axis=0)
    assert honest < 0.05 + 4 * math.sqrt(0.05 * 0.95 / 300)
    assert naive > 0.12  # what treating them as 12 points would give


def test_infinite_losses_rank_last():
    assert rank_correlation([1, 2, 3], [5, 6, math.inf]).rho == 1


def test_nothing_to_rank_is_nan():
    assert math.isnan(rank_correlation([1, 1, 1], [1, 2, 3]).rho)
    assert math.isnan(rank_correlation([1, 2], [1, 2]).p)


def test_unequal_lists_are_refused():
    with pytest.raises(ValueError, match="3 values cannot be paired with 2"):
        rank_correlation([1, 2, 3], [1, 2])
    with pytest.raises(ValueError, match="3 points do not make 2 equal blocks"):
        rank_correlation([1, 2, 3], [1, 2, 3], blocks=2)
