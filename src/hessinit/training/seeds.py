"""Random numbers of a run: every purpose has its own stream, derived from the run's seed."""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from collections.abc import Iterator

import numpy
import torch

from hessinit.problem.preserve import untouched_random_state

# A run uses the global generators and sets the thread count, so threads of an executor take turns.
_ONE_AT_A_TIME = threading.RLock()


def derive(seed: int, purpose: str) -> int:
    """The seed for one purpose of a run: with one seed for all, weights and batches would be dependent.

    >>> derive(0, "weights") == derive(0, "weights"), derive(0, "weights") == derive(0, "batches")
    (True, False)
    """
    digest = hashlib.sha256(f"{seed} {purpose}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def generator(seed: int, purpose: str) -> torch.Generator:
    """A generator on the CPU, so that every device sees the same numbers."""
    return torch.Generator().manual_seed(derive(seed, purpose))


def seed_everything(seed: int, purpose: str) -> None:
    """Seed torch, random and numpy; call it inside `reproducible()` only."""
    number = derive(seed, purpose)
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number % 2**32)  # noqa: NPY002 - the user's code may draw from the old global state


@contextlib.contextmanager
def reproducible() -> Iterator[None]:
    """One thread, so that sums have one order, no autocast; the caller's random state returns at the end."""
    threads = torch.get_num_threads()
    with (
        _ONE_AT_A_TIME,
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
