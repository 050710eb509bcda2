"""The blocks of a weight's outputs that lead separate lives: a fused qkv, a gate and what it gates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hessinit.schemes.record import Record, Signal, Step, Use
from hessinit.schemes.surroundings import Surroundings

# For models traced without a sample: a batch of 2, sequences of 7, images of 5 × 7. All primes, so that a
# reshape that fits is one that was meant.
_BATCH, _LENGTH, _HEIGHT = 2, 7, 5


def find_parts(surroundings: Surroundings, step: Step) -> tuple[int, ...]:
    """The sizes of the blocks, in the order of their first channels; () where the output stays whole.

    Channel numbers are sent through the rearranging steps that follow, in place of the output: where they
    arrive in disjoint sets that together are all channels, these sets are the parts.
    """
    use = step.use
    if use is None or use.parts or use.kind not in ("dense", "convolution", "transposed convolution"):
        return use.parts if use else ()
    kinds = {consumer.kind for consumer in surroundings.consumers.get(step.index, [])}
    if not kinds & {"rearrange", "split", "gate"}:
        return ()
    channels = _channels(use)
    for around, shape in _shapes(step, use, channels):
        numbers = torch.arange(channels, dtype=torch.float64)
        axis = -1 if use.kind == "dense" else len(shape) - len(use.shape) + 1
        tail = (1,) * (len(shape) - 1 - axis % len(shape))
        try:
            numbers = numbers.reshape(-1, *tail).expand(shape)
            arrived = set(_arrivals(surroundings, step, numbers, around))
        except Exception:  # the shapes assumed do not fit these calls
            continue
        if len(arrived) > 1 and sum(map(len, arrived)) == channels == len(frozenset().union(*arrived)):
            return tuple(len(part) for part in sorted(arrived, key=min))
    return ()


def _channels(use: Use) -> int:
    if use.kind == "transposed convolution":
        return use.shape[1] * use.groups
    return use.shape[1] if use.outputs_last else use.shape[0]


def _shapes(step: Step, use: Use, channels: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes of the signals around and of the output: the true one, or some that are likely."""
    if step.shape is not None:
        yield step.shape, step.shape
    elif use.kind == "dense":
        inputs = math.prod(use.shape) // channels
        for places in ((_BATCH, _LENGTH), (_BATCH,), (_BATCH, _HEIGHT, _LENGTH)):
            yield (*places, inputs), (*places, channels)
    else:
        size = (_LENGTH, _HEIGHT, _LENGTH)[-(len(use.shape) - 2) :]
        yield (_BATCH, channels, *size), (_BATCH, channels, *size)


def _arrivals(
    surroundings: Surroundings, step: Step, value: Any, around: tuple[int, ...]
) -> Iterator[frozenset[float]]:
    consumers = surroundings.consumers.get(step.index, [])
    for consumer in consumers:
        if consumer.kind == "gate":
            dim = consumer.call.kwargs.get("dim", (*consumer.call.args, -1)[1]) if consumer.call else -1
            yield from (_distinct(half) for half in value.chunk(2, dim))
        elif consumer.kind in ("rearrange", "split") and consumer.call is not None:
            moved = _moved(surroundings.record, consumer, step, value, around)
            yield from _arrivals(surroundings, consumer, moved, around)
        else:
            yield _distinct(value)
    if not consumers:
        yield _distinct(value)


def _moved(record: Record, consumer: Step, step: Step, value: Any, around: tuple[int, ...]) -> Any:
    def value_of(signal: Signal) -> Any:
        if signal.index == step.index:
            return value
        known = record[signal.index].shape
        return torch.empty(around if known is None else known, device="meta")

    assert consumer.call is not None
    if consumer.name.startswith(("expand", "broadcast")):
        return value  # the same channels, and the shape to expand to may not be known
    return consumer.call.run(value_of)


def _distinct(value: Any) -> frozenset[float]:
    if not isinstance(value, Tensor):
        raise TypeError("a tuple was not taken apart")
    if not value.numel():
        raise ValueError("nothing is left: the dimension is not what was assumed")
    return frozenset(value.unique().tolist())
