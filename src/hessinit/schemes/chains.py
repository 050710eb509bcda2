"""Chains of elementwise functions, taken from the record and run again on points of our own.

A dropout is a link of the chain if it has to be: f(z/q) is not f(z)/q unless f is positively homogeneous, as
ReLU. A tanh behind a dropout gives f(z/q) with probability q and f(0) else, and has the second moment
q·E f(z/q)² + (1 − q)·f(0)².
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hessinit.errors import ProblemError
from hessinit.schemes.record import Step


@dataclass(frozen=True)
class Link:
    """One elementwise function and what to call it; with probability 1 − `keep` it gives 0 instead."""

    name: str
    run: Callable[[Tensor], Tensor]
    keep: float = 1.0


Chain = tuple[Link, ...]  # in the order in which they run


def link_of(step: Step) -> Link:
    """The function of an elementwise step of one signal."""
    call = step.call
    assert call is not None
    return Link(step.name, lambda value: call.run(lambda signal: value))


def put_before(step: Step, chain: Chain) -> tuple[Chain, float]:
    """The chain with an elementwise step or a dropout before it, and the share kept by what is left out.

    A dropout is left out where it makes no difference on which side of the chain it stands.
    """
    if step.kind == "elementwise":
        return (link_of(step), *chain), 1.0
    keep = step.keep
    inside = any(link.keep < 1 for link in chain)
    if not chain or not 0 < keep < 1 or (not inside and is_homogeneous(partial(run, chain), 1 / keep)):
        return chain, keep
    return (Link(step.name, lambda value: value / keep, keep), *chain), 1.0


def is_homogeneous(function: Callable[[Tensor], Tensor], factor: float = 2.0) -> bool:
    """Whether `f(c·z) = c·f(z)` for c > 0, as for ReLU: such a function has one gain for all sizes."""
    points = torch.linspace(-8, 8, 65, dtype=torch.float64, device="cpu")
    try:
        with torch.no_grad():
            value, grown = function(points).double(), function(factor * points).double()
    except Exception:  # not elementwise: whoever needs the gain says so
        return True
    return torch.allclose(grown, factor * value, rtol=1e-5, atol=1e-6, equal_nan=True)


def outcomes(chain: Chain) -> list[tuple[float, Chain]]:
    """Without dropout, one chain for each way in which the masks inside may fall, with its probability."""
    for place, link in enumerate(chain):
        if link.keep < 1:
            dropped = Link(link.name, torch.zeros_like)
            return [
                (chance * share, one)
                for chance, now in ((link.keep, replace(link, keep=1.0)), (1 - link.keep, dropped))
                for share, one in outcomes((*chain[:place], now, *chain[place + 1 :]))
            ]
    return [(1.0, chain)]


def function_of(chain: Chain) -> Callable[[Tensor], Tensor] | None:
    """The chain as one function, its root mean square over the masks inside; None for an empty one."""
    ways = outcomes(chain)
    if len(ways) == 1:
        return (lambda value: run(chain, value)) if chain else None
    return lambda value: torch.stack([chance * run(one, value) ** 2 for chance, one in ways]).sum(0).sqrt()


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
    """The value after the whole chain, nothing dropped."""
    for link in chain:
        value = link.run(value)
    return value


def moment(chain: Chain, measure: Callable[[Callable[[Tensor], Tensor]], float], scale: float = 1.0) -> float:
    """E f(z)² or E f'(z)², as `measure` says, for the chain at `scale`·z; nan if it has none."""
    if not chain:
        return scale**2
    try:
        return sum(chance * measure(_at_scale(one, scale)) for chance, one in outcomes(chain))
    except ProblemError:  # not elementwise after all, or not finite: whoever needs the gain says so
        return math.nan


def _at_scale(chain: Chain, scale: float) -> Callable[[Tensor], Tensor]:
    return lambda value: run(chain, scale * value)
