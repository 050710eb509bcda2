"""Batches of every shape: nested, several, short; averaged over examples as one large batch would be."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import hessinit
from calls import call, measure
from tiny import LOSS, Net, batch, inputs, labels, network

EXACT: dict[str, Any] = {"dtype": torch.float64, "tolerance": 1e-10, "curvature": "both"}


def norms(report: hessinit.CurvatureReport) -> list[float]:
    rows = (*report.layers, report.network)
    return [number for row in rows for number in (row.norm, row.approximation.value)]


class Pair(NamedTuple):
    features: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Frozen:
    inner: Pair
    name: str = "kept"


class Encoding(collections.UserDict[str, Any]):
    """As Hugging Face's BatchEncoding: dict-like, no dict."""


def test_structures_reach_forward_and_loss_converted_and_whole_numbers_stay_whole() -> None:
    x, scale = inputs(), torch.linspace(1, 2, 6).unsqueeze(1).double()
    structure = [Encoding(deep=(Frozen(Pair(x, scale)), None, "text", 3), ids=labels(), mask=labels() > 0)]

    def forward(model: nn.Module, given: Any) -> Tensor:
        frozen, *others = given[0]["deep"]
        features, factors = frozen.inner
        assert (type(given[0]), type(frozen), frozen.name) == (Encoding, Frozen, "kept")
        assert others == [None, "text", 3]
        assert features.dtype == factors.dtype == torch.float32
        assert (given[0]["ids"].dtype, given[0]["mask"].dtype) == (torch.int64, torch.bool)
        return model(features * factors)

    nested = lambda z, y: F.cross_entropy(z, y["class"])  # noqa: E731
    absent = lambda z, _: F.cross_entropy(z, labels())  # noqa: E731
    plain = hessinit.measure(network(), LOSS, (x * scale.float(), labels())).network
    for loss, target in ((nested, {"class": labels(), "name": "six"}), (absent, None)):
        assert measure(network(), loss, (structure, target), forward=forward).network.norm == plain.norm
    assert structure[0]["deep"][0].inner.scale is scale
    assert scale.dtype == torch.float64


class PerBatch(nn.Module):
    """A mean, whatever its attribute says."""

    reduction = "sum"

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction=self.reduction) / len(output)


LOSSES: dict[str, Any] = {
    "mean": nn.CrossEntropyLoss(),
    "mean that calls itself a sum": PerBatch(),
    "sum of a callable": lambda z, y: F.cross_entropy(z, y, reduction="sum"),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_short_batches_count_for_what_they_hold(kind: str) -> None:
    x, y = batch(7)
    pieces = [(x[:3], y[:3]), (x[3:6], y[3:6]), (x[6:], y[6:])]
    whole, parts = (measure(network(), LOSSES[kind], data, **EXACT) for data in ((x, y), pieces))
    assert norms(parts) == pytest.approx(norms(whole), rel=1e-9)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-12)
    assert (parts.examples, parts.batches) == (7, 3)


WEIGHTS = torch.linspace(0.5, 2, 6)


def weighted_by_position(output: Tensor, target: Tensor) -> Tensor:
    """Knows the size of its batch, so that no other one can be tried."""
    return (WEIGHTS.to(output) * F.cross_entropy(output, target, reduction="none")).sum()


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(20 * output @ output.roll(1, 0).T, torch.arange(len(output)))


def dense_mean(loss: Any, pieces: list[Any]) -> float:
    """The norm of Gauss-Newton, averaged over the examples of the pieces."""
    operators = [call(hessinit.gauss_newton, network(), loss, one, dtype=torch.float64) for one in pieces]
    sizes = [len(piece[1]) / sum(len(other[1]) for other in pieces) for piece in pieces]
    mean = sum(size * one.to_dense() for size, one in zip(sizes, operators, strict=True))
    return float(torch.linalg.eigvalsh(mean).abs().max())


def test_a_mean_with_weights_of_its_own_is_averaged_over_examples() -> None:
    x, y = batch(7)
    loss, pieces = nn.CrossEntropyLoss(ignore_index=0), [(x[:3], y[:3]), (x[3:], y[3:])]
    found = measure(network(), loss, pieces, **EXACT).network.approximation.value
    assert found == pytest.approx(dense_mean(loss, pieces), rel=1e-9)


@pytest.mark.parametrize("loss", [weighted_by_position, contrastive])
def test_a_loss_that_does_not_tell_is_asked_for_its_reduction(loss: Any) -> None:
    pieces = [batch(6), (inputs(12)[6:], labels(6))]
    message = "its values do not tell.*reduction=.mean.*reduction=.sum"
    with pytest.raises(hessinit.ProblemError, match=message):
        hessinit.measure(network(), loss, pieces)
    truth, options = dense_mean(loss, pieces), {**EXACT, "curvature": "gauss-newton"}
    for reduction, factor in (("sum", 2), ("mean", 1)):
        found = measure(network(), loss, pieces, reduction=reduction, **options).network.norm
        assert found == pytest.approx(factor * truth, rel=1e-9)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_short_batches_of_flattened_positions_count_by_examples(reduction: str) -> None:
    x, y = inputs(6, 3, 4), torch.arange(18) % 3
    pieces = [(x[:4], y[:12]), (x[4:], y[12:])]
    loss = lambda z, t: F.cross_entropy(z, t, reduction=reduction)  # noqa: E731
    forward = lambda model, x: model(x).flatten(0, 1)  # noqa: E731
    whole, parts = (measure(network(), loss, data, forward=forward, **EXACT) for data in ((x, y), pieces))
    assert whole.examples == parts.examples == 6
    assert norms(parts) == pytest.approx(norms(whole), rel=1e-9)


def time_first(flat: bool) -> Net:
    """A recurrent network, position by position: rows of logits, as flat targets want them, or (T, N, C)."""
    torch.manual_seed(0)
    parts = {"body": nn.LSTM(4, 5), "head": nn.Linear(5, 3)}
    return Net(lambda net, x: net.head(net.body(x)[0]).flatten(0, int(flat)), **parts)


@pytest.mark.parametrize("flat", [True, False])
def test_time_first_batches_of_unequal_size_with_flat_targets_count_by_their_rows(flat: bool) -> None:
    x, y = inputs(5, 8, 4), torch.arange(40).remainder(3).view(5, 8)
    pieces = [(x[:, :6], y[:, :6].flatten()), (x[:, 6:], y[:, 6:].flatten())]
    loss = lambda z, t: F.cross_entropy(z.reshape(-1, 3), t)  # noqa: E731
    options = {**EXACT, "reduction": "mean"}
    whole, parts = (measure(time_first(flat), loss, data, **options) for data in ((x, y.flatten()), pieces))
    assert norms(parts) == pytest.approx(norms(whole), rel=1e-9)


def test_packed_sequences_count_by_examples() -> None:
    model, rows = nn.LSTM(4, 3), [inputs(length) for length in (3, 2, 2)]
    single = [(row.unsqueeze(1), labels(3)[i : i + 1]) for i, row in enumerate(rows)]
    options, both = {"forward": lambda model, x: model(x)[1][0][0], **EXACT}, (pack_sequence(rows), labels(3))
    packed, parts = (measure(model, LOSS, data, **options) for data in (both, single))
    assert packed.examples == parts.examples == 3
    assert norms(packed) == pytest.approx(norms(parts), rel=1e-9)


def test_a_generator_is_read_once_and_a_loader_is_an_iterable_of_batches() -> None:
    reads: list[int] = []

    def pairs() -> Iterator[Any]:
        for size in (4, 2):
            reads.append(size)
            yield batch(size)

    report = hessinit.measure(network(), LOSS, pairs(), curvature="both")
    assert (reads, report.batches, report.examples) == ([4, 2], 2, 6)
    loader = DataLoader(TensorDataset(*batch(7)), batch_size=3)
    report, whole = (measure(network(), LOSS, data, **EXACT) for data in (loader, batch(7)))
    assert norms(report) == pytest.approx(norms(whole), rel=1e-9)


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_the_spread_holds_the_norm_of_every_batch_alone(curvature: str) -> None:
    x, y = batch(7)
    parts = [(x[:4], y[:4]), (x[4:], y[4:])]
    options: dict[str, Any] = {**EXACT, "curvature": curvature}
    report = measure(network(), LOSS, parts, **options)
    alone = [measure(network(), LOSS, part, **options) for part in parts]
    for row in (*report.layers, report.network):
        expected = [(one.network if row.name == "network" else one[row.name]).norm for one in alone]
        assert list(row.spread.norms) == pytest.approx(expected, rel=1e-8)
    assert all(row.spread is None for row in alone[0])
