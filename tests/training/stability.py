"""Where an optimizer of torch stops being stable, found by running it on a quadratic of known spectrum."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

SPECTRUM = torch.tensor([0.01, 0.3, 1.0, 2.5], dtype=torch.float64)
STEPS = 600
START, TOO_FAR = 1e-3, 100.0  # no farther, or squared gradients would move even a frozen second moment

Build = Callable[[list[Tensor], float], torch.optim.Optimizer]


def grows(
    build: Build, lr: float, prepare: Callable[[torch.optim.Optimizer, Tensor], None] | None = None
) -> bool:
    """Whether ½ Σ λ w² is larger after many steps than it was after some of them."""
    weights = torch.full_like(SPECTRUM, START).requires_grad_()
    optimizer = build([weights], lr)
    if prepare is not None:
        prepare(optimizer, weights)
    early = math.inf
    for step in range(STEPS):
        weights.grad = SPECTRUM * weights.detach()
        optimizer.step()
        size = float(weights.detach().abs().max())
        if not math.isfinite(size) or size > TOO_FAR:
            return True
        if step == STEPS // 3:
            early = size
    # In the stable range the slow directions are still there, and shrink: the fast one is what can grow.
    return float(weights.detach()[-1].abs()) > early


def edge(build: Build, prepare: Callable[[torch.optim.Optimizer, Tensor], None] | None = None) -> float:
    """The largest stable rate, by bisection to a thousandth."""
    low, high = 1e-4, 1e4
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if grows(build, middle, prepare) else (middle, high)
    return math.sqrt(low * high)
