"""Whatever lies in nested tuples, lists, dicts and slices, as the arguments of a call are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def map_leaves(function: Callable[[Any], Any], structure: Any) -> Any:
    """`function` applied to whatever is not a tuple, list, dict or slice."""
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(map_leaves(function, entry) for entry in structure))
    if isinstance(structure, (tuple, list)):
        kind = type(structure) if type(structure) in (tuple, list) else tuple
        return kind(map_leaves(function, entry) for entry in structure)
    if isinstance(structure, dict):
        return {key: map_leaves(function, entry) for key, entry in structure.items()}
    if isinstance(structure, slice):
        parts = (structure.start, structure.stop, structure.step)
        return slice(*(map_leaves(function, part) for part in parts))
    return function(structure)


def leaves_of(structure: Any) -> Iterator[Any]:
    """Whatever `map_leaves` would meet, in order."""
    if isinstance(structure, (tuple, list)):
        for entry in structure:
            yield from leaves_of(entry)
    elif isinstance(structure, dict):
        yield from leaves_of(list(structure.values()))
    elif isinstance(structure, slice):
        yield from leaves_of([structure.start, structure.stop, structure.step])
    else:
        yield structure
