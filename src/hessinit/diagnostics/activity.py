"""Activations that no longer pass anything on: dead units, saturated entries."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hessinit.curvature.layer_uses import Node
from hessinit.problem.activations import activation_kind
from hessinit.problem.layer_values import Passage

# An entry is saturated when the activation's slope there is below this share of its largest slope.
SATURATED_BELOW = 0.05

# The slope over its largest value, of the activation's input and output (in any order of entries).
_RELATIVE_SLOPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tanh": lambda before, after: 1 - after.square(),
    "sigmoid": lambda before, after: 4 * after * (1 - after),
    "hardsigmoid": lambda before, after: (after > 0) & (after < 1),
    "erf": lambda before, after: (-before.square()).exp(),
}


def activation_name(node: Node | None) -> str:
    """What people call it; "" for none."""
    if node is None:
        return ""
    name = activation_kind(node) or ""
    if name == "hardtanh" and (node._saved_min_val, node._saved_max_val) == (0, 6):
        return "relu6"
    if name == "elu" and math.isclose(node._saved_scale, 1.0507009873554805, rel_tol=1e-6):
        return "selu"
    return name


def count_saturated(passage: Passage) -> tuple[int, int] | None:
    """How many entries are saturated, of how many; None for an activation without bounds.

    At the low end of one that starts at 0 (as relu6 does) an entry is silent, not saturated.
    """
    node: Any = passage.activation
    name = activation_name(node)
    after = passage.after.value
    if name in ("hardtanh", "relu6"):
        # The bounds as the activation itself rounds them.
        low, high = (
            torch.tensor(bound, dtype=after.dtype) for bound in (node._saved_min_val, node._saved_max_val)
        )
        saturated = after >= high if low == 0 else (after <= low) | (after >= high)
    elif name in _RELATIVE_SLOPES:
        saturated = _RELATIVE_SLOPES[name](passage.entry.value, after) < SATURATED_BELOW
    else:
        return None
    return int(saturated.sum()), saturated.numel()


def living_units(passage: Passage) -> Tensor | None:
    """For each unit, whether it gives anything but 0 for some example and position; None where 0 is no end.

    A unit is a channel of a convolution, a feature of anything else.
    """
    node = passage.activation
    before = passage.entry.value
    if node is None or before.ndim == 0:
        return None
    name = activation_name(node)
    if name == "relu" or (name in ("hardtanh", "relu6") and node._saved_min_val == 0):
        alive = before > 0
    elif name == "threshold" and not bool(passage.after.value[before <= node._saved_threshold].any()):
        alive = before > node._saved_threshold
    else:
        return None
    # Judged before the activation, where the weight's own output still has its own order of dimensions.
    is_convolution = type(passage.node).__name__ == "ConvolutionBackward0"
    units = 1 if is_convolution and before.ndim > 1 else before.ndim - 1
    return alive.movedim(units, -1).reshape(-1, before.shape[units]).any(dim=0)
