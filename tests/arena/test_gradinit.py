from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from arena.competitors.gradinit import _Step, gradinit_
from arena.competitors.overlapping import overlapping_pairs


def least_squares() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(40, 3, generator=generator, dtype=torch.float64) * torch.tensor([2.0, 1.0, 0.3])
    targets = inputs @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    model = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.2, -0.5, 0.9]]))
    return model, (inputs, targets)


def one_step_losses(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], rate: float) -> tuple:
    """The loss after one normalized step from every scale of a grid, in closed form with numpy."""
    X, y = (part.numpy() for part in batch)
    grid = np.linspace(0.01, 6, 6000)
    weights = grid[:, None] * model.weight.detach().numpy()
    gradients = 2 / len(X) * (weights @ X.T - y.T) @ X
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    after = weights - rate * gradients / norms
    return grid, ((after @ X.T - y.T) ** 2).mean(1), norms[:, 0]


@pytest.fixture
def whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """S and S̃ are the whole batch, so that the best scale is one number."""
    same = lambda batches, seed: itertools.repeat((batches[0], batches[0]))  # noqa: E731
    monkeypatch.setattr("arena.competitors.gradinit.overlapping_pairs", same)


@pytest.mark.usefixtures("whole_batch")
@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_one_scale_goes_to_the_best_of_a_grid(rate: float) -> None:
    model, batch = least_squares()
    drawn = model.weight.detach().clone()
    grid, losses, _ = one_step_losses(model, batch, rate)
    best = grid[losses.argmin()]
    assert abs(best - 1) > 0.2  # else standing still would pass
    gradinit_(
        model, mse_loss, [batch], lr=rate, step=rate, iterations=800, scale_lr=0.005, gamma=float("inf")
    )
    scale = float(model.weight.detach()[0, 0] / drawn[0, 0])
    torch.testing.assert_close(model.weight.detach(), scale * drawn)
    assert scale == pytest.approx(best, abs=0.02)


@pytest.mark.usefixtures("whole_batch")
def test_the_bound_on_the_gradient_stops_the_scale_where_a_grid_says() -> None:
    model, batch = least_squares()
    drawn = model.weight.detach().clone()
    grid, losses, norms = one_step_losses(model, batch, 0.1)
    free = losses.argmin()
    bound = 0.5 * (norms.min() + norms[free])  # between: the free optimum is forbidden
    allowed = norms <= bound
    best = grid[allowed][losses[allowed].argmin()]
    gradinit_(model, mse_loss, [batch], lr=0.1, step=0.1, iterations=1500, scale_lr=0.003, gamma=float(bound))
    scale = float(model.weight.detach()[0, 0] / drawn[0, 0])
    assert abs(best - grid[free]) > 0.1
    assert scale == pytest.approx(best, abs=0.02)


def deep_net(factor: float, depth: int = 8) -> tuple[nn.Module, list]:
    layers = [[nn.Linear(20, 20), nn.ReLU()] for _ in range(depth)]
    model = nn.Sequential(*itertools.chain(*layers), nn.Linear(20, 4))
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
            layer.weight.data.mul_(factor)
    inputs = [torch.randn(32, 20) for _ in range(6)]
    return model, [(part, part[:, :4].argmax(1)) for part in inputs]


def gradient_norm(model: nn.Module, batch: tuple, order: int = 2) -> float:
    loss = cross_entropy(model(batch[0]), batch[1])
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return float(torch.cat([gradient.flatten() for gradient in gradients]).norm(order))


@pytest.mark.parametrize(("optimizer", "order", "gamma"), [("sgd", 2, 1.0), ("adam", 1, 30.0)])
def test_a_net_drawn_too_large_ends_within_the_bound(optimizer: str, order: int, gamma: float) -> None:
    model, batches = deep_net(1.4)
    before = [gradient_norm(model, batch, order) for batch in batches]
    gradinit_(model, cross_entropy, batches, lr=0.05, optimizer=optimizer, gamma=gamma)
    after = [gradient_norm(model, batch, order) for batch in batches]
    assert min(before) > 3 * gamma
    assert np.mean(after) < 1.1 * gamma


def test_the_loss_after_the_first_step_falls() -> None:
    model, batches = deep_net(1.0, depth=3)

    def after_a_step() -> float:
        pairs = zip(batches, batches[1:] + batches[:1], strict=True)
        steps = [_Step(model, cross_entropy, pair, 0.3, "sgd", True, None) for pair in pairs]
        return float(np.mean([float(step.loss_gradient()[0]) for step in steps]))

    before = after_a_step()
    gradinit_(model, cross_entropy, batches, lr=0.1, step=0.3)
    assert after_a_step() < 0.9 * before


@pytest.mark.parametrize("through", [True, False])
def test_the_slope_of_the_loss_after_the_step_is_that_of_finite_differences(through: bool) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    batch = (torch.randn(9, 5).double(), torch.randint(0, 3, (9,)))
    other = (torch.randn(9, 5).double(), torch.randint(0, 3, (9,)))

    def step() -> _Step:
        return _Step(model, cross_entropy, (batch, other), 0.7, "sgd", through, None)

    _, gradients = step().loss_gradient()
    fixed = step()._direction
    for name, weight in model.named_parameters():
        drawn, epsilon, values = weight.detach().clone(), 1e-5, []
        for sign in (1, -1):
            weight.data.copy_(drawn * (1 + sign * epsilon))
            moved = step()
            if not through:
                moved._direction = fixed
            values.append(float(moved.loss_gradient()[0]))
            weight.data.copy_(drawn)
        slope = (values[0] - values[1]) / (2 * epsilon)
        assert float((gradients[name] * drawn).sum()) == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_a_step_leaves_the_weights_bit_for_bit() -> None:
    model, batches = deep_net(1.0)
    before = copy.deepcopy(model.state_dict())
    _Step(model, cross_entropy, (batches[0], batches[1]), 0.3, "sgd", True, None).loss_gradient()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_net_that_overflows_as_drawn_stays_as_drawn() -> None:
    model, batches = deep_net(1e6)
    before = copy.deepcopy(model.state_dict())
    gradinit_(model, cross_entropy, batches, lr=0.1, iterations=5)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_scales_return_to_the_last_finite_ones() -> None:
    """Above a scale of 1.3 the loss is not a number; the loss falls as the scale grows."""
    weight = nn.Linear(1, 1, bias=False)
    nn.init.ones_(weight.weight)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return -output.mean() + (1.3 - output.mean()).sqrt()

    batches = [(torch.ones(6, 1), torch.ones(6, 1))] * 2
    gradinit_(weight, loss, batches, lr=1e-3, step=1e-3, iterations=60, gamma=float("inf"), scale_lr=0.05)
    assert 1.2 < weight.weight.item() < 1.3


def test_zero_biases_stay_and_dropout_and_modes_are_left_as_found() -> None:
    model = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    nn.init.zeros_(model[0].bias)
    model[1].eval()
    statistics = model[1].running_mean.clone()
    batches = [(torch.randn(12, 20) + 1, torch.randint(0, 4, (12,)))]
    drawing = torch.get_rng_state()
    gradinit_(model, cross_entropy, batches, lr=0.1, iterations=3)
    assert torch.equal(torch.get_rng_state(), drawing)
    assert [module.training for module in model] == [True, False, True, True]
    assert torch.equal(model[1].running_mean, statistics)
    assert not model[0].bias.any()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_second_batch_shares_half_of_the_first() -> None:
    batches = [(torch.arange(8.0) + 10 * place, torch.arange(8) + 10 * place) for place in range(3)]
    for _, (first, second) in zip(range(7), overlapping_pairs(batches, seed=0), strict=False):
        shared = set(first[1].tolist()) & set(second[1].tolist())
        assert len(shared) == 4
        assert len(second[1]) == 8
        assert torch.equal(second[0].long(), second[1])


def test_a_single_batch_is_cut_in_overlapping_thirds() -> None:
    batch = (torch.arange(9.0), torch.arange(9))
    first, second = next(overlapping_pairs([batch], seed=0))
    assert len(first[1]) == len(second[1]) == 6
    assert len(set(first[1].tolist()) & set(second[1].tolist())) == 3


def test_batches_that_cannot_be_paired_are_refused() -> None:
    pair = (torch.ones(2, 1), torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"batches is empty; pass a list of at least one"):
        next(overlapping_pairs([], 0))
    with pytest.raises(ValueError, match=r"one \(inputs, targets\) pair; pass a list of such pairs"):
        next(overlapping_pairs(pair, 0))
    with pytest.raises(ValueError, match=r"the only batch has 2 examples; pass at least 3"):
        next(overlapping_pairs([pair], 0))


@pytest.mark.parametrize(
    ("optimizer", "lr", "gamma", "step"), [("sgd", 0.1, 1.0, 0.1), ("adam", 5e-4, 1e3, 5e-4)]
)
def test_at_the_papers_rates_the_defaults_are_the_papers(
    optimizer: str, lr: float, gamma: float, step: float
) -> None:
    model, batches = deep_net(1.0, depth=2)
    twin = copy.deepcopy(model)
    gradinit_(model, cross_entropy, batches, lr=lr, optimizer=optimizer, iterations=9)
    gradinit_(twin, cross_entropy, batches, lr=9.0, optimizer=optimizer, iterations=9, gamma=gamma, step=step)
    assert torch.equal(model[0].weight, twin[0].weight)


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"optimizer='adamw' is unknown; choose from 'sgd', 'adam'"):
        gradinit_(nn.Linear(1, 1), mse_loss, [], lr=0.1, optimizer="adamw")
