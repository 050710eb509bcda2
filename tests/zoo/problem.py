"""One small measuring problem: a model, a loss and a batch, the same at every call."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tiny import Net

Parts = tuple[nn.Module, Callable[..., torch.Tensor], Any]


@dataclass(frozen=True, eq=False)
class Problem:
    """`build()` gives `(model, loss, batch)`; `forward` and `options` go to `hessinit.measure` as they are.

    `hessian_by` says how the dense truth differentiates twice: "func" is `torch.func.hessian`
    (forward over reverse), "loops" is `torch.autograd.grad` row by row, where torch.func cannot go.
    `stand_in` turns a fresh model into an equal one that torch can differentiate twice.
    `flat_layers` are the layers whose true curvature is exactly zero.
    """

    name: str
    build: Callable[[], Parts]
    forward: Callable[[nn.Module, Any], torch.Tensor] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    hessian_by: str = "func"
    stand_in: Callable[[nn.Module], nn.Module] | None = None
    flat_layers: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


def seeded(name: str, function: Callable[[], Parts]) -> Callable[[], Parts]:
    """`function` run on random numbers that depend on `name` only; the caller's generator does not move."""

    def build() -> Parts:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(name.encode()))
            return function()

    return build


def problems(table: Mapping[str, Callable[[], Parts]], **settings: Mapping[str, Any]) -> list[Problem]:
    """The problems of a table; `settings` gives some of them, by name, other fields of `Problem`."""
    return [Problem(name, seeded(name, build), **settings.get(name, {})) for name, build in table.items()]


def labels(classes: int, *shape: int) -> torch.Tensor:
    return torch.randint(classes, shape)


def mlp(*widths: int, act: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    """Dense layers of these widths, with an activation between them."""
    pairs = [(nn.Linear(before, after), act()) for before, after in itertools.pairwise(widths)]
    return nn.Sequential(*[module for pair in pairs for module in pair][:-1])


def classify(model: nn.Module, *shape: int, classes: int = 3) -> Parts:
    """Random inputs of this shape, one label for each."""
    return model, nn.CrossEntropyLoss(), (torch.randn(*shape), labels(classes, shape[0]))


def classify_by(run: Callable[..., torch.Tensor], *shape: int, classes: int = 3, **parts: Any) -> Parts:
    """`classify` of a network whose forward is a function of its parts."""
    return classify(Net(run, **parts), *shape, classes=classes)


def regress(model: nn.Module, shape: tuple[int, ...], target: tuple[int, ...]) -> Parts:
    return model, nn.MSELoss(), (torch.randn(*shape), torch.randn(*target))


def per_token_cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def classify_tokens(model: nn.Module, *shape: int, classes: int = 3) -> Parts:
    """Random features, one label for each position."""
    return model, per_token_cross_entropy, (torch.randn(*shape), labels(classes, *shape[:-1]))
