"""`initialize_` never makes a network worse, and takes forwards that differentiate."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hessinit.initializing.judging import distance
from initialized_networks import LOSS, state
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

import hessinit
from tiny import labels


class LayerScaled(nn.Module):
    """A vision transformer whose branches start at 1e-5, read at a token that starts at 0."""

    def __init__(self, final_norm: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.patches, self.norm = nn.Linear(12, 8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.scale = nn.Parameter(1e-5 * torch.ones(8))
        self.final = nn.LayerNorm(8) if final_norm else nn.Identity()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(x), -1, -1), self.patches(x)], 1)
        q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
        h = h + self.scale * self.out(F.scaled_dot_product_attention(q, k, v))
        return self.head(self.final(h[:, 0]))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gate, self.head = (
            nn.Linear(6, 16),
            nn.Parameter(torch.tensor(1e-4)),
            nn.Linear(16, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gate * torch.relu(self.first(x)))


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


SMALL_BEFORE_A_WEIGHT: dict[str, Any] = {
    "LayerScale": (lambda: LayerScaled(final_norm=False), random(8, 4, 12)),
    "LayerScale and a final norm": (lambda: LayerScaled(final_norm=True), random(8, 4, 12)),
    "a gate": (Gated, random(8, 6)),
}


@pytest.mark.filterwarnings("ignore::hessinit.errors.ConvergenceWarning")
@pytest.mark.parametrize("kind", SMALL_BEFORE_A_WEIGHT)
@pytest.mark.parametrize("rule", ["network", "layers"])
def test_weights_that_would_be_worse_are_not_kept(kind: str, rule: str) -> None:
    build, x = SMALL_BEFORE_A_WEIGHT[kind]
    model = build()
    before = state(model)
    result = hessinit.initialize_(model, LOSS, (x, labels(8)), lr=0.1, rule=rule)
    assert max(float(parameter.detach().std()) for parameter in model.parameters() if parameter.ndim > 1) < 10
    if rule == "network":
        assert not result.converged
        assert "the old weights were put back" in result.reason
        assert state(model) == before
        assert result.after.network.norm == result.before.network.norm
        assert set(result.scales.values()) == {1.0}


@pytest.mark.filterwarnings("ignore::hessinit.errors.ConvergenceWarning")
def test_a_result_is_never_twice_as_far_from_the_target_as_what_was_found() -> None:
    for seed in range(12):
        torch.manual_seed(seed)
        depth, width = 2 + seed % 4, (8, 16, 32)[seed % 3]
        layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU())]
        model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), *layers, nn.Linear(width, 3))
        lr = 10.0 ** (seed % 5 - 3)
        result = hessinit.initialize_(model, LOSS, (random(16, 6), labels(16)), lr=lr, seed=seed)
        before, after = (
            abs(math.log(one.network.norm / result.target)) for one in (result.before, result.after)
        )
        assert result.converged or result.scaling == "none" or after <= 2 * before


def test_a_loss_that_explodes_puts_the_weights_back() -> None:
    """A quadratic loss does not saturate: any norm can be reached, at any loss."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    data, before = (random(8, 6), torch.zeros(8, 3)), state(model)
    wish = {"target": 1e4, "scaling": "all"}
    with pytest.warns(
        hessinit.ConvergenceWarning, match="the loss would be .* the old weights were put back"
    ):
        hessinit.initialize_(model, nn.MSELoss(), data, **wish)
    assert state(model) == before
    assert hessinit.initialize_(model, nn.MSELoss(), data, **wish, max_sharpening=math.inf).converged


def test_lsuv_says_when_it_undoes_something_small() -> None:
    plan = hessinit.apply_scheme_(Gated(), "lsuv", sample=random(8, 6))
    assert any("head gets a standard deviation of" in note and "LayerScale" in note for note in plan.notes)


class Physical(nn.Module):
    """A physics-informed network: its output holds its derivative by the inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        u = self.net(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return u + slope.sum(1, keepdim=True)


@pytest.mark.parametrize("scheme", ["auto", "he", "orthogonal", "keep"])
def test_a_forward_that_differentiates_by_its_inputs_is_initialized(scheme: str) -> None:
    data = random(8, 2), torch.zeros(8, 1)
    result = hessinit.initialize_(Physical(), nn.MSELoss(), data, target=12.0, scheme=scheme)
    assert result.converged
    assert result.after.network.norm == pytest.approx(12.0, rel=0.05)
    assert not data[0].requires_grad


class Meta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights = [self.first.weight, self.last.weight]
        inner = F.linear(F.linear(x, weights[0]).tanh(), weights[1]).square().mean()
        steps = torch.autograd.grad(inner, weights, create_graph=True)
        return F.linear(F.linear(x, weights[0] - steps[0]).tanh(), weights[1] - steps[1])


def test_a_forward_that_differentiates_by_its_weights_is_told_the_way_out_and_it_leads_out() -> None:
    data = random(8, 4), labels(8)
    for scheme in ("auto", "he"):
        with pytest.raises(hessinit.ProblemError, match='differentiates by its own weights.*scheme="keep"'):
            hessinit.initialize_(Meta(), LOSS, data, lr=0.1, scheme=scheme)
    assert hessinit.initialize_(Meta(), LOSS, data, target=0.3, scheme="keep").converged


@pytest.mark.parametrize("shape", [(4, 3), (3, 4), (4, 4)])
@pytest.mark.parametrize("kind", ["householder", "matrix_exp", "cayley"])
def test_orthogonal_parametrizations_of_every_shape_are_written_through(
    kind: str, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        orthogonal(nn.Linear(*shape), orthogonal_map=kind), nn.Tanh(), nn.Linear(shape[1], 3)
    )
    hessinit.apply_scheme_(model, "orthogonal", sample=random(8, shape[0]))
    weight = model[0].weight.detach()
    small = weight @ weight.T if shape[0] > shape[1] else weight.T @ weight
    assert torch.allclose(small, small[0, 0] * torch.eye(len(small)), atol=1e-5)
