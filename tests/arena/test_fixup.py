from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from arena.competitors.fixup import fixup_


class Residual(nn.Module):
    """Blocks x + branch(x) with m layers in a branch, and a scalar factor and bias in each."""

    def __init__(self, blocks: int, layers: int = 2, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Linear(10, width)
        self.branches = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width) for _ in range(layers)) for _ in range(blocks)
        )
        self.factors = nn.ParameterList(nn.Parameter(torch.randn(1)) for _ in range(blocks))
        self.classifier = nn.Linear(width, 3)

    def branch(self, place: int, state: torch.Tensor) -> torch.Tensor:
        *inner, last = self.branches[place]
        for layer in inner:
            state = torch.relu(layer(state))
        return self.factors[place] * last(state)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        state = self.stem(inputs)
        for place in range(len(self.branches)):
            state = state + self.branch(place, state)
        return self.classifier(state)

    def residual_branches(self) -> list[list[nn.Module]]:
        return [list(branch) for branch in self.branches]


def test_every_branch_and_the_output_are_zero() -> None:
    model, inputs = Residual(12), torch.randn(5, 10)
    fixup_(model)
    state = model.stem(inputs)
    assert bool(state.any())
    assert not any(model.branch(place, state).any() for place in range(12))
    assert not model(inputs).any()
    assert all(factor.item() == 1 for factor in model.factors)


@pytest.mark.parametrize(("blocks", "layers"), [(16, 2), (16, 3), (81, 3)])
def test_inner_layers_are_hes_times_the_papers_factor(blocks: int, layers: int) -> None:
    model = Residual(blocks, layers)
    fixup_(model)
    factor = {(16, 2): 1 / 4, (16, 3): 1 / 2, (81, 3): 1 / 3}[blocks, layers]
    inner = torch.cat([layer.weight.flatten() for branch in model.branches for layer in list(branch)[:-1]])
    assert inner.std().item() == pytest.approx(factor * math.sqrt(2 / 64), rel=0.02)
    assert model.stem.weight.std().item() == pytest.approx(math.sqrt(2 / 10), rel=0.1)


def test_a_branch_of_one_layer_is_zero() -> None:
    model = Residual(4, layers=1)
    fixup_(model)
    assert not any(branch[0].weight.any() for branch in model.branches)


def output_change(blocks: int, rate: float, *, rescale: bool = True) -> float:
    """How far one step of SGD moves the output, per unit of rate.

    The classifier is drawn: at zero it would be the only layer to learn in the first step.
    """
    model = Residual(blocks)
    fixup_(model)
    torch.manual_seed(0)  # after the model: data and classifier are the same at every depth, as is the stem
    with torch.no_grad():
        model.classifier.weight.normal_(0, math.sqrt(1 / 64))
        if not rescale:
            for branch in model.branches:
                branch[0].weight.mul_(math.sqrt(blocks))
    inputs, targets = torch.randn(32, 10), torch.randn(32, 3)
    weights = [layer.weight for branch in model.branches for layer in branch]
    before = model(inputs)
    gradients = torch.autograd.grad(mse_loss(before, targets), weights)
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.sub_(rate * gradient)
        return float((model(inputs) - before).norm() / rate)


def test_the_first_step_of_the_branches_moves_the_output_as_far_at_every_depth() -> None:
    changes = [output_change(blocks, 1e-3) for blocks in (4, 16, 64)]
    assert max(changes) < 1.3 * min(changes)
    without = [output_change(blocks, 1e-5, rescale=False) for blocks in (4, 64)]
    assert without[1] > 10 * without[0]  # 16 times as many branches, each moving as far


def test_the_first_step_of_all_weights_is_the_same_at_every_depth() -> None:
    """Only the classifier has a gradient, and what it sees is the stem's output, whatever the depth."""
    moved = []
    for blocks in (2, 40):
        model = Residual(blocks)
        fixup_(model)
        torch.manual_seed(0)
        inputs, targets = torch.randn(32, 10), torch.randn(32, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
        moved.append(model(inputs).detach())
    assert bool(moved[0].any())
    torch.testing.assert_close(moved[0], moved[1])


def test_the_same_seed_gives_the_same_weights() -> None:
    models = [Residual(3) for _ in range(3)]
    for model, seed in zip(models, (4, 4, 5), strict=True):
        fixup_(model, seed=seed)
    assert torch.equal(models[0].stem.weight, models[1].stem.weight)
    assert not torch.equal(models[0].stem.weight, models[2].stem.weight)


def test_models_without_branches_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"Linear does not say what its residual branches are.*leave Fixup out"
    ):
        fixup_(nn.Linear(2, 2))
    model = Residual(2)
    model.residual_branches = lambda: [[nn.ReLU()]]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"lists ReLU among its residual branches; list only layers with"):
        fixup_(model)
