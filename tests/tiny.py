"""One problem that is small enough for every test: four features, five hidden units, three classes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hessinit

LOSS = nn.CrossEntropyLoss()
ALONE = hessinit.RunSettings(workers=1, progress=False)
SHORT_RUNS: dict[str, Any] = {"steps": 10, "seeds": 1, "settings": ALONE}


def network(**settings: Any) -> nn.Sequential:
    """The same weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(**settings)


def inputs(examples: int = 6, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(examples, *(shape or (4,)), generator=generator)


def labels(examples: int = 6) -> torch.Tensor:
    return torch.arange(examples) % 3


def batch(examples: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return inputs(examples), labels(examples)


def raise_from(call: int, error: BaseException) -> Callable[[], None]:
    """Raises `error` at its `call`-th call and from then on, counted where measuring does not put it back."""
    calls = itertools.count(1).__next__

    def count() -> None:
        if calls() >= call:
            raise error

    return count


@functools.lru_cache
def ones(length: int, dtype: torch.dtype) -> torch.Tensor:
    """Cached where a model finds it by the name of this module."""
    return torch.ones(length, dtype=dtype)


class Net(nn.Module):
    """Parts by name, and the forward as a function of the module and its input."""

    def __init__(self, run: Callable[[Any, Any], torch.Tensor], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Any) -> torch.Tensor:
        return self.run(self, x)


class Calling(Net):
    """The network, called through any function of (network, inputs)."""

    def __init__(self, call: Any, inner: nn.Module | None = None) -> None:
        super().__init__(lambda net, x: call(net.inner, x), inner=inner or network())
