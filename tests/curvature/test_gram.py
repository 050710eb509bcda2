"""The Gram engine: when it is chosen, whose row is it, whole or in pieces, do layers make the network?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pieces import assert_right, split_into
from torch import Tensor, nn

import hessinit
from calls import measure
from tiny import LOSS, Net, labels
from zoo import ZOO, Problem
from zoo.truth import true_layers, true_network

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*did not reach tolerance:hessinit.ConvergenceWarning"),
]


def double(*shape: int) -> Tensor:
    return torch.randn(*(shape or (6, 3)), dtype=torch.float64)


def perceptron(outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def two_layers(run: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    return Net(run, first=nn.Linear(3, 4), last=nn.Linear(4, 3)).double()


SCALAR = Net(lambda m, x: m.layer(x).mean(), layer=nn.Linear(3, 1)).double()
DOWN_UP = {"down": nn.Parameter(double(2, 3)), "up": nn.Parameter(double(3, 2))}
LOW_RANK = Net(lambda m, x: x @ m.down.T @ m.up.T, **DOWN_UP)
UNKNOWN = "no layer is known: their calls mix the examples, or are none of"
REASONS: dict[str, tuple[nn.Module, Any, str]] = {
    "not convex": (perceptron(), lambda z, t: -z.pow(2).mean(), "the loss is not convex in the output"),
    "coupled": (perceptron(), lambda z, t: z.mean(0).pow(2).sum(), "the loss couples the examples"),
    "no examples": (SCALAR, lambda z, t: z.pow(2), "the output has no dimension that counts examples"),
    "products written out": (LOW_RANK, LOSS, UNKNOWN),
}


@pytest.mark.parametrize("name", REASONS)
def test_auto_says_why_it_is_lanczos_and_gram_is_refused_for_the_same_reason(name: str) -> None:
    model, loss, reason = REASONS[name]
    report = hessinit.measure(model, loss, (double(), labels()))
    assert report.engine == "lanczos"
    assert report.engine_reason.startswith(reason)
    refusal = f"estimator='gram' cannot measure this problem: {reason}.*Use estimator='auto'"
    with pytest.raises(hessinit.ProblemError, match=refusal):
        hessinit.measure(model, loss, (double(), labels()), estimator="gram")
    if name != "no examples":
        assert_right(model, loss, (double(), labels()))


def test_many_outputs_go_by_lanczos_unless_gram_is_asked_for() -> None:
    model, data = perceptron(300), (double(), labels())
    chosen, insisted = (hessinit.measure(model, LOSS, data, estimator=name) for name in ("auto", "gram"))
    reason = "300 outputs per example are too many for one backward pass each"
    assert (chosen.engine, chosen.engine_reason, insisted.engine) == ("lanczos", reason, "gram")
    assert insisted.network.norm == pytest.approx(chosen.network.norm, rel=2e-3)


@pytest.mark.parametrize("examples", [3, 4, 12])
@pytest.mark.parametrize("inputs", [2, 5])
def test_the_rank_is_bounded_by_the_outputs_even_where_examples_mix(examples: int, inputs: int) -> None:
    def mixed(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x)
        return m.head(torch.tanh(hidden - hidden.mean(dim=0)))

    model = Net(mixed, first=nn.Linear(inputs, 3), head=nn.Linear(3, 2)).double()
    report = assert_right(model, nn.MSELoss(), (double(examples, inputs), double(examples, 2)))
    assert report["first"].engine == "lanczos"
    assert report.engine_reason.endswith("1 of 2 layers by Lanczos")
    assert ("rank at most" in report["first"].bottom.reason) == (2 * examples < 3 * inputs)


@pytest.mark.parametrize("position", [0, -1])
@pytest.mark.parametrize(("examples", "steps"), [(2, 4), (3, 4), (8, 5), (20, 30), (5, 2)])
def test_rows_by_position_do_not_pass_for_rows_by_example(examples: int, steps: int, position: int) -> None:
    """Time first inside, and only one position is read: most rows get no signal at all."""
    model = two_layers(lambda m, x: m.last(torch.tanh(m.first(x.transpose(0, 1))))[position])
    report = assert_right(model, LOSS, (double(examples, steps, 3), labels(examples)))
    assert {row.engine for row in report.layers} == {"gram"}


@pytest.mark.parametrize("examples", [2, 3, 5, pytest.param(16, marks=pytest.mark.sweep), 40])
def test_no_single_pair_of_examples_is_missed(examples: int) -> None:
    few = [(i, j) for i in range(examples) for j in {0, (i + 1) % examples, examples - 1} - {i}]
    many = [((7 * seed) % 40, (11 * seed + 3) % 40) for seed in range(12)]
    for seed, (seeing, seen) in enumerate(many if examples == 40 else few):

        def see(m: Any, x: Tensor, pair: tuple[int, int] = (seeing, seen)) -> Tensor:
            hidden = torch.tanh(m.first(x))
            place = F.one_hot(torch.tensor(pair[0]), len(x)).to(hidden.dtype)
            return m.last(hidden + torch.outer(place, hidden[pair[1]]))

        options = {"network": False, "max_iterations": 3, "seed": seed if examples == 40 else 0}
        report = measure(two_layers(see), LOSS, (double(examples, 3), labels(examples)), **options)
        assert report["first"].engine == "lanczos", (seeing, seen)


def test_a_layer_that_the_forward_does_not_use_is_flat() -> None:
    unused = Net(lambda m, x: m.used(x), used=nn.Linear(2, 2), unused=nn.Linear(2, 2)).double()
    report = assert_right(unused, nn.MSELoss(), (double(9, 2), double(9, 2)))
    assert report["used"].bottom.value > 0
    assert report.network.bottom.value == 0.0  # even with more outputs than weights
    assert "does not use" in report.network.bottom.reason


def test_a_small_gram_matrix_is_searched_to_the_end() -> None:
    # Its second eigenvalue is close to the first, which this start hardly sees: 1.75 % too low if stopped.
    torch.manual_seed(49)
    convolution = [nn.Conv2d(2, 4, 3, stride=2), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*convolution, nn.Linear(4, 3)).double()
    batch = torch.randn(3, 2, 6, 6).double(), torch.randn(3, 3).double()
    report = hessinit.measure(model, nn.MSELoss(), batch, network=False)
    dense = hessinit.gauss_newton(hessinit.Problem(model, nn.MSELoss(), batch, layers="0")).to_dense()
    assert report["0"].norm == pytest.approx(torch.linalg.eigvalsh(dense)[-1].item(), rel=1e-9)


@pytest.mark.parametrize("examples", [1, 2])
@pytest.mark.parametrize("problem", ZOO)
def test_every_problem_of_the_zoo_is_right_in_pieces(
    problem: Problem, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_into(monkeypatch, examples)
    options = {"dtype": torch.float64, "tolerance": 1e-8, "forward": problem.forward, **problem.options}
    report = measure(*problem.build(), **options)
    for name, true in true_layers(problem, "gauss-newton").items():
        assert report[name].norm == pytest.approx(true.norm, rel=1e-6, abs=1e-12), name
    assert report.network.norm == pytest.approx(true_network(problem, "gauss-newton").norm, rel=1e-6)


def take_another_path(m: Any, x: Tensor) -> Tensor:
    """As many dense layers of one shape on either path, in another order."""
    early, late = (m.second, m.third) if len(x) > 2 else (m.third, m.second)
    return late(torch.tanh(early(torch.tanh(m.first(x)))))


def unlike() -> dict[str, nn.Module]:
    """Models that do other things with fewer examples."""
    first, last, flat = nn.Linear(3, 5), nn.Linear(5, 3), nn.Linear(5, 3)
    nn.init.zeros_(flat.weight)  # only the inputs tell that the pieces differ
    centred = Net(lambda _, x: x - x.mean(dim=0))
    path = Net(take_another_path, **{name: nn.Linear(3, 3) for name in ("first", "second", "third")})
    path.third.load_state_dict(path.second.state_dict())
    return {
        "batch norm before all layers": nn.Sequential(nn.BatchNorm1d(3), first, nn.Tanh(), last),
        "batch norm between layers": nn.Sequential(first, nn.BatchNorm1d(5), nn.Tanh(), last),
        "divided by the batch size": nn.Sequential(first, Net(lambda _, x: x / len(x)), nn.Tanh(), last),
        "a batch size written out": nn.Sequential(Net(lambda _, x: x.view(6, 3)), first, nn.Tanh(), last),
        "centred before a head of zeros": nn.Sequential(centred, first, nn.Tanh(), flat),
        "another path to the same output": path,
    }


UNLIKE = unlike()


@pytest.mark.parametrize("kind", UNLIKE)
def test_a_model_that_differs_with_fewer_examples_is_taken_whole(kind: str, monkeypatch: Any) -> None:
    gathered = split_into(monkeypatch, 2)
    assert_right(UNLIKE[kind].double(), LOSS, (double(), labels()))
    assert gathered[-1] == 6


CONVOLUTION = nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)).double()
FLATTENED = nn.Sequential(*perceptron(), nn.Flatten(0, 1))
MEAN_OVER_TIME = Net(lambda m, x: m.head(x.mean(dim=0)), head=nn.Linear(3, 3)).double()
CUT: dict[str, tuple[nn.Module, tuple[int, ...], int, int, list[int]]] = {
    "one by one": (perceptron(), (6, 3), 6, 1, [1] * 6),
    "a short last piece": (perceptron(), (6, 3), 6, 4, [4, 2]),
    "convolutions": (CONVOLUTION, (7, 1, 5, 5), 7, 3, [3, 3, 1]),
    "flattened positions are no examples": (FLATTENED, (4, 3, 3), 12, 2, [12]),
    "time first": (MEAN_OVER_TIME, (4, 6, 3), 6, 2, [6]),
    "time first, as long as the batch": (MEAN_OVER_TIME, (6, 6, 3), 6, 2, [6]),
}


@pytest.mark.parametrize("kind", CUT)
def test_batches_are_cut_along_their_examples_only(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, shape, targets, examples, sizes = CUT[kind]
    gathered = split_into(monkeypatch, examples)
    assert_right(model, LOSS, (double(*shape), labels(targets)))
    assert gathered == sizes


def test_a_frozen_dropout_mask_belongs_to_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*perceptron(), nn.Dropout(0.5), nn.Linear(3, 3).double())
    batch = double(), labels()
    whole = measure(model, LOSS, batch, dropout="freeze")
    split_into(monkeypatch, 2)
    pieces = measure(model, LOSS, batch, dropout="freeze")
    assert [row.norm for row in pieces.layers] == [row.norm for row in whole.layers]


def test_what_comes_after_the_pieces_is_measured_on_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanczos for the layer that Gram leaves, and the extras of all rows: the graph was let go meanwhile."""

    def with_einsum(m: Any, x: Tensor) -> Tensor:
        hidden = torch.tanh(m.first(x))
        return torch.einsum("ni,nj,ijo->no", hidden, hidden, m.mix)

    model = Net(with_einsum, first=nn.Linear(3, 4), mix=nn.Parameter(torch.randn(4, 4, 3))).double()
    batch = double(), labels()
    whole, gathered = hessinit.measure(model, LOSS, batch, details="trace"), split_into(monkeypatch, 2)
    report = assert_right(model, LOSS, batch, details="trace")
    assert gathered == [2, 2, 2]
    assert {row.name: row.engine for row in report.layers} == {"first": "gram", "mix": "lanczos"}
    traces = [row.trace.value for row in whole.layers]
    assert [row.trace.value for row in report.layers] == pytest.approx(traces, rel=1e-8)
