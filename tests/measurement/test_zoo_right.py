"""`measure` against the dense fp64 truth: the whole zoo, both curvatures, every layer and the network."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hessinit
from dense import Extremes
from zoo import PROBLEMS, Problem
from zoo.snapshot import differences, snapshot
from zoo.truth import true_layers, true_network

# The settings of a measurement, and the difference from the truth that they allow, over the true norm.
PRECISIONS: list[tuple[dict[str, Any], float]] = [
    ({"dtype": torch.float64, "tolerance": 1e-8}, 1e-6),
    ({}, 5e-3),
]


def wrong(row: Any, truth: Extremes, relative: float) -> list[str]:
    """A line for each number that is farther than `relative` times the true norm from the truth."""
    pairs = {
        "norm": (row.norm, truth.norm),
        "top eigenvalue": (row.top_eigenvalue, truth.top),
        "bottom eigenvalue": (row.bottom_eigenvalue, truth.bottom),
    }
    return [
        f"{row.name}: {what} is {got!r}, truth {true!r} with norm {truth.norm:.3e}"
        for what, (got, true) in pairs.items()
        if not abs(got - true) <= relative * truth.norm
    ]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_every_layer_is_right_in_both_precisions_and_the_model_comes_back_bit_for_bit(
    problem: Problem, curvature: str
) -> None:
    truths = {**true_layers(problem, curvature), "network": true_network(problem, curvature)}
    for settings, relative in PRECISIONS:
        model, loss, batch = problem.build()
        before = snapshot(model, loss, batch)
        report = hessinit.measure(
            model,
            loss,
            batch,
            curvature=curvature,
            forward=problem.forward,
            **{**settings, **problem.options},
        )
        assert differences(before, snapshot(model, loss, batch)) == []
        rows = {**{row.name: row for row in report.layers}, "network": report.network}
        assert sorted(rows) == sorted(truths)
        assert [line for name, row in rows.items() for line in wrong(row, truths[name], relative)] == []
        outside = {
            name: (row.norm, row.error, truths[name].norm)
            for name, row in rows.items()
            if settings and not abs(row.norm - truths[name].norm) <= row.error + 1e-9 * truths[name].norm
        }
        assert outside == {}
