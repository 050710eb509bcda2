"""Each correction to the paper's text: the right formula holds, and what is printed does not.

Data and gradients are pushed through real modules, 20 layers deep.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from calls import measure
from hessinit.digits import load_digits
from hessinit.init.apply_scheme import apply_scheme_
from hessinit.init.gain import gain

DEPTH, WIDTH, EXAMPLES, NETS = 20, 512, 64, 6
EXACT = {"curvature": "hessian", "network": False, "tolerance": 1e-6}
Set = Callable[[nn.Sequential], object]


def deep(*modules: Callable[[], nn.Module]) -> nn.Sequential:
    """The given modules, one of them linear, 20 times over."""
    return nn.Sequential(*[module() for _ in range(DEPTH) for module in modules])


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def both_passes(model: nn.Module, inputs: Tensor) -> tuple[float, float]:
    """Squared length out over in of the data, and in over out of a random gradient, summed over examples."""
    outputs = model(inputs.requires_grad_())
    cotangent = torch.randn_like(outputs)
    (gradient,) = torch.autograd.grad(outputs, inputs, cotangent)
    lengths = [one.double().square().sum().item() for one in (outputs, inputs, gradient, cotangent)]
    return lengths[0] / lengths[1], lengths[2] / lengths[3]


def mean_passes(build: Callable[[], Any], set_: Set, width: int = WIDTH, scale: float = 1.0) -> Tensor:
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


def with_scheme(scheme: str, **options: object) -> Set:
    return lambda model: apply_scheme_(model, scheme, **options)


def test_relu_needs_root_two_and_one_over_root_two_vanishes_as_a_quarter_a_layer() -> None:
    def relus() -> nn.Sequential:
        return deep(nn.ReLU, linear)

    assert stay_within_two(mean_passes(relus, with_scheme("he")))
    assert stay_within_two(mean_passes(lambda: deep(linear, nn.ReLU), with_scheme("backward")))
    printed = mean_passes(relus, with_scheme("he", gains={"*": 1 / math.sqrt(2)}))
    assert end_at(printed, 0.25**DEPTH)


@pytest.mark.parametrize("keep", [0.6, pytest.param(0.2, marks=pytest.mark.sweep)])
def test_dropout_needs_the_root_of_the_keep_rate_and_dividing_by_it_explodes(keep: float) -> None:
    def dropped() -> nn.Sequential:
        return deep(nn.ReLU, lambda: nn.Dropout(1 - keep), linear)

    assert stay_within_two(mean_passes(dropped, with_scheme("he")))
    printed = with_scheme("he", gains={"*": math.sqrt(2 / keep)}, dropout=False)
    assert end_at(mean_passes(dropped, printed), keep ** (-2 * DEPTH))
    assert end_at(mean_passes(dropped, with_scheme("he", dropout=False)), keep**-DEPTH)


@pytest.mark.parametrize("first", [32, 512])
def test_each_rule_keeps_its_own_measure_and_misses_the_other_by_the_ratio_of_the_widths(first: int) -> None:
    """By norms (the paper) the forward rule is 1/outputs, by units (Glorot) it is 1/inputs."""
    ratio = 16.0 if first == 32 else 1 / 16
    widths = [round(first * ratio ** (layer / DEPTH)) for layer in range(DEPTH + 1)]

    def growth(scheme: str) -> Tensor:
        """Squared lengths, forward and backward, of small data: tanh is the identity, as in the corollary."""
        pairs = list(zip(widths[:-1], widths[1:], strict=True))
        modules = [lambda m=m, n=n: (nn.Tanh(), nn.Linear(m, n)) for m, n in pairs]
        build = lambda: nn.Sequential(*[one for pair in modules for one in pair()])  # noqa: E731
        return mean_passes(build, with_scheme(scheme, gains={"*": 1.0}), first, scale=1e-3)

    by_outputs, by_inputs = growth("forward"), growth("backward")
    assert stay_within_two(torch.stack([by_outputs[0], by_inputs[1]]))  # lengths
    assert stay_within_two(torch.stack([by_inputs[0] / ratio, by_outputs[1] * ratio]))  # units
    # The same numbers, the other measure: off by 16 either way.
    assert end_at(by_inputs[:1], ratio)
    assert end_at(by_outputs[1:], 1 / ratio)


def first_layer_gap(activation: type[nn.Module], scale: float = 1.0) -> float:
    """The exact norm over that of Theorem 1: 64-64-64-64-10 as PyTorch starts it, then scaled."""
    torch.manual_seed(0)
    hidden = [module for _ in range(3) for module in (nn.Linear(64, 64), activation())]
    model = nn.Sequential(*hidden, nn.Linear(64, 10))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    images, labels = load_digits()
    options = {"curvature": "both", "layers": "0", "network": False, "dtype": torch.float64}
    row = measure(model, nn.CrossEntropyLoss(), (images[:128].flatten(1), labels[:128]), **options)["0"]
    return row.norm / row.approximation.value


def test_theorem_1_is_exact_for_relu_close_for_tanh_and_far_off_where_the_activation_bends_at_zero() -> None:
    assert first_layer_gap(nn.ReLU) == pytest.approx(1, rel=2e-3)
    assert 1.02 < first_layer_gap(nn.Tanh) < 2
    assert first_layer_gap(nn.GELU) > 4
    # Smaller weights make it worse, though the inputs get smaller.
    assert first_layer_gap(nn.Tanh, scale=0.01) > 100 * first_layer_gap(nn.Tanh)


def test_a_sigmoid_needs_its_own_slope_and_its_offset_taken_away() -> None:
    def with_gain(factor: float, centred: bool) -> Set:
        @torch.no_grad()
        def set_(model: nn.Sequential) -> None:
            apply_scheme_(model, "he", gains={"*": factor})
            for layer in model[1::2] if centred else []:
                layer.bias.copy_(-layer.weight.sum(1) / 2)  # what f(0) = 1/2 sends on

        return set_

    def sigmoids() -> nn.Sequential:
        return deep(nn.Sigmoid, linear)

    true = gain("sigmoid", backward=True)
    assert 1 / true < 1 / 4  # E f'² < f'(0)² = 1/16
    assert stay_within_two(mean_passes(sigmoids, with_gain(true, centred=True)))
    # Taken for f'(0) = 1, each layer leaves less than f'(0)² of the gradient.
    assert mean_passes(sigmoids, with_gain(1.0, centred=False))[1] < (1 / 16) ** DEPTH
    # The right slope alone is not enough: f(0) = 1/2 drives the units into saturation.
    assert mean_passes(sigmoids, with_gain(true, centred=False))[1] < 1e-4


def losses_of_descent(model: nn.Module, weight: Tensor, batch: tuple[Tensor, Tensor], rate: float) -> Tensor:
    """The squared error at the start and after each of 60 steps in one weight, which is put back."""
    start, losses = weight.detach().clone(), []
    for _ in range(61):
        loss = F.mse_loss(model(batch[0]), batch[1])
        losses.append(loss.detach())
        (gradient,) = torch.autograd.grad(loss, weight)
        with torch.no_grad():
            weight -= rate * gradient
    with torch.no_grad():
        weight.copy_(start)
    return torch.stack(losses)


@pytest.mark.parametrize("kind", ["a quadratic", "a layer near its minimum"])
def test_descent_turns_at_two_over_the_measured_norm(kind: str) -> None:
    torch.manual_seed(0)
    images = load_digits()[0][:128].flatten(1).double()
    if kind == "a quadratic":
        model, batch = nn.Linear(64, 10, bias=False).double(), (images, torch.randn(128, 10).double())
        weight, norm = model.weight, measure(model, nn.MSELoss(), batch, **EXACT)["weight"].norm
        truth = torch.linalg.eigvalsh(images.mT @ images)[-1].item() * 2 / (128 * 10)
        assert norm == pytest.approx(truth, rel=1e-5)
    else:
        model, batch, norm = near_its_minimum(images)
        weight = model[2].weight
        with torch.no_grad():
            weight.add_(1e-4 * F.normalize(torch.randn_like(weight).flatten(), dim=0).view_as(weight))
    for factor in (0.5, 1.0, 1.9):
        assert bool((losses_of_descent(model, weight, batch, factor / norm).diff() < 0).all())
    losses = losses_of_descent(model, weight, batch, 2.2 / norm)
    assert losses[-1] > 10 * losses[0]


def near_its_minimum(images: Tensor) -> tuple[nn.Sequential, tuple[Tensor, Tensor], float]:
    """A tanh network whose targets are its own outputs, and the norm of its second layer."""
    layers = nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 10)
    model = nn.Sequential(*layers).double()
    batch = images, model(images).detach()
    return model, batch, measure(model, nn.MSELoss(), batch, layers="2", **EXACT)["2"].norm
