"""Nested inputs and targets: tensors inside tuples, lists, dicts, named tuples, dataclasses and the like."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def map_tensors(function: Callable[[Tensor], Tensor], structure: Any) -> Any:
    """The same structure with `function` applied to every tensor in it; anything else is passed through.

    >>> import torch
    >>> map_tensors(lambda t: t * 2, {"x": torch.ones(1), "name": "kept"})
    {'x': tensor([2.]), 'name': 'kept'}
    """
    if isinstance(structure, Tensor):
        return function(structure)
    if isinstance(structure, Mapping):
        changed = {key: map_tensors(function, value) for key, value in structure.items()}
        return _rebuild_mapping(structure, changed)
    if isinstance(structure, PackedSequence):
        # Its batch_sizes must stay on the CPU, whole numbers in order.
        parts = (structure.data, structure.sorted_indices, structure.unsorted_indices)
        data, order, back = map_tensors(function, parts)
        return PackedSequence(data, structure.batch_sizes, order, back)
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(map_tensors(function, value) for value in structure))
    if isinstance(structure, (list, tuple)):
        return type(structure)(map_tensors(function, value) for value in structure)
    if dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        twin = copy.copy(structure)
        for field in dataclasses.fields(structure):
            # object.__setattr__ also reaches the fields of frozen dataclasses; `twin` is ours alone.
            object.__setattr__(twin, field.name, map_tensors(function, getattr(structure, field.name)))
        return twin
    return structure


def _rebuild_mapping(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(original) is dict:
        return items
    try:
        # Hugging Face's BatchEncoding, OrderedDict and friends take a plain dict.
        return type(original)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def tensors_in(structure: Any) -> Iterator[Tensor]:
    """Every tensor in the structure, in a fixed order."""
    if isinstance(structure, Tensor):
        yield structure
    elif isinstance(structure, Mapping):
        for value in structure.values():
            yield from tensors_in(value)
    elif isinstance(structure, (list, tuple)):
        for value in structure:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        for field in dataclasses.fields(structure):
            yield from tensors_in(getattr(structure, field.name))
