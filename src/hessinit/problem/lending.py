"""Stand-ins for what a forward may change in place: tensors, arrays, and generators of a model's own."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn

_GENERATORS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState)


class Loan:
    """Copies of tensors and arrays, and seeded generators; what has two names has one stand-in.

    Weights are not copied: whoever calls the model puts others in their place.

    >>> loan, tensor = Loan(seed=0), torch.zeros(2)
    >>> lent = loan.lend({"state": tensor, "again": tensor, "size": 2, "source": torch.Generator()})
    >>> list(lent), lent["state"] is lent["again"], lent["state"] is tensor
    (['state', 'again', 'source'], True, False)
    >>> before = loan.drew()
    >>> noise = torch.rand(1, generator=lent["source"])
    >>> before, loan.drew()
    (False, True)
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._made: dict[int, Any] = {}
        self._twins: list[tuple[Any, Any]] = []

    def lend(self, named: Mapping[Any, Any]) -> dict[Any, Any]:
        """A stand-in for each that needs one, by its name."""
        return {name: self._stand_in(value) for name, value in named.items() if _needs_one(value)}

    def drew(self) -> bool:
        """Whether any of the generators was drawn from."""
        return any(_draw(lent) != _draw(twin) for lent, twin in self._twins)

    def _stand_in(self, value: Any) -> Any:
        if id(value) not in self._made:
            self._made[id(value)] = self._make(value)
        return self._made[id(value)]

    def _make(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.clone()
        if isinstance(value, numpy.ndarray):
            return value.copy()
        lent, twin = _seeded(value, self._seed), _seeded(value, self._seed)
        self._twins.append((lent, twin))
        return lent


def _needs_one(value: Any) -> bool:
    if isinstance(value, nn.Parameter):
        return False
    # Not what is derived from it: that of the system has no seed.
    return isinstance(value, (Tensor, numpy.ndarray, *_GENERATORS)) or type(value) is random.Random


def _seeded(generator: Any, seed: int) -> Any:
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device).manual_seed(seed)
    if isinstance(generator, numpy.random.Generator):
        return numpy.random.Generator(type(generator.bit_generator)(seed))
    if isinstance(generator, numpy.random.RandomState):
        return numpy.random.RandomState(seed % 2**32)
    return random.Random(seed)


def _draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator, device=generator.device).item()
    return float(generator.random())
