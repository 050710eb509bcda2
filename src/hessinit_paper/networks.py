"""The paper's networks, built with all weights zero, and the rules by which weights are drawn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}
POOLS: dict[str, type[nn.Module]] = {"average": nn.AvgPool2d, "max": nn.MaxPool2d}


def build(
    described: Mapping[str, Any], shape: tuple[int, int, int], activation: str
) -> nn.Sequential:
    """Return the network that a record describes: `dense` with its hidden layers, or a `lenet`."""
    hidden = described.get("hidden widths", described.get("hidden units"))
    if hidden is not None:
        return dense([math.prod(shape), *hidden, 10], activation)
    return lenet(
        shape,
        channels=described["channels"],
        kernel=described["kernel"],
        pool=described["pool"],
        head=described.get("head", described.get("dense")),
        activation=activation,
    )


def dense(
    widths: Sequence[int], activation: str, before: nn.Sequential | None = None
) -> nn.Sequential:
    """Return fully connected layers dense1, dense2, …, with the activation between them.

    They are added to the layers `before` them, and all weights are set to zero.

    >>> [name for name, _ in dense([784, 64, 10], "relu").named_children()]
    ['dense1', 'activation1', 'dense2']
    """
    model = nn.Sequential() if before is None else before
    for number, (inputs, outputs) in enumerate(itertools.pairwise(widths), start=1):
        model.add_module(f"dense{number}", nn.utils.skip_init(nn.Linear, inputs, outputs))
        if number < len(widths) - 1:
            model.add_module(f"activation{number}", ACTIVATIONS[activation]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def lenet(
    shape: tuple[int, int, int],
    *,
    channels: Sequence[int] = (6, 16),
    kernel: int = 5,
    pool: str = "average",
    head: Sequence[int] = (120, 84),
    activation: str = "tanh",
) -> nn.Sequential:
    """Return convolutions conv1 and conv2, each with the activation and a pool of 2, then `dense`.

    The kernels have no padding. Images of fewer than 12 pixels to a side would vanish under two
    kernels of 5 and two pools: they get kernels of 3 with a padding of 1. A maximum is taken before
    the activation: a monotonic activation gives the same output, for a quarter of the work.

    >>> lenet((3, 32, 32)).dense1  # LeNet-5: 32 − 4 = 28, halved 14, − 4 = 10, halved 5
    Linear(in_features=400, out_features=120, bias=True)
    """
    padding = 0
    if min(shape[1:]) < 12:
        kernel = 3
        padding = 1
    model = nn.Sequential()
    sides = list(shape[1:])
    for number, (before, after) in enumerate(itertools.pairwise((shape[0], *channels)), start=1):
        convolution = nn.utils.skip_init(nn.Conv2d, before, after, kernel, padding=padding)
        model.add_module(f"conv{number}", convolution)
        followers = {"pool": POOLS[pool](2), "conv_activation": ACTIVATIONS[activation]()}
        for name in sorted(followers, reverse=pool == "max"):
            model.add_module(f"{name}{number}", followers[name])
        sides = [(side + 2 * padding - kernel + 1) // 2 for side in sides]
    model.add_module("flatten", nn.Flatten())
    return dense([channels[-1] * sides[0] * sides[1], *head, 10], activation, model)


def glorot_(model: nn.Module, generator: torch.Generator) -> None:
    """Draw every weight of two or more dimensions by Glorot's uniform rule; set biases to zero."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.xavier_uniform_(parameter, generator=generator)
        else:
            nn.init.zeros_(parameter)


def default_(model: nn.Module, seed: int) -> None:
    """Draw weights and biases as PyTorch does for a new layer."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for layer in model.modules():
            if isinstance(layer, (nn.Linear, nn.Conv2d)):
                layer.reset_parameters()
