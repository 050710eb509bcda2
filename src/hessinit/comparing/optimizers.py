"""The optimizers of a comparison, and a rate that warms up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import SGD, Adam, Optimizer

from hessinit.errors import ProblemError, choose

MakeOptimizer = Callable[[list[nn.Parameter], float], Optimizer]

NAMED: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters, lr: SGD(parameters, lr=lr),
    "momentum": lambda parameters, lr: SGD(parameters, lr=lr, momentum=0.9),
    "adam": lambda parameters, lr: Adam(parameters, lr=lr),
}


def check_optimizer(optimizer: Any) -> None:
    """A word, or a function that makes one."""
    if isinstance(optimizer, Optimizer):
        raise ProblemError(
            f"optimizer is a {type(optimizer).__name__} of one model, and every run trains a new one; pass a "
            f"function: lambda parameters, lr: torch.optim.{type(optimizer).__name__}(parameters, lr=lr)."
        )
    if not callable(optimizer):
        choose("optimizer", optimizer, list(NAMED))


def make_optimizer(optimizer: str | MakeOptimizer, model: nn.Module, learning_rate: float) -> Optimizer:
    """An optimizer of the model's trainable parameters."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ProblemError(
            f"the model ({type(model).__name__}) has no trainable parameter, so there is nothing to train; "
            "unfreeze some (requires_grad_()), and give the model before the loss."
        )
    make = NAMED[optimizer] if isinstance(optimizer, str) else optimizer
    made: Any = make(parameters, learning_rate)
    if not isinstance(made, Optimizer):
        raise ProblemError(
            f"optimizer returned a {type(made).__name__}; it must be called as optimizer(parameters, lr) and "
            "return a torch.optim.Optimizer."
        )
    return made


class Warmup:
    """Raises the rate linearly over `steps` steps, up to what the optimizer was made with; 0: not at all.

    >>> import torch
    >>> optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
    >>> warmup = Warmup(optimizer, steps=4)
    >>> for step in (0, 1, 3, 9):
    ...     warmup.set(step)
    ...     print(optimizer.param_groups[0]["lr"])
    0.1
    0.2
    0.4
    0.4
    """

    def __init__(self, optimizer: Optimizer, steps: int) -> None:
        self._groups = [(group, group["lr"]) for group in optimizer.param_groups]
        self._steps = steps

    def set(self, step: int) -> None:
        """Set the rate of the step that comes, counted from 0."""
        if step < self._steps:
            for group, rate in self._groups:
                group["lr"] = rate * (step + 1) / self._steps
