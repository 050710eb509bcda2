"""What the walk finds before and after a weight; moments against closed forms and scipy's integrals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from scipy import integrate
from torch import nn
from torch.nn import functional as F

from hessinit.init.trace import WeightUse
from hessinit.init.weight_uses import find_weight_uses

BOTH = pytest.mark.parametrize("with_sample", [True, False], ids=["run", "traced"])


def sites_of(model: nn.Module, sample: torch.Tensor, with_sample: bool) -> dict[str, WeightUse]:
    return {site.parameter: site for site in find_weight_uses(model, sample if with_sample else None).uses}


def mean_square(function: Callable[[float], float]) -> float:
    """E f(z)², z ~ N(0, 1), with a break at 0 for the kinks."""

    def weighed(z: float) -> float:
        return function(z) ** 2 * math.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)

    halves = (integrate.quad(weighed, *ends, epsabs=1e-12) for ends in ((-12, 0), (0, 12)))
    return sum(value for value, _ in halves)


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


class Between(nn.Module):
    """Two layers with a function between them."""

    def __init__(
        self, function: Callable[[torch.Tensor], torch.Tensor], width: int = 6, inner: int = 6
    ) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, width), nn.Linear(inner, 3), function

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self.first(features)))


FUNCTIONS: dict[str, tuple[Callable[[Any], Any], Callable[[float], float], Callable[[float], float]]] = {
    "relu": (F.relu, lambda z: max(z, 0), lambda z: float(z > 0)),
    "method": (lambda x: x.relu().view(-1, 6), lambda z: max(z, 0), lambda z: float(z > 0)),
    "inplace": (lambda x: x.relu_(), lambda z: max(z, 0), lambda z: float(z > 0)),
    "scaled_tanh": (
        lambda x: 1.7 * torch.tanh(x),
        lambda z: 1.7 * math.tanh(z),
        lambda z: 1.7 / math.cosh(z) ** 2,
    ),
    "silu_by_hand": (
        lambda x: x * torch.sigmoid(x),
        lambda z: z * sigmoid(z),
        lambda z: sigmoid(z) * (1 + z * (1 - sigmoid(z))),
    ),
    "leaky_by_where": (
        lambda x: torch.where(x > 0, x, 0.1 * x),
        lambda z: z if z > 0 else 0.1 * z,
        lambda z: 1 if z > 0 else 0.1,
    ),
    "squared_relu": (lambda x: F.relu(x) ** 2, lambda z: max(z, 0) ** 2, lambda z: 2 * max(z, 0)),
    "two_in_a_row": (
        lambda x: torch.sin(torch.clamp(x, min=0)),
        lambda z: math.sin(max(z, 0)),
        lambda z: math.cos(z) * (z > 0),
    ),
    "shifted": (lambda x: x + 0.5, lambda z: z + 0.5, lambda z: 1.0),
}


@BOTH
@pytest.mark.parametrize("name", FUNCTIONS)
def test_moments_are_those_of_the_composite_function(name: str, with_sample: bool) -> None:
    function, value, slope = FUNCTIONS[name]
    sites = sites_of(Between(function), torch.randn(5, 4), with_sample)
    assert sites["last.weight"].upstream.moment == pytest.approx(mean_square(value), rel=1e-6)
    assert sites["first.weight"].downstream.moment == pytest.approx(mean_square(slope), rel=1e-6)
    assert sites["last.weight"].upstream.end == sites["first.weight"].downstream.end == "weight"
    assert (sites["first.weight"].upstream.end, sites["last.weight"].downstream.end) == ("input", "output")


@BOTH
def test_a_prelu_counts_with_the_mean_over_its_channels(with_sample: bool) -> None:
    activation = nn.PReLU(6)
    with torch.no_grad():
        activation.weight.copy_(torch.tensor([-0.5, 0.1, 0.2, 0.3, 0.9, 1.5]))
    site = sites_of(Between(activation), torch.randn(5, 4), with_sample)["last.weight"]
    slopes = activation.weight.detach().double().numpy()
    assert site.upstream.moment == pytest.approx((1 + numpy.mean(slopes**2)) / 2, rel=1e-6)


@BOTH
@pytest.mark.parametrize("training", [True, False])
def test_dropout_counts_in_either_mode(with_sample: bool, training: bool) -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.Dropout2d(0.2), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, 3)
    )
    model.train(training)
    sites = sites_of(model, torch.randn(3, 2, 5, 5), with_sample)
    before, after = sites["5.weight"].upstream, sites["0.weight"].downstream
    assert before.words == after.words == "dropout 0.2, relu, dropout 0.5"
    assert before.keep == after.keep == pytest.approx(0.8 * 0.5)
    assert before.dropout_active is after.dropout_active is training
    assert before.moment == pytest.approx(0.5)


@BOTH
def test_alpha_dropout_keeps_the_size(with_sample: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.SELU(), nn.AlphaDropout(0.3), nn.Linear(6, 2))
    before = sites_of(model, torch.randn(3, 4), with_sample)["3.weight"].upstream
    assert before.keep == 1.0
    assert before.words == "selu, alpha_dropout 0.3"
    assert before.moment == pytest.approx(1.0, abs=1e-6)


class GatedByChunks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 12), nn.Linear(6, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        value, gate = self.first(features).chunk(2, dim=-1)
        return self.last(value * torch.sigmoid(gate) * gate)


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.last = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.last(F.dropout(F.silu(self.gate(features)), 0.25) * self.up(features))


@BOTH
def test_second_moments_of_a_gate_and_what_it_gates_multiply(with_sample: bool) -> None:
    silu, half = mean_square(lambda z: z * sigmoid(z)), mean_square(sigmoid)
    sample = torch.randn(3, 4)
    chunked = sites_of(GatedByChunks(), sample, with_sample)
    assert chunked["last.weight"].upstream.moment == pytest.approx(silu, rel=1e-6)
    assert chunked["first.weight"].blocks == (6, 6)
    swiglu = sites_of(SwiGLU(), sample, with_sample)
    assert swiglu["last.weight"].upstream.moment == pytest.approx(silu, rel=1e-6)
    assert swiglu["last.weight"].upstream.keep == 0.75
    assert swiglu["gate.weight"].downstream.end == swiglu["up.weight"].downstream.end == "product"
    glu = sites_of(nn.Sequential(nn.Linear(4, 12), nn.GLU(), nn.Linear(6, 3)), sample, with_sample)
    assert glu["2.weight"].upstream.moment == pytest.approx(half, rel=1e-6)
    assert glu["0.weight"].blocks == (6, 6)


class SkipByConcatenation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 6, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(6, 2, 2, stride=2), nn.Conv2d(8, 2, 3, padding="same")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        fine = F.relu(self.down(images))
        coarse = F.dropout(self.up(F.max_pool2d(fine, 2)), 0.5)
        return self.out(torch.cat([fine, coarse], dim=1))


def test_what_is_joined_counts_by_its_width() -> None:
    sites = sites_of(SkipByConcatenation(), torch.randn(2, 1, 4, 4), True)
    before = sites["out.weight"].upstream
    assert before.end == "cat"
    assert before.moment == pytest.approx((6 * 0.5 + 2 * 1.0) / 8)
    # With dropout the mean square is (6·½ + 2·1/0.5)/8: `keep` says by how much it grew.
    assert before.moment / before.keep == pytest.approx((6 * 0.5 + 2 * 2.0) / 8)
    assert sites["up.weight"].upstream.words == "relu"
    assert (sites["up.weight"].kind, sites["up.weight"].stride) == ("transposed convolution", (2, 2))


@BOTH
def test_a_softmax_before_a_weight_is_trouble_and_attention_is_not(with_sample: bool) -> None:
    trouble = sites_of(Between(lambda x: F.softmax(x, dim=-1)), torch.randn(3, 4), with_sample)
    assert trouble["last.weight"].upstream.trouble == "softmax"
    assert trouble["first.weight"].upstream.trouble == ""
    mixing = Between(lambda x: F.softmax(x @ x.transpose(-2, -1), dim=-1) @ x)
    sites = sites_of(mixing, torch.randn(2, 3, 4), with_sample)
    assert sites["last.weight"].upstream.trouble == ""
    assert sites["last.weight"].upstream.end == "mix"


def test_a_function_without_a_mean_square_is_trouble_for_whoever_needs_it() -> None:
    before = sites_of(Between(torch.log), torch.randn(3, 4), False)["last.weight"].upstream
    assert before.trouble == "log"
    assert math.isnan(before.moment)


class RMSNormByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features * torch.rsqrt(features.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain


def divide_by_root_mean_square(features: torch.Tensor) -> torch.Tensor:
    return features / features.square().mean(-1, keepdim=True).sqrt()


def standardize(features: torch.Tensor) -> torch.Tensor:
    centred = features - features.mean(-1, keepdim=True)
    return F.relu(centred / (features.var(-1, keepdim=True) + 1e-5).sqrt())


@BOTH
@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(6),
        nn.LayerNorm(6),
        nn.GroupNorm(2, 6),
        RMSNormByHand(),
        divide_by_root_mean_square,
        standardize,
    ],
)
def test_a_norm_that_follows_is_seen_also_when_written_by_hand(norm: Any, with_sample: bool) -> None:
    sites = sites_of(Between(norm), torch.randn(5, 4), with_sample)
    assert sites["first.weight"].norm_follows
    assert not sites["last.weight"].norm_follows
    assert sites["last.weight"].upstream.end == "norm"
    assert sites["last.weight"].upstream.moment == pytest.approx(0.5 if norm is standardize else 1.0)


@BOTH
def test_a_norm_behind_an_activation_does_not_follow(with_sample: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3))
    assert not sites_of(model, torch.randn(3, 4), with_sample)["0.weight"].norm_follows


@BOTH
def test_constant_scales_count_and_learnable_ones_do_not(with_sample: bool) -> None:
    scale = nn.Parameter(torch.tensor(1e-5))
    sample = torch.randn(3, 4)
    learnable = Between(lambda x: x * scale)
    learnable.scale = scale
    assert sites_of(Between(lambda x: x / 2), sample, with_sample)[
        "last.weight"
    ].upstream.moment == pytest.approx(0.25)
    assert sites_of(learnable, sample, with_sample)["last.weight"].upstream.moment == 1.0
