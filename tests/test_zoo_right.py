"""`measure` against the dense fp64 truth: the whole zoo, both curvatures, every layer and the network."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import hessinit
from dense import Extremes
from zoo import PROBLEMS, Problem
from zoo.snapshot import differences, snapshot
from zoo.truth import true_layers, true_network

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning"),
    pytest.mark.parametrize("problem", PROBLEMS, ids=str),
    pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"]),
]
PRECISIONS: dict[str, dict[str, Any]] = {
    "double": {"dtype": torch.float64, "tolerance": 1e-8},
    "single": {},
}


@functools.cache
def measured(problem: Problem, curvature: str, precision: str) -> tuple[Any, list[str]]:
    """The report, and what the call changed that it should have left alone."""
    model, loss, batch = problem.build()
    before = snapshot(model, loss, batch)
    settings = {**PRECISIONS[precision], **problem.options}
    report = hessinit.measure(model, loss, batch, curvature=curvature, forward=problem.forward, **settings)
    return report, differences(before, snapshot(model, loss, batch))


def compared(problem: Problem, curvature: str, precision: str) -> list[tuple[str, Any, Extremes]]:
    """Name, measured row and truth of every layer and of the network."""
    report, _ = measured(problem, curvature, precision)
    layers = true_layers(problem, curvature)
    rows = [(layer.name, layer, layers[layer.name]) for layer in report.layers]
    return [*rows, ("the network", report.network, true_network(problem, curvature))]


def wrong(rows: list[tuple[str, Any, Extremes]], relative: float) -> list[str]:
    """A line for each number that is farther than `relative` times the true norm from the truth."""
    return [
        f"{name}: {what} is {got!r}, truth {true!r} with norm {truth.norm:.3e}"
        for name, row, truth in rows
        for what, got, true in (
            ("norm", row.norm, truth.norm),
            ("top eigenvalue", row.top_eigenvalue, truth.top),
            ("bottom eigenvalue", row.bottom_eigenvalue, truth.bottom),
        )
        if not abs(got - true) <= relative * truth.norm
    ]


def test_every_weight_is_a_layer_under_its_own_name(problem: Problem, curvature: str) -> None:
    report, _ = measured(problem, curvature, "single")
    assert sorted(layer.name for layer in report.layers) == sorted(true_layers(problem, curvature))


def test_double_precision_is_right_to_a_millionth(problem: Problem, curvature: str) -> None:
    assert wrong(compared(problem, curvature, "double"), 1e-6) == []


def test_single_precision_at_default_tolerance_is_right_to_half_a_percent(
    problem: Problem, curvature: str
) -> None:
    assert wrong(compared(problem, curvature, "single"), 5e-3) == []


def test_the_truth_lies_within_the_stated_error(problem: Problem, curvature: str) -> None:
    rows = compared(problem, curvature, "double")
    outside = {
        name: (row.norm, row.error, truth.norm)
        for name, row, truth in rows
        if not abs(row.norm - truth.norm) <= row.error + 1e-9 * truth.norm
    }
    assert outside == {}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_model_comes_back_bit_for_bit(problem: Problem, curvature: str, precision: str) -> None:
    _, changed = measured(problem, curvature, precision)
    assert changed == []
