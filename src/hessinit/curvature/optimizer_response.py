"""How an optimizer's steps respond to the gradient: the preconditioner of any optimizer.

Where steps are linear in small changes of the gradient, training on a quadratic leaves stability as
a step answers a change of the weights that alternates in sign by twice that change: the root z = −1
of the closed forms of momentum, Nesterov and Adam. So the optimizer is asked. It steps on copies of
the parameters with the gradients of mini-batches, and a second copy with (−1)ᵗ s v added to them;
the difference of their updates, over s v and the learning rate, is the response.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hessinit.curvature import operators


@dataclass(frozen=True)
class ResponseRules:
    """How an optimizer is asked; chosen with benchmarks/optimizer_limits.py."""

    # An odd number of gradients that come again in one order is orthogonal to what alternates, so
    # that this does not move the second moments.
    most_gradients: int = 7
    warm_steps: int = 56  # of a new optimizer, whose moments begin at 0
    steps: int = 56  # of the response: a multiple of twice the gradients
    averaged: int = 14  # of them, the last
    size: float = 1e-3  # of the change, over the root mean square of each entry's gradients
    # The response is measured twice, later along another direction, of another size and at another
    # rate: together the two must agree to these factors, and the entries to their root mean square.
    times_larger: float = 4.0
    least: float = 0.5
    most: float = 1.15
    spread: float = 0.1


RESPONSE = ResponseRules()


class OptimizerCopy:
    """Optimizers on copies of their parameters, in double precision: steps leave these unmoved."""

    def __init__(self, optimizers: Sequence[Optimizer], parameters: Sequence[nn.Parameter]) -> None:
        groups = [group for part in optimizers for group in part.param_groups]
        held = {id(weight): weight for group in groups for weight in group["params"]}
        held |= {id(weight): weight for weight in parameters}
        copies = {
            key: nn.Parameter(weight.detach().double(), requires_grad=weight.requires_grad)
            for key, weight in held.items()
        }
        self.optimizers = [_transplant(part, copies) for part in optimizers]
        self.parameters = [copies[id(weight)] for weight in parameters]
        self._all = list(copies.values())
        self._start = [weight.detach().clone() for weight in self._all]

    def scale_rates(self, factor: float) -> None:
        for group in (group for part in self.optimizers for group in part.param_groups):
            group["lr"] = group["lr"] * factor

    def update(self, gradient: Tensor) -> Tensor:
        """Step with this flat gradient; return the flat update, which is then undone."""
        sizes = [weight.numel() for weight in self.parameters]
        for weight, piece in zip(self.parameters, gradient.double().split(sizes), strict=True):
            weight.grad = piece.view_as(weight).clone()
        before = [weight.detach().clone() for weight in self.parameters]
        for part in self.optimizers:
            part.step()
        moved = [weight.detach() - old for weight, old in zip(self.parameters, before, strict=True)]
        with torch.no_grad():
            for weight, start in zip(self._all, self._start, strict=True):
                weight.copy_(start)
        return operators.join(moved)


def _transplant(optimizer: Optimizer, copies: dict[int, nn.Parameter]) -> Optimizer:
    """Return the optimizer with its state, over copies of its parameters (by their ids)."""
    memo: dict[int, Any] = dict(copies)
    replaced = {"state", "step", *(name for name in vars(optimizer) if name.endswith("_hooks"))}
    attributes = {
        name: copy.deepcopy(value, memo)
        for name, value in vars(optimizer).items()
        if name not in replaced
    }
    new: Optimizer = type(optimizer).__new__(type(optimizer))
    new.__setstate__({**attributes, "state": collections.defaultdict(dict)})
    new.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return new


def measure_response(
    stepping: OptimizerCopy, gradients: Sequence[Tensor], seed: int, size: float = RESPONSE.size
) -> Tensor:
    """Return the response of each entry, flat; `stepping` steps on. 0 where no gradient is."""
    generator = torch.Generator().manual_seed(seed)
    mean_square = torch.stack(list(gradients)).double().square().mean(0)
    signs = torch.randint(2, mean_square.shape, generator=generator).to(mean_square) * 2 - 1
    change = size * signs * mean_square.sqrt()
    changed = OptimizerCopy(stepping.optimizers, stepping.parameters)
    response = torch.zeros_like(change)
    for step in range(RESPONSE.steps):
        sign = (-1) ** step
        gradient = gradients[step % len(gradients)].double()
        update = stepping.update(gradient)
        difference = changed.update(gradient + sign * change) - update
        if step >= RESPONSE.steps - RESPONSE.averaged:
            response -= sign * difference / RESPONSE.averaged
    return torch.where(change != 0, response / change, 0.0)


def warm_up(stepping: OptimizerCopy, gradients: Sequence[Tensor], steps: int) -> Tensor:
    """Step with the gradients in turn; return the first update."""
    first = stepping.update(gradients[0])
    for step in range(1, steps):
        stepping.update(gradients[step % len(gradients)])
    return first


def is_descent(response: Tensor) -> bool:
    """Whether every weight steps against a change of its gradient."""
    return bool(response.any()) and not bool(
        (response < -RESPONSE.spread * response.abs().mean()).any()
    )


def disagreement(first: Tensor, second: Tensor) -> str:
    """Say why two responses are not those of one linear, diagonal rule; empty if they are."""
    ratio = float(first @ second) / float(first.square().sum())
    spread = float((second / ratio - first).norm() / first.norm())
    if spread > RESPONSE.spread:
        return "its steps are not linear, weight by weight, in a change of the gradient"
    if not RESPONSE.least <= ratio <= RESPONSE.most:
        return "its response to the gradient depends on the rate or on the steps before"
    return ""
