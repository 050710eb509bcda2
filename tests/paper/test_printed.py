"""The printed numbers, the claims and the verdicts."""

from __future__ import annotations

import math

import pytest

from hessinit.paper.printed import holds, judged_cell, make_cell, printed


@pytest.mark.parametrize(
    ("experiment", "cells"), [("table-2", 15), ("table-3", 6), ("table-4", 18), ("table-5", 12)]
)
def test_every_printed_number_has_a_claim(experiment: str, cells: int) -> None:
    table = printed(experiment)
    claimed = [
        judged_cell(experiment, table["data"], row, column, float(paper), error=None, n=1)
        for row, numbers in table["rows"].items()
        for column, paper in numbers.items()
    ]
    assert len(claimed) == cells
    assert all(cell.within and cell.rule for cell in claimed)  # the paper agrees with itself


def test_the_claims_are_those_announced() -> None:
    rule = {
        (row, column): judged_cell("table-4", "mnist", row, column, 1.0, error=None, n=1).rule
        for row in ("1.000", "0.500", "0.100", "0.005")
        for column in ("Hessian 1", "Training loss")
    }
    assert rule["1.000", "Hessian 1"] == rule["0.500", "Training loss"] == "within a factor of 10"
    assert rule["0.100", "Hessian 1"] == rule["0.005", "Hessian 1"] == "within 50 %"
    assert rule["0.100", "Training loss"] == "within 0.05"


def test_a_cell_is_a_mean_with_its_standard_error() -> None:
    cell = make_cell("table-4", "mnist", "0.100", "Hessian 1", [2.0, 3.0, 4.0])
    assert (cell.ours, cell.n, cell.paper, cell.within) == (3.0, 3, 2.34, True)
    assert cell.error == pytest.approx(1 / math.sqrt(3))
    assert make_cell("table-4", "mnist", "0.100", "Hessian 1", [4.0]).within is False
    assert make_cell("table-4", "mnist", "0.100", "Hessian 1", [4.0]).error is None


def test_nothing_is_claimed_on_other_data_or_for_what_is_not_printed() -> None:
    other = make_cell("table-4", "fashion-mnist", "0.100", "Hessian 1", [2.0])
    assert (other.paper, other.rule, other.within) == (2.34, "", None)
    ours = make_cell("table-4", "mnist", "hessinit", "Hessian 1", [2.0])
    assert (ours.paper, ours.rule, ours.within) == (None, "", None)
    assert make_cell("word2vec", "wikipedia", "0.1", "loss", [2.0]).paper is None


def test_a_training_that_broke_off_is_not_within() -> None:
    cell = make_cell("table-4", "mnist", "1.000", "Training loss", [8.0, math.inf])
    assert (cell.ours, cell.error, cell.within) == (math.inf, None, False)


@pytest.mark.parametrize(
    ("rule", "ours", "paper", "within"),
    [
        ("within a factor of 2", 2.0, 1.0, True),
        ("within a factor of 2", 0.5, 1.0, True),
        ("within a factor of 2", 2.01, 1.0, False),
        ("within a factor of 2", -1.0, 1.0, False),
        ("within 50 %", 0.49, 1.0, False),
        ("within 50 %", 0.51, 1.0, True),
        ("within 10 points", 88.1, 78.0, False),
        ("within 0.05", 0.271, 0.32, True),
        ("at least as many", 9.0, 9.0, True),
        ("at least as many", math.nan, 9.0, False),
    ],
)
def test_claims_hold_as_worded(rule: str, ours: float, paper: float, within: bool) -> None:
    assert holds(rule, ours, paper) is within


def test_a_claim_in_other_words_is_refused() -> None:
    with pytest.raises(ValueError, match="'about the same' is no claim"):
        holds("about the same", 1.0, 1.0)
