"""Mini-batches of skip-gram pairs, and plain SGD on them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from hessinit.paper.skip_gram import SkipGram
from hessinit.paper.text.load import Text
from hessinit.training.seeds import generator

Batch = tuple[Tensor, Tensor]


def draw_batches(
    model: str, text: Text, *, size: int, steps: int, seed: int, negatives: int
) -> Iterator[Batch]:
    """Inputs and targets of every step for that model: the text's pairs in a random order, again if they end.

    With "negative", each pair gets `negatives` words of its own, which may happen to be its near word too:
    word2vec.c leaves those out, and they are too rare to matter.
    """
    order = torch.randperm(len(text.pairs), generator=generator(seed, "order"))
    times = math.ceil(steps * size / len(order))
    pairs = torch.from_numpy(text.pairs)[order].long().repeat(times, 1)
    for_noise = generator(seed, "negatives")
    cumulative = torch.from_numpy(text.vocabulary.noise()).cumsum(0)
    labels = torch.zeros(size, 1 + negatives)
    labels[:, 0] = 1
    for step in range(steps):
        chosen = pairs[step * size : (step + 1) * size]
        if model == "softmax":
            yield chosen[:, 0], chosen[:, 1]
        else:
            yield torch.cat([chosen, draw_noise(cumulative, (size, negatives), for_noise)], dim=1), labels


def draw_noise(cumulative: Tensor, shape: tuple[int, int], random: torch.Generator) -> Tensor:
    """Words by their cumulative probabilities."""
    numbers = torch.rand(shape, generator=random, dtype=cumulative.dtype)
    # The last sum may fall short of 1 by rounding, and a number between them would be no word.
    return torch.searchsorted(cumulative, numbers, right=True).clamp_(max=len(cumulative) - 1)


def train_(model: SkipGram, batches: Iterable[Batch], rate: float) -> list[float]:
    """Plain SGD; the loss of every batch before its step, and inf from where it is no longer finite."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = True  # a step then costs the batch's words, not the vocabulary
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses: list[float] = []
    for inputs, targets in batches:
        if losses and not math.isfinite(losses[-1]):
            losses.append(math.inf)
            continue
        optimizer.zero_grad()
        loss = model.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item() if math.isfinite(loss.item()) else math.inf)
    return losses
