"""The paper's networks: shapes, and weights against the rules' own formulas and PyTorch's own layers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hessinit.errors import ProblemError
from hessinit.paper.networks import default_, dense, glorot_, lenet, normal_


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_dense_layers_are_named_in_order_and_the_last_has_no_activation() -> None:
    model = dense([7, 5, 4, 3], "gelu")
    assert [name for name, _ in model.named_children()] == [
        "dense1", "activation1", "dense2", "activation2", "dense3",
    ]  # fmt: skip
    assert [tuple(weight.shape) for weight in model.parameters() if weight.ndim > 1] == [
        (5, 7),
        (4, 5),
        (3, 4),
    ]
    assert isinstance(model.activation2, nn.GELU)


def test_new_networks_are_zero_and_draw_no_random_numbers() -> None:
    before = torch.get_rng_state()
    models = [dense([7, 5, 3], "tanh"), lenet((1, 28, 28))]
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(weight.any() for model in models for weight in model.parameters())
    assert all(weight.device.type == "cpu" for model in models for weight in model.parameters())


@pytest.mark.parametrize(
    ("shape", "kernel", "features"),
    [
        ((3, 32, 32), 5, 16 * 5 * 5),
        ((3, 32, 32), 3, 16 * 6 * 6),
        ((1, 28, 28), 5, 16 * 4 * 4),
        ((1, 8, 8), 5, 16 * 2 * 2),  # kernels of 3 with padding
    ],
)
def test_lenet_takes_images_of_every_size(shape: tuple[int, int, int], kernel: int, features: int) -> None:
    model = lenet(shape, kernel=kernel)
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


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_glorot_weights_have_the_variance_of_both_fans(kind: str) -> None:
    model = nn.Sequential(nn.Linear(300, 500), nn.Conv2d(20, 40, 5))
    glorot_(model, seeded(), kind)
    for layer, fans in ((model[0], 800), (model[1], 25 * 60)):
        assert layer.weight.var().item() == pytest.approx(2 / fans, rel=0.05)
        assert not layer.bias.any()
        if kind == "uniform":
            assert layer.weight.abs().max().item() <= math.sqrt(6 / fans)


def test_default_weights_are_those_of_new_pytorch_layers_bit_for_bit() -> None:
    ours = lenet((1, 28, 28))
    default_(ours, seeded(3))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        theirs = [
            nn.Conv2d(1, 6, 5),
            nn.Conv2d(6, 16, 5),
            nn.Linear(256, 120),
            nn.Linear(120, 84),
            nn.Linear(84, 10),
        ]
    drawn = [parameter for layer in theirs for parameter in layer.parameters()]
    assert all(torch.equal(own, their) for own, their in zip(ours.parameters(), drawn, strict=True))


def test_normal_weights_have_the_std_and_leave_the_bias() -> None:
    layer = nn.Linear(300, 200)
    bias = layer.bias.detach().clone()
    normal_(layer, 0.05, seeded())
    assert layer.weight.std().item() == pytest.approx(0.05, rel=0.02)
    assert torch.equal(layer.bias, bias)


def test_unknown_words_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ProblemError, match="activation='rleu' is unknown.*'relu'"):
        dense([3, 2], "rleu")
    with pytest.raises(ProblemError, match="pool='mean' is unknown.*'average', 'max'"):
        lenet((1, 28, 28), pool="mean")
    with pytest.raises(ProblemError, match="kind='gaussian' is unknown.*'uniform', 'normal'"):
        glorot_(nn.Linear(2, 2), seeded(), "gaussian")
