"""Nested inputs and targets: tensors inside tuples, lists, dicts, named tuples, dataclasses."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from hessinit.errors import ProblemError, argument
from hessinit.problem.preserve import untouched_random_state, untouched_sources


def map_tensors(function: Callable[[Tensor], Tensor], structure: Any) -> Any:
    """The same structure with `function` applied to every tensor in it."""
    if isinstance(structure, Tensor):
        return function(structure)
    if isinstance(structure, Mapping):
        changed = {key: map_tensors(function, value) for key, value in structure.items()}
        try:
            # Hugging Face's BatchEncoding, OrderedDict and friends take a plain dict.
            if type(structure) is dict:
                return changed
            return type(structure)(changed)  # type: ignore[call-arg]
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
        fields_of = dataclasses.fields(structure)
        values = {field.name: getattr(structure, field.name) for field in fields_of if field.init}
        return dataclasses.replace(structure, **map_tensors(function, values))
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
        """What a mean loss averages over: examples, or rows of targets flattened over positions."""
        counts = [len(tensor) for tensor in tensors_in(self.targets) if tensor.ndim]
        if len(counts) == 1 and counts[0] % self.size == 0:
            return counts[0]
        return self.size

    def take(self, examples: Tensor) -> Batch:
        """Only these examples of every tensor whose first dimension counts the examples."""

        def pick(tensor: Tensor) -> Tensor:
            if tensor.ndim == 0 or tensor.shape[0] != self.size:
                return tensor
            return tensor[examples.to(tensor.device)]

        return Batch(map_tensors(pick, self.inputs), map_tensors(pick, self.targets), len(examples))

    def sample(self) -> Tensor:
        """The numbers of some examples: an eighth, and at least four if there are as many."""
        return torch.arange(0, self.size, min(8, max(1, self.size // 4)))

    def joined_targets(self, other: Batch) -> Batch | None:
        """The targets of both, one after the other, without inputs; None if they do not fit."""
        return join_batches([Batch(None, batch.targets, batch.size) for batch in (self, other)])


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
    """The examples of all batches, one after the other; None if they do not fit together."""
    content = [(batch.inputs, batch.targets) for batch in batches]
    try:
        joined = iter([torch.cat(column) for column in zip(*map(tensors_in, content), strict=True)])
    except (RuntimeError, ValueError):
        return None
    inputs, targets = map_tensors(lambda _: next(joined), content[0])
    if next(joined, None) is not None:  # packed sequences hold more than is mapped
        return None
    return Batch(inputs, targets, sum(batch.size for batch in batches))


def read_batches(batch: Any) -> list[tuple[str, Batch]]:
    """`(inputs, targets)`, or an iterable of such pairs, as batches with a prefix for errors."""
    if _is_pair(batch):
        return [("", _count(batch[0], batch[1], ""))]
    if isinstance(batch, (Tensor, Mapping, str)) or not isinstance(batch, Iterable):
        raise ProblemError(
            f"batch is a {type(batch).__name__}; it must be (inputs, targets), or an iterable of "
            "such pairs, as a DataLoader is. For a loss that needs no targets, pass (inputs, "
            "None); for a dict b, (b, b['labels']), with ",
            argument("forward"),
            " for a model that takes inputs by name.",
        )
    pairs = read_few(batch, "one (inputs, targets) pair")
    for index, pair in enumerate(pairs):
        if isinstance(pair, (tuple, list)) and len(pair) == 2:
            continue
        if isinstance(batch, (tuple, list)) and all(isinstance(item, Tensor) for item in batch):
            raise ProblemError(
                f"batch is a {type(batch).__name__} of {len(batch)} tensors; it must be (inputs, "
                "targets). Group several inputs: ((x1, x2), targets), with ",
                argument("forward"),
                "lambda model, x: model(*x).",
            )
        raise ProblemError(
            f"batch {index} is a {type(pair).__name__}; every batch must be a pair (inputs, "
            "targets). Make pairs of dicts: ((b, b['labels']) for b in loader), with ",
            argument("forward"),
            " for a model that takes inputs by name.",
        )
    prefixes = [f"batch {index}: " for index in range(len(pairs))]
    return [
        (prefix, _count(inputs, targets, prefix))
        for prefix, (inputs, targets) in zip(prefixes, pairs, strict=True)
    ]


def read_few(batches: Iterable[Any], minimum: str) -> list[Any]:
    """The items of an iterable, at least one and not endlessly many; no generator moves on."""
    with untouched_random_state(), untouched_sources(batches):
        items = list(itertools.islice(batches, MOST_BATCHES + 1))
    if not items:
        raise ProblemError(
            f"batch is an empty iterable; it must hold at least {minimum}. An iterator is empty "
            "once it was read: pass the loader or list itself."
        )
    if len(items) > MOST_BATCHES:
        raise ProblemError(
            f"batch gives more than {MOST_BATCHES} batches, and all are held in memory at once; a "
            "few tell the curvature: pass itertools.islice(batch, 8)."
        )
    return items


def _is_pair(batch: Any) -> bool:
    """`(inputs, targets)`, not a list of two batches: those are pairs (or dicts) themselves."""

    def has_two(item: Any) -> bool:
        return isinstance(item, (tuple, list)) and len(item) == 2

    def is_batch(item: Any) -> bool:
        return isinstance(item, Mapping) or dataclasses.is_dataclass(item) or has_two(item)

    # ((x1, x2), y) is one batch with two inputs; ((x, y), (x, y)) can only be two batches if it is
    # a list.
    lists_batches = isinstance(batch, list) and all(map(is_batch, batch))
    return has_two(batch) and not lists_batches


def _count(inputs: Any, targets: Any, prefix: str) -> Batch:
    input_shapes = [tuple(tensor.shape) for tensor in tensors_in(inputs) if tensor.ndim > 0]
    target_shapes = [tuple(tensor.shape) for tensor in tensors_in(targets) if tensor.ndim > 0]
    if not input_shapes and not target_shapes:
        raise ProblemError(
            f"{prefix}inputs are of type {type(inputs).__name__} and targets of type "
            f"{type(targets).__name__}: neither holds a tensor whose first dimension counts "
            "examples. Convert arrays with torch.as_tensor, and give a single example a first "
            "dimension of 1."
        )
    size = _examples(input_shapes, target_shapes)
    if size == 0:
        raise ProblemError(
            f"{prefix}the batch is empty (it holds a tensor of shape "
            f"{(target_shapes or input_shapes)[0]}); pass at least one example."
        )
    if size is None:
        raise ProblemError(
            f"{prefix}inputs have {input_shapes[0][0]} examples (shape {input_shapes[0]}) and "
            f"targets {target_shapes[0][0]} (shape {target_shapes[0]}); both must count the same "
            "examples along the first dimension. Cut one to the other, or transpose it."
        )
    return Batch(inputs, targets, size)


def _examples(
    input_shapes: list[tuple[int, ...]], target_shapes: list[tuple[int, ...]]
) -> int | None:
    """How many examples tensors of these shapes hold; None if inputs and targets contradict."""
    if not input_shapes or not target_shapes:
        return (input_shapes or target_shapes)[0][0]
    first_input = input_shapes[0][0]
    first_target = target_shapes[0][0]
    target_counts = [shape[0] for shape in target_shapes]
    for shape in input_shapes:
        if shape[0] in target_counts:
            return shape[0]
    if any(first_target in shape[1:2] and shape[0] > 1 for shape in input_shapes):
        return first_target  # time first, as recurrent layers like it
    if first_input and first_target % first_input == 0:
        return first_input  # targets flattened over examples and positions, as in language models
    if len(input_shapes) == len(target_shapes) == 1:
        return None
    # Nested inputs may count anything (the nodes of graphs, the words of bags): only the model can
    # tell.
    return first_input if len(input_shapes) == 1 else first_target


def cast(structure: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Floating-point and complex tensors in `dtype`, all on `device`.

    Copies only what has to change.

    Where some are on `device` already, the rest stays: the lengths of packed sequences belong on
    the CPU.
    """
    placed = any(tensor.device == device for tensor in tensors_in(structure))
    destination = None if placed else device

    def convert(tensor: Tensor) -> Tensor:
        kind = None
        if tensor.is_floating_point():
            kind = dtype
        elif tensor.is_complex():
            kind = dtype.to_complex()
        return tensor.detach().to(device=destination, dtype=kind)

    return map_tensors(convert, structure)
