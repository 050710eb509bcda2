"""The data of an experiment, and the mini-batches that a seed makes of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hessinit.comparing.seeds import generator, seed_everything
from hessinit.errors import ProblemError
from hessinit.problem.batches import Batch, map_tensors, read_batches, tensors_in
from hessinit.problem.preserve import untouched_random_state, untouched_sources


@dataclass(frozen=True)
class Examples:
    """All examples in one: every epoch is a new permutation, cut into mini-batches of `batch_size`.

    What is left over at an epoch's end is dropped, so all mini-batches are of one size.
    """

    whole: Batch
    batch_size: int

    @property
    def examples(self) -> int:
        return self.whole.size

    def minibatches(self, seed: int) -> Iterator[Batch]:
        """An endless sequence, the same for the same seed."""
        source = generator(seed, "batches")
        while True:
            order = torch.randperm(self.whole.size, generator=source)
            for first in range(0, self.whole.size - self.batch_size + 1, self.batch_size):
                yield self.whole.take(order[first : first + self.batch_size])

    def starting_batch(self, seed: int) -> Batch:
        """What a start may look at, and where the curvature is measured: the same for all starts."""
        order = torch.randperm(self.whole.size, generator=generator(seed, "starting batch"))
        return self.whole.take(order[: self.batch_size])

    def parts(self) -> list[Batch]:
        """What the data consist of."""
        return [self.whole]


@dataclass(frozen=True)
class ReadyBatches:
    """Batches as the user made them: every epoch has them in a new order."""

    batches: tuple[Batch, ...]

    @property
    def batch_size(self) -> int:
        """Of the first batch; the others may differ."""
        return self.batches[0].size

    @property
    def examples(self) -> int:
        return sum(batch.size for batch in self.batches)

    def minibatches(self, seed: int) -> Iterator[Batch]:
        """An endless sequence, the same for the same seed."""
        source = generator(seed, "batches")
        while True:
            for index in torch.randperm(len(self.batches), generator=source).tolist():
                yield self.batches[index]

    def starting_batch(self, seed: int) -> Batch:
        """What a start may look at, and where the curvature is measured: the same for all starts."""
        source = generator(seed, "starting batch")
        return self.batches[int(torch.randint(len(self.batches), (1,), generator=source))]

    def parts(self) -> list[Batch]:
        """What the data consist of."""
        return list(self.batches)


Data = Examples | ReadyBatches


def read_data(data: Any, batch_size: int, steps: int) -> Data:
    """`(inputs, targets)` with all examples, or ready batches; of an iterator, as many as there are steps."""
    if isinstance(data, (Tensor, Mapping, str)) or not isinstance(data, Iterable):
        raise ProblemError(
            f"data is a {type(data).__name__}; it must be (inputs, targets) with all examples, or an "
            "iterable of such pairs, as a DataLoader is. For a loss that needs no targets, pass "
            "(inputs, None)."
        )
    if isinstance(data, (tuple, list)) and len(data) == 2:
        read = read_batches(data)
        if len(read) == 1:
            return _check_examples(read[0][1], batch_size)
        return ReadyBatches(tuple(batch for _, batch in read))
    with untouched_random_state(), untouched_sources(data):
        seed_everything(0, "data")  # a loader that shuffles draws from the caller's generators
        # An iterator may be endless, and no run sees more batches than it has steps.
        pairs = list(data if isinstance(data, Sequence) else itertools.islice(data, steps))
    if not pairs:
        raise ProblemError("data is empty; it must hold at least one batch (inputs, targets).")
    if all(isinstance(pair, Tensor) for pair in pairs):
        read_batches(data)  # says what is wrong with a tuple of tensors
    return ReadyBatches(tuple(_read_pair(index, pair) for index, pair in enumerate(pairs)))


def place(batch: Batch, device: torch.device) -> Batch:
    """A copy of the batch on the model's device: a model may write into its inputs, and others need them."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)

    return Batch(map_tensors(move, batch.inputs), map_tensors(move, batch.targets), batch.size)


def _read_pair(index: int, pair: Any) -> Batch:
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
        found = type(pair).__name__ + (f" of {len(pair)}" if isinstance(pair, (tuple, list)) else "")
        raise ProblemError(f"data[{index}] is a {found}; every batch must be a pair (inputs, targets).")
    try:
        return read_batches(tuple(pair))[0][1]
    except ProblemError as refusal:
        raise ProblemError(f"data[{index}]: {refusal}") from None


def _check_examples(whole: Batch, batch_size: int) -> Examples:
    for name, part in (("inputs", whole.inputs), ("targets", whole.targets)):
        shapes = [tuple(tensor.shape) for tensor in tensors_in(part)]
        if shapes and not any(shape[:1] == (whole.size,) for shape in shapes):
            raise ProblemError(
                f"the {name} of data have shape {shapes[0]}, and the first dimension must count the "
                f"{whole.size} examples, so that mini-batches can be drawn. Transpose them, or pass a list "
                "of ready batches."
            )
    if batch_size > whole.size:
        # The size may be the default, so it is the data that are short.
        raise ProblemError(
            f"the data hold {whole.size} example{'' if whole.size == 1 else 's'}, fewer than "
            f"batch_size={batch_size}; pass batch_size={whole.size}{'' if whole.size == 1 else ' or less'}."
        )
    return Examples(whole, batch_size)
