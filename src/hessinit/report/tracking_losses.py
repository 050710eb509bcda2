"""Losses by step, thinned to as many as a picture can show."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

MOST_LOSSES = 1000

Loss = TypeVar("Loss")


def thin(losses: Iterable[tuple[int, Loss]], stride: int) -> list[tuple[int, Loss]]:
    """Those whose step is a multiple of `stride`.

    >>> thin([(1, 2.5), (2, 2.4), (3, 2.3), (4, 2.2)], stride=2)
    [(2, 2.4), (4, 2.2)]
    """
    return [(step, loss) for step, loss in losses if step % stride == 0]
