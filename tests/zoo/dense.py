"""Multilayer perceptrons, one per activation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from zoo.problem import Family, Parts, labels

family = Family()

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "softplus": nn.Softplus,
    "elu": nn.ELU,
    "selu": nn.SELU,
    "prelu": nn.PReLU,
    "hardswish": nn.Hardswish,
}


def perceptron(activation: Callable[[], nn.Module]) -> Parts:
    model = nn.Sequential(nn.Linear(5, 6), activation(), nn.Linear(6, 5), activation(), nn.Linear(5, 3))
    return model, nn.CrossEntropyLoss(), (torch.randn(7, 5), labels(3, 7))


for _name, _activation in ACTIVATIONS.items():
    family.add(f"mlp_{_name}")(lambda activation=_activation: perceptron(activation))


@family.add()
def linear_regression() -> Parts:
    return nn.Linear(4, 3), nn.MSELoss(), (torch.randn(8, 4), torch.randn(8, 3))


@family.add()
def mlp_without_biases() -> Parts:
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False))
    return model, nn.CrossEntropyLoss(), (torch.randn(6, 4), labels(3, 6))


@family.add()
def mlp_wide_output_few_examples() -> Parts:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 20))
    return model, nn.CrossEntropyLoss(), (torch.randn(2, 4), labels(20, 2))


@family.add()
def mlp_one_example() -> Parts:
    model = nn.Sequential(nn.Linear(4, 5), nn.SiLU(), nn.Linear(5, 3))
    return model, nn.CrossEntropyLoss(), (torch.randn(1, 4), labels(3, 1))


@family.add()
def mlp_in_double_precision() -> Parts:
    model = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3)).double()
    return model, nn.CrossEntropyLoss(), (torch.randn(6, 4).double(), labels(3, 6))
