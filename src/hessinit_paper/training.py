"""The trainings of the experiments: plain SGD, and summaries of its losses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[[Any, Any], Tensor]


def train(
    model: nn.Module, loss: Loss, batches: Iterable[tuple[Tensor, Tensor]], learning_rate: float
) -> list[float]:
    """Train in place by plain SGD; return the loss of every mini-batch before its step.

    A loss that is not finite is the last one, and no step is made with it.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    losses = []
    for inputs, targets in batches:
        model.zero_grad(set_to_none=True)
        value = loss(model(inputs), targets)
        losses.append(value.item())
        if not math.isfinite(losses[-1]):
            break
        value.backward()
        optimizer.step()
    return losses


def final_loss(losses: Sequence[float], last: int) -> float:
    """Return the mean of the last losses; the last one where it is not finite."""
    return statistics.fmean(losses[-last:]) if math.isfinite(losses[-1]) else losses[-1]


def chunk_means(losses: Sequence[float], length: int) -> list[float]:
    """Return the mean of every `length` losses in turn; the last chunk may be shorter.

    >>> chunk_means([4.0, 2.0, 1.0, 3.0, 1.0], length=2)
    [3.0, 2.0, 1.0]
    """
    starts = range(0, len(losses), length)
    return [statistics.fmean(losses[start : start + length]) for start in starts]
