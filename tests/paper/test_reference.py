"""Printed numbers against the paper, claims as worded, and rank correlations against scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from hessinit_paper.experiments import MODULES, find_experiment
from hessinit_paper.reference import holds, make_table, mean, printed, rank_correlation

# From the paper's tables, read off once more: row, column, number.
PRINTED = {
    "table-1": [("loss by outputs", "dependent", 10), ("loss by output, output by layer", "mean p", 0.02)],
    "table-2": [("Dense 1", "rtol ≤ 0.5", 41), ("Dense 3", "rtol ≤ 0.5", 81), ("Dense 2", "rtol ≤ 1.5", 97)],
    "table-3": [("Convolution 1", "rtol ≤ 5", 92), ("Convolution 2", "rtol ≤ 1", 73)],
    "table-4": [("1.000", "Training loss", 8.65), ("0.005", "Hessian 1", 0.005)],
    "table-5": [("0.100", "Hessian 1", 1.47), ("0.050", "Training loss", 2.30)],
}  # fmt: skip


@pytest.mark.parametrize("name", PRINTED)
def test_printed_numbers_are_those_of_the_paper(name: str) -> None:
    table = printed()[name]
    for row, column, number in PRINTED[name]:
        assert table["rows"][row][column] == number
    assert table["data"] == find_experiment(name).data[0]
    assert set(printed()) == set(MODULES) - {"word2vec"}
    for claim in table["claims"]:
        assert holds(claim["rule"], 1.0, 1.0)
        assert set(claim.get("rows", [])) <= set(table["rows"])


@pytest.mark.parametrize(
    ("rule", "ours", "paper", "expected"),
    [
        ("within 50 %", 1.5, 1.0, True), ("within 50 %", 0.49, 1.0, False),
        ("within a factor of 2", 0.5, 1.0, True), ("within a factor of 2", 2.01, 1.0, False),
        ("within a factor of 2", -1.0, 1.0, False), ("within a factor of 10", math.inf, 1.0, False),
        ("within 10 points", 68.0, 78.0, True), ("within 0.05", 0.39, 0.33, False),
        ("within 0.05", math.nan, 0.33, False), ("at least as many", 10, 9, True),
    ],
)  # fmt: skip
def test_claims_are_judged_as_worded(rule: str, ours: float, paper: float, expected: bool) -> None:
    assert holds(rule, ours, paper) is expected


def test_only_the_papers_own_data_are_judged_and_the_first_claim_wins() -> None:
    cells = {("1.000", "Training loss"): mean([0.9, 1.1]), ("1.000", "exact 1"): mean([math.inf, 1.0])}
    cell, exact = make_table("", "", cells, experiment="table-4", data="mnist").cells
    assert (cell.paper, cell.rule, cell.within) == (8.65, "within a factor of 10", True)
    assert (cell.ours, cell.error, cell.n) == (1.0, pytest.approx(0.1), 2)
    assert (exact.paper, exact.error) == (None, None)
    other = make_table("", "", cells, experiment="table-4", data="fashion-mnist").cells[0]
    assert (other.paper, other.rule, other.within) == (8.65, "", None)


def test_rho_and_p_over_every_order_are_scipys() -> None:
    random = np.random.default_rng(5)
    first = random.normal(size=6)
    second = np.round(first + random.normal(size=6), 0)  # with ties
    statistic = lambda x: stats.spearmanr(x, second).statistic  # noqa: E731
    options = {"permutation_type": "pairings", "n_resamples": math.inf}
    truth = stats.permutation_test((first,), statistic, **options)
    found = rank_correlation(first.tolist(), second.tolist())
    assert (found.rho, found.p, found.n) == pytest.approx((truth.statistic, truth.pvalue, 6), rel=1e-10)


def test_blocks_add_no_evidence_infinite_losses_rank_last_and_nothing_to_rank_is_nan() -> None:
    once, thrice = [1, 2, 3, 4], [1, 2, 3, 4] * 3
    assert rank_correlation(once, once).p == rank_correlation(thrice, thrice, blocks=3).p == 2 / 24
    assert rank_correlation([1, 2, 3], [5, 6, math.inf]).rho == 1
    assert math.isnan(rank_correlation([1, 1, 1], [1, 2, 3]).rho)
