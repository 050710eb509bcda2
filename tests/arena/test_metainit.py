from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev
from torch.nn.functional import cross_entropy

from arena.competitors.metainit import gradient_quotient, metainit_


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_the_quotient_is_that_of_the_dense_hessian(activation: type[nn.Module]) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 5), activation(), nn.Linear(5, 3)).double()
    inputs, targets = torch.randn(7, 4).double(), torch.randint(0, 3, (7,))
    names = [name for name, _ in model.named_parameters()]
    shapes = [weight.shape for weight in model.parameters()]

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


def test_a_linear_loss_has_no_curvature_and_a_quotient_of_epsilon() -> None:
    """H = 0: what is left is |g / (g ± ε) − 1| = ε / (|g| + ε), with g = 1 here."""
    model = nn.Linear(1, 1, bias=False)
    quotient = gradient_quotient(model, lambda output, target: output.mean(), (torch.ones(2, 1), None))
    assert quotient.item() == pytest.approx(1e-5, rel=0.02)


WIDTH, DEPTH = 32, 8


def relu_net(factor: float) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 4))
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
            layer.weight.data.mul_(factor)
    return model


def mean_gain(model: nn.Sequential) -> float:
    """The geometric mean of the layers' norms over those of He's weights."""
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    logs = [
        math.log(float(layer.weight.detach().norm()) / math.sqrt(2 * len(layer.weight))) for layer in layers
    ]
    return math.exp(sum(logs) / len(logs))


def test_from_too_large_and_too_small_it_goes_to_the_same_norms() -> None:
    batch = (torch.randn(64, WIDTH), torch.randint(0, 4, (64,)))
    large, small = relu_net(1.6), relu_net(0.3)
    for model in (large, small):
        before = float(gradient_quotient(model, cross_entropy, batch).detach())
        metainit_(model, cross_entropy, batch, steps=300)
        assert float(gradient_quotient(model, cross_entropy, batch).detach()) < 0.7 * before
    assert mean_gain(large) == pytest.approx(mean_gain(small), rel=0.1)
    assert 0.4 < mean_gain(small) < 1.0


def test_only_norms_of_weights_change_and_biases_are_zero() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3))
    before = copy.deepcopy(model)
    metainit_(model, cross_entropy, (torch.randn(8, 6), torch.randint(0, 3, (8,))), steps=5)
    ratio = (model[0].weight / before[0].weight).detach()
    torch.testing.assert_close(ratio, ratio[:1, :1].expand_as(ratio))
    assert abs(float(ratio[0, 0]) - 1) > 0.01
    assert not model[0].bias.any()
    assert not model[3].bias.any()
    assert torch.equal(model[1].weight, before[1].weight)


def test_the_same_seed_gives_the_same_weights_and_leaves_the_callers_numbers() -> None:
    batch = (torch.randn(16, WIDTH), torch.randint(0, 4, (16,)))
    models = [relu_net(0.8) for _ in range(3)]
    state = torch.get_rng_state()
    for model, seed in zip(models, (0, 0, 1), strict=True):
        metainit_(model, cross_entropy, batch, steps=20, seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(models[0][0].weight, models[1][0].weight)
    assert not torch.equal(models[0][0].weight, models[2][0].weight)


def test_a_net_that_overflows_stays_as_drawn() -> None:
    model = relu_net(1e6)
    before = copy.deepcopy(model.state_dict())
    metainit_(model, cross_entropy, (torch.randn(16, WIDTH), torch.randint(0, 4, (16,))), steps=4)
    assert torch.equal(model[0].weight, before["0.weight"])


class Characters(nn.Module):
    """Embedding, recurrence and attention: tokens in, kernels that torch would fuse."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", batch_first=True)
        self.head = nn.Linear(8, 7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.lstm(self.embed(tokens))[0])).flatten(0, 1)


@pytest.mark.parametrize("scheme", ["gradinit", "metainit"])
def test_recurrence_attention_and_tokens_work(scheme: str) -> None:
    from arena.competitors.gradinit import gradinit_

    tokens = torch.randint(0, 7, (6, 5))
    batch = (tokens, tokens.roll(-1, 1))
    model = Characters()
    before = copy.deepcopy(model)

    def loss(scores: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        return cross_entropy(scores, following.flatten())

    if scheme == "gradinit":
        gradinit_(model, loss, [batch], lr=0.1, iterations=3)
    else:
        metainit_(model, loss, batch, steps=3)
    for (name, weight), drawn in zip(model.named_parameters(), before.parameters(), strict=True):
        assert bool(weight.isfinite().all())
        assert weight.ndim < 2 or not torch.equal(weight, drawn), name


def test_unknown_data_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data='noise' is unknown; choose from 'random', 'real'"):
        metainit_(nn.Linear(1, 1), cross_entropy, (), data="noise")
