"""Training as the paper does it: plain stochastic gradient descent for some epochs, every loss kept."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hessinit.paper.minibatches import ImageSet

Loss = Callable[[Tensor, Tensor], Tensor]
MOST_POINTS = 60  # of a curve, so that records stay small


@dataclass(frozen=True)
class Recipe:
    """How a network is trained, and of how many `last` losses the training loss is the mean."""

    learning_rate: float
    batch: int
    epochs: int
    last: int

    def steps(self, examples: int) -> int:
        """Of the whole training; what does not fill a last mini-batch is left out in each epoch."""
        return self.epochs * (examples // self.batch)


def train(
    model: nn.Module, loss: Loss, images: ImageSet, recipe: Recipe, order: torch.Generator, *, flat: bool
) -> list[float]:
    """Train in place; returns the loss of every mini-batch before its step.

    One that is not finite is the last: no later step could bring the weights back.
    """
    if not flat:
        # Channels last: convolutions and pools of few channels take 60 % of the time on a CPU.
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's own stubs miss it
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.learning_rate)
    losses: list[float] = []
    for _ in range(recipe.epochs):
        for index in images.epoch(recipe.batch, order):
            inputs, targets = images.batch(index, flat)
            if not flat:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            value = loss(model(inputs), targets)
            losses.append(value.item())
            if not math.isfinite(losses[-1]):
                return losses
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    return losses


def final_loss(losses: Sequence[float], last: int) -> float:
    """The mean of the last losses; what broke a training off, where something did.

    >>> final_loss([3.0, 2.0, 1.0], last=2), final_loss([3.0, float("inf")], last=2)
    (1.5, inf)
    """
    return statistics.fmean(losses[-last:]) if math.isfinite(losses[-1]) else losses[-1]


def chunk_length(steps: int) -> int:
    """How many steps one point of a curve stands for, so that there are no more than 60.

    >>> chunk_length(3750), chunk_length(40)
    (63, 1)
    """
    return math.ceil(steps / MOST_POINTS)


def chunk_means(losses: Sequence[float], length: int) -> list[float]:
    """The mean of every `length` losses in turn; the last ones may be fewer.

    >>> chunk_means([4.0, 2.0, 1.0, 3.0, 1.0], length=2)
    [3.0, 2.0, 1.0]
    """
    return [statistics.fmean(losses[start : start + length]) for start in range(0, len(losses), length)]


def chunk_middles(steps: int, length: int) -> list[float]:
    """The step in the middle of every chunk.

    >>> chunk_middles(5, length=2)
    [1.0, 3.0, 4.5]
    """
    return [(start + min(start + length, steps)) / 2 for start in range(0, steps, length)]
