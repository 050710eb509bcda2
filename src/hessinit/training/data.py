"""Training data, the mini-batches that a seed makes of them, and the random streams of a run."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from hessinit.errors import ProblemError
from hessinit.problem.batches import Batch, map_tensors, part_of, read_batches, tensors_in
from hessinit.problem.preserve import untouched_random_state, untouched_sources
from hessinit.training.workers import ONE_AT_A_TIME

# Half of fewer examples may be far sharper than the batch.
FEWEST_TO_HALVE = 16


def derive(seed: int, purpose: str) -> int:
    """Return the seed for one purpose of a run: one for all would correlate weights and batches.

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
    # The user's code may draw from numpy's old global state.
    numpy.random.seed(number % 2**32)  # noqa: NPY002


@contextlib.contextmanager
def reproducible() -> Iterator[None]:
    """Compute without autocast, on one thread, in which sums have one order; restore randomness."""
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
    """All examples in one part, from which mini-batches are drawn, or ready batches.

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
        """Split off that many random batches; returns the remaining data, and the batches."""
        order = self._permutation(generator(seed, "held out"))
        size = self._entries_of_a_batch
        held_out = tuple(self._take(order[: batches * size], size))
        remaining = order[batches * size :]
        parts = tuple(self._take(remaining, len(remaining)))
        return replace(self, parts=parts), Data(held_out, self.batch_size, ready=True)

    def minibatches(self, seed: int) -> Iterator[Batch]:
        """An endless sequence, the same for the same seed."""
        source = generator(seed, "batches")
        while True:
            order = self._permutation(source)
            size = self._entries_of_a_batch
            yield from self._take(order[: self.different * size], size)

    def initial_batch(self, seed: int) -> Batch:
        """The batch that initializations see and on which the initial curvature is measured."""
        source = generator(seed, "starting batch")
        if self.ready:
            return self.parts[int(torch.randint(len(self.parts), (1,), generator=source))]
        return self.parts[0].take(self._permutation(source)[: self.batch_size])

    def tracked_batches(self, examples: int, seed: int) -> list[Batch]:
        """Return one batch of that many random examples, or ready batches with at least as many."""
        order = self._permutation(generator(seed, "tracked batch"))
        if not self.ready:
            return [self.parts[0].take(order[:examples])]
        chosen: list[Batch] = []
        for index in order.tolist():
            if sum(batch.size for batch in chosen) < examples:
                chosen.append(self.parts[index])
        return chosen

    def digest(self) -> str:
        """Return a hash of all examples, with their shapes and dtypes."""
        digest = hashlib.sha256()
        for tensor in tensors_in([(part.inputs, part.targets) for part in self.parts]):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            entries = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(entries.view(torch.uint8).numpy().data)
        return digest.hexdigest()[:16]

    @property
    def _entries_of_a_batch(self) -> int:
        """How many entries of a permutation make a batch."""
        return 1 if self.ready else self.batch_size

    def _take(self, order: Tensor, size: int) -> Iterator[Batch]:
        """Return the ready batches with these numbers, or batches of `size` of these examples."""
        if self.ready:
            return (self.parts[index] for index in order.tolist())
        return (self.parts[0].take(rows) for rows in order.split(size))

    def _permutation(self, source: torch.Generator) -> Tensor:
        entries = len(self.parts) if self.ready else self.examples
        return torch.randperm(entries, generator=source)


def read_data(data: Any, batch_size: int, steps: int) -> Data:
    """Read `(inputs, targets)` with all examples, or at most `steps` ready batches."""
    if isinstance(data, Data):
        return data
    if isinstance(data, (Tensor, Mapping, str)) or not isinstance(data, Iterable):
        raise ProblemError(
            f"data is a {type(data).__name__}; it must be (inputs, targets) with all examples, "
            "where targets may be None, or an iterable of such pairs, as a DataLoader is."
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
                f"data[{index}] is a {type(pair).__name__}; every batch must be a pair (inputs, "
                "targets), or data one pair of all examples."
            )
    parts = tuple(read_batches(tuple(pair))[0][1] for pair in pairs)
    return Data(parts, parts[0].size, ready=True)


def copy_to(
    batch: Batch, device: torch.device, dtype: torch.dtype | None = None
) -> tuple[Any, Any]:
    """Copy inputs and targets to the device: a model may write into its inputs.

    Floating-point tensors get the `dtype`. Where some tensors of inputs or targets are on the
    device already, the others stay where they are.
    """

    def copy_all(structure: Any) -> Any:
        is_there = any(tensor.device == device for tensor in tensors_in(structure))
        destination = None if is_there else device

        def copy_one(tensor: Tensor) -> Tensor:
            new_dtype = dtype if tensor.is_floating_point() else None
            copied = tensor.detach().to(device=destination, dtype=new_dtype, copy=True)
            return copied.requires_grad_(tensor.requires_grad)

        return map_tensors(copy_one, structure)

    return copy_all(batch.inputs), copy_all(batch.targets)


def device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def dtype_of(model: nn.Module) -> torch.dtype | None:
    """Return the dtype of the floating-point parameters; None where they have several."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else None


def half_of(batch: Batch, order: Tensor, source: torch.Generator) -> Batch:
    """Return half of the examples in `order`, drawn at random."""
    drawn = torch.randperm(len(order), generator=source)
    return part_of(batch, order[drawn[: max(1, len(order) // 2)]])


def order_by_content(batch: Batch, seed: int) -> Tensor:
    """Return the indices of the examples, sorted by what the examples hold.

    Random halves of them do not depend on the order in the batch. A batch that is repeated as a
    whole counts once.
    """
    by_inputs = _project(batch, batch.inputs, seed)
    content = by_inputs + _project(batch, batch.targets, seed + 1)
    # Targets may be renamed: they only decide where the inputs are the same.
    order = content.argsort(stable=True)
    order = order[by_inputs[order].argsort(stable=True)]
    sorted_content = content[order]
    jumps = sorted_content.diff(prepend=torch.tensor([math.inf])).abs()
    is_new = jumps > 1e-6 * content.abs().max()
    repetitions = math.gcd(*is_new.cumsum(0).bincount()[1:].tolist())
    is_enough = len(order) >= repetitions * FEWEST_TO_HALVE
    return order[::repetitions] if is_enough else order


def _project(batch: Batch, structure: Any, seed: int) -> Tensor:
    """Return a number for each example: its content along a random direction."""
    total = torch.zeros(batch.size)
    for tensor in tensors_in(structure):
        if tensor.ndim and len(tensor) % batch.size == 0:
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            rows = real.detach().reshape(batch.size, -1).float()
            direction = torch.randn(rows.shape[1], generator=generator(seed, "order"))
            total = total + (rows @ direction.to(rows)).cpu()
    return total


def _check_examples(batch: Batch, batch_size: int) -> None:
    for name, structure in (("inputs", batch.inputs), ("targets", batch.targets)):
        shapes = [tuple(tensor.shape) for tensor in tensors_in(structure)]
        if structure is None or any(shape[:1] == (batch.size,) for shape in shapes):
            continue
        actual = f"are a {type(structure).__name__} without a tensor in it"
        if shapes:
            actual = f"have shape {shapes[0]}"
        raise ProblemError(
            f"the {name} of data {actual}, and the first dimension must count the {batch.size} "
            "examples. Transpose or convert them, or pass a list of ready batches."
        )
    if batch_size > batch.size:
        raise ProblemError(
            f"the data hold {batch.size} examples, fewer than batch_size={batch_size}; pass "
            f"{batch.size} or less."
        )
