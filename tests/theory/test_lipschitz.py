"""The constants of the table against Jacobians, and chains against products by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from measured_products import measured_products
from torch import Tensor, nn
from torch.nn import functional as F

from hessinit.curvature.engines import LanczosSettings
from hessinit.products.lipschitz import Chain, read_chain

EFFORT = LanczosSettings(1e-9, 200, 0)
Map = Callable[[Tensor], Tensor]


def constant_of(function: Map, inputs: Tensor) -> float | str:
    start = inputs.double().requires_grad_()
    chain = read_chain(function(start.clone()), [start], EFFORT)
    return chain if isinstance(chain, str) else math.exp(sum(chain.logarithms))


def largest_jacobian(function: Map, inputs: Tensor) -> float:
    jacobian = torch.func.jacrev(function)(inputs.double())
    return torch.linalg.matrix_norm(jacobian.reshape(-1, inputs.numel()), 2).item()


TIGHT_ACTIVATIONS: list[Map] = [
    nn.ReLU(), nn.Tanh(), nn.LeakyReLU(0.1), nn.LeakyReLU(3.0), nn.ELU(), nn.ELU(2.0), nn.SELU(),
    nn.CELU(2.0), nn.Hardtanh(), nn.ReLU6(), nn.Sigmoid(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Mish(),
    nn.Softplus(), nn.Hardswish(), nn.Hardsigmoid(), nn.LogSigmoid(), nn.Softshrink(),
    torch.erf, torch.sin, torch.abs,
    nn.PReLU(init=1.7).double(), lambda x: F.elu(x, inplace=True),
    lambda x: F.leaky_relu(x, 0.2, inplace=True),
    lambda x: x.clamp(-1, 1), lambda x: -x,
]  # fmt: skip


@pytest.mark.parametrize("function", TIGHT_ACTIVATIONS)
def test_the_constant_of_an_activation_is_its_largest_slope(function: Map) -> None:
    points = torch.linspace(-20, 20, 400_001, dtype=torch.float64, requires_grad=True)
    (slopes,) = torch.autograd.grad(function(points.clone()).sum(), points)
    steepest = slopes.abs().max().item()
    assert steepest <= constant_of(function, torch.randn(3)) <= steepest * 1.0005


IMAGES = torch.randn(1, 2, 6, 6, generator=torch.Generator().manual_seed(0))
VECTOR = torch.randn(1, 6, generator=torch.Generator().manual_seed(1))
LINEAR: list[tuple[Map, Tensor]] = [
    (nn.Linear(6, 4).double(), VECTOR),
    (lambda x: x @ torch.arange(12.0).double().view(6, 2), VECTOR),
    (lambda x: (torch.arange(12.0).double().view(2, 6) @ x.T).T, VECTOR),
    (nn.Conv2d(2, 3, 3, stride=2, padding=1).double(), IMAGES),
    (nn.Conv2d(2, 4, 2, groups=2, dilation=2).double(), IMAGES),
    (nn.ConvTranspose2d(2, 3, 3, stride=2).double(), IMAGES),
    (nn.BatchNorm2d(2).double().eval(), IMAGES),
    (nn.AvgPool2d(2), IMAGES),
    (lambda x: x.mean(dim=(2, 3)), IMAGES),
    (lambda x: x.sum(dim=1), IMAGES),
    (lambda x: 3 * x + 1, VECTOR),
    (lambda x: 1 - x / 4, VECTOR),
    (lambda x: x * torch.tensor([1.0, -5.0, 2.0, 0.0, 1.0, 1.0]).double(), VECTOR),
    (lambda x: torch.sub(torch.ones(1).double(), x, alpha=2), VECTOR),
    (lambda x: F.pad(x, (1, 1)).transpose(1, 2).flatten(1).unsqueeze(0), IMAGES),
    (lambda x: x.expand(3, 6), VECTOR),
    (lambda x: x[:, 1:4], VECTOR),
    (nn.PixelShuffle(1), IMAGES),
]


@pytest.mark.parametrize(("function", "inputs"), LINEAR)
def test_the_constant_of_a_linear_piece_is_its_norm(function: Map, inputs: Tensor) -> None:
    truth = largest_jacobian(function, inputs)
    assert truth * (1 - 1e-9) <= constant_of(function, inputs) <= truth * (1 + 1e-4)


POOLS: list[Map] = [
    nn.MaxPool2d(2), nn.MaxPool2d(3, stride=1), nn.MaxPool2d(3, stride=2, padding=1), nn.AdaptiveMaxPool2d(4),
    nn.MaxPool2d(2, dilation=2, stride=1), nn.AvgPool2d(3, stride=1, padding=1), nn.AdaptiveAvgPool2d(4),
    nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False), nn.AvgPool2d(4, stride=1, ceil_mode=True),
    nn.AdaptiveAvgPool2d(3), nn.Softmax(dim=1),
]  # fmt: skip


@pytest.mark.parametrize("function", POOLS, ids=str)
def test_the_constant_of_a_pool_is_above_every_jacobian(function: Map) -> None:
    constant = constant_of(function, IMAGES)
    generator = torch.Generator().manual_seed(2)
    for _ in range(20):
        images = torch.randn(IMAGES.shape, generator=generator)
        assert largest_jacobian(function, images) <= constant * (1 + 1e-9)


def test_dropout_counts_by_its_largest_factor() -> None:
    torch.manual_seed(0)
    assert constant_of(lambda x: F.dropout(x, 0.75), torch.randn(100)) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x + x.tanh(), "the forward is not a chain: AddBackward0 joins two signals"),
        (lambda x: torch.cat((x, x, x)), "the forward is not a chain: CatBackward0 joins 3 signals"),
        (lambda x: x.exp(), "no Lipschitz constant is known for ExpBackward0"),
        (nn.LayerNorm(6).double(), "no Lipschitz constant is known for NativeLayerNormBackward0"),
        (lambda x: 1 / x, "no Lipschitz constant is known for ReciprocalBackward0"),
        (nn.AdaptiveAvgPool1d(9), "no Lipschitz constant is known for AdaptiveAvgPool2DBackward0"),
        (nn.BatchNorm1d(6).double(), "no Lipschitz constant is known for NativeBatchNormBackward0"),
    ],
)
def test_what_is_no_chain_of_known_pieces_is_said_in_words(function: Map, reason: str) -> None:
    assert constant_of(function, torch.randn(2, 6)) == reason


def test_a_start_that_the_output_does_not_depend_on_is_said_in_words() -> None:
    start = torch.randn(3, requires_grad=True)
    other = torch.randn(3, requires_grad=True)
    assert (
        read_chain(other.tanh(), [start], EFFORT)
        == "the output does not depend on what the network starts from"
    )


def test_a_chain_leaves_one_layer_out() -> None:
    assert Chain(("a", "b", "c"), (1.0, 2.0, 4.0)).without("b") == 5.0
    assert Chain(("a",), (1.0,)).without("x") is None


def test_the_bound_of_a_network_is_the_product_of_the_other_layers_norms() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 6), nn.SiLU(), nn.Linear(6, 1)).double()
    inputs = torch.randn(3, 4).double()
    found = measured_products(model, nn.MSELoss(), (inputs, torch.zeros(3, 1)), tolerance=1e-9)
    norms = [torch.linalg.matrix_norm(model[k].weight.detach(), 2).item() for k in (0, 2, 4)]
    activations = 0.25 * 1.09985
    for index, layer in enumerate(("0", "2", "4")):
        others = math.prod(norms[:index] + norms[index + 1 :]) * activations
        expected = 2 / 3 * others**2 * inputs.pow(2).sum().item()
        assert found[layer].lipschitz_bound == pytest.approx(expected, rel=1e-6)


def test_a_layer_used_twice_counts_both_ways() -> None:
    torch.manual_seed(0)
    shared, inputs = nn.Linear(3, 3, bias=False).double(), torch.randn(1, 3).double()
    model = nn.Sequential(shared, nn.ReLU(), shared)
    found = measured_products(model, nn.MSELoss(reduction="sum"), (inputs, torch.zeros(1, 3)), tolerance=1e-9)
    norm = torch.linalg.matrix_norm(shared.weight.detach(), 2).item()
    expected = 2 * (2 * norm * inputs.norm().item()) ** 2
    assert found["0"].lipschitz_bound == pytest.approx(expected, rel=1e-6)


def test_deep_products_overflow_to_inf_and_not_to_nan() -> None:
    layers = [nn.Linear(3, 3, bias=False) for _ in range(300)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.diag(torch.tensor([1.0, 1e-3, 1e-3])))
            layer.weight[1, 0] = 20.0
    model = nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())])
    found = measured_products(model, nn.MSELoss(), (torch.ones(2, 3), torch.zeros(2, 3)))
    row = found["298"]
    assert row.lipschitz_bound == math.inf
    assert 0 < row.rigorous_bound < 1e6
