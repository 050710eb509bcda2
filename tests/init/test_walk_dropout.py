"""Dropout on the way to a weight, on either side of the activation and by hand; against scipy's integrals."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from scipy import integrate
from torch import Tensor, nn
from torch.nn import functional as F
from walking import BOTH, Between, skip_what_torch_cannot_trace

from hessinit.init.apply_scheme import apply_scheme_
from hessinit.init.trace import Context
from hessinit.init.weight_uses import find_weight_uses


def around(function: Callable[[Tensor], Tensor], with_sample: bool) -> tuple[Context, Context]:
    """What the walk finds before the second layer and after the first."""
    first, last = find_weight_uses(Between(function), torch.randn(5, 4) if with_sample else None).uses
    return last.upstream, first.downstream


def mean(function: Callable[[float], float]) -> float:
    """E f(z), z ~ N(0, 1)."""

    def weighed(z: float) -> float:
        return function(z) * math.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)

    return sum(integrate.quad(weighed, *ends, epsabs=1e-12)[0] for ends in ((-12, 0), (0, 12)))


def gelu(z: float) -> float:
    return z * (1 + math.erf(z / math.sqrt(2))) / 2


def gelu_slope(z: float) -> float:
    return (1 + math.erf(z / math.sqrt(2))) / 2 + z * math.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


FUNCTIONS = {
    "tanh": (torch.tanh, math.tanh, lambda z: 1 / math.cosh(z) ** 2),
    "gelu": (F.gelu, gelu, gelu_slope),
    "sigmoid": (torch.sigmoid, sigmoid, lambda z: sigmoid(z) * (1 - sigmoid(z))),
}


@BOTH
@pytest.mark.parametrize("p", [0.4, 0.8])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_dropout_before_a_function_that_is_not_homogeneous_is_a_part_of_it(
    name: str, p: float, with_sample: bool
) -> None:
    function, value, slope = FUNCTIONS[name]
    q = 1 - p
    before, after = around(lambda x: function(F.dropout(x, p)), with_sample)
    assert before.moment == pytest.approx(q * mean(lambda z: value(z / q) ** 2) + p * value(0) ** 2, rel=1e-6)
    assert after.moment == pytest.approx(q * mean(lambda z: (slope(z / q) / q) ** 2), rel=1e-6)
    assert before.keep == after.keep == 1.0
    assert before.dropout_active
    assert before.words == after.words == f"dropout {p:g}, {name}"


@BOTH
@pytest.mark.parametrize("function", [torch.relu, lambda x: F.leaky_relu(x, 0.2), torch.abs])
def test_a_homogeneous_function_lets_the_factor_of_dropout_through(
    function: Callable[[Tensor], Tensor], with_sample: bool
) -> None:
    plain, _ = around(function, with_sample)
    before, after = around(lambda x: function(F.dropout(x, 0.4)), with_sample)
    assert before.moment == pytest.approx(plain.moment)
    assert before.keep == after.keep == pytest.approx(0.6)


@BOTH
def test_of_two_dropouts_around_a_tanh_the_first_alone_is_a_part_of_it(with_sample: bool) -> None:
    before, after = around(lambda x: F.dropout(torch.tanh(F.dropout(x, 0.5)), 0.2), with_sample)
    assert before.keep == after.keep == pytest.approx(0.8)
    assert before.moment == pytest.approx(0.5 * mean(lambda z: math.tanh(2 * z) ** 2), rel=1e-6)


def test_two_dropouts_inside_are_counted_with_all_their_masks() -> None:
    before, _ = around(lambda x: torch.sigmoid(F.dropout(torch.tanh(F.dropout(x, 0.5)) + 1, 0.2)), True)
    z = torch.randn(4_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.manual_seed(1)
    values = torch.sigmoid(F.dropout(torch.tanh(F.dropout(z, 0.5)) + 1, 0.2)).square()
    error = float(values.std()) / math.sqrt(len(z))
    assert abs(float(values.mean()) - before.moment) < 4 * error
    assert error < 1e-3 * before.moment


def test_without_dropout_it_is_named_and_counts_for_nothing() -> None:
    model = Between(lambda x: F.dropout(torch.tanh(F.dropout(x, 0.5)), 0.2))
    before = find_weight_uses(model, dropout=False).uses[1].upstream
    assert before.moment == pytest.approx(mean(lambda z: math.tanh(z) ** 2), rel=1e-6)
    assert before.keep == 1.0
    assert before.words == "dropout 0.5, tanh, dropout 0.2"


@pytest.mark.parametrize(("activation", "p", "depth"), [(nn.Tanh, 0.8, 20), (nn.GELU, 0.4, 1)])
def test_data_keep_their_size_behind_dropout_and_an_activation(
    activation: type[nn.Module], p: float, depth: int
) -> None:
    layers: list[nn.Module] = [nn.Linear(256, 256)]
    for _ in range(depth):
        layers += [nn.Dropout(p), activation(), nn.Linear(256, 256)]
    model = nn.Sequential(*layers)
    apply_scheme_(model, "he", generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    with torch.no_grad():
        size = float(model(torch.randn(2000, 256)).square().mean())
    assert (0.5 < size < 2) if depth > 1 else (0.95 < size < 1.05)


BY_HAND: dict[str, Callable[[Tensor], Tensor]] = {
    "bernoulli": lambda h: h * torch.bernoulli(torch.full_like(h, 0.7)) / 0.7,
    "in_place": lambda h: h * torch.empty_like(h).bernoulli_(0.7).div_(0.7),
    "compared": lambda h: h * (torch.rand_like(h) > 0.3) / 0.7,
    "cast": lambda h: h * ((torch.rand(h.shape) < 0.7).float() / 0.7),
    "filled": lambda h: h.masked_fill(torch.rand_like(h) < 0.3, 0.0) / 0.7,
    "where": lambda h: torch.where(torch.rand_like(h) < 0.7, h / 0.7, torch.zeros_like(h)),
}


@BOTH
@pytest.mark.parametrize("name", BY_HAND)
def test_dropout_by_hand_is_dropout(name: str, with_sample: bool) -> None:
    if name == "cast":
        skip_what_torch_cannot_trace(with_sample)
    before, after = around(lambda x: BY_HAND[name](torch.relu(x)), with_sample)
    assert before.moment == pytest.approx(0.5, rel=1e-6)
    assert before.keep == after.keep == pytest.approx(0.7)
    assert before.dropout_active
    assert "dropout 0.3" in before.words


def test_a_mask_for_whole_examples_is_no_dropout_and_keeps_the_mean() -> None:
    before, _ = around(lambda x: torch.relu(x) / 0.7 * (torch.rand(x.shape[0], 1) < 0.7).float(), True)
    assert before.moment == pytest.approx(0.5, rel=1e-6)
    assert before.keep == 1.0
