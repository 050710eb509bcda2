"""Random numbers of a run: each purpose has its own, and all follow from the run's seed."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy
import torch

from hessinit.problem.preserve import untouched_random_state


def derive(seed: int, purpose: str) -> int:
    """A seed for one purpose of a run.

    Weights and batches drawn from generators of the same seed would be the same numbers, not independent.

    >>> derive(0, "weights") == derive(0, "weights"), derive(0, "weights") == derive(0, "batches")
    (True, False)
    """
    digest = hashlib.sha256(f"{seed} {purpose}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def generator(seed: int, purpose: str) -> torch.Generator:
    """A generator on the CPU, so that every device sees the same numbers."""
    return torch.Generator().manual_seed(derive(seed, purpose))


def seed_everything(seed: int, purpose: str) -> None:
    """Seed torch, random and numpy; inside `as_if_alone` only."""
    number = derive(seed, purpose)
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number % 2**32)  # noqa: NPY002 - the user's code may draw from the old global state


@contextlib.contextmanager
def as_if_alone() -> Iterator[None]:
    """One thread, and generators that nobody misses: sums run in one order, whatever the machine is doing."""
    threads = torch.get_num_threads()
    with (
        untouched_random_state(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
