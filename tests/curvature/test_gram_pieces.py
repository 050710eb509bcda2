"""Large batches go through in pieces: the numbers must be those of the whole, or the whole must be taken."""

from __future__ import annotations

import pytest
import torch
from pieces import assert_right, split_into
from torch import nn

import hessinit
from zoo import ZOO, Problem
from zoo.truth import true_layers, true_network

LOSS = nn.CrossEntropyLoss()
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning"),
    pytest.mark.filterwarnings("ignore::hessinit.ConvergenceWarning"),
]


@pytest.mark.parametrize("examples", [1, 2])
@pytest.mark.parametrize("problem", ZOO)
def test_every_problem_of_the_zoo_is_right_in_pieces(
    problem: Problem, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_into(monkeypatch, examples)
    model, loss, batch = problem.build()
    report = hessinit.measure(
        model, loss, batch, dtype=torch.float64, tolerance=1e-8, forward=problem.forward, **problem.options
    )
    for name, true in true_layers(problem, "gauss-newton").items():
        assert report[name].norm == pytest.approx(true.norm, rel=1e-6, abs=1e-12), name
    assert report.network.norm == pytest.approx(true_network(problem, "gauss-newton").norm, rel=1e-6)


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (6, 3)), dtype=torch.float64)


@pytest.mark.parametrize(("examples", "sizes"), [(1, [1] * 6), (4, [4, 2]), (5, [5, 1])])
def test_a_plain_network_goes_through_in_pieces_of_that_size(
    examples: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered = split_into(monkeypatch, examples)
    assert_right(perceptron(), LOSS, (inputs(), LABELS))
    assert gathered == sizes


def test_written_convolutions_go_through_in_uneven_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = split_into(monkeypatch, 3)
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)).double()
    assert_right(model, LOSS, (inputs(7, 1, 5, 5), torch.arange(7) % 3))
    assert gathered == [3, 3, 1]


class Centred(nn.Module):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features - features.mean(dim=0)


class OverBatchSize(nn.Module):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features / features.shape[0]


class NeedsSix(nn.Module):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features.view(6, 3)


def headless() -> nn.Linear:
    """Outputs that are the same whatever goes in: only the inputs tell that the pieces differ."""
    head = nn.Linear(5, 3)
    nn.init.zeros_(head.weight)
    return head


def with_unlike_pieces() -> dict[str, nn.Module]:
    first, last = nn.Linear(3, 5), nn.Linear(5, 3)
    return {
        "batch norm before all layers": nn.Sequential(nn.BatchNorm1d(3), first, nn.Tanh(), last),
        "batch norm between layers": nn.Sequential(first, nn.BatchNorm1d(5), nn.Tanh(), last),
        "centred before a head of zeros": nn.Sequential(Centred(), first, nn.Tanh(), headless()),
        "divided by the batch size": nn.Sequential(first, OverBatchSize(), nn.Tanh(), last),
        "a batch size written into the model": nn.Sequential(NeedsSix(), first, nn.Tanh(), last),
    }


@pytest.mark.parametrize("name", with_unlike_pieces())
def test_a_model_that_does_other_things_with_fewer_examples_is_taken_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered = split_into(monkeypatch, 2)
    assert_right(with_unlike_pieces()[name].double(), LOSS, (inputs(), LABELS))
    assert gathered[-1] == 6


class AnotherPath(nn.Module):
    """As many dense layers of one shape on either path, in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(3, 3) for _ in range(3))
        with torch.no_grad():
            self.third.weight.copy_(self.second.weight)
            self.third.bias.copy_(self.second.bias)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(features))
        early, late = (self.second, self.third) if len(features) > 2 else (self.third, self.second)
        return late(torch.tanh(early(hidden)))


def test_a_piece_that_takes_another_path_to_the_same_output_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gathered = split_into(monkeypatch, 2)
    assert_right(AnotherPath().double(), LOSS, (inputs(), LABELS))
    assert gathered[-1] == 6


def test_a_frozen_dropout_mask_belongs_to_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3)).double()
    batch = (inputs(), LABELS)
    whole = hessinit.measure(model, LOSS, batch, dropout="freeze")
    split_into(monkeypatch, 2)
    pieces = hessinit.measure(model, LOSS, batch, dropout="freeze")
    assert [row.norm for row in pieces.layers] == [row.norm for row in whole.layers]


def test_outputs_flattened_over_positions_do_not_count_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = split_into(monkeypatch, 2)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3), nn.Flatten(0, 1)).double()
    assert_right(model, LOSS, (inputs(4, 3, 3), torch.arange(12) % 3))
    assert gathered == [12]


class MeanOverTime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.head(features.mean(dim=0))


@pytest.mark.parametrize("steps", [4, 6])  # with 6, the first dimension only looks like examples
def test_inputs_with_time_first_are_not_cut_along_time(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = split_into(monkeypatch, 2)
    assert_right(MeanOverTime().double(), LOSS, (inputs(steps, 6, 3), LABELS))
    assert gathered == [6]


def test_what_comes_after_the_pieces_is_measured_on_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanczos for the layer that Gram leaves, and the extras of all rows: the graph was let go meanwhile."""

    class WithEinsum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.mix = nn.Linear(3, 4), nn.Parameter(torch.randn(4, 4, 3))

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.first(features))
            return torch.einsum("ni,nj,ijo->no", hidden, hidden, self.mix)

    model, batch = WithEinsum().double(), (inputs(), LABELS)
    whole = hessinit.measure(model, LOSS, batch, top=2, trace=True, frobenius=True, tolerance=1e-8)
    gathered = split_into(monkeypatch, 2)
    report = assert_right(model, LOSS, batch, top=2, trace=True, frobenius=True)
    assert gathered == [2, 2, 2]
    assert {row.name: row.engine for row in report.layers} == {"first": "gram", "mix": "lanczos"}
    for one, other in zip((*report.layers, report.network), (*whole.layers, whole.network), strict=True):
        assert one.trace.value == pytest.approx(other.trace.value, rel=1e-8)
        assert one.frobenius.value == pytest.approx(other.frobenius.value, rel=1e-8)
        assert [v.value for v in one.eigenvalues] == pytest.approx(
            [v.value for v in other.eigenvalues], rel=1e-6
        )


def test_pieces_of_several_batches_and_both_curvatures_agree_with_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = perceptron()
    batches = [(inputs(), LABELS), (inputs(3, 3), LABELS[:3])]
    split_into(monkeypatch, 2)
    report = assert_right(model, LOSS, batches, curvature="gauss-newton")
    both = hessinit.measure(model, LOSS, batches, curvature="both", tolerance=1e-8)
    assert_right(model, LOSS, batches, curvature="hessian")
    for row, exact in zip(report.layers, both.layers, strict=True):
        assert exact.approximation.value == pytest.approx(row.norm, rel=1e-6)
        assert len(row.spread.norms) == 2
