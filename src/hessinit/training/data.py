"""Training data, the mini-batches that a seed makes of them, and the random streams of a run."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from hessinit.errors import ProblemError
from hessinit.problem.batches import Batch, map_tensors, read_batches, tensors_in
from hessinit.problem.preserve import untouched_random_state, untouched_sources
from hessinit.training.workers import ONE_AT_A_TIME


def derive(seed: int, purpose: str) -> int:
    """The seed for one purpose of a run: with one seed for all, weights and batches would be dependent.

    >>> derive(0, "weights") == derive(0, "weights"), derive(0, "weights") == derive(0, "batches")
    (True, False)
    """
    digest = hashlib.sha256(f"{seed} {purpose}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def generator(seed: int, purpose: str) -> torch.Generator:
    """A generator on the CPU, so that every device sees the same numbers."""
    return torch.Generator().manual_seed(derive(seed, purpose))


def seed_everything(seed: int, purpose: str) -> None:
    """Seed torch, random and numpy; call it inside `reproducible()` only."""
    seed_generators(derive(seed, purpose))


def seed_generators(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number % 2**32)  # noqa: NPY002 - the user's code may draw from the old global state


@contextlib.contextmanager
def reproducible() -> Iterator[None]:
    """One thread, so that sums have one order, no autocast; the caller's random state returns at the end."""
    threads = torch.get_num_threads()
    with (
        ONE_AT_A_TIME,
        untouched_random_state(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


@dataclass(frozen=True)
class Data:
    """All examples in one part, from which mini-batches of `batch_size` are drawn, or ready batches.

    Every epoch is a new permutation, of the examples (its remainder is dropped) or of the ready
    batches.
    """

    parts: tuple[Batch, ...]
    batch_size: int  # of ready batches: the size of the first
    ready: bool

    @property
    def examples(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def different(self) -> int:
        """How many batches there are before one comes again."""
        return len(self.parts) if self.ready else self.examples // self.batch_size

    def hold_out(self, batches: int, seed: int) -> tuple[Data, Data]:
        """The data without that many random batches, and these."""
        order = self._permutation(generator(seed, "held out"))
        size = 1 if self.ready else self.batch_size
        rest = order[batches * size :]
        out = order[: batches * size]
        kept = self._take(rest, len(rest))
        taken = self._take(out, size)
        return replace(self, parts=tuple(kept)), Data(tuple(taken), self.batch_size, ready=True)

    def minibatches(self, seed: int) -> Iterator[Batch]:
        """An endless sequence, the same for the same seed."""
        source = generator(seed, "batches")
        while True:
            order = self._permutation(source)
            size = 1 if self.ready else self.batch_size
            yield from self._take(order[: self.different * size], size)

    def initial_batch(self, seed: int) -> Batch:
        """The batch that initializations see and on which the initial curvature is measured."""
        source = generator(seed, "starting batch")
        if self.ready:
            return self.parts[int(torch.randint(len(self.parts), (1,), generator=source))]
        return self.parts[0].take(self._permutation(source)[: self.batch_size])

    def tracked_batches(self, examples: int, seed: int) -> list[Batch]:
        """One batch of that many random examples, or ready batches that hold at least as many together."""
        order = self._permutation(generator(seed, "tracked batch"))
        if not self.ready:
            return [self.parts[0].take(order[:examples])]
        chosen: list[Batch] = []
        for index in order.tolist():
            if sum(batch.size for batch in chosen) < examples:
                chosen.append(self.parts[index])
        return chosen

    def digest(self) -> str:
        found = hashlib.sha256()
        for tensor in (
            tensor for part in self.parts for tensor in tensors_in((part.inputs, part.targets))
        ):
            found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(
                tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            )
        return found.hexdigest()[:16]

    def _take(self, order: Tensor, size: int) -> Iterator[Batch]:
        """The ready batches of these numbers, or batches of `size` of these examples."""
        if self.ready:
            return (self.parts[index] for index in order.tolist())
        return (self.parts[0].take(some) for some in order.split(size))

    def _permutation(self, source: torch.Generator) -> Tensor:
        return torch.randperm(
            len(self.parts) if self.ready else self.parts[0].size, generator=source
        )


def read_data(data: Any, batch_size: int, steps: int) -> Data:
    """`(inputs, targets)` with all examples, or ready batches; of an iterator at most `steps` are read."""
    if isinstance(data, Data):
        return data
    if isinstance(data, (Tensor, Mapping, str)) or not isinstance(data, Iterable):
        raise ProblemError(
            f"data is a {type(data).__name__}; it must be (inputs, targets) with all examples, where targets "
            "may be None, or an iterable of such pairs, as a DataLoader is."
        )
    if isinstance(data, (tuple, list)) and len(data) == 2:
        parts = tuple(batch for _, batch in read_batches(data))
        if len(parts) == 1:
            _check_examples(parts[0], batch_size)
            return Data(parts, batch_size, ready=False)
        return Data(parts, parts[0].size, ready=True)
    with untouched_random_state(), untouched_sources(data):
        seed_everything(0, "data")  # a loader that shuffles draws from the global generators
        # An iterator may be endless, and no run sees more batches than it has steps.
        pairs = list(data if isinstance(data, Sequence) else itertools.islice(data, steps))
    if not pairs:
        raise ProblemError("data is empty; it must hold at least one batch (inputs, targets).")
    for index, pair in enumerate(pairs):
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            raise ProblemError(
                f"data[{index}] is a {type(pair).__name__}; every batch must be a pair (inputs, targets), "
                "or data one pair of all examples."
            )
    parts = tuple(read_batches(tuple(pair))[0][1] for pair in pairs)
    return Data(parts, parts[0].size, ready=True)


def copy_to(
    batch: Batch, device: torch.device, dtype: torch.dtype | None = None
) -> tuple[Any, Any]:
    """Inputs and targets, copied to the device: a model may write into its inputs.

    Floating-point tensors get the `dtype`. Where some are on the device already, the others stay.
    """

    def copied(structure: Any) -> Any:
        place = None if any(tensor.device == device for tensor in tensors_in(structure)) else device

        def move(tensor: Tensor) -> Tensor:
            kind = dtype if tensor.is_floating_point() else None
            moved = tensor.detach().to(device=place, dtype=kind, copy=True)
            return moved.requires_grad_(tensor.requires_grad)

        return map_tensors(move, structure)

    return copied(batch.inputs), copied(batch.targets)


def device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _check_examples(whole: Batch, batch_size: int) -> None:
    for name, part in (("inputs", whole.inputs), ("targets", whole.targets)):
        shapes = [tuple(tensor.shape) for tensor in tensors_in(part)]
        found = (
            f"have shape {shapes[0]}"
            if shapes
            else f"are a {type(part).__name__} without a tensor in it"
        )
        if part is not None and not any(shape[:1] == (whole.size,) for shape in shapes):
            raise ProblemError(
                f"the {name} of data {found}, and the first dimension must count the {whole.size} examples. "
                "Transpose or convert them, or pass a list of ready batches."
            )
    if batch_size > whole.size:
        raise ProblemError(
            f"the data hold {whole.size} examples, fewer than batch_size={batch_size}; pass {whole.size} "
            "or less."
        )
