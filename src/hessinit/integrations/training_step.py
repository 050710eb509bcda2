"""The step that a trainer's optimizer takes, in the words of `initialize_`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hessinit.advising.adaptive import Adaptive
from hessinit.advising.reading import read_optimizer
from hessinit.advising.wrapped import unwrap_optimizer
from hessinit.errors import ProblemError
from hessinit.problem.layers import find_layers


def initialization_options(
    optimizer: torch.optim.Optimizer | None, model: nn.Module, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The options of `initialize_`: what the user gave and, for the rest, rate and kind of the optimizer.

    >>> model = nn.Linear(4, 3)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)
    >>> initialization_options(optimizer, model, {"seed": 3})
    {'optimizer': 'momentum', 'momentum': 0.8, 'lr': 0.1, 'seed': 3}
    """
    aimed = "lr" in given or "target" in given
    if optimizer is None:
        if not aimed:
            raise ProblemError(f"there is not one optimizer to read the learning rate from; {_WAY_OUT}.")
        return dict(given)
    try:
        read = _read(unwrap_optimizer(optimizer), model, given.get("layers"))
    except ProblemError as refusal:
        if aimed:
            return dict(given)
        raise ProblemError(f"{refusal} Or {_WAY_OUT}.") from refusal
    if "target" in given:
        del read["lr"]
    return {**read, **given}


_WAY_OUT = "say the step yourself: initialize={'lr': 0.1, 'optimizer': 'sgd'}"


def _read(optimizer: torch.optim.Optimizer, model: nn.Module, layers: Any) -> dict[str, Any]:
    reading = read_optimizer(optimizer, model, find_layers(model, layers))
    # OneCycleLR starts below the rate that it works towards, and notes that one beside it.
    peaks = [float(group["max_lr"]) for group in optimizer.param_groups if "max_lr" in group]
    lr = max(peaks, default=reading.lr)
    if not lr:
        raise ProblemError("the optimizer's learning rate is 0.")
    rule = reading.rule
    if isinstance(rule, Adaptive):
        # Steps that do not grow with the gradient are alike to `initialize_`, RMSprop's too.
        return {"optimizer": "adamw" if rule.kind == "adamw" else "adam", "lr": lr}
    if not rule.momentum:
        return {"optimizer": "sgd", "lr": lr}
    return {"optimizer": "nesterov" if rule.nesterov else "momentum", "momentum": rule.momentum, "lr": lr}
