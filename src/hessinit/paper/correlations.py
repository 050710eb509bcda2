"""Many initializations of a small dense network at once: the gradients at its output, and how they correlate.

Every sample is a network of its own, drawn by Glorot's uniform rule, that sees one image. Its gradients need
no backward pass: the cross-entropy of a softmax has ∂L/∂z = p − y, and a dense layer's ∂z/∂h is its weight.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hessinit.paper.scipy_extra import import_stats

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "tanh": torch.tanh}


@dataclass(frozen=True)
class Samples:
    """One row for each initialization."""

    probabilities: Tensor  # (n, classes), the softmax of the logits
    targets: Tensor  # (n, classes), one-hot
    hidden: Tensor  # (n, units), the last hidden layer's output
    weights: Tensor  # (n,), the weight from hidden unit 0 to logit 0

    @property
    def loss_by_logits(self) -> Tensor:
        return self.probabilities - self.targets


def draw_samples(
    inputs: Tensor, labels: Tensor, widths: Sequence[int], activations: Sequence[str],
    generator: torch.Generator,
) -> dict[str, Samples]:  # fmt: skip
    """A network of its own for every row of `inputs`, the same weights for each activation.

    A weight on a pixel that is 0 changes nothing, so it is not drawn: of MNIST's pixels four fifths are 0.
    """
    lit = gather_lit(inputs)
    fans = list(itertools.pairwise([inputs.shape[1], *widths]))
    rows = [lit.shape[1], *widths[:-1]]
    weights = [
        torch.empty(len(lit), row, after).uniform_(-bound, bound, generator=generator)
        for row, (before, after) in zip(rows, fans, strict=True)
        for bound in [math.sqrt(6 / (before + after))]
    ]
    targets = F.one_hot(labels, widths[-1]).to(inputs.dtype)
    drawn = {}
    for name in activations:
        hidden = lit.unsqueeze(1)
        for weight in weights[:-1]:
            hidden = ACTIVATIONS[name](torch.bmm(hidden, weight))
        logits = torch.bmm(hidden, weights[-1]).squeeze(1)
        drawn[name] = Samples(logits.softmax(1), targets, hidden.squeeze(1), weights[-1][:, 0, 0].clone())
    return drawn


def gather_lit(inputs: Tensor) -> Tensor:
    """Each row's pixels that are not 0 moved to the front, and the columns left empty by all cut off.

    >>> gather_lit(torch.tensor([[0.0, 0.5, 0.0, 0.2], [0.0, 0.0, 0.0, 0.7]])).tolist()
    [[0.5, 0.20000000298023224], [0.699999988079071, 0.0]]
    """
    lit = inputs != 0
    order = lit.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
    return inputs.gather(1, order)[:, : max(1, int(lit.sum(1).max()))]


def join(parts: Sequence[Samples]) -> Samples:
    fields = ("probabilities", "targets", "hidden", "weights")
    return Samples(**{name: torch.cat([getattr(part, name) for part in parts]) for name in fields})


def pearson(one: Tensor, other: Tensor) -> tuple[float, float]:
    """Pearson's r and its two-sided p-value."""
    found = import_stats().pearsonr(one.double().numpy(), other.double().numpy())
    return float(found.statistic), float(found.pvalue)
