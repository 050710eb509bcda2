"""Batches of every shape: nested, several, short; averaged over examples as one large batch would be."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import hessinit
from tiny import LOSS, batch, inputs, labels, network

EXACT: dict[str, Any] = {"dtype": torch.float64, "tolerance": 1e-10, "curvature": "both"}


def norms(report: hessinit.CurvatureReport) -> list[float]:
    rows = (*report.layers, report.network)
    return [number for row in rows for number in (row.norm, row.approximation.value)]


class Pair(NamedTuple):
    features: torch.Tensor
    scale: torch.Tensor


@dataclass
class Loose:
    features: torch.Tensor
    scale: torch.Tensor
    name: str = "kept"


@dataclass(frozen=True)
class Frozen:
    features: torch.Tensor
    inner: Loose


class Encoding(collections.UserDict[str, torch.Tensor]):
    """As Hugging Face's BatchEncoding: dict-like, no dict, with attributes."""

    def __getattr__(self, name: str) -> torch.Tensor:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


class ReadOnly(Mapping[str, torch.Tensor]):
    """Dict-like, and not to be built from a dict."""

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self._items = {"features": first, "scale": second}

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


X, S = inputs(), torch.linspace(1, 2, 6).unsqueeze(1).double()
STRUCTURES: dict[str, tuple[Any, Callable[[Any], tuple[torch.Tensor, torch.Tensor]]]] = {
    "tuple": ((X, S), lambda x: x),
    "list": ([X, S], lambda x: x),
    "dict": ({"features": X, "scale": S}, lambda x: (x["features"], x["scale"])),
    "ordered dict": (collections.OrderedDict(a=X, b=S), lambda x: tuple(x.values())),
    "named tuple": (Pair(X, S), lambda x: (x.features, x.scale)),
    "dataclass": (Loose(X, S), lambda x: (x.features, x.scale)),
    "frozen dataclass": (Frozen(X, Loose(X, S)), lambda x: (x.features, x.inner.scale)),
    "encoding": (Encoding(features=X, scale=S), lambda x: (x.features, x["scale"])),
    "read-only mapping": (ReadOnly(X, S), lambda x: (x["features"], x["scale"])),
    "nested": ([{"deep": (Pair(X, S), None, "text", 3)}], lambda x: tuple(x[0]["deep"][0])),
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_inputs_of_every_structure_reach_the_forward_converted(kind: str) -> None:
    structure, read = STRUCTURES[kind]

    def forward(model: nn.Module, given: Any) -> torch.Tensor:
        features, scale = read(given)
        assert features.dtype == scale.dtype == torch.float32
        if kind != "read-only mapping":
            assert type(given) is type(structure)
        return model(features * scale)

    report = hessinit.measure(network(), LOSS, (structure, labels()), forward=forward)
    plain = hessinit.measure(network(), LOSS, (X * S.float(), labels()))
    assert report.network.norm == plain.network.norm
    assert read(structure)[1] is S
    assert S.dtype == torch.float64


def test_targets_may_be_nested_and_absent() -> None:
    def loss(output: torch.Tensor, target: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(output, target["class"])

    plain = hessinit.measure(network(), LOSS, batch()).network
    nested = hessinit.measure(network(), loss, (inputs(), {"class": labels(), "name": "six"})).network
    absent = hessinit.measure(network(), lambda o, _: F.cross_entropy(o, labels()), (inputs(), None)).network
    assert nested == plain
    assert absent == plain


class PerBatch(nn.Module):
    """A mean, whatever its attribute says."""

    reduction = "sum"

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, reduction=self.reduction) / len(output)


def summed_behind_an_offset(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target, reduction="sum") / 100 + 50


LOSSES: dict[str, Any] = {
    "mean": nn.CrossEntropyLoss(),
    "mean that calls itself a sum": PerBatch(),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "mean of a callable": lambda output, target: F.cross_entropy(output, target),
    "sum of a callable": lambda output, target: F.cross_entropy(output, target, reduction="sum"),
    "sum of squares": lambda output, target: (output - F.one_hot(target, 3)).square().sum(),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_short_batches_count_for_what_they_hold(kind: str) -> None:
    x, y = batch(7)
    whole = hessinit.measure(network(), LOSSES[kind], (x, y), **EXACT)
    parts = hessinit.measure(
        network(), LOSSES[kind], [(x[:3], y[:3]), (x[3:6], y[3:6]), (x[6:], y[6:])], **EXACT
    )
    assert norms(parts) == pytest.approx(norms(whole), rel=1e-9)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-12)
    assert (parts.examples, parts.batches) == (7, 3)


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0])), nn.CrossEntropyLoss(ignore_index=0)]
)
def test_a_mean_with_weights_of_its_own_is_averaged_over_examples(loss: nn.Module) -> None:
    x, y = batch(7)
    pieces = [(x[:3], y[:3]), (x[3:], y[3:])]
    operators = [hessinit.gauss_newton(network(), loss, piece, dtype=torch.float64) for piece in pieces]
    mean = sum(len(piece[1]) / 7 * one.to_dense() for piece, one in zip(pieces, operators, strict=True))
    found = hessinit.measure(network(), loss, pieces, **EXACT).network.approximation
    assert found is not None
    assert found.value == pytest.approx(float(torch.linalg.eigvalsh(mean)[-1]), rel=1e-9)


WEIGHTS = torch.linspace(0.5, 2, 6)


def weighted_by_position(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Knows the size of its batch, so that no other one can be tried."""
    return (WEIGHTS.to(output) * F.cross_entropy(output, target, reduction="none")).sum()


def contrastive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(20 * output @ output.roll(1, 0).T, torch.arange(len(output)))


@pytest.mark.parametrize("loss", [weighted_by_position, contrastive])
def test_a_loss_that_does_not_tell_is_asked_for_its_reduction(loss: Any) -> None:
    pieces = [batch(6), (inputs(12)[6:], labels(6))]
    with pytest.raises(
        hessinit.ProblemError, match='its values do not tell.*reduction="mean".*reduction="sum"'
    ):
        hessinit.measure(network(), loss, pieces)
    operators = [hessinit.gauss_newton(network(), loss, piece, dtype=torch.float64) for piece in pieces]
    total = sum(one.to_dense() for one in operators)
    truth = float(torch.linalg.eigvalsh(total).abs().max())
    options: dict[str, Any] = {**EXACT, "curvature": "gauss-newton"}
    added = hessinit.measure(network(), loss, pieces, reduction="sum", **options)
    averaged = hessinit.measure(network(), loss, pieces, reduction="mean", **options)
    assert (added.network.norm, averaged.network.norm) == pytest.approx((truth, truth / 2), rel=1e-9)


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(
        hessinit.ProblemError, match="reduction='avg' is unknown; choose from 'auto', 'mean', 'sum'"
    ):
        hessinit.measure(network(), LOSS, batch(), reduction="avg")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("short", [1, 2])
def test_short_batches_of_flattened_positions_count_by_examples(reduction: str, short: int) -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, reduction=reduction)

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).flatten(0, 1)

    x, y = inputs(6, 3, 4), torch.arange(18) % 3
    cut = 6 - short
    pieces = [(x[:cut], y[: 3 * cut]), (x[cut:], y[3 * cut :])]
    whole = hessinit.measure(network(), loss, (x, y), forward=forward, **EXACT)
    parts = hessinit.measure(network(), loss, pieces, forward=forward, **EXACT)
    assert whole.examples == parts.examples == 6
    assert norms(parts) == pytest.approx(norms(whole), rel=1e-9)


def test_short_batches_with_time_first_count_by_examples() -> None:
    model = nn.LSTM(4, 3)
    x, y = inputs(5, 10, 4), labels(10)

    def last(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x)[0][-1]

    whole = hessinit.measure(model, LOSS, (x, y), forward=last, **EXACT)
    parts = hessinit.measure(model, LOSS, [(x[:, :7], y[:7]), (x[:, 7:], y[7:])], forward=last, **EXACT)
    assert whole.examples == parts.examples == 10
    assert norms(parts) == pytest.approx(norms(whole), rel=1e-9)


def test_packed_sequences_are_inputs_like_any_other() -> None:
    rows = [torch.randn(length, 4) for length in (3, 2, 2)]
    packed = pack_sequence(rows)

    def last(model: nn.Module, x: PackedSequence) -> torch.Tensor:
        return model(x)[1][0][0]

    model = nn.LSTM(4, 3)
    report = hessinit.measure(model, LOSS, (packed, labels(3)), forward=last, **EXACT)
    one_by_one = [(row.unsqueeze(1), labels(3)[i : i + 1]) for i, row in enumerate(rows)]
    parts = hessinit.measure(model, LOSS, one_by_one, forward=lambda m, x: m(x)[1][0][0], **EXACT)
    assert report.examples == parts.examples == 3
    assert norms(report) == pytest.approx(norms(parts), rel=1e-9)


def test_a_generator_is_read_once() -> None:
    reads: list[int] = []

    def pairs() -> Iterator[Any]:
        for size in (4, 2):
            reads.append(size)
            yield batch(size)

    report = hessinit.measure(network(), LOSS, pairs(), curvature="both")
    assert reads == [4, 2]
    assert (report.batches, report.examples) == (2, 6)


def test_a_loader_is_an_iterable_of_batches() -> None:
    loader = DataLoader(TensorDataset(*batch(7)), batch_size=3)
    report = hessinit.measure(network(), LOSS, loader, **EXACT)
    assert norms(report) == pytest.approx(
        norms(hessinit.measure(network(), LOSS, batch(7), **EXACT)), rel=1e-9
    )


class Noisy(torch.utils.data.Dataset):
    """Augments, with generators of its own."""

    def __init__(self) -> None:
        self.torch = torch.Generator().manual_seed(1)
        self.numpy = numpy.random.default_rng(1)
        self.python = random.Random(1)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.rand(4, generator=self.torch) + self.numpy.random() + self.python.random()
        return noise, index % 3


@pytest.mark.parametrize("at", ["loader", "sampler", "dataset"])
def test_the_generators_of_a_loader_go_on_as_if_it_had_not_been_read(at: str) -> None:
    def draw(measures: bool) -> list[torch.Tensor]:
        data = Noisy()
        own = torch.Generator().manual_seed(2)
        sampler = torch.utils.data.RandomSampler(data, generator=own)
        loader = torch.utils.data.DataLoader(
            data, 2, **({"sampler": sampler} if at == "sampler" else {"generator": own, "shuffle": True})
        )
        nested = torch.utils.data.DataLoader(torch.utils.data.Subset(data, range(6)), 2)
        if measures:
            hessinit.measure(network(), LOSS, nested if at == "dataset" else loader)
        return [given for given, _ in (nested if at == "dataset" else loader)]

    assert all(map(torch.equal, draw(measures=False), draw(measures=True)))


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_the_spread_holds_the_norm_of_every_batch_alone(curvature: str) -> None:
    x, y = batch(7)
    parts = [(x[:4], y[:4]), (x[4:], y[4:])]
    options: dict[str, Any] = {"curvature": curvature, "dtype": torch.float64, "tolerance": 1e-10}
    report = hessinit.measure(network(), LOSS, parts, **options)
    alone = [hessinit.measure(network(), LOSS, part, **options) for part in parts]
    for row in (*report.layers, report.network):
        expected = [(one.network if row.name == "network" else one[row.name]).norm for one in alone]
        assert row.spread is not None
        assert list(row.spread.norms) == pytest.approx(expected, rel=1e-8)
    assert all(row.spread is None for row in alone[0])
