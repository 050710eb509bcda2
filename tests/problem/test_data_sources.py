"""Generators, wherever a source of data keeps them, are put back."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from hessinit.problem.batches import read_batches
from hessinit.problem.preserve import untouched_sources

# How to draw from each kind of generator.
KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "torch": (lambda: torch.Generator().manual_seed(1), lambda it: torch.rand(1, generator=it).item()),
    "numpy": (lambda: numpy.random.default_rng(1), lambda it: it.random()),
    "old numpy": (lambda: numpy.random.RandomState(1), lambda it: it.random_sample()),
    "python": (lambda: random.Random(1), lambda it: it.random()),
}


class Holder:
    def __init__(self, it: Any) -> None:
        self.it = it

    def method(self) -> None: ...


def closure(it: Any) -> Callable[[], Any]:
    return lambda: it


PLACES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda it: it,
    "an attribute": Holder,
    "an attribute's attribute": lambda it: Holder(SimpleNamespace(deep=it)),
    "a list in a dict": lambda it: {"all": [0, it]},
    "a closure": closure,
    "a method's object": lambda it: Holder(it).method,
    "a partial": lambda it: functools.partial(print, it, end=""),
    "a default": lambda it: lambda again=it: again,
    "a loader's sampler": lambda it: torch.utils.data.DataLoader(
        [0], sampler=torch.utils.data.RandomSampler([0], generator=it)
    ),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_is_found_and_put_back(kind: str, place: str) -> None:
    make, draw = KINDS[kind]
    generator, expected = make(), draw(make())
    with untouched_sources(PLACES[place](generator)):
        draw(generator)
    assert draw(generator) == expected


def test_examples_are_not_walked_through() -> None:
    class Untouchable:
        @property
        def __dict__(self) -> Any:
            raise AssertionError

    holder = Holder([Untouchable()] * 2000)
    with untouched_sources(holder):
        holder.it = None
    assert len(holder.it) == 2000


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # since Python 3.12
def test_a_loader_that_training_reads_with_persistent_workers_goes_on_where_it_was() -> None:
    loader = torch.utils.data.DataLoader(
        [(float(number), 0.0) for number in range(6)], num_workers=1, persistent_workers=True, timeout=20
    )
    reading = iter(loader)
    seen = [next(reading)[0].item()]
    assert [batch.inputs.item() for _, batch in read_batches(loader)] == [0, 1, 2, 3, 4, 5]
    seen += [inputs.item() for inputs, _ in reading]
    assert seen == [0, 1, 2, 3, 4, 5]
