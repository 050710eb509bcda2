"""Random streams of an experiment, and the settings under which its numbers come again."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch


def derive(seed: int, purpose: str) -> int:
    """Return the seed for one purpose: with one for all, weights and batches would depend.

    >>> derive(0, "weights") == derive(0, "weights"), derive(0, "weights") == derive(0, "batches")
    (True, False)
    """
    digest = hashlib.sha256(f"{seed} {purpose}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def generator(seed: int, purpose: str) -> torch.Generator:
    """Return a generator on the CPU for one purpose of the seed."""
    return torch.Generator().manual_seed(derive(seed, purpose))


@contextlib.contextmanager
def reproducible() -> Iterator[None]:
    """Run on one thread with torch's defaults of a new process; restore the caller's at the end.

    On several threads sums would have another order, and other last digits.
    """
    threads = torch.get_num_threads()
    dtype = torch.get_default_dtype()
    try:
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        with (
            torch.device("cpu"),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
