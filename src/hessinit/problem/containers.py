"""Lists, dicts, sets and deques that a model keeps among its attributes, and what was in them."""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

from torch import nn

from hessinit.problem.lending import Loan

Container = list[Any] | dict[Any, Any] | set[Any] | deque[Any]

_KINDS = (list, dict, set, deque)
# Not those derived from them: some, as the outputs of Transformers, refuse what a dict allows.
_PLAIN_KINDS = (list, dict, OrderedDict, defaultdict, deque)
# Hooks, parameters and buffers: torch's own tables, which every module has.
_OWN = frozenset(nn.Module().__dict__)
# A vocabulary is copied, but not searched for lists to be filled.
_MOST_SEARCHED = 1000


def containers_in(model: nn.Module) -> list[Container]:
    """Those in the attributes of its modules, and those within these."""
    waiting = [
        value
        for module in model.modules()
        for name, value in module.__dict__.items()
        if name not in _OWN and isinstance(value, _KINDS)
    ]
    found: dict[int, Container] = {}
    while waiting:
        one = waiting.pop()
        if id(one) not in found:
            found[id(one)] = one
            waiting += _within(one)
    return list(found.values())


def _within(one: Container) -> Iterator[Container]:
    if len(one) <= _MOST_SEARCHED:
        for value in one.values() if isinstance(one, dict) else one:
            if isinstance(value, _KINDS):
                yield value


class Contents:
    """What a container holds now.

    >>> heard = ["first"]
    >>> contents = Contents(heard)
    >>> heard.append("second")
    >>> contents.put_back(); heard
    ['first']
    """

    def __init__(self, container: Container) -> None:
        self._container = container
        self._before = _entries(container)

    def lend(self, loan: Loan) -> None:
        """Put stand-ins in the place of its tensors and generators, until it is put back."""
        one = self._container
        if type(one) in _PLAIN_KINDS:
            for place, lent in loan.lend(one if isinstance(one, dict) else dict(enumerate(one))).items():
                one[place] = lent  # type: ignore[index]

    def put_back(self) -> None:
        """As it was, without a touch where it still is."""
        one, now = self._container, _entries(self._container)
        if len(now) == len(self._before) and all(map(operator.is_, now, self._before)):
            return
        one.clear()
        if isinstance(one, dict):
            one.update(zip(self._before[::2], self._before[1::2], strict=True))
        elif isinstance(one, set):
            one.update(self._before)
        else:
            one.extend(self._before)


def _entries(one: Container) -> list[Any]:
    """Every value; for a dict, keys and values in turn."""
    return [part for pair in one.items() for part in pair] if isinstance(one, dict) else list(one)
