"""Tokens, several inputs, several batches, weights used in unknown ways: closed forms and words."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from measured_products import measured_products
from torch import Tensor, nn

import hessinit

LOSS = nn.MSELoss(reduction="sum")  # H_z = 2


def bare(*shape: int) -> nn.Linear:
    return nn.Linear(*shape, bias=False)


class Bag(nn.Module):
    def __init__(self, positions: bool = False, padding: int | None = None) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(7, 4, padding_idx=padding), bare(12, 2)
        self.positions = nn.Embedding(3, 4) if positions else None

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.words(tokens)
        if self.positions is not None:
            stream = stream + self.positions(torch.arange(3))
        return self.head(stream.flatten(1))


TOKENS = torch.tensor([[1, 1, 2], [3, 4, 5], [0, 0, 0]])


def test_an_embedding_moves_as_far_as_its_most_frequent_word() -> None:
    model = Bag().double()
    found = measured_products(model, LOSS, (TOKENS, torch.zeros(3, 2)), tolerance=1e-9)
    norm = torch.linalg.matrix_norm(model.head.weight.detach(), 2).item()
    words = found["words"]
    assert words.forward.value == 1.0
    assert words.backward.value == pytest.approx(norm)
    assert words.rigorous_bound == pytest.approx(2 * norm**2 * (2 + 1 + 3))
    assert words.paper_bound == pytest.approx(2 * norm**2 * (3 + 3 + 3))
    assert words.lipschitz_bound == pytest.approx(2 * norm**2 * 9)
    # The network starts from the embedding's output.
    length = model.words(TOKENS).detach().pow(2).sum().item()
    assert found["head"].forward.value == pytest.approx(1.0)
    assert found["head"].rigorous_bound == pytest.approx(2 * length)
    assert found["head"].paper_bound == pytest.approx(2 * length)
    assert found["head"].lipschitz_bound == pytest.approx(2 * length)


def test_padding_does_not_move() -> None:
    model = Bag(padding=0).double()
    found = measured_products(model, LOSS, (TOKENS, torch.zeros(3, 2)), tolerance=1e-9)
    norm = torch.linalg.matrix_norm(model.head.weight.detach(), 2).item()
    assert found["words"].rigorous_bound == pytest.approx(2 * norm**2 * (2 + 1 + 0))


def test_a_batch_of_padding_alone_has_no_reach() -> None:
    found = measured_products(Bag(padding=0), LOSS, (torch.zeros(3, 3, dtype=torch.long), torch.zeros(3, 2)))
    assert found["words"].rigorous_bound == 0


def test_a_table_of_positions_counts_as_a_bias() -> None:
    model = Bag(positions=True).double()
    found = measured_products(model, LOSS, (TOKENS, torch.zeros(3, 2)), tolerance=1e-9)
    words = model.words(TOKENS).detach().pow(2).sum().item()
    assert found["head"].note == ""
    assert found["head"].forward.value == pytest.approx(1.0)
    assert found["head"].paper_bound == pytest.approx(2 * words)
    # All positions are one table for the whole batch.
    assert found["positions"].note.startswith("the examples see each other")


def test_a_frozen_embedding_is_a_start_too() -> None:
    model = Bag().double()
    model.words.requires_grad_(False)
    found = measured_products(model, LOSS, (TOKENS, torch.zeros(3, 2)), tolerance=1e-9)
    assert list(found) == ["head"]
    assert found["head"].paper_bound == pytest.approx(2 * model.words(TOKENS).pow(2).sum().item())


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens).sum(1) @ self.words.weight.t()


def test_an_embedding_tied_to_the_head_adds_both_reaches() -> None:
    model, tokens = TiedHead().double(), torch.tensor([[1, 1, 2]])
    found = measured_products(model, LOSS, (tokens, torch.zeros(1, 5)), tolerance=1e-9)["words"]
    weight, summed = model.words.weight.detach(), model.words(tokens).sum(1).detach()

    def pushes(change: Tensor) -> Tensor:
        return torch.cat((change[tokens[0]].flatten(), (summed @ change.T).flatten()))

    def output(moved: Tensor) -> Tensor:
        first, second = moved[:9].view(1, 3, 3), moved[9:].view(1, 5)
        return ((weight[tokens] + first).sum(1) @ weight.T + second).flatten()

    reach = torch.linalg.matrix_norm(torch.func.jacrev(pushes)(weight).flatten(1), 2).item()
    backward = torch.linalg.matrix_norm(torch.func.jacrev(output)(torch.zeros(14).double()), 2).item()
    assert found.backward.value == pytest.approx(backward)
    assert found.rigorous_bound == pytest.approx(2 * (backward * reach) ** 2)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = bare(2, 3), bare(4, 3), bare(3, 1)

    def forward(self, pair: Any) -> Tensor:
        return self.head(self.left(pair["a"]) + self.right(pair["b"]))


def test_several_inputs_are_one_start() -> None:
    model, inputs = TwoInputs().double(), {"a": torch.randn(5, 2), "b": torch.randn(5, 4)}
    found = measured_products(model, LOSS, (inputs, torch.zeros(5, 1)), tolerance=1e-9)
    both = torch.cat((model.left.weight, model.right.weight), dim=1).detach()
    forward = torch.linalg.matrix_norm(both, 2).item()
    length = inputs["a"].pow(2).sum().item() + inputs["b"].pow(2).sum().item()
    assert found["head"].forward.value == pytest.approx(forward)
    assert found["head"].paper_bound == pytest.approx(2 * forward**2 * length, rel=1e-6)
    assert found["head"].lipschitz_bound is None
    assert found["head"].lipschitz_reason == "the forward is not a chain: AddBackward0 joins two signals"
    assert found["left"].forward.value == pytest.approx(1.0)


def test_uneven_batches_add_up_by_their_examples() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    inputs, labels = torch.randn(7, 3), torch.randint(2, (7,))
    whole = measured_products(model, nn.CrossEntropyLoss(), (inputs, labels))
    parts = measured_products(
        model, nn.CrossEntropyLoss(), [(inputs[:2], labels[:2]), (inputs[2:], labels[2:])]
    )
    for layer in ("0", "2"):
        one, other = whole[layer], parts[layer]
        for name in ("rigorous_bound", "paper_bound", "lipschitz_bound", "activation", "backward_largest"):
            assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-9)
        assert other.backward.value == pytest.approx(one.backward.value, rel=1e-9)
        assert other.forward.value == pytest.approx(one.forward.value, rel=1e-9)


class Quadratic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(3, 3)), bare(3, 2)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(features @ self.weight.pow(2))


def test_an_unknown_use_has_a_reason_and_no_numbers() -> None:
    found = measured_products(Quadratic(), LOSS, (torch.randn(4, 3), torch.zeros(4, 2)))
    row = found["weight"]
    assert (
        row.reason
        == "the weight goes into PowBackward0, none of the known uses (dense, convolution, embedding)"
    )
    assert (row.forward, row.backward, row.activation) == (None, None, None)
    assert (row.rigorous_bound, row.paper_bound, row.lipschitz_bound) == (None, None, None)
    assert found["head"].reason == ""


class RefusesGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = bare(3, 2)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(torch.from_numpy(features.numpy()))


def test_a_forward_that_cannot_be_differentiated_by_its_inputs_keeps_the_rigorous_bound() -> None:
    inputs = torch.randn(4, 3).double()
    row = measured_products(RefusesGradients(), LOSS, (inputs, torch.zeros(4, 2)), tolerance=1e-9)["head"]
    assert row.forward is None
    assert row.paper_bound is None
    assert row.reason.startswith("the forward fails on inputs that require gradients")
    assert row.rigorous_bound == pytest.approx(2 * inputs.pow(2).sum().item())


def test_a_layer_on_a_constant_has_no_forward_product() -> None:
    class OnConstant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.head = bare(2, 3), bare(3, 3)

        def forward(self, features: Tensor) -> Tensor:
            return self.head(features) + self.bias(torch.ones(len(features), 2, dtype=features.dtype))

    row = measured_products(OnConstant(), LOSS, (torch.randn(4, 3), torch.zeros(4, 3)), tolerance=1e-9)[
        "bias"
    ]
    assert row.reason == "the layer's input does not depend on what the network starts from"
    assert row.rigorous_bound == pytest.approx(2 * 2 * 4)
    assert "not on the way" in row.lipschitz_reason


class ScaledIntoActivation(nn.Module):
    """The activation sees ten times the layer's output, or sees it three times."""

    def __init__(self, repeated: bool) -> None:
        super().__init__()
        self.inner, self.head, self.repeated = bare(3, 1), bare(3, 2), repeated

    def forward(self, features: Tensor) -> Tensor:
        shift = torch.zeros(3, dtype=features.dtype)
        if self.repeated:
            return self.head(torch.relu(self.inner(features) + shift))
        return self.head(torch.relu(torch.add(shift[:1], self.inner(features), alpha=10)).expand(-1, 3))


@pytest.mark.parametrize("repeated", [True, False])
def test_what_changes_lengths_before_the_activation_belongs_to_the_backward_product(repeated: bool) -> None:
    torch.manual_seed(0)
    parts = ScaledIntoActivation(repeated), LOSS, (torch.randn(4, 3), torch.zeros(4, 2))
    norm = hessinit.measure(*parts, dtype=torch.float64, network=False)["inner"].norm
    assert norm > 0
    assert measured_products(*parts)["inner"].rigorous_bound >= norm


def test_coupled_losses_count_as_a_whole() -> None:
    def squared_mean(output: Tensor, target: Tensor) -> Tensor:
        return output.mean(0).pow(2).sum()

    inputs = torch.randn(5, 3).double()
    found = measured_products(
        nn.Sequential(bare(3, 2)), squared_mean, (inputs, torch.zeros(5)), tolerance=1e-9
    )
    assert found["0"].rigorous_bound == pytest.approx(2 / 5 * inputs.pow(2).sum().item(), rel=1e-6)


def test_a_dead_network_has_bounds_of_zero() -> None:
    model = nn.Sequential(bare(3, 4), nn.ReLU(), bare(4, 2))
    nn.init.constant_(model[0].weight, -1.0)
    found = measured_products(model, LOSS, (torch.rand(4, 3), torch.zeros(4, 2)))
    assert found["0"].activation == 0
    assert found["0"].rigorous_bound == found["2"].rigorous_bound == 0
    assert not math.isnan(found["2"].paper_bound)
