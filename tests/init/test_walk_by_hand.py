"""Activations and norms written out in tensor operations; moments against scipy's integrals."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from scipy import integrate
from torch import Tensor, nn
from torch.nn import functional as F
from walking import BOTH, Between, skip_what_torch_cannot_trace

from hessinit.init.weight_uses import TracedWeights, find_weight_uses


def walk(function: Callable[[Tensor], Tensor], with_sample: bool) -> TracedWeights:
    return find_weight_uses(Between(function), torch.randn(5, 4) if with_sample else None)


def mean_square(function: Callable[[float], float]) -> float:
    """E f(z)², z ~ N(0, 1), with a break at 0 for the kinks."""

    def weighed(z: float) -> float:
        return function(z) ** 2 * math.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)

    return sum(integrate.quad(weighed, *ends, epsabs=1e-12)[0] for ends in ((-12, 0), (0, 12)))


def relu(z: float) -> float:
    return max(z, 0.0)


def silu(z: float) -> float:
    return z / (1 + math.exp(-z))


def tanh_times(z: float) -> float:
    return z * math.tanh(z)


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[float], float]]] = {
    "maximum": (lambda x: torch.maximum(x, torch.zeros_like(x)), relu),
    "masked_fill": (lambda x: x.masked_fill(x < 0, 0.0), relu),
    "max_of_two": (lambda x: torch.max(x, x.new_zeros(())), relu),
    "max_by_name": (lambda x: torch.max(x, other=torch.zeros(x.shape)), relu),
    "sliced_zeros": (lambda x: torch.maximum(x, torch.zeros_like(x).unsqueeze(1)[:, 0]), relu),
    "constant_zeros": (lambda x: torch.maximum(x, torch.zeros(6)), relu),
    "step": (lambda x: (x > 0).float() * x, relu),
    "other_step": (lambda x: (1 - (x < 0).to(x.dtype)) * x, relu),
    "clipped": (lambda x: torch.minimum(x, torch.full_like(x, 0.5)), lambda z: min(z, 0.5)),
    "squared": (lambda x: torch.where(x > 0, x**2, torch.zeros_like(x)), lambda z: relu(z) ** 2),
    "named": (lambda x: torch.where(x > 0, input=x, other=torch.full_like(x, fill_value=0)), relu),
    "cast": (lambda x: x * torch.sigmoid(x.float()).to(x.dtype), silu),
    "cloned": (lambda x: x.clone() * torch.sigmoid(x.contiguous()), silu),
    "viewed": (lambda x: torch.tanh(x.view(x.shape)) * x, tanh_times),
    "viewed_as": (lambda x: torch.tanh(x).contiguous().view_as(x) * x, tanh_times),
}


@BOTH
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_by_hand_is_one_function(name: str, with_sample: bool) -> None:
    if name == "max_by_name":
        skip_what_torch_cannot_trace(with_sample)
    function, value = ACTIVATIONS[name]
    found = walk(function, with_sample)
    assert found.uses[1].upstream.moment == pytest.approx(mean_square(value), rel=1e-6)
    assert found.uses[1].upstream.end == found.uses[0].downstream.end == "weight"
    assert found.notes == ()


def relu_by_writing(features: Tensor) -> Tensor:
    features = features.clone()
    features[features < 0] = 0
    return features


def leaky_by_writing(features: Tensor) -> Tensor:
    features = features.clone()
    features[features < 0] = 0.1 * features[features < 0]
    return features


def test_a_relu_by_writing_into_the_negatives_is_one_and_anything_else_is_noted() -> None:
    assert walk(relu_by_writing, True).uses[1].upstream.moment == pytest.approx(0.5, rel=1e-6)
    assert "input of last comes from an unknown function" in walk(leaky_by_writing, True).notes[0]


class Masked(nn.Module):
    """A mask that comes with the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(features)).masked_fill(mask.unsqueeze(-1) == 0, 0.0))


def test_a_mask_of_another_signal_is_looked_through() -> None:
    for sample in (None, (torch.randn(5, 4), torch.ones(5))):
        forward = None if sample is None else lambda model, given: model(*given)
        before = find_weight_uses(Masked(), sample, forward).uses[1].upstream
        assert (before.words, before.end) == ("relu", "weight")


def test_an_outer_product_of_a_signal_with_itself_is_no_function_of_one_number() -> None:
    found = walk(lambda x: (torch.tanh(x.unsqueeze(1)) * x.unsqueeze(2)).mean(1), True)
    assert found.uses[1].upstream.end == "product"


class Swish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(()))

    def forward(self, features: Tensor) -> Tensor:
        return features * torch.sigmoid(self.slope * features)


@BOTH
def test_a_swish_with_a_learnable_slope_is_taken_at_slope_one(with_sample: bool) -> None:
    before = walk(Swish(), with_sample).uses[1].upstream
    assert before.moment == pytest.approx(mean_square(silu), rel=1e-6)


NORMALIZED: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "vector_norm": lambda x: x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + 1e-6),
    "root": lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True)),
    "softmax": lambda x: x.exp() / x.exp().sum(-1, keepdim=True),
}


@BOTH
@pytest.mark.parametrize("name", NORMALIZED)
def test_what_is_divided_by_its_length_is_not_of_size_one(name: str, with_sample: bool) -> None:
    found = walk(NORMALIZED[name], with_sample)
    assert found.uses[1].upstream.trouble == "normalize by hand"
    assert not found.uses[0].norm_follows
    rows = NORMALIZED["norm"](torch.randn(50, 6))
    assert float(rows.square().mean()) == pytest.approx(1 / 6)


@BOTH
def test_what_is_divided_by_its_deviation_is_a_norm(with_sample: bool) -> None:
    found = walk(lambda x: F.relu(x / x.std(-1, keepdim=True)), with_sample)
    assert found.uses[1].upstream.end == "norm"
    assert found.uses[1].upstream.moment == pytest.approx(0.5)
    assert found.uses[0].norm_follows
