"""Chains of elementwise functions, taken from the record and run again on points of our own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hessinit.errors import ProblemError
from hessinit.schemes.record import Step


@dataclass(frozen=True)
class Link:
    """One elementwise function and what to call it."""

    name: str
    run: Callable[[Tensor], Tensor]


Chain = tuple[Link, ...]  # in the order in which they run


def link_of(step: Step) -> Link:
    """The function of an elementwise step of one signal."""
    call = step.call
    assert call is not None
    return Link(step.name, lambda value: call.run(lambda signal: value))


def product_of(chains: list[Chain]) -> Chain:
    """One function for several that start from the same value and are multiplied."""
    if len(chains) == 1:
        return chains[0]

    def multiply(value: Tensor) -> Tensor:
        result = run(chains[0], value)
        for chain in chains[1:]:
            result = result * run(chain, value)
        return result

    names = [link.name for chain in chains for link in chain]
    return (Link(", ".join([*names, "mul"]), multiply),)


def run(chain: Chain, value: Tensor) -> Tensor:
    """The value after the whole chain."""
    for link in chain:
        value = link.run(value)
    return value


def moment(chain: Chain, measure: Callable[[Callable[[Tensor], Tensor]], float], scale: float = 1.0) -> float:
    """E f(z)² or E f'(z)², as `measure` says, for the chain at `scale`·z; nan if it has none."""
    if not chain:
        return scale**2
    try:
        return measure(lambda value: run(chain, scale * value))
    except ProblemError:  # not elementwise after all, or not finite: whoever needs the gain says so
        return math.nan
