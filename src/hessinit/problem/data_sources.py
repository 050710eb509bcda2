"""Datasets, loaders and collators, read from and left where they were: they may draw numbers of their own."""

from __future__ import annotations

import contextlib
import functools
import random
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader

# Nobody keeps a generator among thousands of examples, and a walk over all of them would take its time.
_MOST_IN_ONE = 1000
_MOST_OBJECTS = 20_000
_OPAQUE = (Tensor, numpy.ndarray, str, bytes, int, float, complex, type(None), type, types.ModuleType)


@contextlib.contextmanager
def untouched_sources(*sources: Any) -> Iterator[None]:
    """Let someone read from `sources`, and put back every generator and every attribute found inside them.

    Generators of torch, numpy and Python are found in attributes, small containers and closures. Not undone
    is what was written into a container, and how far an iterator or a file was read.

    >>> drawing = torch.utils.data.RandomSampler([0] * 9, generator=torch.Generator().manual_seed(0))
    >>> with untouched_sources(drawing):
    ...     first = list(drawing)
    >>> list(drawing) == first
    True
    """
    inside = list(_inside(sources))
    put_back = [restore for found in inside for restore in _restores(found)]
    try:
        for loader in inside:
            if isinstance(loader, DataLoader) and loader._iterator is not None:
                # With persistent workers all loops share this one: ours would use up that of training.
                loader._iterator = None
        yield
    finally:
        for restore in put_back:
            restore()


def _inside(sources: tuple[Any, ...]) -> Iterator[Any]:
    waiting, seen = list(sources), dict[int, Any]()
    while waiting and len(seen) < _MOST_OBJECTS:
        one = waiting.pop()
        if isinstance(one, _OPAQUE) or id(one) in seen:
            continue
        seen[id(one)] = one  # held, so that no other object gets its id
        yield one
        waiting += _parts(one)


def _parts(one: Any) -> list[Any]:
    if isinstance(one, Mapping | list | tuple | set | frozenset):
        if len(one) > _MOST_IN_ONE:
            return []
        return list(one.values()) if isinstance(one, Mapping) else list(one)
    if isinstance(one, types.MethodType):
        return [one.__self__]
    if isinstance(one, functools.partial):
        return [one.func, *one.args, *one.keywords.values()]
    if isinstance(one, types.FunctionType):
        return [*_cells(one), *(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
    # The queues and processes of a loader that is being read are not to be turned back.
    busy = "_iterator" if isinstance(one, DataLoader) else None
    return [value for name, value in getattr(one, "__dict__", {}).items() if name != busy]


def _cells(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a name that is bound later
            yield cell.cell_contents


def _restores(one: Any) -> Iterator[Callable[[], Any]]:
    if isinstance(one, torch.Generator):
        yield functools.partial(one.set_state, one.get_state())
    elif isinstance(one, numpy.random.Generator):
        yield functools.partial(setattr, one.bit_generator, "state", one.bit_generator.state)
    elif isinstance(one, numpy.random.RandomState):
        yield functools.partial(one.set_state, one.get_state())
    elif isinstance(one, random.Random):
        with contextlib.suppress(NotImplementedError):  # that of the system has no state
            yield functools.partial(one.setstate, one.getstate())
    attributes = getattr(one, "__dict__", None)
    if isinstance(attributes, dict) and not isinstance(one, types.FunctionType):
        yield functools.partial(_rebind, attributes, dict(attributes))


def _rebind(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    for name in attributes.keys() - before.keys():
        del attributes[name]
    attributes.update(before)
