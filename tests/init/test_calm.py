"""Pre-activations are smaller than 1 where the gradient would explode."""

from __future__ import annotations

import math

import pytest
import torch
from initialized_networks import LOSS, digits, mlp
from torch import Tensor, nn

from hessinit.init.apply_scheme import apply_scheme_
from hessinit.init.initialize import initialize_
from hessinit.init.mean_field import MAX_GROWTH, capped_stds
from hessinit.init.weight_uses import find_weight_uses


def stds(model: nn.Module) -> dict[str, float]:
    return capped_stds(find_weight_uses(model, digits()[0], None).uses)


def test_homogeneous_and_short_chains_are_left_at_one() -> None:
    assert stds(mlp(30)) == {}
    assert stds(mlp(6, nn.Tanh)) == {}
    assert stds(mlp(10, nn.GELU)) == {}


def test_the_growth_of_the_gradient_is_brought_down_to_what_it_may_be() -> None:
    """χ of tanh by Monte Carlo, not by the quadrature of the code."""
    found = stds(mlp(30, nn.Tanh))
    (std,) = set(found.values())
    assert len(found) == 29  # all but the last weight, whose output is no pre-activation
    normal = std * torch.randn(4_000_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    signal = torch.tanh(normal).square().mean()
    slope = (1 - torch.tanh(normal).square()).square().mean()
    growth = float(std**2 * slope / signal) ** 29
    assert growth == pytest.approx(MAX_GROWTH, rel=0.06)


def test_the_start_has_the_sizes_asked_for() -> None:
    model = mlp(30, nn.Tanh)
    initialize_(model, LOSS, digits(), lr="auto")
    (std,) = set(stds(model).values())
    seen: list[float] = []

    def note(module: nn.Module, inputs: object, output: Tensor) -> None:
        seen.append(float(output.std()))

    hooks = [part.register_forward_hook(note) for part in model if isinstance(part, nn.Linear)]
    with torch.no_grad():
        model(digits()[0])
    for hook in hooks:
        hook.remove()
    assert seen[:-1] == pytest.approx([std] * 29, rel=0.02)
    assert seen[-1] == pytest.approx(1.0, rel=0.02)


def test_lsuv_takes_gains_as_the_std_of_outputs() -> None:
    model = mlp(4, nn.Tanh)
    plan = apply_scheme_(model, "lsuv", sample=digits()[0], gains={"1": 0.5})
    with torch.no_grad():
        assert float(model[:2](digits()[0]).std()) == pytest.approx(0.5, rel=0.01)
        assert float(model(digits()[0]).std()) == pytest.approx(1.0, rel=0.01)
    assert plan["1"].gain == 0.5
    assert math.isclose(plan["3"].gain, 1.0)
