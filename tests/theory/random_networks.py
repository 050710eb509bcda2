"""Random architectures, the same for the same seed: depth, widths, activations, biases, layers, losses."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

Parts = tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]

PIECEWISE_LINEAR = (nn.ReLU, nn.LeakyReLU, nn.Identity)
SMOOTH = (nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.Softplus, nn.Hardswish)


class Residual(nn.Module):
    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, stream: Tensor) -> Tensor:
        return stream + self.branch(stream)


def random_network(seed: int, *, bias_free_relu: bool = False) -> Parts:
    """A model, a loss and a batch."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    bias = not bias_free_relu and chance.random() < 0.7
    activation = nn.ReLU if bias_free_relu else chance.choice((*PIECEWISE_LINEAR, *SMOOTH))
    examples, classes = chance.choice((1, 2, 5, 9)), chance.choice((1, 2, 4))
    if chance.random() < 0.5:
        features = chance.randint(1, 8)
        inputs, body, width = torch.randn(examples, features), *dense_body(chance, features, activation, bias)
    else:
        channels, side = chance.randint(1, 3), chance.randint(5, 7)
        inputs = torch.randn(examples, channels, side, side)
        body = conv_body(chance, channels, activation, bias)
        width = body(inputs).shape[1]
    model = nn.Sequential(body, nn.Linear(width, classes, bias=bias))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(chance.choice((0.3, 1.0, 3.0)))
    if classes > 1 and chance.random() < 0.5:
        return model, nn.CrossEntropyLoss(), (inputs, torch.randint(classes, (examples,)))
    return model, nn.MSELoss(), (inputs, torch.randn(examples, classes))


def dense_body(chance: random.Random, width: int, activation: Any, bias: bool) -> tuple[nn.Module, int]:
    parts: list[nn.Module] = []
    for _ in range(chance.randint(1, 6)):
        if parts and chance.random() < 0.3:
            inner = nn.Linear(width, width, bias=bias)
            parts.append(Residual(nn.Sequential(inner, activation())))
        else:
            following = chance.randint(1, 8)
            parts += [nn.Linear(width, following, bias=bias), activation()]
            width = following
    return nn.Sequential(*parts), width


def conv_body(chance: random.Random, channels: int, activation: Any, bias: bool) -> nn.Module:
    parts: list[nn.Module] = []
    for _ in range(chance.randint(1, 3)):
        groups = chance.choice([g for g in (1, 2, 3) if channels % g == 0])
        out = groups * chance.randint(1, 2)
        kind = nn.ConvTranspose2d if chance.random() < 0.25 else nn.Conv2d
        settings = {"stride": chance.randint(1, 2), "padding": 1, "groups": groups, "bias": bias}
        settings["dilation"] = 1 if kind is nn.ConvTranspose2d else chance.randint(1, 2)
        parts += [
            nn.Sequential(nn.ZeroPad2d(1), kind(channels, out, chance.randint(2, 3), **settings)),
            activation(),
        ]
        channels = out
    if chance.random() < 0.5:
        parts.append(
            nn.AvgPool2d(2, ceil_mode=True) if chance.random() < 0.5 else nn.MaxPool2d(2, ceil_mode=True)
        )
    return nn.Sequential(*parts, nn.Flatten())
