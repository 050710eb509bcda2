"""Schemes judged by data pushed through real modules: norms, variances and gradients stay what they were."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from networks import LOSS, branch, digits, mlp, seeded
from torch import Tensor, nn

from hessinit.init.apply_scheme import apply_scheme_
from hessinit.init.gain import gain
from hessinit.init.mean_field import LIMITS, preactivation_stds
from hessinit.init.weights import find_weight_uses
from hessinit.problem.problem import Problem
from hessinit.training.initialize import initialize_

sweep = pytest.mark.sweep
SAMPLES = 4096
DENSE = [(64, 16), (16, 64), (64, 64)]


def deep(activation: type[nn.Module], dropout: float, width: int, layers: int = 20) -> nn.Sequential:
    stack: list[nn.Module] = [nn.Linear(width, width)]
    for _ in range(layers - 1):
        stack += [activation(), nn.Dropout(dropout), nn.Linear(width, width)]
    return nn.Sequential(*stack)


def mean_squared_norm(signal: Tensor) -> float:
    return float(signal.detach().flatten(1).square().sum(1).mean())


@pytest.mark.parametrize(("inputs", "outputs"), DENSE)
def test_forward_and_backward_keep_the_norms_of_signal_and_gradient(inputs: int, outputs: int) -> None:
    def ratio(seed: int, scheme: str) -> float:
        layer = nn.Linear(inputs, outputs)
        apply_scheme_(layer, scheme, generator=seeded(seed))
        signal = torch.randn(SAMPLES, inputs, generator=seeded(100 + seed), requires_grad=True)
        if scheme == "forward":
            return mean_squared_norm(layer(signal)) / mean_squared_norm(signal)
        cotangent = torch.randn(SAMPLES, outputs, generator=seeded(200 + seed))
        (gradient,) = torch.autograd.grad(layer(signal), signal, cotangent)
        return mean_squared_norm(gradient) / mean_squared_norm(cotangent)

    for scheme in ("forward", "backward"):  # one small matrix alone is off by several per cent
        assert statistics.mean(ratio(seed, scheme) for seed in range(16)) == pytest.approx(1, abs=0.03)


STACKS = {
    "dense 64 → 16 → 64": lambda: [nn.Linear(64, 16), nn.Linear(16, 64)],
    "dense 256 → 64 → 256": lambda: [nn.Linear(256, 64), nn.Linear(64, 256)],
    "strided 3 → 64": lambda: [nn.Conv2d(3, 64, 5, stride=2), nn.Conv2d(64, 64, 3)],
    "depthwise": lambda: [nn.Conv2d(256, 256, 3, groups=256), nn.Conv2d(256, 256, 3, groups=256)],
    "grouped": lambda: [nn.Conv2d(32, 64, 3, groups=4), nn.Conv2d(64, 32, 3, groups=8)],
    "transposed": lambda: [
        nn.ConvTranspose2d(16, 64, 4, stride=2),
        nn.ConvTranspose2d(64, 64, 3, stride=2, groups=2),
    ],
}


def shape_for(layer: nn.Module) -> tuple[int, ...]:
    if isinstance(layer, nn.Linear):
        return (SAMPLES, layer.in_features)
    assert isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d))
    size = 9 if isinstance(layer, nn.ConvTranspose2d) else 21
    return (32, layer.in_channels, size, size)


def inner(signal: Tensor, layer: nn.Module) -> Tensor:
    """Borders aside: a transposed convolution sums over fewer inputs there. Even, as its period is 2."""
    return signal[..., 6:-6, 6:-6][..., :4, :4] if isinstance(layer, nn.ConvTranspose2d) else signal


def mean_variances(stack: str, activation: type[nn.Module]) -> list[float]:
    """Of the pre-activations of both layers of a stack under `he`, over 32 draws of the weights."""
    found = []
    for seed in range(32):
        first, second = STACKS[stack]()
        apply_scheme_(nn.Sequential(first, activation(), second), "he", generator=seeded(seed))
        middle = first(torch.randn(shape_for(first), generator=seeded(100 + seed)))
        pairs = (middle, first), (second(activation()(middle)), second)
        found.append([float(inner(value.detach(), layer).square().mean()) for value, layer in pairs])
    return list(torch.tensor(found).mean(0))


BENT = ("dense 256 → 64 → 256", "strided 3 → 64")
CASES = [*((one, nn.ReLU) for one in STACKS if one != "depthwise"), *((one, nn.GELU) for one in BENT)]
SLOW = [pytest.param(one, nn.Tanh, marks=sweep) for one in ("grouped", "strided 3 → 64")]
SLOW.append(pytest.param("depthwise", nn.ReLU, marks=sweep))


@pytest.mark.parametrize(("stack", "activation"), [*CASES, *SLOW])
def test_he_keeps_the_variance_of_preactivations(stack: str, activation: type[nn.Module]) -> None:
    assert mean_variances(stack, activation) == pytest.approx([1, 1], abs=0.03)


@pytest.mark.parametrize(
    ("activation", "dropout"),
    [
        (nn.ReLU, 0.8), (nn.Tanh, 0.4), (nn.GELU, 0.8),
        *(pytest.param(*one, marks=sweep) for one in ((nn.ReLU, 0.4), (nn.Tanh, 0.8), (nn.GELU, 0.4))),
    ],
)  # fmt: skip
def test_twenty_layers_with_dropout_keep_the_variance(dropout: float, activation: type[nn.Module]) -> None:
    model = deep(activation, dropout, 512)

    def end_variance(seed: int, **options: bool) -> float:
        torch.manual_seed(seed)  # the same seed: the weights must not be the numbers of the data
        apply_scheme_(model, "he", generator=seeded(seed), **options)
        with torch.no_grad():
            return float(model(torch.randn(256, 512)).square().mean())

    found = [end_variance(seed) for seed in range(6)]
    # Single draws scatter, the more the less linear the activation: one in six may miss, the mean may not.
    assert 0.5 <= sum(found) / len(found) <= 2, found
    assert sum(0.5 <= one <= 2 for one in found) >= 5, found
    assert not 0.5 <= end_variance(0, dropout=False) <= 2


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3)])
def test_every_gate_and_part_of_a_fused_projection_has_its_own_fans(kind: Any, gates: int) -> None:
    layer = kind(300, 200)
    apply_scheme_(layer, "glorot", sample=torch.randn(5, 2, 300), generator=seeded(0))
    for weight, fan_in in ((layer.weight_ih_l0, 300), (layer.weight_hh_l0, 200)):
        for gate in weight.detach().chunk(gates):
            assert float(gate.std()) == pytest.approx((2 / (fan_in + 200)) ** 0.5, rel=0.02)
    layer = kind(16, 16)
    apply_scheme_(layer, "orthogonal", sample=torch.randn(5, 2, 16), generator=seeded(0))
    for gate in layer.weight_hh_l0.chunk(gates):
        assert torch.allclose(gate @ gate.T, torch.eye(16), atol=1e-5)
    attention, signal = nn.MultiheadAttention(256, 4), torch.randn(5, 2, 256)
    problem = Problem(attention, LOSS, (signal, signal), forward=lambda model, x: model(x, x, x)[0])
    apply_scheme_(problem, "glorot", generator=seeded(0))
    for block in attention.in_proj_weight.detach().chunk(3):
        assert float(block.std()) == pytest.approx((2 / 512) ** 0.5, rel=0.02)


def test_lsuv_gives_every_layer_unit_variance() -> None:
    torch.manual_seed(0)
    convolution = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    model = nn.Sequential(*convolution, nn.Linear(72, 30), nn.Tanh(), nn.Linear(30, 10))
    sample = torch.rand(64, 1, 8, 8)
    apply_scheme_(model, "lsuv", sample=sample, generator=seeded(0))
    signal = sample
    for layer in model:
        signal = layer(signal)
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            assert float(signal.detach().std()) == pytest.approx(1, rel=2e-3)


@pytest.mark.parametrize("training", [True, False])
def test_lsuv_counts_dropout_whether_or_not_it_runs(training: bool) -> None:
    torch.manual_seed(0)
    model = deep(nn.ReLU, 0.5, 256, layers=10).train(training)
    sample = torch.randn(512, 256)
    apply_scheme_(model, "lsuv", sample=sample, generator=seeded(0))
    assert 0.7 < float(model.train()(sample).detach().var()) < 1.4


def test_a_scaled_residual_network_keeps_its_stream_bounded() -> None:
    model = nn.Sequential(*(branch(64) for _ in range(20)))
    signal = torch.randn(256, 64)
    plan = apply_scheme_(model, "he", residual="scaled", generator=seeded(0))
    assert [layer.closes_residual for layer in plan] == [False, True] * 20
    assert plan[1].std == pytest.approx((2**0.5 / 8 / 20**0.5,))
    assert float(model(signal).detach().var()) < 5
    plan = apply_scheme_(model, "he", generator=seeded(0))
    assert float(model(signal).detach().var()) > 1e4
    assert any("20 residual branches" in note for note in plan.notes)


def end_variances(activation: type[nn.Module], dropout: float, *, corrected: bool) -> list[float]:
    found = []
    for seed in range(4):
        torch.manual_seed(seed)
        model = deep(activation, dropout, 256)
        apply_scheme_(model, "he", gains=None if corrected else {"*": gain(activation), "0": 1.0})
        with torch.no_grad():
            found.append(float(model(torch.randn(512, 256)).square().mean()))
    return found


@pytest.mark.parametrize(
    ("activation", "dropout", "plain"),
    [
        (nn.SiLU, 0.8, 15),
        *(pytest.param(*one, marks=sweep) for one in ((nn.GELU, 0.8, 2.5), (nn.SiLU, 0.4, 5))),
    ],
)
def test_variances_stay_where_a_gain_alone_lets_them_grow(
    activation: Any, dropout: float, plain: float
) -> None:
    assert statistics.median(end_variances(activation, dropout, corrected=False)) > plain
    assert 0.4 < statistics.median(end_variances(activation, dropout, corrected=True)) < 2.5


def test_homogeneous_bounded_shallow_convolutional_and_normalized_networks_need_no_correction() -> None:
    activations = (nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.ELU)
    normalized = [part for _ in range(20) for part in (nn.Linear(64, 64), nn.LayerNorm(64), nn.SiLU())]
    convolutions = [part for _ in range(20) for part in (nn.Conv2d(8, 8, 3), nn.SiLU())]
    models = [*(deep(one, 0.4, 256) for one in activations), deep(nn.GELU, 0.4, 64, layers=3)]
    for model in (*models, nn.Sequential(*convolutions), nn.Sequential(*normalized)):
        plan = apply_scheme_(model, "he", dry_run=True)
        assert {layer.variance_correction for layer in plan} == {1.0}


def test_the_factor_is_its_own_column_beside_the_true_gain() -> None:
    plan = apply_scheme_(deep(nn.SiLU, 0.4, 256), "he", dry_run=True)
    last = plan[-1]
    assert last.gain == pytest.approx(1.6765, abs=1e-4)
    assert 0.8 < last.variance_correction < 0.95
    assert last.std[0] == pytest.approx(last.gain * last.dropout_factor * last.variance_correction / 16)


def stds(model: nn.Module) -> dict[str, float]:
    return preactivation_stds(find_weight_uses(model, digits()[0], None).uses)


def test_the_growth_of_the_gradient_is_brought_down_to_what_it_may_be() -> None:
    """χ of tanh by Monte Carlo, not by the quadrature of the code."""
    assert stds(mlp(30)) == stds(mlp(6, nn.Tanh)) == stds(mlp(10, nn.GELU)) == {}
    found = stds(mlp(30, nn.Tanh))
    (std,) = set(found.values())
    assert len(found) == 29  # all but the last weight, whose output is no pre-activation
    normal = std * torch.randn(4_000_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    signal = torch.tanh(normal).square().mean()
    slope = (1 - torch.tanh(normal).square()).square().mean()
    growth = float(std**2 * slope / signal) ** 29
    assert growth == pytest.approx(LIMITS.growth, rel=0.06)


@pytest.mark.parametrize("activation", [nn.GELU, nn.SiLU])
def test_examples_of_a_deep_chain_stay_of_one_size(activation: type[nn.Module]) -> None:
    """The power to which a layer raises the ratio of two examples, from the ratio itself by Monte Carlo."""
    found = stds(mlp(24, activation))
    (std,) = set(found.values())
    assert 3 < std < 9
    normal = torch.randn(4_000_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    first, second = (activation()(size * std * normal).square().mean().log() for size in (0.99, 1.01))
    power = float((second - first) / (2 * math.log(1.01 / 0.99)))
    assert power**23 == pytest.approx(LIMITS.small_divergence, rel=0.02)


def test_the_initialization_has_the_sizes_asked_for() -> None:
    model = mlp(30, nn.Tanh)
    initialize_(model, LOSS, digits(), lr="auto")
    (std,) = set(stds(model).values())
    seen, signal = [], digits()[0]
    for layer in model:
        signal = layer(signal).detach()
        seen += [float(signal.std())] if isinstance(layer, nn.Linear) else []
    assert seen[:-1] == pytest.approx([std] * 29, rel=0.02)
    assert seen[-1] == pytest.approx(1.0, rel=0.02)
