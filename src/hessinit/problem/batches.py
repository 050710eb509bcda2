"""Nested inputs and targets: tensors inside tuples, lists, dicts, named tuples, dataclasses and the like."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from hessinit.errors import ProblemError
from hessinit.problem.preserve import untouched_random_state, untouched_sources


def map_tensors(function: Callable[[Tensor], Tensor], structure: Any) -> Any:
    """The same structure with `function` applied to every tensor in it; anything else is passed through."""
    if isinstance(structure, Tensor):
        return function(structure)
    if isinstance(structure, Mapping):
        changed = {key: map_tensors(function, value) for key, value in structure.items()}
        try:
            # Hugging Face's BatchEncoding, OrderedDict and friends take a plain dict.
            return changed if type(structure) is dict else type(structure)(changed)  # type: ignore[call-arg]
        except TypeError:
            return changed
    if isinstance(structure, PackedSequence):
        # Its batch_sizes must stay on the CPU, whole numbers in order.
        fields = (structure.data, structure.sorted_indices, structure.unsorted_indices)
        data, order, back = map_tensors(function, fields)
        return PackedSequence(data, structure.batch_sizes, order, back)
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(map_tensors(function, value) for value in structure))
    if isinstance(structure, (list, tuple)):
        return type(structure)(map_tensors(function, value) for value in structure)
    if dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        own = {
            one.name: getattr(structure, one.name)
            for one in dataclasses.fields(structure)
            if one.init
        }
        return dataclasses.replace(structure, **map_tensors(function, own))
    return structure


def tensors_in(structure: Any) -> Iterator[Tensor]:
    """Every tensor in the structure, in a fixed order."""
    if isinstance(structure, Tensor):
        yield structure
    elif isinstance(structure, (Mapping, list, tuple)):
        for value in structure.values() if isinstance(structure, Mapping) else structure:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        for field in dataclasses.fields(structure):
            yield from tensors_in(getattr(structure, field.name))


MOST_BATCHES = 1000  # more than anybody needs, few enough to notice an endless generator


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of `size` examples."""

    inputs: Any
    targets: Any
    size: int

    @property
    def rows(self) -> int:
        """What a mean loss averages over: the examples, or the rows of targets flattened over positions."""
        counts = [len(one) for one in tensors_in(self.targets) if one.ndim]
        return counts[0] if len(counts) == 1 and counts[0] % self.size == 0 else self.size

    def take(self, examples: Tensor) -> Batch:
        """Only these examples: every tensor whose first dimension counts the examples is indexed."""

        def pick(tensor: Tensor) -> Tensor:
            follows = tensor.ndim > 0 and tensor.shape[0] == self.size
            return tensor[examples.to(tensor.device)] if follows else tensor

        return Batch(map_tensors(pick, self.inputs), map_tensors(pick, self.targets), len(examples))

    def sample(self) -> Tensor:
        """The numbers of some examples: an eighth, and at least four if there are as many."""
        return torch.arange(0, self.size, min(8, max(1, self.size // 4)))

    def joined_targets(self, other: Batch) -> Batch | None:
        """The targets of both, one after the other, without inputs; None where they do not fit together."""
        return join_batches([Batch(None, one.targets, one.size) for one in (self, other)])


def part_of(batch: Batch, examples: Tensor) -> Batch:
    """Some of the examples, of targets that may be flat.

    Flat targets have several entries in a row for each example, as in text.
    """

    def pick(tensor: Tensor) -> Tensor:
        entries, excess = divmod(len(tensor), batch.size) if tensor.ndim else (0, 1)
        if excess or entries < 2:
            return tensor
        by_example = tensor.unflatten(0, (batch.size, entries))
        return by_example[examples.to(tensor.device)].flatten(0, 1)

    taken = batch.take(examples)
    return Batch(taken.inputs, map_tensors(pick, taken.targets), taken.size)


def join_batches(batches: Sequence[Batch]) -> Batch | None:
    """The examples of all batches, one after the other; None where they do not fit together."""
    content = [(one.inputs, one.targets) for one in batches]
    try:
        joined = iter([torch.cat(column) for column in zip(*map(tensors_in, content), strict=True)])
    except (RuntimeError, ValueError):
        return None
    inputs, targets = map_tensors(lambda _: next(joined), content[0])
    if next(joined, None) is not None:  # packed sequences hold more than is mapped
        return None
    return Batch(inputs, targets, sum(one.size for one in batches))


def read_batches(batch: Any) -> list[tuple[str, Batch]]:
    """`(inputs, targets)`, or any finite iterable of such pairs, as batches with their names in errors."""
    if _is_pair(batch):
        return [("", _count(batch[0], batch[1], ""))]
    if isinstance(batch, (Tensor, Mapping, str)) or not isinstance(batch, Iterable):
        raise ProblemError(
            f"batch is a {type(batch).__name__}; it must be (inputs, targets), or an iterable of such pairs, "
            "as a DataLoader is. For a loss that needs no targets, pass (inputs, None); for a dict b, "
            "(b, b['labels']), with forward= for a model that takes inputs by name."
        )
    pairs = read_few(batch, "one (inputs, targets) pair")
    for index, pair in enumerate(pairs):
        if isinstance(pair, (tuple, list)) and len(pair) == 2:
            continue
        if isinstance(batch, (tuple, list)) and all(isinstance(item, Tensor) for item in batch):
            why = f"batch is a {type(batch).__name__} of {len(batch)} tensors; it must be (inputs, targets)"
            way = (
                "Group several inputs: ((x1, x2), targets), with forward=lambda model, x: model(*x)"
            )
            raise ProblemError(f"{why}. {way}.")
        raise ProblemError(
            f"batch {index} is a {type(pair).__name__}; every batch must be a pair (inputs, targets). Make "
            "pairs of dicts: ((b, b['labels']) for b in loader), with forward= for a model that takes inputs "
            "by name."
        )
    places = [f"batch {index}: " for index in range(len(pairs))]
    return [
        (place, _count(pair[0], pair[1], place)) for place, pair in zip(places, pairs, strict=True)
    ]


def read_few(batches: Iterable[Any], minimum: str) -> list[Any]:
    """All that an iterable gives: at least one, not endlessly many.

    Nobody's random numbers are used up.
    """
    with untouched_random_state(), untouched_sources(batches):
        found = list(itertools.islice(batches, MOST_BATCHES + 1))
    if not found:
        why = f"batch is an empty iterable; it must hold at least {minimum}"
        raise ProblemError(
            f"{why}. An iterator is empty once it was read: pass the loader or list itself."
        )
    if len(found) > MOST_BATCHES:
        why = f"batch gives more than {MOST_BATCHES} batches, and all are held in memory at once"
        raise ProblemError(f"{why}; a few tell the curvature: pass itertools.islice(batch, 8).")
    return found


def _is_pair(batch: Any) -> bool:
    """`(inputs, targets)`, not a list of two batches: those are pairs (or dicts) themselves."""

    def has_two(item: Any) -> bool:
        return isinstance(item, (tuple, list)) and len(item) == 2

    # ((x1, x2), y) is one batch with two inputs; ((x, y), (x, y)) can only be two batches if it is
    # a list.
    batches = isinstance(batch, list) and all(
        isinstance(one, Mapping) or dataclasses.is_dataclass(one) or has_two(one) for one in batch
    )
    return has_two(batch) and not batches


def _count(inputs: Any, targets: Any, place: str) -> Batch:
    given = [tuple(tensor.shape) for tensor in tensors_in(inputs) if tensor.ndim > 0]
    targeted = [tuple(tensor.shape) for tensor in tensors_in(targets) if tensor.ndim > 0]
    if not given and not targeted:
        what = f"inputs are of type {type(inputs).__name__} and targets of type {type(targets).__name__}"
        raise ProblemError(
            f"{place}{what}: neither holds a tensor whose first dimension counts examples. Convert arrays "
            "with torch.as_tensor, and give a single example a first dimension of 1."
        )
    size = _examples(given, targeted)
    if size == 0:
        why = f"{place}the batch is empty (it holds a tensor of shape {(targeted or given)[0]})"
        raise ProblemError(f"{why}; pass at least one example.")
    if size is None:
        raise ProblemError(
            f"{place}inputs have {given[0][0]} examples (shape {given[0]}) and targets {targeted[0][0]} "
            f"(shape {targeted[0]}); both must count the same examples along the first dimension. Cut one "
            "to the other, or transpose it."
        )
    return Batch(inputs, targets, size)


def _examples(given: list[tuple[int, ...]], targeted: list[tuple[int, ...]]) -> int | None:
    """How many examples tensors of these shapes hold; None when inputs and targets contradict each other."""
    if not given or not targeted:
        return (given or targeted)[0][0]
    size = targeted[0][0]
    first = given[0][0]
    counts = [shape[0] for shape in targeted]
    for shape in given:
        if shape[0] in counts:
            return shape[0]
    if any(size in shape[1:2] and shape[0] > 1 for shape in given):
        return size  # time first, as recurrent layers like it
    if first and size % first == 0:
        return first  # targets flattened over examples and positions, as language models like them
    if len(given) == len(targeted) == 1:
        return None
    # Nested ones may count anything (the nodes of graphs, the words of bags): only the model can
    # tell.
    return first if len(given) == 1 else size


def cast(structure: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Floating-point and complex tensors in `dtype`, everything on `device`; copies only what has to change.

    Where some are on `device` already, the others stay: the lengths of packed sequences belong on
    the CPU.
    """
    placed = any(tensor.device == device for tensor in tensors_in(structure))

    def convert(tensor: Tensor) -> Tensor:
        kind = (
            dtype
            if tensor.is_floating_point()
            else dtype.to_complex()
            if tensor.is_complex()
            else None
        )
        return tensor.detach().to(device=None if placed else device, dtype=kind)

    return map_tensors(convert, structure)
