"""Pairs of mini-batches that share half of their examples, as GradInit draws them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from arena.competitors.evaluation import seeded_generator
from hessinit.problem.batches import map_tensors, tensors_in


def overlapping_pairs(batches: Sequence[Any], seed: int) -> Iterator[tuple[Any, Any]]:
    """Endless (S, S̃): S is a batch, S̃ half of it and half of the next; a new order in every round.

    A single batch is cut in thirds, in a new order each time: S the first two, S̃ the last two.
    """
    if isinstance(batches, tuple) and len(batches) == 2 and isinstance(batches[1], Tensor):
        raise ValueError("batches is one (inputs, targets) pair; pass a list of such pairs: batches=[batch].")
    batches = list(batches)
    if not batches:
        raise ValueError("batches is empty; pass a list of at least one (inputs, targets).")
    generator = seeded_generator(seed, "order of GradInit's batches")
    while True:
        if len(batches) == 1:
            yield _thirds(batches[0], generator)
            continue
        order = torch.randperm(len(batches), generator=generator).tolist()
        for place, after in zip(order, order[1:] + order[:1], strict=True):
            yield batches[place], _halves(batches[place], batches[after])


def _thirds(batch: Any, generator: torch.Generator) -> tuple[Any, Any]:
    examples = count_examples(batch)
    if examples < 3:
        raise ValueError(f"the only batch has {examples} examples; pass at least 3, or more batches.")
    order = torch.randperm(examples, generator=generator)
    third = examples // 3
    return _select(batch, order[: 2 * third]), _select(batch, order[third : 3 * third])


def _halves(batch: Any, following: Any) -> Any:
    kept = _select(batch, torch.arange(count_examples(batch) // 2))
    size = count_examples(following)
    more = tensors_in(_select(following, torch.arange(size // 2, size)))
    # Every tensor of the kept half takes the next one of `more`: both walk the same structure.
    return map_tensors(lambda tensor: torch.cat([tensor, next(more)]), kept)


def count_examples(batch: Any) -> int:
    return len(next(tensors_in(batch)))


def _select(batch: Any, places: Tensor) -> Any:
    return map_tensors(lambda tensor: tensor[places.to(tensor.device)], batch)
