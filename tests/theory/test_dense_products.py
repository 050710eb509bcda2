"""Every norm and both bounds against whole Jacobians."""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from dense_products import DenseProducts, dense_products
from measured_products import measured_products
from torch import Tensor, nn
from torch.nn import functional as F

from hessinit.products import spectral_norms as norms_module


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, stream: Tensor) -> Tensor:
        return self.head(stream + self.second(self.act(self.first(stream))))


class UsedThrice(nn.Module):
    def __init__(self, shared: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.shared, self.act, self.head = shared, nn.Tanh(), head

    def forward(self, features: Tensor) -> Tensor:
        for _ in range(3):
            features = self.act(self.shared(features))
        return self.head(features.flatten(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.stay, self.head = nn.Linear(2, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 3)

    def forward(self, sequence: Tensor) -> Tensor:
        state = sequence.new_zeros(len(sequence), 4)
        for step in sequence.unbind(1):
            state = torch.tanh(self.enter(step) + self.stay(state))
        return self.head(state)


class Block(nn.Module):
    """A transformer block; its rows are the tokens, its examples the sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query, self.key, self.value = nn.LayerNorm(4), *(nn.Linear(4, 4) for _ in range(3))
        self.wide, self.act, self.narrow, self.head = (
            nn.Linear(4, 7),
            nn.GELU(),
            nn.Linear(7, 4),
            nn.Linear(4, 3),
        )

    def forward(self, stream: Tensor) -> Tensor:
        inner = self.norm(stream)
        mixed = F.softmax(self.query(inner) @ self.key(inner).mT, dim=-1) @ self.value(inner)
        stream = stream + mixed
        return self.head(stream + self.narrow(self.act(self.wide(stream))))


class WeightedSteps(nn.Module):
    """Sequences as (examples, time, features) or, time first, as (time, examples, features)."""

    def __init__(self, time_first: bool) -> None:
        super().__init__()
        self.each, self.act, self.head, self.time_first = (
            nn.Linear(3, 5),
            nn.Tanh(),
            nn.Linear(5, 2),
            time_first,
        )

    def forward(self, sequence: Tensor) -> Tensor:
        steps = self.act(self.each(sequence))
        weights = torch.arange(1.0, 4.0, dtype=steps.dtype)
        return self.head(torch.einsum("tnd,t->nd" if self.time_first else "ntd,t->nd", steps, weights))


@dataclass(frozen=True)
class Case:
    """`layers` maps a layer to the module behind which its backward product starts."""

    model: Any
    inputs: tuple[int, ...]
    layers: dict[str, str]
    classes: int = 3
    together: tuple[str, ...] = ()


def mlp(*widths: int, bias: bool = True) -> nn.Sequential:
    layers = [nn.Linear(a, b, bias=bias) for a, b in zip(widths[:-1], widths[1:], strict=True)]
    return nn.Sequential(*[part for layer in layers[:-1] for part in (layer, nn.GELU())], layers[-1])


CASES = {
    "mlp": Case(lambda: mlp(4, 6, 5, 3), (5, 4), {"0": "1", "2": "3", "4": "4"}),
    # More inputs and outputs than unit vectors are sent for: Lanczos on either side.
    "wide": Case(lambda: mlp(90, 6, 80), (3, 90), {"0": "1", "2": "2"}, classes=80),
    "one example": Case(lambda: mlp(4, 6, 3), (1, 4), {"0": "1", "2": "2"}),
    "convolutions": Case(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 2, groups=2), nn.Sigmoid(),
            nn.ConvTranspose2d(4, 2, 3, stride=2, groups=2), nn.Flatten(), nn.Linear(98, 3),
        ),
        (4, 2, 7, 7),
        {"0": "1", "2": "3", "4": "4", "6": "6"},
    ),
    "dilated": Case(
        lambda: nn.Sequential(
            nn.Conv1d(2, 3, 3, dilation=2, stride=2), nn.ELU(), nn.Flatten(), nn.Linear(9, 3)
        ),
        (4, 2, 9),
        {"0": "1", "3": "3"},
    ),
    "residual": Case(Residual, (5, 4), {"first": "act", "second": "second", "head": "head"}),
    "used thrice": Case(
        lambda: UsedThrice(nn.Linear(4, 4), nn.Linear(4, 3)), (5, 4), {"shared": "act", "head": "head"}
    ),
    "convolution used thrice": Case(
        lambda: UsedThrice(nn.Conv2d(2, 2, 3, padding=1), nn.Linear(18, 3)), (3, 2, 3, 3), {"shared": "act"}
    ),
    "recurrent": Case(Recurrent, (4, 3, 2), {"enter": "enter", "stay": "stay", "head": "head"}),
    "transformer": Case(
        Block,
        (3, 4, 4),
        {"query": "query", "value": "value", "wide": "act", "narrow": "narrow", "head": "head"},
    ),
    "batchnorm in train mode": Case(
        lambda: nn.Sequential(
            nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Tanh(), nn.Linear(5, 3)
        ),
        (6, 4),
        {"0": "0"},
        together=("0",),
    ),
}  # fmt: skip


def build(name: str) -> tuple[Case, nn.Module, tuple[Tensor, Tensor]]:
    case = CASES[name]
    torch.manual_seed(3)
    model = case.model()
    inputs = torch.randn(*case.inputs)
    shape = (case.inputs[0],) if name != "transformer" else case.inputs[:2]
    return case, model, (inputs, torch.randint(case.classes, shape))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


@functools.cache
def truth(name: str, layer: str) -> list[DenseProducts]:
    case, model, batch = build(name)
    modules = dict(model.named_modules())
    return dense_products(
        model, modules[layer], modules[case.layers[layer]], loss, batch, together=layer in case.together
    )


@functools.cache
def measured(name: str) -> Any:
    _, model, batch = build(name)
    return measured_products(model, loss, batch, tolerance=1e-7)


PAIRS = [(name, layer) for name, case in CASES.items() for layer in case.layers]


@pytest.mark.parametrize(("name", "layer"), PAIRS)
def test_the_norms_are_those_of_the_whole_jacobians(name: str, layer: str) -> None:
    rows, found = truth(name, layer), measured(name)[layer]
    assert found.forward.converged
    assert found.backward.converged
    assert found.forward.value == pytest.approx(statistics.mean(row.forward for row in rows), rel=1e-5)
    assert found.forward_largest == pytest.approx(max(row.forward for row in rows), rel=1e-5)
    assert found.backward.value == pytest.approx(statistics.mean(row.backward for row in rows), rel=1e-5)
    assert found.backward_largest == pytest.approx(max(row.backward for row in rows), rel=1e-5)
    assert found.activation == pytest.approx(max(row.activation for row in rows), rel=1e-9)


@pytest.mark.parametrize(("name", "layer"), PAIRS)
def test_the_rigorous_bound_is_the_sum_of_the_examples_products(name: str, layer: str) -> None:
    expected = sum(row.rigorous for row in truth(name, layer))
    assert measured(name)[layer].rigorous_bound == pytest.approx(expected, rel=1e-4)
    assert measured(name)[layer].rigorous_bound >= expected * (1 - 1e-12)


@pytest.mark.parametrize(
    ("name", "layer", "taps"),
    [
        ("mlp", "2", 1),
        ("wide", "2", 1),
        ("residual", "second", 1),
        ("recurrent", "stay", 1),
        ("transformer", "narrow", 1),
        ("batchnorm in train mode", "0", 1),
        ("convolutions", "0", 4),  # each of three taps meets every second pixel, twice in each direction
        ("convolutions", "2", 4),
        ("convolutions", "4", 9),  # transposed: every pixel is spread over the whole kernel
        ("dilated", "0", 3),  # dilation and stride alike: all taps meet the same pixels
        ("convolution used thrice", "shared", 9),
    ],
)
def test_the_papers_bound_is_the_sum_of_the_examples_products(name: str, layer: str, taps: int) -> None:
    expected = sum(row.paper(taps) for row in truth(name, layer))
    assert measured(name)[layer].paper_bound == pytest.approx(expected, rel=1e-4)


def test_after_batchnorm_only_the_forward_product_sees_the_batch_as_one() -> None:
    _, model, batch = build("batchnorm in train mode")
    modules = dict(model.named_modules())
    whole = dense_products(model, modules["3"], modules["3"], loss, batch, together=True)
    each = dense_products(model, modules["3"], modules["3"], loss, batch)
    found = measured("batchnorm in train mode")["3"]
    assert found.forward.value == pytest.approx(whole[0].forward, rel=1e-5)
    assert found.backward.value == pytest.approx(1.0, rel=1e-12)
    assert found.rigorous_bound == pytest.approx(sum(row.rigorous for row in each), rel=1e-4)
    assert found.note.startswith("before this layer the examples see each other")
    assert measured("batchnorm in train mode")["0"].note.startswith("the examples see each other")
    assert measured("mlp")["2"].note == ""


def test_time_first_gives_the_numbers_of_batch_first() -> None:
    torch.manual_seed(0)
    model, sequence, labels = WeightedSteps(False), torch.randn(5, 3, 3), torch.randint(2, (5,))
    twin = WeightedSteps(True)
    twin.load_state_dict(model.state_dict())
    one = measured_products(model, loss, (sequence, labels), tolerance=1e-7)
    other = measured_products(twin, loss, (sequence.transpose(0, 1).contiguous(), labels), tolerance=1e-7)
    for layer in ("each", "head"):
        assert other[layer].note == ""
        for name in ("forward_largest", "backward_largest", "activation", "rigorous_bound", "paper_bound"):
            assert getattr(other[layer], name) == pytest.approx(getattr(one[layer], name), rel=1e-6)


def test_lanczos_and_unit_vectors_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms_module, "_FEW", 0)
    monkeypatch.setattr(norms_module, "_PASSES_PER_LAYER", 0)
    for name in ("mlp", "convolutions", "used thrice", "transformer", "batchnorm in train mode"):
        _, model, batch = build(name)
        for layer, other in measured_products(model, loss, batch, tolerance=1e-7).items():
            one = measured(name)[layer]
            assert "settled" in other.backward.reason
            assert other.backward.value == pytest.approx(one.backward.value, rel=1e-5)
            assert other.forward.value == pytest.approx(one.forward.value, rel=1e-5)
            assert other.rigorous_bound == pytest.approx(one.rigorous_bound, rel=1e-4)


def test_unit_vectors_may_go_a_few_layers_and_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms_module, "_BYTES_AT_ONCE", 1)
    monkeypatch.setattr(norms_module, "_NUMBERS_AT_ONCE", 1)
    _, model, batch = build("convolutions")
    for layer, other in measured_products(model, loss, batch, tolerance=1e-7).items():
        assert other.backward.value == pytest.approx(
            measured("convolutions")[layer].backward.value, rel=1e-12
        )
        assert other.forward.value == pytest.approx(measured("convolutions")[layer].forward.value, rel=1e-9)
