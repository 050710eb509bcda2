"""Which activations are admissible, and what Theorem 1 leaves out where they bend at 0."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from pushing import DEPTH, Set, deep, linear, mean_passes, stay_within_two, weights_of
from torch import Tensor, nn

from hessinit.digits import load_digits
from hessinit.init.apply_scheme import apply_scheme_
from hessinit.init.gain import gain
from hessinit.measurement.measure import measure


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        (torch.tanh, (0, 1, 0)),
        (torch.sigmoid, (1 / 2, 1 / 4, 0)),
        (F.gelu, (0, 1 / 2, math.sqrt(2 / math.pi))),
        (F.silu, (0, 1 / 2, 1 / 2)),
        (F.softplus, (math.log(2), 1 / 2, 1 / 4)),
    ],
)
def test_the_value_and_slopes_of_activations_at_zero(
    activation: Callable[[Tensor], Tensor], expected: tuple[float, ...]
) -> None:
    zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
    value = activation(zero)
    (slope,) = torch.autograd.grad(value, zero, create_graph=True)
    (bend,) = torch.autograd.grad(slope, zero)
    assert (value.item(), slope.item(), bend.item()) == pytest.approx(expected, abs=1e-12)


def first_layer_gap(activation: type[nn.Module], scale: float = 1.0, seed: int = 0) -> float:
    """The exact norm over that of Theorem 1: 64-64-64-64-10 as PyTorch starts it, then scaled."""
    torch.manual_seed(seed)
    hidden = [module for _ in range(3) for module in (nn.Linear(64, 64), activation())]
    model = nn.Sequential(*hidden, nn.Linear(64, 10))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    images, labels = load_digits()
    batch = images[:128].flatten(1), labels[:128]
    report = measure(
        model,
        nn.CrossEntropyLoss(),
        batch,
        curvature="both",
        layers="0",
        network=False,
        dtype=torch.float64,
    )
    approximation = report["0"].approximation
    assert approximation is not None
    return report["0"].norm / approximation.value


def test_theorem_1_is_exact_for_relu_close_for_tanh_and_far_off_where_the_activation_bends_at_zero() -> None:
    assert first_layer_gap(nn.ReLU) == pytest.approx(1, rel=2e-3)
    assert 1.02 < first_layer_gap(nn.Tanh) < 2
    assert first_layer_gap(nn.SiLU) > 3
    assert first_layer_gap(nn.GELU) > 4


def test_smaller_weights_make_theorem_1_worse_though_the_inputs_get_smaller() -> None:
    assert first_layer_gap(nn.Tanh, scale=0.01) > 100 * first_layer_gap(nn.Tanh)


def test_a_sigmoid_needs_its_own_slope_and_its_offset_taken_away() -> None:
    def with_gain(factor: float, centred: bool) -> Set:
        @torch.no_grad()
        def set_(model: nn.Sequential) -> None:
            apply_scheme_(model, "he", gains={"*": factor})
            for layer in weights_of(model) if centred else []:
                layer.bias.copy_(-layer.weight.sum(1) / 2)  # what f(0) = 1/2 sends on

        return set_

    true = gain("sigmoid", backward=True)
    assert 1 / true < torch.sigmoid(torch.zeros(())).item() * 0.5  # E f'² < f'(0)² = 1/16

    def sigmoids() -> nn.Sequential:
        return deep(nn.Sigmoid, linear)

    assert stay_within_two(mean_passes(sigmoids, with_gain(true, centred=True)))
    # Taken for f'(0) = 1, each layer leaves less than f'(0)² of the gradient.
    assert mean_passes(sigmoids, with_gain(1.0, centred=False))[1] < (1 / 16) ** DEPTH
    # The right slope alone is not enough: f(0) = 1/2 drives the units into saturation.
    assert mean_passes(sigmoids, with_gain(true, centred=False))[1] < 1e-4
