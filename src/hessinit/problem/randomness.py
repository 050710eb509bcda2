"""Random numbers: every forward sees the same ones, and the user's generators stay where they were."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy
import torch

numpy_random: Any = numpy.random  # its stubs lack the two functions used below

_STAND_IN: Any = numpy.random.MT19937(0)
# Two threads at once would each put back what the other has lent: the user's generator would be lost.
_ONE_AT_A_TIME = threading.RLock()

# The global generators are at stake here, not ones of our own.
# ruff: noqa: NPY002


@contextlib.contextmanager
def untouched_random_state(device: torch.device | None = None) -> Iterator[None]:
    """Let someone draw (a DataLoader does, even without shuffling), and put every generator back."""
    with _ONE_AT_A_TIME:
        generators = _torch_generators(device)
        states = [generator.get_state() for generator in generators]
        python = random.getstate()
        own = numpy_random.get_bit_generator()
        if device is None:  # reading data: numpy goes on from where it is
            _STAND_IN.state = own.state
        try:
            # Lending numpy another generator is much faster than to save and restore the state of its own.
            numpy_random.set_bit_generator(_STAND_IN)
            yield
        finally:
            numpy_random.set_bit_generator(own)
            random.setstate(python)
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def _torch_generators(device: torch.device | None) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if device is None and torch.cuda.is_available() and torch.cuda.is_initialized():
        generators += torch.cuda.default_generators
    elif device is not None and device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    return generators


class Draws:
    """All generators that a forward on `device` may draw from, seeded; `happened()` says whether it did."""

    def __init__(self, seed: int, device: torch.device) -> None:
        # torch.manual_seed would reach every device, also those that nobody puts back.
        self._generators = _torch_generators(device)
        for generator in self._generators:
            generator.manual_seed(seed)
        self._states = [generator.get_state() for generator in self._generators]
        self._seed_others(seed)
        self._next = (random.random(), numpy.random.random_sample())
        self._seed_others(seed)

    @staticmethod
    def _seed_others(seed: int) -> None:
        random.seed(seed)
        numpy.random.seed(seed % 2**32)

    def happened(self) -> bool:
        """Whether anything was drawn since the seeding; ask once, for asking draws."""
        states = zip(self._generators, self._states, strict=True)
        if any(not torch.equal(generator.get_state(), state) for generator, state in states):
            return True
        return (random.random(), numpy.random.random_sample()) != self._next
