"""Jacobian norms and both bounds: against whole Jacobians, closed forms, and true Gauss-Newton norms."""

from __future__ import annotations

import functools
import math
import statistics
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from jacobian_truth import DenseProducts, dense_products, measured_bounds, random_network
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hessinit
from hessinit.theory import jacobians
from tiny import Net
from zoo import PROBLEMS, Problem
from zoo.snapshot import differences, snapshot
from zoo.truth import true_layers


def residual_net() -> Net:
    return Net(
        lambda net, stream: net.head(stream + net.second(net.act(net.first(stream)))),
        first=nn.Linear(4, 6),
        act=nn.SiLU(),
        second=nn.Linear(6, 4),
        head=nn.Linear(4, 3),
    )


def used_thrice(shared: nn.Module, head: nn.Module) -> Net:
    def run(net: Any, features: Any) -> Tensor:
        for _ in range(3):
            features = net.act(net.shared(features))
        return net.head(features.flatten(1))

    return Net(run, shared=shared, act=nn.Tanh(), head=head)


def recurrent() -> Net:
    def run(net: Any, sequence: Any) -> Tensor:
        state = sequence.new_zeros(len(sequence), 4)
        for step in sequence.unbind(1):
            state = torch.tanh(net.enter(step) + net.stay(state))
        return net.head(state)

    return Net(run, enter=nn.Linear(2, 4), stay=nn.Linear(4, 4, bias=False), head=nn.Linear(4, 3))


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


def weighted_steps(time_first: bool) -> Net:
    """Sequences as (examples, time, features) or, time first, as (time, examples, features)."""

    def run(net: Any, sequence: Any) -> Tensor:
        steps = net.act(net.each(sequence))
        weights = torch.arange(1.0, 4.0, dtype=steps.dtype)
        return net.head(torch.einsum("tnd,t->nd" if net.time_first else "ntd,t->nd", steps, weights))

    return Net(run, each=nn.Linear(3, 5), act=nn.Tanh(), head=nn.Linear(5, 2), time_first=time_first)


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
    "residual": Case(residual_net, (5, 4), {"first": "act", "second": "second", "head": "head"}),
    "used thrice": Case(
        lambda: used_thrice(nn.Linear(4, 4), nn.Linear(4, 3)), (5, 4), {"shared": "act", "head": "head"}
    ),
    "convolution used thrice": Case(
        lambda: used_thrice(nn.Conv2d(2, 2, 3, padding=1), nn.Linear(18, 3)), (3, 2, 3, 3), {"shared": "act"}
    ),
    "recurrent": Case(recurrent, (4, 3, 2), {"enter": "enter", "stay": "stay", "head": "head"}),
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
    return measured_bounds(model, loss, batch, tolerance=1e-7)


PAIRS = [(name, layer) for name, case in CASES.items() for layer in case.layers]


@pytest.mark.parametrize(("name", "layer"), PAIRS)
def test_norms_and_rigorous_bound_are_those_of_the_whole_jacobians(name: str, layer: str) -> None:
    rows, found = truth(name, layer), measured(name)[layer]
    assert found.forward.converged
    assert found.backward.converged
    assert found.forward.value == pytest.approx(statistics.mean(row.forward for row in rows), rel=1e-5)
    assert found.forward_largest == pytest.approx(max(row.forward for row in rows), rel=1e-5)
    assert found.backward.value == pytest.approx(statistics.mean(row.backward for row in rows), rel=1e-5)
    assert found.backward_largest == pytest.approx(max(row.backward for row in rows), rel=1e-5)
    assert found.activation == pytest.approx(max(row.activation for row in rows), rel=1e-9)
    expected = sum(row.rigorous for row in rows)
    assert found.rigorous_bound == pytest.approx(expected, rel=1e-4)
    assert found.rigorous_bound >= expected * (1 - 1e-12)


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
    assert found.note.startswith("before this layer the examples depend on each other")
    assert measured("batchnorm in train mode")["0"].note.startswith("the examples depend on each other")
    assert measured("mlp")["2"].note == ""


def test_time_first_gives_the_numbers_of_batch_first() -> None:
    torch.manual_seed(0)
    model, sequence, labels = weighted_steps(False), torch.randn(5, 3, 3), torch.randint(2, (5,))
    twin = weighted_steps(True)
    twin.load_state_dict(model.state_dict())
    one = measured_bounds(model, loss, (sequence, labels), tolerance=1e-7)
    other = measured_bounds(twin, loss, (sequence.transpose(0, 1).contiguous(), labels), tolerance=1e-7)
    for layer in ("each", "head"):
        assert other[layer].note == ""
        for name in ("forward_largest", "backward_largest", "activation", "rigorous_bound", "paper_bound"):
            assert getattr(other[layer], name) == pytest.approx(getattr(one[layer], name), rel=1e-6)


def test_lanczos_and_unit_vectors_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jacobians, "_FEW", 0)
    monkeypatch.setattr(jacobians, "_PASSES_PER_LAYER", 0)
    for name in ("mlp", "convolutions", "used thrice", "transformer", "batchnorm in train mode"):
        _, model, batch = build(name)
        for layer, other in measured_bounds(model, loss, batch, tolerance=1e-7).items():
            one = measured(name)[layer]
            assert "settled" in other.backward.reason
            assert other.backward.value == pytest.approx(one.backward.value, rel=1e-5)
            assert other.forward.value == pytest.approx(one.forward.value, rel=1e-5)
            assert other.rigorous_bound == pytest.approx(one.rigorous_bound, rel=1e-4)


def test_unit_vectors_may_go_a_few_layers_and_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jacobians, "_BYTES_AT_ONCE", 1)
    monkeypatch.setattr(jacobians, "_NUMBERS_AT_ONCE", 1)
    _, model, batch = build("convolutions")
    for layer, other in measured_bounds(model, loss, batch, tolerance=1e-7).items():
        assert other.backward.value == pytest.approx(
            measured("convolutions")[layer].backward.value, rel=1e-12
        )
        assert other.forward.value == pytest.approx(measured("convolutions")[layer].forward.value, rel=1e-9)


# --- Tokens, several inputs, several batches, unknown uses ---

LOSS = nn.MSELoss(reduction="sum")  # H_z = 2


def bare(*shape: int) -> nn.Linear:
    return nn.Linear(*shape, bias=False)


def bag(positions: bool = False, padding: int | None = None) -> Net:
    def run(net: Any, tokens: Any) -> Tensor:
        stream = net.words(tokens)
        if net.positions is not None:
            stream = stream + net.positions(torch.arange(3))
        return net.head(stream.flatten(1))

    return Net(
        run,
        words=nn.Embedding(7, 4, padding_idx=padding),
        head=bare(12, 2),
        positions=nn.Embedding(3, 4) if positions else None,
    )


TOKENS = torch.tensor([[1, 1, 2], [3, 4, 5], [0, 0, 0]])


def test_an_embedding_counts_with_its_most_frequent_token() -> None:
    model = bag().double()
    found = measured_bounds(model, LOSS, (TOKENS, torch.zeros(3, 2)), tolerance=1e-9)
    norm = torch.linalg.matrix_norm(model.head.weight.detach(), 2).item()
    words = found["words"]
    assert words.forward.value == 1.0
    assert words.backward.value == pytest.approx(norm)
    assert words.rigorous_bound == pytest.approx(2 * norm**2 * (2 + 1 + 3))
    assert words.paper_bound == pytest.approx(2 * norm**2 * (3 + 3 + 3))
    # The network starts from the embedding's output.
    length = model.words(TOKENS).detach().pow(2).sum().item()
    assert found["head"].forward.value == pytest.approx(1.0)
    assert found["head"].rigorous_bound == pytest.approx(2 * length)
    assert found["head"].paper_bound == pytest.approx(2 * length)


def test_padding_does_not_move() -> None:
    model = bag(padding=0).double()
    found = measured_bounds(model, LOSS, (TOKENS, torch.zeros(3, 2)), tolerance=1e-9)
    norm = torch.linalg.matrix_norm(model.head.weight.detach(), 2).item()
    assert found["words"].rigorous_bound == pytest.approx(2 * norm**2 * (2 + 1 + 0))


def test_a_batch_of_padding_alone_has_no_reach() -> None:
    found = measured_bounds(bag(padding=0), LOSS, (torch.zeros(3, 3, dtype=torch.long), torch.zeros(3, 2)))
    assert found["words"].rigorous_bound == 0


def test_a_table_of_positions_counts_as_a_bias() -> None:
    model = bag(positions=True).double()
    found = measured_bounds(model, LOSS, (TOKENS, torch.zeros(3, 2)), tolerance=1e-9)
    words = model.words(TOKENS).detach().pow(2).sum().item()
    assert found["head"].note == ""
    assert found["head"].forward.value == pytest.approx(1.0)
    assert found["head"].paper_bound == pytest.approx(2 * words)
    # All positions are one table for the whole batch.
    assert found["positions"].note.startswith("the examples depend on each other")


def test_a_frozen_embedding_is_a_start_too() -> None:
    model = bag().double()
    model.words.requires_grad_(False)
    found = measured_bounds(model, LOSS, (TOKENS, torch.zeros(3, 2)), tolerance=1e-9)
    assert list(found) == ["head"]
    assert found["head"].paper_bound == pytest.approx(2 * model.words(TOKENS).pow(2).sum().item())


def tied_head() -> Net:
    return Net(lambda net, tokens: net.words(tokens).sum(1) @ net.words.weight.t(), words=nn.Embedding(5, 3))


def test_an_embedding_tied_to_the_head_adds_both_reaches() -> None:
    model, tokens = tied_head().double(), torch.tensor([[1, 1, 2]])
    found = measured_bounds(model, LOSS, (tokens, torch.zeros(1, 5)), tolerance=1e-9)["words"]
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


def two_inputs() -> Net:
    return Net(
        lambda net, pair: net.head(net.left(pair["a"]) + net.right(pair["b"])),
        left=bare(2, 3),
        right=bare(4, 3),
        head=bare(3, 1),
    )


def test_several_inputs_are_one_start() -> None:
    model, inputs = two_inputs().double(), {"a": torch.randn(5, 2), "b": torch.randn(5, 4)}
    found = measured_bounds(model, LOSS, (inputs, torch.zeros(5, 1)), tolerance=1e-9)
    both = torch.cat((model.left.weight, model.right.weight), dim=1).detach()
    forward = torch.linalg.matrix_norm(both, 2).item()
    length = inputs["a"].pow(2).sum().item() + inputs["b"].pow(2).sum().item()
    assert found["head"].forward.value == pytest.approx(forward)
    assert found["head"].paper_bound == pytest.approx(2 * forward**2 * length, rel=1e-6)
    assert found["left"].forward.value == pytest.approx(1.0)


def test_uneven_batches_add_up_by_their_examples() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    inputs, labels = torch.randn(7, 3), torch.randint(2, (7,))
    whole = measured_bounds(model, nn.CrossEntropyLoss(), (inputs, labels))
    parts = measured_bounds(
        model, nn.CrossEntropyLoss(), [(inputs[:2], labels[:2]), (inputs[2:], labels[2:])]
    )
    for layer in ("0", "2"):
        one, other = whole[layer], parts[layer]
        for name in ("rigorous_bound", "paper_bound", "activation", "backward_largest"):
            assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-9)
        assert other.backward.value == pytest.approx(one.backward.value, rel=1e-9)
        assert other.forward.value == pytest.approx(one.forward.value, rel=1e-9)


def quadratic() -> Net:
    return Net(
        lambda net, features: net.head(features @ net.weight.pow(2)),
        weight=nn.Parameter(torch.randn(3, 3)),
        head=bare(3, 2),
    )


def test_an_unknown_use_has_a_reason_and_no_numbers() -> None:
    found = measured_bounds(quadratic(), LOSS, (torch.randn(4, 3), torch.zeros(4, 2)))
    row = found["weight"]
    assert (
        row.reason
        == "the weight goes into PowBackward0, none of the known uses (dense, convolution, embedding)"
    )
    assert (row.forward, row.backward, row.activation) == (None, None, None)
    assert (row.rigorous_bound, row.paper_bound) == (None, None)
    assert found["head"].reason == ""


def refuses_gradients() -> Net:
    return Net(lambda net, features: net.head(torch.from_numpy(features.numpy())), head=bare(3, 2))


def test_a_forward_that_cannot_be_differentiated_by_its_inputs_keeps_the_rigorous_bound() -> None:
    inputs = torch.randn(4, 3).double()
    row = measured_bounds(refuses_gradients(), LOSS, (inputs, torch.zeros(4, 2)), tolerance=1e-9)["head"]
    assert row.forward is None
    assert row.paper_bound is None
    assert row.reason.startswith("the forward fails on inputs that require gradients")
    assert row.rigorous_bound == pytest.approx(2 * inputs.pow(2).sum().item())


def test_a_layer_on_a_constant_has_no_forward_product() -> None:
    def on_constant() -> Net:
        return Net(
            lambda net, features: (
                net.head(features) + net.bias(torch.ones(len(features), 2, dtype=features.dtype))
            ),
            bias=bare(2, 3),
            head=bare(3, 3),
        )

    row = measured_bounds(on_constant(), LOSS, (torch.randn(4, 3), torch.zeros(4, 3)), tolerance=1e-9)["bias"]
    assert row.reason == "the layer's input does not depend on the network's input"
    assert row.rigorous_bound == pytest.approx(2 * 2 * 4)


def scaled_into_activation(repeated: bool) -> Net:
    """The activation sees ten times the layer's output, or sees it three times."""

    def run(net: Any, features: Any) -> Tensor:
        shift = torch.zeros(3, dtype=features.dtype)
        if net.repeated:
            return net.head(torch.relu(net.inner(features) + shift))
        return net.head(torch.relu(torch.add(shift[:1], net.inner(features), alpha=10)).expand(-1, 3))

    return Net(run, inner=bare(3, 1), head=bare(3, 2), repeated=repeated)


@pytest.mark.parametrize("repeated", [True, False])
def test_what_changes_lengths_before_the_activation_belongs_to_the_backward_product(repeated: bool) -> None:
    torch.manual_seed(0)
    parts = scaled_into_activation(repeated), LOSS, (torch.randn(4, 3), torch.zeros(4, 2))
    norm = hessinit.measure(*parts, dtype=torch.float64, network=False)["inner"].norm
    assert norm > 0
    assert measured_bounds(*parts)["inner"].rigorous_bound >= norm


def test_coupled_losses_count_as_a_whole() -> None:
    def squared_mean(output: Tensor, target: Tensor) -> Tensor:
        return output.mean(0).pow(2).sum()

    inputs = torch.randn(5, 3).double()
    found = measured_bounds(nn.Sequential(bare(3, 2)), squared_mean, (inputs, torch.zeros(5)), tolerance=1e-9)
    assert found["0"].rigorous_bound == pytest.approx(2 / 5 * inputs.pow(2).sum().item(), rel=1e-6)


def test_a_dead_network_has_bounds_of_zero() -> None:
    model = nn.Sequential(bare(3, 4), nn.ReLU(), bare(4, 2))
    nn.init.constant_(model[0].weight, -1.0)
    found = measured_bounds(model, LOSS, (torch.rand(4, 3), torch.zeros(4, 2)))
    assert found["0"].activation == 0
    assert found["0"].rigorous_bound == found["2"].rigorous_bound == 0
    assert not math.isnan(found["2"].paper_bound)


def energy() -> Net:
    return Net(lambda net, x: net.a(x).tanh().sum(), a=nn.Linear(4, 1))


def test_an_output_without_dimensions_has_products() -> None:
    def loss(output: Tensor, target: None) -> Tensor:
        return (output - 1) ** 2

    row = hessinit.measure(energy(), loss, (torch.randn(9, 4), None), jacobians=True)["a"]
    assert row.jacobians.rigorous_bound >= row.norm


def tempered() -> Net:
    return Net(lambda net, x: net.a(x[0]) * x[1], a=nn.Linear(4, 3))


def test_an_input_without_dimensions_is_no_obstacle() -> None:
    batch = (torch.randn(6, 4), torch.tensor(2.0)), torch.randint(3, (6,))
    row = hessinit.measure(tempered(), nn.CrossEntropyLoss(), batch, jacobians=True)["a"]
    assert row.jacobians.rigorous_bound >= row.norm


def checkpointed() -> Net:
    return Net(
        lambda net, x: net.b(torch.tanh(checkpoint(net.a, x, use_reentrant=True))),
        a=nn.Linear(4, 4),
        b=nn.Linear(4, 3),
    )


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints_are_refused_in_words() -> None:
    batch = torch.randn(6, 4), torch.randint(3, (6,))
    # No gradient reaches the layer inside, since its inputs have none: torch warns, and the check refuses it.
    with pytest.raises(hessinit.ProblemError, match="is not that of the function that is trained"):
        hessinit.measure(checkpointed(), nn.CrossEntropyLoss(), batch)
    with pytest.raises(hessinit.ProblemError, match="reentrant checkpoints"):
        hessinit.measure(checkpointed(), nn.CrossEntropyLoss(), batch, jacobians=True, check=False)


def sloped() -> Net:
    return Net(lambda net, x: F.prelu(x, net.a(x).view(-1)), a=nn.Linear(5, 5))


def test_a_layer_that_gives_the_slope_of_an_activation_does_not_have_it() -> None:
    batch = -torch.rand(1, 5), torch.randint(5, (1,))
    report = hessinit.measure(sloped(), nn.CrossEntropyLoss(), batch, jacobians=True, diagnostics=True)
    assert report["a"].jacobians.activation == 1.0
    assert report["a"].jacobians.rigorous_bound >= report["a"].norm * 0.999
    assert report["a"].diagnostics.activation == ""


@pytest.mark.filterwarnings("ignore::hessinit.ConvergenceWarning")
def test_an_unfinished_search_gives_no_bound() -> None:
    weights = torch.ones(300).double()
    weights[7] = 1.5
    model, x = nn.Linear(4, 300, bias=False).double(), torch.randn(1, 4).double()
    report = hessinit.measure(
        model, lambda output, _: (weights * output**2).sum(), (x, None), jacobians=True, max_iterations=1
    )
    found = report[0].jacobians
    assert found.rigorous_bound is None
    assert "did not converge; raise max_iterations" in found.reason


@pytest.mark.filterwarnings("ignore::hessinit.ConvergenceWarning")
def test_a_norm_beyond_range_is_not_compared_with_its_bounds() -> None:
    layers = [nn.Linear(5, 5, bias=False) for _ in range(20)]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for layer in layers:
            layer.weight.mul_(1e3)
    report = hessinit.measure(model, nn.MSELoss(), (torch.zeros(3, 5), torch.zeros(3, 5)), jacobians=True)
    assert math.isclose(report[0].norm, 0.0)
    assert "times ‖H‖" not in report.verdict
    assert "above the paper's bound" not in report.verdict


def some_by_default(cases: Any, every: int) -> list[Any]:
    """Every so-manieth case; the full sweep runs them all."""
    return [
        case if at % every == 0 else pytest.param(case, marks=pytest.mark.sweep)
        for at, case in enumerate(cases)
    ]


def true_norms(parts: Any) -> dict[str, float]:
    report = hessinit.measure(*parts, dtype=torch.float64, tolerance=1e-8, network=False)
    return {layer.name: layer.norm for layer in report}


@pytest.mark.parametrize("start", some_by_default(range(0, 80, 20), 4))
def test_the_rigorous_bound_is_never_below_the_norm(start: int) -> None:
    for seed in range(start, start + 20):
        parts = random_network(seed)
        found, norms = measured_bounds(*parts), true_norms(parts)
        below = {
            name: (found[name], norm)
            for name, norm in norms.items()
            if not found[name].rigorous_bound >= norm * (1 - 1e-9)
        }
        assert below == {}, seed


@pytest.mark.parametrize("start", some_by_default(range(100, 160, 10), 6))
def test_the_papers_bound_is_never_below_the_norm_of_bias_free_relu_networks(start: int) -> None:
    for seed in range(start, start + 10):
        parts = random_network(seed, bias_free_relu=True)
        found, norms = measured_bounds(*parts), true_norms(parts)
        for name, norm in norms.items():
            rigorous, paper = found[name].rigorous_bound, found[name].paper_bound
            assert norm * (1 - 1e-9) <= rigorous, (seed, name)
            # The layer's input is ‖F x‖ long here, at most ‖F‖ ‖x‖; both carry errors of up to a per cent.
            assert rigorous <= paper * 1.03, (seed, name)


def test_single_precision_keeps_the_bounds() -> None:
    for seed in range(40, 48):
        parts = random_network(seed)
        found = measured_bounds(*parts, dtype=torch.float32)
        for name, norm in true_norms(parts).items():
            assert found[name].rigorous_bound >= norm * (1 - 1e-4), (seed, name)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("problem", some_by_default(PROBLEMS, 6), ids=str)
def test_the_zoo_is_bounded_and_left_as_found(problem: Problem) -> None:
    model, loss, batch = problem.build()
    settings = {key: value for key, value in problem.options.items() if key in ("layers", "dropout", "seed")}
    before = snapshot(model, loss, batch)
    found = measured_bounds(model, loss, batch, forward=problem.forward, **settings)
    assert differences(before, snapshot(model, loss, batch)) == []
    for name, truth in true_layers(problem, "gauss-newton").items():
        row = found[name]
        if row.rigorous_bound is None:
            assert row.reason
            continue
        assert row.rigorous_bound >= truth.norm * (1 - 1e-9), name
        assert row.forward is not None
        assert row.paper_bound is not None
