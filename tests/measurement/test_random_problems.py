"""A sample of benchmarks/silent_errors.py: random problems against dense truth."""

from __future__ import annotations

from collections import Counter

import pytest
from odd_constructions import ODD, draw
from silent_errors import failures, run_one

SEEDS = range(5000, 5024)  # others than those of the committed record


def test_no_random_problem_is_measured_wrong() -> None:
    records = [record for seed in SEEDS for record in run_one(seed)]
    assert failures(records) == []
    outcomes = Counter(record["outcome"] for record in records if draw(record["seed"]).ordinary)
    assert outcomes["refused"] <= 0.05 * outcomes.total()
    assert outcomes["measured"] > 40


@pytest.mark.parametrize("kind", [kind for kind, odd in ODD.items() if odd.has_no_curvature])
def test_what_has_no_curvature_is_refused(kind: str) -> None:
    seed = next(seed for seed in range(10_000) if draw(seed).name == f"odd {kind}")
    assert {record["outcome"] for record in run_one(seed)} == {"refused"}
