"""Groups of an optimizer with rates and decays of their own: one rule, in coordinates where all go alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hessinit.advising.reading import Reading, read_optimizer
from hessinit.advising.wrapped import unwrap_optimizer
from hessinit.curvature.operators import join
from hessinit.problem.layers import Layer


def groups_by_weight(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, dict[str, Any]]:
    """The group of every parameter of the model that the optimizer holds."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(one)]: group
        for group in optimizer.param_groups
        for one in group["params"]
        if id(one) in names
    }


def read_common_rule(
    optimizer: torch.optim.Optimizer, model: nn.Module, layers: tuple[Layer, ...]
) -> Reading:
    """Read it as one that has not stepped, with one rate, and the largest decay for all.

    Refused is what differs beyond: the momentum, Adam's betas, the direction.
    """
    optimizer = unwrap_optimizer(optimizer)
    held = groups_by_weight(optimizer, model)
    decays = [held[layer.parameter].get("weight_decay", 0.0) for layer in layers if layer.parameter in held]
    stand_in = object.__new__(type(optimizer))
    groups = [{**group, "lr": 1.0} for group in optimizer.param_groups]
    for group in groups:
        group.pop("initial_lr", None)
        if "weight_decay" in group and decays:
            group["weight_decay"] = max(decays, key=float)
    stand_in.__dict__.update(param_groups=groups, state={})
    return read_optimizer(stand_in, model, layers)


def slowness_of(rates: Mapping[str, float], leaves: Mapping[str, Tensor]) -> Tensor | None:
    """The largest rate over that of each weight, flat (inf where one rests); None where all are the same.

    >>> slowness_of({"a": 0.1, "b": 0.4}, {"a": torch.zeros(1), "b": torch.zeros(2)})
    tensor([4., 1., 1.])
    """
    largest = max(rates.values())
    if all(rate == largest for rate in rates.values()):
        return None
    ratios = {name: largest / rate if rate else math.inf for name, rate in rates.items()}
    return join([torch.full_like(leaf, ratios[name]).detach() for name, leaf in leaves.items()])
