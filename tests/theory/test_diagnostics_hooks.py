"""Activations and gradients are those that module hooks see, on what people build."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diagnosing import assert_like, diagnosis, watch
from torch import Tensor, nn

LOSS = nn.CrossEntropyLoss()


def labels(*shape: int) -> Tensor:
    return torch.randint(3, shape)


class Residual(nn.Module):
    """Additions of all kinds: of a bias apart, of the input, of another branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        x = self.relu(x + self.second(x))
        return self.head(x)


MODELS: dict[str, tuple[Any, Any, dict[str, tuple[str, str]]]] = {
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.GELU(), nn.Linear(6, 3)),
        lambda: (torch.randn(9, 5), labels(9)),
        {"0": ("0", "1"), "2": ("2", "3"), "4": ("4", "4")},
    ),
    "convolutions, in place": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, bias=False), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, groups=2, padding=1),
            nn.SiLU(inplace=True), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 3, 2, stride=2),
            nn.LeakyReLU(0.1, inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3),
        ),
        lambda: (torch.randn(5, 2, 6, 6), labels(5)),
        {"0": ("0", "1"), "2": ("2", "3"), "5": ("5", "6"), "9": ("9", "9")},
    ),
    "one example without a batch dimension in its convolution": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Flatten(0), nn.Linear(16, 6), nn.Unflatten(0, (2, 3)),
        ),
        lambda: (torch.randn(2, 6), labels(2)),
        {"0": ("0", "1"), "3": ("3", "3")},
    ),
    "transformer": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(4, 2, dim_feedforward=6, batch_first=True, dropout=0.0),
            nn.Linear(4, 3), nn.Flatten(0, 1),
        ),
        lambda: (torch.randn(4, 3, 4), labels(12)),
        {"0.linear2": ("0.linear2", "0.linear2"), "1": ("1", "1")},
    ),
    "sequences, a layer used twice": (
        lambda: nn.Sequential(*[nn.Linear(4, 4), nn.Sigmoid()] * 2, nn.Linear(4, 3), nn.Flatten(0, 1)),
        lambda: (torch.randn(4, 3, 4), labels(12)),
        {"0": ("0", "1"), "4": ("4", "4")},
    ),
    "residual connections": (
        Residual,
        lambda: (torch.randn(9, 6), labels(9)),
        {"first": ("first", "first"), "second": ("second", "second"), "head": ("head", "head")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_numbers_are_those_that_hooks_see(kind: str) -> None:
    build, data, places = MODELS[kind]
    model, batch = build(), data()
    found = diagnosis(model, LOSS, batch)
    before, _ = watch(model, LOSS, batch, [own for own, _ in places.values()])
    after, worked = watch(model, LOSS, batch, [last for _, last in places.values()])
    for name, (own, last) in places.items():
        assert (found[name].activation != "") == (own != last)
        assert_like(found[name], after[last].value(), after[last].gradient(), before[own].value())
        norm = float(worked.get_parameter(f"{name}.weight").grad.norm())
        assert found[name].weight_gradient_norm == pytest.approx(norm, rel=1e-5)


def test_attention_and_the_transformers_own_activation_are_found() -> None:
    model = nn.TransformerEncoderLayer(4, 2, dim_feedforward=6, batch_first=True, dropout=0.0)
    model = nn.Sequential(model, nn.Linear(4, 3), nn.Flatten(0, 1))
    batch = torch.randn(4, 3, 4), labels(12)
    found = diagnosis(model, LOSS, batch)
    own, _ = watch(model, LOSS, batch, ["0.linear1"])
    assert found["0.linear1"].activation == "relu"
    expected = F.relu(own["0.linear1"].value()).double()
    assert found["0.linear1"].activation_mean == pytest.approx(float(expected.mean()), rel=1e-5)
    attention = model[0].self_attn
    qkv = F.linear(batch[0], attention.in_proj_weight, attention.in_proj_bias).detach().double()
    assert found["0.self_attn.in_proj_weight"].activation_mean == pytest.approx(float(qkv.mean()), rel=1e-4)
    assert found["0.self_attn.in_proj_weight"].activation_std == pytest.approx(
        float(qkv.std(correction=0)), rel=1e-5
    )


def test_the_gates_of_an_lstm_are_those_of_one_written_by_hand() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0][:, -1])

    model, batch = Last(), (torch.randn(5, 4, 2), labels(5))
    found = diagnosis(model, LOSS, batch)
    lstm, state, cell = model.lstm, torch.zeros(5, 3), torch.zeros(5, 3)
    from_input, from_state = [], []
    for step in range(4):
        from_input.append(F.linear(batch[0][:, step], lstm.weight_ih_l0, lstm.bias_ih_l0))
        from_state.append(F.linear(state, lstm.weight_hh_l0, lstm.bias_hh_l0))
        for gates in (from_input[-1], from_state[-1]):
            gates.retain_grad()
        i, f, g, o = (from_input[-1] + from_state[-1]).chunk(4, dim=1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        state = o.sigmoid() * cell.tanh()
    LOSS(model.head(state), batch[1]).backward()
    for name, gates in (("lstm.weight_ih_l0", from_input), ("lstm.weight_hh_l0", from_state)):
        assert found[name].activation == ""
        assert_like(found[name], torch.stack(gates).detach(), torch.stack([gate.grad for gate in gates]))


class Functional(nn.Module):
    """No submodule at all: matrices, einsum, a bias added apart, everything overwritten in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bias = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6))
        self.second, self.third = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(5, 3))
        self.taken: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        own = (x @ self.first).add_(self.bias)
        self.taken["first before"] = own.detach().clone()
        hidden = own.view(2, -1, 6).relu_().view(-1, 6)
        self.taken["first"] = hidden
        mixed = torch.einsum("ni,oi->no", hidden, self.second)
        self.taken["second before"] = mixed.detach().clone()
        mixed = torch.tanh(mixed)
        self.taken["second"] = mixed
        output = mixed @ self.third
        self.taken["third before"] = output.detach().clone()
        return output.mul_(2.0)


def test_a_functional_model_is_seen_through_in_spite_of_overwriting() -> None:
    model, batch = Functional(), (torch.randn(8, 4), labels(8))
    found = diagnosis(model, LOSS, batch)
    loss = LOSS(model(batch[0]), batch[1])
    gradients = torch.autograd.grad(loss, [model.taken["first"], model.taken["second"]])
    assert found["second"].activation == "tanh"
    assert_like(found["second"], model.taken["second"], gradients[1], model.taken["second before"])
    # Written into through a view: torch's graph has no single node for the activation.
    third = model.taken["third before"].double()
    assert found["third"].activation_std == pytest.approx(float(third.std(correction=0)), rel=1e-6)
    first = model.taken["first before"].double()
    assert found["first"].preactivation_std == pytest.approx(float(first.std(correction=0)), rel=1e-6)


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * (x @ weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * gradient @ weight.t(), 2 * x.t() @ gradient


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5))
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Doubling.apply(x, self.weight).relu_())


def test_a_function_of_ones_own_and_a_normalized_weight_are_followed_to_the_data() -> None:
    model, batch = Custom(), (torch.randn(8, 4), labels(8))
    found = diagnosis(model, LOSS, batch)
    own = (2 * batch[0] @ model.weight).detach()
    hidden = own.relu().requires_grad_()
    output = model.head(hidden)
    output.retain_grad()
    LOSS(output, batch[1]).backward()
    assert found["weight"].activation == "relu"
    assert_like(found["weight"], hidden.detach(), hidden.grad, own)
    for part in ("original0", "original1"):
        assert_like(found[f"head.parametrizations.weight.{part}"], output.detach(), output.grad)


def test_an_embedding_is_its_rows_not_their_sum_with_the_positions() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)
            self.positions = nn.Parameter(torch.randn(2, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.head((self.words(x) + self.positions).mean(dim=1))

    model, batch = Words(), (torch.randint(7, (6, 2)), labels(6))
    found = diagnosis(model, LOSS, batch)
    seen, _ = watch(model, LOSS, batch, ["words"])
    assert_like(found["words"], seen["words"].value(), seen["words"].gradient())
    summed = seen["words"].value() + model.positions.detach().repeat(6, 1).flatten()
    assert_like(found["positions"], summed, seen["words"].gradient())


def test_tied_weights_pool_their_uses() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.words.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.words(x))

    model, batch = Tied(), (torch.randint(5, (6,)), torch.randint(5, (6,)))
    found = diagnosis(model, LOSS, batch)
    seen, _ = watch(model, LOSS, batch, ["words", "head"])
    assert list(found) == ["words"]
    assert_like(
        found["words"],
        torch.cat([seen["words"].value(), seen["head"].value()]),
        torch.cat([seen["words"].gradient(), seen["head"].gradient()]),
    )


def test_data_that_are_no_tensors_still_show_what_the_layers_give() -> None:
    class Holder:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    x, y = torch.randn(8, 4), labels(8)
    plain = diagnosis(net, LOSS, (x, y))
    held = diagnosis(net, LOSS, (Holder(x), y), forward=lambda model, holder: model(holder.tensor))
    assert held == plain
