"""The gradient, and the mean square that it has over mini-batches: what an adaptive optimizer divides by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hessinit.curvature.evaluation import Evaluation, find_reduction
from hessinit.curvature.operators import join
from hessinit.problem.batches import Batch, map_tensors

# Seven degrees of freedom know a variance to a factor of about 1.5, and the parts cost one gradient together.
PARTS = 8


@dataclass(frozen=True)
class Moments:
    """Flat over the measured weights; `noise` is None where the batches could not be cut."""

    gradient: Tensor
    mean_square: Tensor
    noise: Tensor | None

    @property
    def second(self) -> Tensor:
        """`E g²` over mini-batches of the size given, never below their noise.

        The square of a single gradient is right on average, but close to 0 in some of many weights by mere
        chance, and these few would rule P^-½ H P^-½: on digits its norm came out 4 to 75 times too large.
        """
        return self.mean_square if self.noise is None else torch.maximum(self.mean_square, self.noise)


def measure_moments(evaluations: Sequence[Evaluation]) -> Moments:
    """The moments over all batches, each taken for a mini-batch of training; costs two gradients."""
    sums = find_reduction(evaluations) == "sum"
    # A summed loss adds the batches up: a single one stands for all of them, times their number.
    factor = float(len(evaluations)) if sums else 1.0
    gradients = [_gradient(one.loss, one) for one in evaluations]
    gradient = torch.stack([g * one.weight for g, one in zip(gradients, evaluations, strict=True)]).sum(0)
    shares = [one.batch.size / evaluations[0].problem.examples for one in evaluations]
    square = _weighted([(g * factor).square() for g in gradients], shares)
    noises = [_noise(one, sums) for one in evaluations]
    known = [noise for noise in noises if noise is not None]
    noise = _weighted([one * factor**2 for one in known], shares) if len(known) == len(noises) else None
    return Moments(gradient, square, noise)


def _gradient(loss: Tensor, evaluation: Evaluation) -> Tensor:
    leaves = list(evaluation.problem.leaves.values())
    found = torch.autograd.grad(loss, leaves, retain_graph=True, materialize_grads=True)
    return join([part.detach() for part in found])


def _noise(evaluation: Evaluation, sums: bool) -> Tensor | None:
    """The variance of the batch's gradient, from the gradients of its parts."""
    problem, size = evaluation.problem, evaluation.batch.size
    count = min(PARTS, size)
    if count < 2:
        return None
    found = []
    for first in range(count):
        part = _part(evaluation.batch, torch.arange(first, size, count))
        try:
            gradient = _gradient(problem.loss_of(problem.output(part), part), evaluation)
        except (RuntimeError, ValueError, IndexError, TypeError):
            return None  # the forward or the loss needs the batch whole
        found.append(gradient * (size / part.size) if sums else gradient)
    noise = torch.stack(found).var(0) / count
    return noise if bool(torch.isfinite(noise).all()) else None


def _part(batch: Batch, examples: Tensor) -> Batch:
    """Some of the examples; targets may be flat, with several in a row for each example, as of a text."""

    def pick(tensor: Tensor) -> Tensor:
        each, rest = divmod(len(tensor), batch.size) if tensor.ndim else (0, 1)
        if rest or each < 2:
            return tensor
        return tensor.unflatten(0, (batch.size, each))[examples.to(tensor.device)].flatten(0, 1)

    taken = batch.take(examples)
    return Batch(taken.inputs, map_tensors(pick, taken.targets), taken.size)


def _weighted(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    return torch.stack([tensor * share for tensor, share in zip(tensors, shares, strict=True)]).sum(0)
