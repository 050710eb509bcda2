"""The paper's networks: shapes, and weights against the rules' own formulas and PyTorch's own layers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hessinit.paper.networks import default_, glorot_, lenet, normal_


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("shape", "kernel", "features"),
    [((3, 32, 32), 5, 400), ((3, 32, 32), 3, 16 * 6 * 6), ((1, 28, 28), 5, 256), ((1, 8, 8), 5, 16 * 2 * 2)],
)
def test_lenet_takes_images_of_every_size(shape: tuple[int, int, int], kernel: int, features: int) -> None:
    model = lenet(shape, kernel=kernel)  # small images: kernels of 3 with padding
    assert model.get_submodule("dense1").in_features == features
    assert model(torch.zeros(2, *shape)).shape == (2, 10)
    layers = [name.removesuffix(".weight") for name, weight in model.named_parameters() if weight.ndim > 1]
    assert layers == ["conv1", "conv2", "dense1", "dense2", "dense3"]


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
    gradients = [
        torch.autograd.grad(model(inputs).square().sum(), list(model.parameters())) for model in (ours, usual)
    ]
    for own, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-12, atol=1e-12)


def test_weights_follow_their_rules() -> None:
    model = nn.Sequential(nn.Linear(300, 500), nn.Conv2d(20, 40, 5))
    glorot_(model, seeded())
    for layer, fans in ((model[0], 800), (model[1], 25 * 60)):
        assert layer.weight.var().item() == pytest.approx(2 / fans, rel=0.05)
        assert layer.weight.abs().max().item() <= math.sqrt(6 / fans)
        assert not layer.bias.any()
    layer = nn.Linear(300, 200)
    bias = layer.bias.detach().clone()
    normal_(layer, 0.05, seeded())
    assert layer.weight.std().item() == pytest.approx(0.05, rel=0.02)
    assert torch.equal(layer.bias, bias)


def test_default_weights_are_those_of_new_pytorch_layers_bit_for_bit() -> None:
    ours = lenet((1, 28, 28))
    default_(ours, 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        theirs = [nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)]
        theirs += [nn.Linear(256, 120), nn.Linear(120, 84), nn.Linear(84, 10)]
    drawn = [parameter for layer in theirs for parameter in layer.parameters()]
    assert all(torch.equal(own, their) for own, their in zip(ours.parameters(), drawn, strict=True))
