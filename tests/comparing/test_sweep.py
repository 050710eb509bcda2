"""The sweep over standard deviations, against closed forms."""

from __future__ import annotations

import digit_problem as problem
import pytest
import torch
from torch import nn

from hessinit.comparing.sweep import sweep


def _linear() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))


def test_norms_of_a_two_layer_net_scale_as_the_square_of_the_std() -> None:
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(64, 6, generator=generator), torch.randn(64, 4, generator=generator)
    stds = (2.0, 1.0, 0.1)
    comparison = sweep(_linear, nn.MSELoss(), data, stds=stds, seeds=2, steps=10, workers=1)
    assert (comparison.kind, comparison.stds) == ("sweep", stds)
    assert comparison.schemes == ("std 2.0", "std 1.0", "std 0.1")
    for layer in ("0", "1"):
        unit = comparison.norm("std 1.0", layer=layer)
        for std, start in zip(stds, comparison.schemes, strict=True):
            # Each layer's block is 2/(n·k) · Jᵀ J, and J is linear in the other layer's weights.
            assert comparison.norm(start, layer=layer) == pytest.approx(unit * std**2, rel=0.02)


def test_the_weights_have_the_std_and_biases_are_zero() -> None:
    models: list[nn.Module] = []

    def build() -> nn.Module:
        models.append(nn.Sequential(nn.Flatten(), nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 10)))
        return models[-1]

    run = sweep(
        build, problem.LOSS, problem.data(), stds=[0.05], layers="1", learning_rate=1e-12, seeds=1, steps=10,
        workers=1,
    )  # fmt: skip
    untouched, _, trained = models
    assert trained[1].weight.std().item() == pytest.approx(0.05, rel=0.03)
    assert trained[1].bias.abs().max().item() < 1e-9
    assert torch.allclose(trained[3].weight, untouched[3].weight, atol=1e-9)  # not among `layers`: as built
    assert run.runs[0].steps_done == 10


def test_a_layer_that_does_not_exist_is_refused_before_any_run() -> None:
    for layers, message in [("2", "layers='2' fits no parameter"), ("*.bias", "names no weight of two")]:
        with pytest.raises(ValueError, match=message):
            sweep(problem.build, problem.LOSS, problem.data(), layers=layers, steps=10, workers=1)
