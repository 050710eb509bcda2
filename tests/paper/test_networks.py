"""The paper's networks: shapes, and weights against the rules' own formulas and PyTorch's own layers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hessinit_paper.networks import default_, glorot_, lenet


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_maximum_before_relu_is_the_usual_network_with_the_same_gradients() -> None:
    ours = lenet((1, 28, 28), channels=(3, 4), kernel=3, pool="max", head=(6,), activation="relu").double()
    glorot_(ours, seeded())
    usual = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(100, 6), nn.ReLU(), nn.Linear(6, 10),
    ).double()  # fmt: skip
    with torch.no_grad():
        for theirs, own in zip(usual.parameters(), ours.parameters(), strict=True):
            theirs.copy_(own)
    inputs = torch.rand(5, 1, 28, 28, generator=seeded(1), dtype=torch.float64)
    assert torch.equal(ours(inputs), usual(inputs))
    losses = [(model(inputs).square().sum(), list(model.parameters())) for model in (ours, usual)]
    gradients = [torch.autograd.grad(*loss) for loss in losses]
    for own, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-12, atol=1e-12)


def test_weights_follow_their_rules() -> None:
    model = nn.Sequential(nn.Linear(300, 500), nn.Conv2d(20, 40, 5))
    glorot_(model, seeded())
    for layer, fans in ((model[0], 800), (model[1], 25 * 60)):
        assert layer.weight.var().item() == pytest.approx(2 / fans, rel=0.05)
        assert layer.weight.abs().max().item() <= math.sqrt(6 / fans)
        assert not layer.bias.any()


def test_default_weights_are_those_of_new_pytorch_layers_bit_for_bit() -> None:
    ours = lenet((1, 28, 28))
    default_(ours, 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        theirs = [nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)]
        theirs += [nn.Linear(256, 120), nn.Linear(120, 84), nn.Linear(84, 10)]
    drawn = [parameter for layer in theirs for parameter in layer.parameters()]
    assert all(torch.equal(own, their) for own, their in zip(ours.parameters(), drawn, strict=True))
