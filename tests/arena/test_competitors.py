"""The competitors of the arena do what their papers say."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev
from torch.nn.functional import cross_entropy, mse_loss

from arena.competitors.fixup import fixup_
from arena.competitors.gradinit import gradinit_
from arena.competitors.metainit import gradient_quotient, metainit_
from arena.competitors.overlapping import overlapping_pairs

BATCH = torch.randn(16, 20, generator=torch.Generator().manual_seed(2)), torch.arange(16) % 4


class Residual(nn.Module):
    """Blocks x + branch(x) with m layers in a branch, and a scalar factor in each."""

    def __init__(self, blocks: int, layers: int) -> None:
        super().__init__()
        self.stem, self.classifier = nn.Linear(10, 64), nn.Linear(64, 3)
        branches = [nn.ModuleList(nn.Linear(64, 64) for _ in range(layers)) for _ in range(blocks)]
        self.branches = nn.ModuleList(branches)
        self.factors = nn.ParameterList(nn.Parameter(torch.randn(1)) for _ in range(blocks))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        state = self.stem(inputs)
        for factor, (*inner, last) in zip(self.factors, self.branches, strict=True):
            hidden = state
            for layer in inner:
                hidden = torch.relu(layer(hidden))
            state = state + factor * last(hidden)
        return self.classifier(state)

    def residual_branches(self) -> list[list[nn.Module]]:
        return [list(branch) for branch in self.branches]


@pytest.mark.parametrize(("blocks", "layers", "factor"), [(16, 2, 1 / 4), (16, 3, 1 / 2), (81, 3, 1 / 3)])
def test_fixup_has_branches_of_zero_and_the_papers_factor(blocks: int, layers: int, factor: float) -> None:
    model = Residual(blocks, layers)
    fixup_(model, seed=4)
    assert not any(branch[-1].weight.any() for branch in model.branches)
    assert not model(torch.randn(5, 10)).any()
    assert all(one.item() == 1 for one in model.factors)
    inner = torch.cat([layer.weight.flatten() for branch in model.branches for layer in list(branch)[:-1]])
    assert inner.std().item() == pytest.approx(factor * math.sqrt(2 / 64), rel=0.02)
    assert model.stem.weight.std().item() == pytest.approx(math.sqrt(2 / 10), rel=0.1)


@pytest.mark.parametrize("bounded", [False, True])
def test_one_scale_of_gradinit_goes_to_the_best_of_a_grid(bounded: bool, monkeypatch: Any) -> None:
    """Least squares, S and S̃ the whole batch: the loss after one normalized step has a closed form."""
    rate = 0.1
    same = lambda batches, seed: itertools.repeat((batches[0], batches[0]))  # noqa: E731
    monkeypatch.setattr("arena.competitors.gradinit.overlapping_pairs", same)
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(40, 3, generator=generator, dtype=torch.float64) * torch.tensor([2.0, 1.0, 0.3])
    targets = inputs @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    drawn = torch.tensor([[0.2, -0.5, 0.9]], dtype=torch.float64)
    model = nn.Linear(3, 1, bias=False).double()
    model.weight.data.copy_(drawn)
    X, y = inputs.numpy(), targets.numpy()
    grid = np.linspace(0.01, 6, 6000)
    weights = grid[:, None] * drawn.numpy()
    gradients = 2 / len(X) * (weights @ X.T - y.T) @ X
    norms = np.linalg.norm(gradients, axis=1)
    losses = (((weights - rate * gradients / norms[:, None]) @ X.T - y.T) ** 2).mean(1)
    free = losses.argmin()
    # Between: the free optimum is forbidden.
    gamma = 0.5 * (norms.min() + norms[free]) if bounded else math.inf
    best = grid[norms <= gamma][losses[norms <= gamma].argmin()]
    assert abs(best - (grid[free] if bounded else 1)) > 0.1  # else standing still would pass
    effort = {"iterations": 1500, "scale_lr": 0.003} if bounded else {"iterations": 800, "scale_lr": 0.005}
    gradinit_(model, mse_loss, [(inputs, targets)], lr=rate, step=rate, gamma=float(gamma), **effort)
    scale = float(model.weight.detach()[0, 0] / drawn[0, 0])
    torch.testing.assert_close(model.weight.detach(), scale * drawn)
    assert scale == pytest.approx(best, abs=0.02)


@pytest.mark.parametrize(("optimizer", "lr", "gamma"), [("sgd", 0.1, 1.0), ("adam", 5e-4, 1e3)])
def test_the_defaults_of_gradinit_at_the_papers_rates(optimizer: str, lr: float, gamma: float) -> None:
    model = nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 4))
    twin = copy.deepcopy(model)
    gradinit_(model, cross_entropy, [BATCH], lr=lr, optimizer=optimizer, iterations=9)
    gradinit_(twin, cross_entropy, [BATCH], lr=9.0, optimizer=optimizer, iterations=9, gamma=gamma, step=lr)
    assert torch.equal(model[0].weight, twin[0].weight)


def test_the_second_batch_shares_half_of_the_first_and_a_single_one_is_cut_in_overlapping_thirds() -> None:
    batches = [(torch.arange(8.0) + 10 * place, torch.arange(8) + 10 * place) for place in range(3)]
    for _, (first, second) in zip(range(7), overlapping_pairs(batches, seed=0), strict=False):
        assert len(set(first[1].tolist()) & set(second[1].tolist())) == 4
        assert len(second[1]) == 8
        assert torch.equal(second[0].long(), second[1])
    first, second = next(overlapping_pairs([(torch.arange(9.0), torch.arange(9))], seed=0))
    assert len(first[1]) == len(second[1]) == 6
    assert len(set(first[1].tolist()) & set(second[1].tolist())) == 3


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_metainits_quotient_is_that_of_the_dense_hessian(activation: type[nn.Module]) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 5), activation(), nn.Linear(5, 3)).double()
    inputs, targets = torch.randn(7, 4).double(), torch.randint(0, 3, (7,))
    names, shapes = zip(*((name, weight.shape) for name, weight in model.named_parameters()), strict=True)

    def loss(flat: torch.Tensor) -> torch.Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        weights = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return cross_entropy(functional_call(model, weights, inputs), targets)

    flat = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    gradient, hessian = jacrev(loss)(flat), jacrev(jacrev(loss))(flat)
    shifted = gradient + 1e-5 * torch.where(gradient >= 0, 1.0, -1.0).double()
    truth = ((gradient - hessian @ gradient) / shifted - 1).abs().mean()
    quotient = gradient_quotient(model, cross_entropy, (inputs, targets)).detach()
    torch.testing.assert_close(quotient, truth, rtol=1e-9, atol=0)


def test_metainit_changes_only_norms_of_weights_and_biases_are_zero() -> None:
    model = nn.Sequential(nn.Linear(20, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 4))
    before, state = copy.deepcopy(model), torch.get_rng_state()
    metainit_(model, cross_entropy, BATCH, steps=5)
    assert torch.equal(torch.get_rng_state(), state)
    ratio = (model[0].weight / before[0].weight).detach()
    torch.testing.assert_close(ratio, ratio[:1, :1].expand_as(ratio))
    assert abs(float(ratio[0, 0]) - 1) > 0.01
    assert not any(model[place].bias.any() for place in (0, 3))
    assert torch.equal(model[1].weight, before[1].weight)
