"""One small measuring problem: a model, a loss and a batch, the same at every call."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

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


class Family:
    """The problems of one file, in the order they are written.

    >>> family = Family()
    >>> @family.add()
    ... def linear():
    ...     return nn.Linear(2, 1), nn.MSELoss(), (torch.randn(3, 2), torch.randn(3, 1))
    >>> [problem.name for problem in family.problems]
    ['linear']
    """

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def add(
        self, name: str | None = None, **settings: Any
    ) -> Callable[[Callable[[], Parts]], Callable[[], Parts]]:
        def register(function: Callable[[], Parts]) -> Callable[[], Parts]:
            title = name or function.__name__
            self.problems.append(Problem(title, seeded(title, function), **settings))
            return function

        return register


def labels(classes: int, *shape: int) -> torch.Tensor:
    return torch.randint(classes, shape)
