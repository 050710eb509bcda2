"""Data and gradients pushed through real modules, 20 layers deep: what the tests of the errata share."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

DEPTH, WIDTH, EXAMPLES, NETS = 20, 512, 64, 8
Set = Callable[[nn.Sequential], object]


def deep(*modules: Callable[[], nn.Module]) -> nn.Sequential:
    """The given modules, one of them linear, 20 times over."""
    return nn.Sequential(*[module() for _ in range(DEPTH) for module in modules])


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def squared_ratio(after: Tensor, before: Tensor) -> float:
    return (after.double().square().sum() / before.double().square().sum()).item()


def both_passes(model: nn.Module, inputs: Tensor) -> tuple[float, float]:
    """Squared length out over in of the data, and in over out of a random gradient, summed over examples."""
    inputs = inputs.requires_grad_()
    outputs = model(inputs)
    cotangent = torch.randn_like(outputs)
    (gradient,) = torch.autograd.grad(outputs, inputs, cotangent)
    return squared_ratio(outputs, inputs), squared_ratio(gradient, cotangent)


def mean_passes(
    build: Callable[[], nn.Sequential], set_: Set, width: int = WIDTH, scale: float = 1.0
) -> Tensor:
    """Forward and backward ratio, the mean over several networks; one alone may be 50 % off."""
    ratios = []
    for seed in range(NETS):
        torch.manual_seed(seed)
        model = build()
        set_(model)
        ratios.append(both_passes(model, scale * torch.randn(EXAMPLES, width)))
    return torch.tensor(ratios, dtype=torch.float64).mean(0)


def stay_within_two(ratios: Tensor) -> bool:
    return bool(((ratios > 0.5) & (ratios < 2)).all())


def end_at(ratios: Tensor, expected: float) -> bool:
    """Within a factor of 3 of where 20 layers of the wrong factor lead."""
    return bool((ratios.log() - math.log(expected)).abs().max() < math.log(3))


def weights_of(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]
