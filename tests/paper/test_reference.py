"""The printed numbers are those of the paper, and claims are judged as they are worded."""

from __future__ import annotations

import math

import pytest

from hessinit.paper.experiments import MODULES, find_experiment
from hessinit.paper.reference import holds, judged_cell, mean_cell, printed

# From the paper's tables, read off once more: row, column, number.
PRINTED = {
    "table-1": [("loss by outputs", "dependent", 10), ("loss by output, output by layer", "mean p", 0.02)],
    "table-2": [("Dense 1", "rtol ≤ 0.5", 41), ("Dense 3", "rtol ≤ 0.5", 81), ("Dense 2", "rtol ≤ 1.5", 97)],
    "table-3": [("Convolution 1", "rtol ≤ 5", 92), ("Convolution 2", "rtol ≤ 1", 73)],
    "table-4": [
        ("1.000", "Training loss", 8.65),
        ("0.500", "Hessian 2", 10.09),
        ("0.005", "Hessian 1", 0.005),
    ],
    "table-5": [
        ("0.100", "Hessian 1", 1.47),
        ("0.050", "Training loss", 2.30),
        ("0.001", "Hessian 2", 0.0001),
    ],
}


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
        ("within 50 %", 1.5, 1.0, True),
        ("within 50 %", 0.49, 1.0, False),
        ("within a factor of 2", 0.5, 1.0, True),
        ("within a factor of 2", 2.01, 1.0, False),
        ("within a factor of 2", -1.0, 1.0, False),
        ("within 10 points", 68.0, 78.0, True),
        ("within 0.05", 0.39, 0.33, False),
        ("at least as many", 10, 9, True),
        ("within 0.05", math.nan, 0.33, False),
        ("within a factor of 10", math.inf, 1.0, False),
    ],
)
def test_claims_are_judged_as_worded(rule: str, ours: float, paper: float, expected: bool) -> None:
    assert holds(rule, ours, paper) is expected


def test_an_unknown_claim_is_refused() -> None:
    with pytest.raises(ValueError, match="'near' is not a claim"):
        holds("near", 1.0, 1.0)


def test_only_the_papers_own_data_are_judged_and_the_first_claim_wins() -> None:
    cell = mean_cell("1.000", "Training loss", [0.9, 1.1], "table-4", "mnist")
    assert (cell.paper, cell.rule, cell.within) == (8.65, "within a factor of 10", True)
    assert (cell.ours, cell.error, cell.n) == (1.0, pytest.approx(0.1), 2)
    other = mean_cell("1.000", "Training loss", [1.0], "table-4", "fashion-mnist")
    assert (other.paper, other.rule, other.within, other.error) == (8.65, "", None, None)
    assert (
        judged_cell("1.000", "exact 1", 1.0, 1, error=None, experiment="table-4", data="mnist").paper is None
    )
    assert mean_cell("any", "column", [math.inf, 1.0]).error is None
