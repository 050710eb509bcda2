"""What the arena trains: fifteen small tasks for a CPU, eight larger ones for a GPU.

`development` marks the tasks on which the default of `initialize_` was chosen; the others were not looked at
before it was settled.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from arena import data, networks

HALF_DECADES = (0.01, 0.03, 0.1, 0.3, 1.0)


@dataclass(frozen=True)
class Task:
    """A network, its data and how it is trained; `chance` is the loss of guessing."""

    name: str
    build: Callable[[], nn.Module]
    data: Callable[[], Any]
    rates: tuple[float, ...]
    chance: float
    steps: int = 300
    batch_size: int = 64
    optimizer: str = "sgd"
    device: str = "cpu"
    development: bool = False
    quick: bool = False

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        return next_character if self.data.func is data.characters else nn.functional.cross_entropy  # type: ignore[attr-defined]


def next_character(scores: Tensor, following: Tensor) -> Tensor:
    """Cross-entropy of every position."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def times(rates: tuple[float, ...], factor: float) -> tuple[float, ...]:
    return tuple(float(f"{rate * factor:.3g}") for rate in rates)


DIGITS = {"data": functools.partial(data.mnist), "chance": math.log(10), "rates": times(HALF_DECADES, 0.3)}
COLOURS = {"data": functools.partial(data.cifar), "chance": math.log(10), "rates": times(HALF_DECADES, 0.3)}
LENGTH = 32
TEXT = {
    "data": functools.partial(data.characters, LENGTH),
    "chance": math.log(data.VOCABULARY),
    "steps": 200,
    "batch_size": 16,
}


def _mlp(activation: type[nn.Module], depth: int, dropout: float = 0.0) -> Callable[[], nn.Module]:
    return functools.partial(networks.mlp, activation, depth, dropout=dropout)


def _transformer(norm_first: bool) -> Callable[[], nn.Module]:
    return functools.partial(networks.Transformer, data.VOCABULARY, LENGTH, norm_first=norm_first)


CPU = (
    Task("relu-3", _mlp(nn.ReLU, 3), development=True, quick=True, **DIGITS),
    Task("relu-10", _mlp(nn.ReLU, 10), development=True, quick=True, **DIGITS),
    Task("relu-30", _mlp(nn.ReLU, 30), **DIGITS),
    Task("tanh-3", _mlp(nn.Tanh, 3), **DIGITS),
    Task("tanh-10", _mlp(nn.Tanh, 10), development=True, **DIGITS),
    Task("tanh-30", _mlp(nn.Tanh, 30), development=True, **DIGITS),
    Task("gelu-10", _mlp(nn.GELU, 10), quick=True, **DIGITS),
    Task("sigmoid-3", _mlp(nn.Sigmoid, 3), **DIGITS),
    Task("dropout-5", _mlp(nn.ReLU, 5, 0.5), **DIGITS),
    Task("residual-20", networks.ResidualMLP, development=True, **DIGITS),
    Task("lenet", networks.lenet, development=True, quick=True, **COLOURS),
    Task("plain-cnn-9", networks.plain_cnn, steps=250, batch_size=32, **COLOURS),
    Task(
        "lstm",
        functools.partial(networks.CharacterLSTM, data.VOCABULARY),
        rates=times(HALF_DECADES, 10),
        **TEXT,
    ),
    Task("post-ln", _transformer(False), rates=HALF_DECADES, **TEXT),
    Task("pre-ln", _transformer(True), rates=HALF_DECADES, development=True, **TEXT),
)

FEW = {"steps": 120, "batch_size": 128, "device": "cuda"}
PICTURES = {"data": functools.partial(data.cifar), "chance": math.log(10), **FEW}
SENTENCES = {
    "data": functools.partial(data.characters, 128),
    "chance": math.log(data.VOCABULARY),
    **FEW,
    "batch_size": 32,
}
ADAM = {"optimizer": "adam", "rates": times(HALF_DECADES, 0.01)}
_GPT = functools.partial(
    networks.Transformer, data.VOCABULARY, 128, norm_first=True, width=256, layers=8, heads=8
)

GPU = (
    Task("vgg-16", networks.vgg16, rates=times(HALF_DECADES, 0.3), **PICTURES),
    Task("tanh-cnn-19", networks.tanh_cnn, rates=times(HALF_DECADES, 0.3), **PICTURES),
    Task("resnet-56", functools.partial(networks.ResNet, 56), rates=times(HALF_DECADES, 0.1), **PICTURES),
    Task("resnet-110", functools.partial(networks.ResNet, 110), rates=times(HALF_DECADES, 0.1), **PICTURES),
    Task("vit-ti", networks.VisionTransformer, rates=HALF_DECADES, **PICTURES),
    Task("vit-ti-adam", networks.VisionTransformer, **ADAM, **PICTURES),
    Task("gpt", _GPT, rates=HALF_DECADES, **SENTENCES),
    Task("gpt-adam", _GPT, **ADAM, **SENTENCES),
)
BY_NAME = {task.name: task for task in (*CPU, *GPU)}
