"""The rigorous bound is above the Gauss-Newton norm, the paper's is so for bias-free ReLU networks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from measured_products import measured_products
from random_networks import random_network
from torch import nn

import hessinit
from hessinit.digits import load_digits
from zoo import PROBLEMS, Problem
from zoo.snapshot import differences, snapshot
from zoo.truth import true_layers


def true_norms(parts: Any) -> dict[str, float]:
    report = hessinit.measure(*parts, dtype=torch.float64, tolerance=1e-8, network=False)
    return {layer.name: layer.norm for layer in report}


@pytest.mark.parametrize("start", range(0, 80, 20))
def test_the_rigorous_bound_is_never_below_the_norm(start: int) -> None:
    for seed in range(start, start + 20):
        parts = random_network(seed)
        found, norms = measured_products(*parts), true_norms(parts)
        below = {
            name: (found[name], norm)
            for name, norm in norms.items()
            if not found[name].rigorous_bound >= norm * (1 - 1e-9)
        }
        assert below == {}, seed


@pytest.mark.parametrize("start", range(100, 160, 20))
def test_the_papers_bound_is_never_below_the_norm_of_bias_free_relu_networks(start: int) -> None:
    for seed in range(start, start + 20):
        parts = random_network(seed, bias_free_relu=True)
        found, norms = measured_products(*parts), true_norms(parts)
        for name, norm in norms.items():
            rigorous, paper = found[name].rigorous_bound, found[name].paper_bound
            assert norm * (1 - 1e-9) <= rigorous, (seed, name)
            # The layer's input is ‖F x‖ long here, at most ‖F‖ ‖x‖; both carry errors of up to a per cent.
            assert rigorous <= paper * 1.03, (seed, name)


def test_single_precision_keeps_the_bounds() -> None:
    for seed in range(40, 60):
        parts = random_network(seed)
        found = measured_products(*parts, dtype=torch.float32)
        for name, norm in true_norms(parts).items():
            assert found[name].rigorous_bound >= norm * (1 - 1e-4), (seed, name)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_ten_layers_are_bounded_a_hundred_times_tighter_than_by_spectral_norms(activation: Any) -> None:
    images, labels = load_digits()
    torch.manual_seed(0)
    layers = [part for _ in range(9) for part in (nn.Linear(64, 64), activation())]
    model = nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 10))
    parts = (model, nn.CrossEntropyLoss(), (images[:32], labels[:32]))
    norms = true_norms(parts)
    for name, row in measured_products(*parts).items():
        assert norms[name] <= row.rigorous_bound <= row.lipschitz_bound / 100
        assert row.paper_bound <= row.lipschitz_bound / 100


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_zoo_is_bounded_and_left_as_found(problem: Problem) -> None:
    model, loss, batch = problem.build()
    settings = {key: value for key, value in problem.options.items() if key in ("layers", "dropout", "seed")}
    before = snapshot(model, loss, batch)
    found = measured_products(model, loss, batch, forward=problem.forward, **settings)
    assert differences(before, snapshot(model, loss, batch)) == []
    for name, truth in true_layers(problem, "gauss-newton").items():
        row = found[name]
        if row.rigorous_bound is None:
            assert row.reason
            continue
        assert row.rigorous_bound >= truth.norm * (1 - 1e-9), name
        assert row.forward is not None
        assert row.paper_bound is not None
        assert (row.lipschitz_bound is None) == bool(row.lipschitz_reason)
