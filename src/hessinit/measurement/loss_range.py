"""The unit in which losses are compared: from the best constant output to the best output of all.

A constant added to the loss moves both alike, and a factor scales both: their difference is a unit
that changes as training does. Neither involves the network.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hessinit.problem.batches import Batch, join_batches, map_tensors, part_of
from hessinit.problem.ranks import Ranks, lockstep_ranks

LossOf = Callable[[Tensor, Batch], Tensor]


@dataclass(frozen=True)
class LossSearch:
    """How the lowest losses are found."""

    # Outputs that are fitted one by one: the first examples stand for all, at least two of them.
    fitted_outputs: int = 2**20
    most_outputs: int = 2**23
    examples: int = 64  # whose losses tell their standard deviation
    iterations: int = 10
    # How far a constant output must be above the lowest loss, as a part of what zeros are.
    least_above: float = 1e-3
    # What the second half of the iterations may gain, relative to the first.
    steady: float = 0.5
    # An output of this size was driven there by a loss without a lowest value.
    endless: float = 1e12


LOSS_SEARCH = LossSearch()


@dataclass(frozen=True)
class LossRange:
    """The lowest losses of a constant output (`constant`), and of any outputs at all (`free`).

    Either is nan where it is unknown: the loss needs more than the output, or has no lowest value.
    """

    constant: float = math.nan
    free: float = math.nan

    def height(self, loss: float) -> float:
        """How far a loss, or that of a constant output, is above the lowest; nan if unknown."""
        return max(loss, self.constant) - self.free if loss > self.free else math.nan

    def gain(self, first: float) -> float:
        """What training can gain, at most, from a first loss; nan if unknown."""
        start = first if math.isnan(self.constant) else min(first, self.constant)
        return start - self.free if start > self.free else math.nan

    def left_after(self, part: float, first: float) -> float:
        """The loss after a part of what can be gained; nan if unknown."""
        return self.free + (1 - part) * self.gain(first)


UNKNOWN = LossRange()


def find_loss_range(loss_of: LossOf, output: Any, batches: Sequence[Batch]) -> LossRange:
    """Both losses for outputs like `output`, that of each batch; evaluates the loss alone.

    Of ranks in lockstep, they are those of the first batches of all together.
    """
    ranks = lockstep_ranks()
    if ranks is not None:
        output, batches = _of_all(ranks, output, batches[0])
        return ranks.exchange(_find_both(loss_of, output, batches))[0]
    return _find_both(loss_of, output, batches)


def _of_all(ranks: Ranks, output: Any, batch: Batch) -> tuple[Any, list[Batch]]:
    """An output of the size of all ranks' together (None if they differ), and their targets.

    The search needs no more, and no rank sees the inputs of another.
    """
    shape = output.shape if isinstance(output, Tensor) else ()
    targets = map_tensors(Tensor.cpu, batch.targets)
    parts = ranks.exchange((shape, Batch(None, targets, batch.size)))
    joined = join_batches([part for _, part in parts])
    if joined is None or not shape:
        return None, [batch]
    everything = output.new_zeros(sum(rows for (rows, *_), _ in parts), *shape[1:])
    targets = map_tensors(lambda tensor: tensor.to(output.device), joined.targets)
    return everything, [replace(joined, targets=targets)]


def _find_both(loss_of: LossOf, output: Any, batches: Sequence[Batch]) -> LossRange:
    output = output.detach() if isinstance(output, Tensor) else None
    if output is None or not output.is_floating_point():
        return UNKNOWN
    constant = math.nan
    free = math.nan
    with _unusual_losses():
        constant = constant_loss(loss_of, output, batches)
        of_batch = constant if len(batches) == 1 else math.nan
        free = constant - _free_gain(loss_of, output, batches[0], of_batch)
        zero = float(loss_of(torch.zeros_like(output), batches[0]))
        if zero > constant and constant - free < LOSS_SEARCH.least_above * (zero - free):
            # It solves the task, as one that ranks two columns, and tells nothing.
            constant = math.nan
    return LossRange(constant if math.isfinite(constant) else math.nan, free)


@contextlib.contextmanager
def _unusual_losses() -> Iterator[None]:
    """Ends the block where a loss fails: it may need the model, or its own batch."""
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        yield


def constant_loss(loss_of: LossOf, output: Tensor, batches: Sequence[Batch]) -> float:
    """The lowest mean loss of an output that is the same for all examples and positions.

    `output` is like those of the batches. A network at this loss has learned how often the targets
    occur, and nothing else. The vector runs along the second or the last dimension, whichever is
    better.

    >>> targets = torch.tensor([0, 0, 0, 1])
    >>> def cross_entropy(output, batch):
    ...     return torch.nn.functional.cross_entropy(output, batch.targets)
    >>> batches = [Batch(None, targets, 4)]
    >>> round(constant_loss(cross_entropy, torch.zeros(4, 2), batches), 3)  # the entropy
    0.562
    """
    return _best_constant(loss_of, output, batches)[0]


def _best_constant(
    loss_of: LossOf, output: Tensor, batches: Sequence[Batch]
) -> tuple[float, Tensor]:
    """The lowest mean loss of a constant output, and the vector that has it."""

    def mean(vector: Tensor) -> Tensor:
        return torch.stack([loss_of(vector.expand_as(output), batch) for batch in batches]).mean()

    candidates = []
    for axis in {min(1, output.ndim - 1), output.ndim - 1}:
        shape = [1] * output.ndim
        if axis > 0:
            shape[axis] = output.shape[axis]
        vector = output.new_zeros(shape)
        candidates.append((_lowest(mean, vector), vector))
    return min(candidates, key=lambda candidate: candidate[0])


def deviations_above_constant(loss_of: LossOf, output: Tensor, batch: Batch, loss: float) -> float:
    """How far a loss is above that of the best constant output, in a unit that training notices.

    The unit is the standard deviation of that output's losses over the examples, or what free
    outputs could gain from there, if that is more; nan where there is no unit.
    """
    with _unusual_losses():
        constant, vector = _best_constant(loss_of, output, [batch])
        count = min(len(output), LOSS_SEARCH.examples)
        parts = [part_of(batch, torch.tensor([example])) for example in range(count)]
        first = part_of(batch, torch.arange(count))
        with torch.no_grad():
            outputs = vector.expand_as(output)
            losses = torch.stack([loss_of(outputs[:1], part) for part in parts])
            together = loss_of(outputs[:count], first)
        is_sum = (together - losses.sum()).abs() < (together - losses.mean()).abs()
        deviation = float(losses.std()) * (len(output) if is_sum else 1)
        gain = _free_gain(loss_of, output, batch, constant)
        unit = max(deviation, 0.0 if math.isnan(gain) else gain)
        if unit > 0:
            return (loss - constant) / unit
    return math.nan


def _free_gain(loss_of: LossOf, output: Tensor, batch: Batch, constant: float) -> float:
    """How far below the best constant output free outputs get; nan if no loss is the lowest.

    `constant` is the loss of that output on this batch, nan if it is unknown.
    """
    fitted = LOSS_SEARCH.fitted_outputs * len(output) // max(output.numel(), 1)
    count = min(len(output), max(2, fitted))
    if output[:count].numel() > LOSS_SEARCH.most_outputs:
        return math.nan
    if count < len(output):
        output = output[:count]
        batch = part_of(batch, torch.arange(count))
        constant = math.nan
    if math.isnan(constant):
        constant = constant_loss(loss_of, output, [batch])

    # Not from a constant output: by symmetry, the gradient of a loss that compares examples is zero
    # there.
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    return constant - _lowest(lambda free: loss_of(free, batch), 1e-2 * noise.to(output))


def _lowest(value: Callable[[Tensor], Tensor], start: Tensor) -> float:
    """The lowest value; nan where it still falls as it did at first, as a linear function does."""
    solver = torch.optim.LBFGS(
        [start.requires_grad_()],
        max_iter=LOSS_SEARCH.iterations,
        tolerance_grad=1e-3,
        tolerance_change=1e-4,
        line_search_fn="strong_wolfe",
    )
    (gradient,) = torch.autograd.grad(value(start), start)
    unit = float(gradient.abs().max()) or 1.0  # of the loss: the solver's tolerances are absolute

    def evaluate() -> Tensor:
        solver.zero_grad()
        loss = value(start) / unit
        loss.backward()
        return loss

    first = float(value(start).detach())
    solver.step(evaluate)
    middle = float(value(start).detach())
    solver.step(evaluate)
    last = float(value(start).detach())
    settles = middle - last <= LOSS_SEARCH.steady * (first - middle)
    size = float(start.detach().abs().max())
    return last if settles and size < LOSS_SEARCH.endless else math.nan
