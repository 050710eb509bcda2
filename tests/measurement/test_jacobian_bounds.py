"""Jacobian norms and both bounds: against whole Jacobians, closed forms, and true Gauss-Newton norms."""

from __future__ import annotations

import functools
import math
import statistics
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hessinit
from calls import measure
from hessinit.curvature.engine import LanczosSettings
from hessinit.curvature.engine_choice import evaluate
from hessinit.measurement.jacobians import jacobian_bounds
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.problem import Problem
from hessinit.results.curvature_report import JacobianBounds
from tiny import Net


def measured_bounds(
    model: nn.Module, loss: Any, batch: Any, *, tolerance: float = 1e-3, **settings: Any
) -> dict[str, JacobianBounds]:
    """By layer name, in double precision unless told otherwise."""
    problem = FunctionalProblem(Problem(model, loss, batch, **{"dtype": torch.float64, **settings}))
    with problem.settings():
        found = jacobian_bounds(problem, evaluate(problem), LanczosSettings(tolerance, 200, 0))
    return {layer.name: found[layer.parameter] for layer in problem.layers}


@dataclass(frozen=True)
class DenseProducts:
    """The norms for one example (or, with one group, for the batch as a whole)."""

    forward: float
    backward: float
    activation: float
    weight_map: float
    loss: float
    input_length: float

    @property
    def rigorous(self) -> float:
        return self.loss * (self.backward * self.activation * self.weight_map) ** 2

    def paper(self, overlap: int) -> float:
        factor = self.backward * self.activation * self.forward * self.input_length
        return self.loss * overlap * factor**2


def run(
    model: nn.Module, layer: nn.Module, after: nn.Module, inputs: Tensor, moved: list[Tensor] | None = None
) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """The output, and at each use of the layer its input, its output, and what `after` gives."""
    seen: list[Tensor] = []
    given: list[Tensor] = []
    behind: list[Tensor] = []

    def watch(module: nn.Module, arguments: Any, output: Tensor) -> None:
        seen.append(arguments[0])
        given.append(output)

    def move(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        behind.append(output)
        return output if moved is None else output + moved[len(behind) - 1]

    handles = [layer.register_forward_hook(watch), after.register_forward_hook(move)]
    try:
        return model(inputs), seen, given, behind
    finally:
        for handle in handles:
            handle.remove()


def dense_products(
    model: nn.Module, layer: nn.Module, after: nn.Module, loss: Any, batch: Any, *, joint: bool = False
) -> list[DenseProducts]:
    """One row for each example; one for all with `joint`."""
    model, (inputs, targets) = model.double(), batch
    inputs = inputs.double()
    output, seen, given, behind = run(model, layer, after, inputs)
    groups = [slice(0, len(inputs))] if joint else [slice(i, i + 1) for i in range(len(inputs))]
    zero = [torch.zeros_like(one) for one in behind]
    curvature = jacrev(jacrev(lambda z: loss(z, targets)))(output.detach())

    def products(group: slice) -> DenseProducts:
        def stacked(tensors: list[Tensor]) -> Tensor:
            return torch.cat([one[group].flatten() for one in tensors])

        def weight_map(weight: Tensor) -> Tensor:
            calls = [functional_call(layer, {"weight": weight}, (one[group].detach(),)) for one in seen]
            return torch.cat([call.flatten() for call in calls])

        pushed = jacrev(lambda moved: run(model, layer, after, inputs, moved)[0][group].flatten())(zero)
        backward = torch.cat([part[:, group].flatten(1) for part in pushed], dim=1)
        forward = jacrev(lambda x: stacked(run(model, layer, after, x)[1]))(inputs)[:, group].flatten(1)
        width, values, slope = output[group].numel(), stacked(given).detach().requires_grad_(), 1.0
        if after is not layer:
            slope = torch.autograd.grad(after(values).sum(), values)[0].abs().max().item()
        block = curvature[(group, *[slice(None)] * (output.ndim - 1), group)].reshape(width, width)
        reached = jacrev(weight_map)(layer.weight.detach()).flatten(1)
        length = inputs[group].norm().item()
        return DenseProducts(norm(forward), norm(backward), slope, norm(reached), norm(block), length)

    return [products(group) for group in groups]


def norm(matrix: Tensor) -> float:
    return torch.linalg.matrix_norm(matrix.detach(), 2).item()


def recurrent() -> Net:
    def run(net: Any, sequence: Any) -> Tensor:
        state = sequence.new_zeros(len(sequence), 4)
        for step in sequence.unbind(1):
            state = torch.tanh(net.enter(step) + net.stay(state))
        return net.head(state)

    return Net(run, enter=nn.Linear(2, 4), stay=nn.Linear(4, 4, bias=False), head=nn.Linear(4, 3))


def transformer_block() -> Net:
    """Its rows are the tokens, its examples the sequences."""

    def run(net: Any, stream: Any) -> Tensor:
        inner = net.norm(stream)
        stream = stream + F.softmax(net.query(inner) @ net.key(inner).mT, dim=-1) @ net.value(inner)
        return net.head(stream + net.narrow(net.act(net.wide(stream))))

    parts = {"norm": nn.LayerNorm(4), **{name: nn.Linear(4, 4) for name in ("query", "key", "value")}}
    parts |= {"wide": nn.Linear(4, 7), "act": nn.GELU(), "narrow": nn.Linear(7, 4), "head": nn.Linear(4, 3)}
    return Net(run, **parts)


def weighted_steps(time_first: bool) -> Net:
    """Sequences as (examples, time, features) or, time first, as (time, examples, features)."""

    def run(net: Any, sequence: Any) -> Tensor:
        steps = net.act(net.each(sequence))
        weights = torch.arange(1.0, 4.0, dtype=steps.dtype)
        return net.head(torch.einsum("tnd,t->nd" if time_first else "ntd,t->nd", steps, weights))

    return Net(run, each=nn.Linear(3, 5), act=nn.Tanh(), head=nn.Linear(5, 2))


@dataclass(frozen=True)
class Case:
    """`layers` maps a layer to the module behind which its backward product starts.

    `overlaps` are the outputs that share an element of a convolution's input, where more than one.
    """

    model: Any
    inputs: tuple[int, ...]
    layers: dict[str, str]
    overlaps: dict[str, int] = field(default_factory=dict)
    classes: int = 3
    joint: tuple[str, ...] = ()


def mlp(*widths: int, bias: bool = True) -> nn.Sequential:
    layers = [nn.Linear(a, b, bias=bias) for a, b in zip(widths[:-1], widths[1:], strict=True)]
    return nn.Sequential(*[part for layer in layers[:-1] for part in (layer, nn.GELU())], layers[-1])


CASES = {
    "mlp": Case(lambda: mlp(4, 6, 5, 3), (5, 4), {"0": "1", "2": "3", "4": "4"}),
    # More inputs and outputs than unit vectors are sent for: Lanczos on either side.
    "wide": Case(lambda: mlp(90, 6, 80), (3, 90), {"0": "1", "2": "2"}, classes=80),
    "convolutions": Case(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 2, groups=2), nn.Sigmoid(),
            nn.ConvTranspose2d(4, 2, 3, stride=2, groups=2), nn.Flatten(), nn.Linear(98, 3),
        ),
        (4, 2, 7, 7),
        {"0": "1", "2": "3", "4": "4", "6": "6"},
        # Each of three taps meets every second pixel; transposed, a pixel is spread over the whole kernel.
        {"0": 4, "2": 4, "4": 9},
    ),
    "dilated": Case(
        lambda: nn.Sequential(
            nn.Conv1d(2, 3, 3, dilation=2, stride=2), nn.ELU(), nn.Flatten(), nn.Linear(9, 3)
        ),
        (4, 2, 9),
        {"0": "1", "3": "3"},
        {"0": 3},  # dilation and stride alike: all taps meet the same pixels
    ),
    "recurrent": Case(recurrent, (4, 3, 2), {"enter": "enter", "stay": "stay", "head": "head"}),
    "transformer": Case(
        transformer_block,
        (3, 4, 4),
        {"query": "query", "value": "value", "wide": "act", "narrow": "narrow", "head": "head"},
    ),
    "batchnorm in train mode": Case(
        lambda: nn.Sequential(
            nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Tanh(), nn.Linear(5, 3)
        ),
        (6, 4),
        {"0": "0"},
        joint=("0",),
    ),
}  # fmt: skip


def build(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    case = CASES[name]
    torch.manual_seed(3)
    model, inputs = case.model(), torch.randn(*case.inputs)
    return model, (inputs, torch.randint(case.classes, case.inputs[: 2 if name == "transformer" else 1]))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


@functools.cache
def measured(name: str) -> Any:
    model, batch = build(name)
    return measured_bounds(model, loss, batch, tolerance=1e-7)


@pytest.mark.parametrize(("name", "layer"), [(name, layer) for name in CASES for layer in CASES[name].layers])
def test_norms_and_bounds_are_those_of_the_whole_jacobians(name: str, layer: str) -> None:
    case, (model, batch), found = CASES[name], build(name), measured(name)[layer]
    modules = dict(model.named_modules())
    parts = model, modules[layer], modules[case.layers[layer]], loss, batch
    rows = dense_products(*parts, joint=layer in case.joint)
    for side in ("forward", "backward"):
        norms, estimate = [getattr(row, side) for row in rows], getattr(found, side)
        assert estimate.converged
        assert estimate.value == pytest.approx(statistics.mean(norms), rel=1e-5)
        assert getattr(found, f"{side}_largest") == pytest.approx(max(norms), rel=1e-5)
    assert found.activation == pytest.approx(max(row.activation for row in rows), rel=1e-9)
    expected = sum(row.rigorous for row in rows)
    assert expected * (1 - 1e-12) <= found.rigorous_bound <= expected * (1 + 1e-4)
    paper = sum(row.paper(case.overlaps.get(layer, 1)) for row in rows)
    assert found.paper_bound == pytest.approx(paper, rel=1e-4)


def test_after_batchnorm_only_the_forward_product_sees_the_batch_as_one() -> None:
    model, batch = build("batchnorm in train mode")
    whole, each = (dense_products(model, model[3], model[3], loss, batch, joint=one) for one in (True, False))
    first, last = (measured("batchnorm in train mode")[name] for name in ("0", "3"))
    assert last.forward.value == pytest.approx(whole[0].forward, rel=1e-5)
    assert last.backward.value == pytest.approx(1.0, rel=1e-12)
    assert last.rigorous_bound == pytest.approx(sum(row.rigorous for row in each), rel=1e-4)
    assert last.note.startswith("before this layer the examples depend on each other")
    assert first.note.startswith("the examples depend on each other")
    assert measured("mlp")["2"].note == ""


def test_time_first_gives_the_numbers_of_batch_first_behind_the_layers() -> None:
    torch.manual_seed(0)
    model, sequence, labels = weighted_steps(False), torch.randn(5, 3, 3), torch.randint(2, (5,))
    twin = weighted_steps(True)
    twin.load_state_dict(model.state_dict())
    one = measured_bounds(model, loss, (sequence, labels), tolerance=1e-7)
    other = measured_bounds(twin, loss, (sequence.transpose(0, 1).contiguous(), labels), tolerance=1e-7)
    for layer in ("each", "head"):
        # In front of the layers the first dimension is not that of the examples.
        assert other[layer].note.startswith("before this layer the examples depend on each other")
        assert other[layer].paper_bound >= one[layer].paper_bound
        for name in ("backward_largest", "activation", "rigorous_bound"):
            assert getattr(other[layer], name) == pytest.approx(getattr(one[layer], name), rel=1e-6)


LOSS = nn.MSELoss(reduction="sum")  # H_z = 2


def bare(*shape: int) -> nn.Linear:
    return nn.Linear(*shape, bias=False)


def closed(model: nn.Module, inputs: Any, target: Tensor) -> Any:
    return measured_bounds(model.double(), LOSS, (inputs, target), tolerance=1e-9)


def test_an_embedding_counts_with_its_most_frequent_token_and_padding_does_not_move() -> None:
    tokens = torch.tensor([[1, 1, 2], [3, 4, 5], [0, 0, 0]])
    for padding, most in ((None, 2 + 1 + 3), (0, 2 + 1 + 0)):
        model = nn.Sequential(nn.Embedding(7, 4, padding_idx=padding), nn.Flatten(), bare(12, 2))
        found, width = closed(model, tokens, torch.zeros(3, 2)), norm(model[2].weight)
        assert found["0"].backward.value == pytest.approx(width)
        assert found["0"].rigorous_bound == pytest.approx(2 * width**2 * most)
        length = model[0](tokens).detach().pow(2).sum().item()
        assert found["2"].rigorous_bound == pytest.approx(2 * length)
        for row in found.values():
            assert (row.forward, row.paper_bound) == (None, None)
            assert row.reason.startswith("the network's inputs are tokens, or not all real numbers")
    assert closed(model, torch.zeros(3, 3, dtype=torch.long), torch.zeros(3, 2))["0"].rigorous_bound == 0


def test_an_embedding_tied_to_the_head_adds_both_uses() -> None:
    model = Net(lambda net, x: net.words(x).sum(1) @ net.words.weight.t(), words=nn.Embedding(5, 3))
    tokens = torch.tensor([[1, 1, 2]])
    found = closed(model, tokens, torch.zeros(1, 5))["words"]
    weight, summed = model.words.weight.detach(), model.words(tokens).sum(1).detach()

    def pushes(change: Tensor) -> Tensor:
        return torch.cat((change[tokens[0]].flatten(), (summed @ change.T).flatten()))

    def output(moved: Tensor) -> Tensor:
        first, second = moved[:9].view(1, 3, 3), moved[9:].view(1, 5)
        return ((weight[tokens] + first).sum(1) @ weight.T + second).flatten()

    weight_map = norm(jacrev(pushes)(weight).flatten(1))
    backward = norm(jacrev(output)(torch.zeros(14).double()))
    assert found.backward.value == pytest.approx(backward)
    assert found.rigorous_bound == pytest.approx(2 * (backward * weight_map) ** 2)


def test_several_inputs_are_taken_as_one() -> None:
    parts = {"left": bare(2, 3), "right": bare(4, 3), "head": bare(3, 1)}
    model = Net(lambda net, pair: net.head(net.left(pair["a"]) + net.right(pair["b"])), **parts)
    inputs = {"a": torch.randn(5, 2), "b": torch.randn(5, 4)}
    found = closed(model, inputs, torch.zeros(5, 1))
    forward = norm(torch.cat((model.left.weight, model.right.weight), dim=1))
    length = inputs["a"].pow(2).sum().item() + inputs["b"].pow(2).sum().item()
    assert found["head"].forward.value == pytest.approx(forward)
    assert found["head"].paper_bound == pytest.approx(2 * forward**2 * length, rel=1e-6)
    assert found["left"].forward.value == pytest.approx(1.0)


def test_uneven_batches_add_up_by_their_examples() -> None:
    model, (x, y) = build("mlp")
    whole, split = (measured_bounds(model, loss, one) for one in ((x, y), [(x[:2], y[:2]), (x[2:], y[2:])]))
    for layer in ("0", "2"):
        one, other = whole[layer], split[layer]
        for name in ("rigorous_bound", "paper_bound", "activation", "backward_largest"):
            assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-9)
        assert other.backward.value == pytest.approx(one.backward.value, rel=1e-9)
        assert other.forward.value == pytest.approx(one.forward.value, rel=1e-9)


def test_what_has_no_bound_has_a_reason() -> None:
    inputs = torch.randn(4, 3).double()
    parts = {"weight": nn.Parameter(torch.eye(3)), "head": bare(3, 2)}
    squared = Net(lambda net, x: net.head(x @ net.weight.pow(2)), **parts)
    found = closed(squared, inputs, torch.zeros(4, 2))
    row = found["weight"]
    assert row.reason.startswith("the weight goes into PowBackward0, none of the known uses (dense,")
    assert (row.forward, row.backward, row.activation, row.rigorous_bound, row.paper_bound) == (None,) * 5
    assert found["head"].reason == ""
    refusing = Net(lambda net, x: net.head(torch.from_numpy(x.numpy())), head=bare(3, 2))
    row = closed(refusing, inputs, torch.zeros(4, 2))["head"]
    assert (row.forward, row.paper_bound) == (None, None)
    assert row.reason.startswith("the forward fails on inputs that require gradients")
    assert row.rigorous_bound == pytest.approx(2 * inputs.pow(2).sum().item())
    constant = Net(
        lambda net, x: net.head(x) + net.bias(torch.ones(len(x), 2, dtype=x.dtype)),
        bias=bare(2, 3), head=bare(3, 3),
    )  # fmt: skip
    row = closed(constant, inputs, torch.zeros(4, 3))["bias"]
    assert row.reason == "the layer's input does not depend on the network's input"
    assert row.rigorous_bound == pytest.approx(2 * 2 * 4)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


ABOVE_THE_NORM: dict[str, Any] = {
    "no output dimension": (
        lambda net, x: net.a(x).tanh().sum(), (4, 1), lambda z, _: (z - 1) ** 2, drawn(9, 4), None
    ),
    "no input dimension": (
        lambda net, x: net.a(x[0]) * x[1], (4, 3), nn.CrossEntropyLoss(),
        (drawn(6, 4), torch.tensor(2.0)), torch.arange(6) % 3,
    ),
    # The activation sees the layer's output three times, or ten times as large.
    "repeated": (
        lambda net, x: net.head(torch.relu(net.a(x) + torch.zeros(3, dtype=x.dtype))),
        (1, 1), LOSS, drawn(16, 1), torch.zeros(16, 2),
    ),
    "scaled": (
        lambda net, x: net.head(torch.relu(x.new_zeros(1).add(net.a(x), alpha=10)).expand(-1, 3)),
        (1, 1), LOSS, drawn(16, 1), torch.zeros(16, 2),
    ),
    "turned": (lambda net, x: net.head(net.a(x).T.tanh().T), (3, 3), LOSS, drawn(16, 3), torch.zeros(16, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", ABOVE_THE_NORM)
def test_bounds_of_odd_shapes_and_scaled_activations_are_above_the_norm(name: str) -> None:
    torch.manual_seed(0)
    run, shape, loss, inputs, target = ABOVE_THE_NORM[name]
    model = Net(run, a=nn.Linear(*shape), head=bare(3, 2))
    nn.init.ones_(model.head.weight)  # which adds repeated numbers up
    row = measure(model, loss, (inputs, target), layers="a", details="jacobians")["a"]
    assert row.jacobians.rigorous_bound >= row.norm > 0
    assert name != "turned" or row.jacobians.activation == 1  # its numbers come in another order


def test_coupled_losses_count_as_a_whole_and_a_dead_network_has_bounds_of_zero() -> None:
    inputs, settings = torch.randn(5, 3).double(), {"tolerance": 1e-9}
    batch = inputs, torch.zeros(5)
    found = measured_bounds(nn.Sequential(bare(3, 2)), lambda z, _: z.mean(0).pow(2).sum(), batch, **settings)
    assert found["0"].rigorous_bound == pytest.approx(2 / 5 * inputs.pow(2).sum().item(), rel=1e-6)
    model = nn.Sequential(bare(3, 4), nn.ReLU(), bare(4, 2))
    nn.init.constant_(model[0].weight, -1.0)
    found = closed(model, torch.rand(4, 3), torch.zeros(4, 2))
    assert found["0"].activation == 0
    assert found["0"].rigorous_bound == found["2"].rigorous_bound == 0
    assert not math.isnan(found["2"].paper_bound)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints_are_refused_in_words() -> None:
    model = Net(
        lambda net, x: net.b(torch.tanh(checkpoint(net.a, x, use_reentrant=True))),
        a=nn.Linear(4, 4), b=nn.Linear(4, 3),
    )  # fmt: skip
    problem = model, nn.CrossEntropyLoss(), (torch.randn(6, 4), torch.randint(3, (6,)))
    # No gradient reaches the layer inside, since its inputs have none: torch warns, and the check refuses it.
    with pytest.raises(hessinit.ProblemError, match="is not that of the function that is trained"):
        hessinit.measure(*problem)
    with pytest.raises(hessinit.ProblemError, match="reentrant checkpoints"):
        measure(*problem, check=False, details="jacobians")


def test_a_layer_that_gives_the_slope_of_an_activation_does_not_have_it() -> None:
    model = Net(lambda net, x: F.prelu(x, net.a(x).view(-1)), a=nn.Linear(5, 5))
    batch = -torch.rand(1, 5), torch.randint(5, (1,))
    row = hessinit.measure(model, nn.CrossEntropyLoss(), batch, details=["jacobians", "diagnostics"])["a"]
    assert (row.jacobians.activation, row.diagnostics.activation) == (1.0, "")
    assert row.jacobians.rigorous_bound >= row.norm * 0.999


@pytest.mark.filterwarnings("ignore::hessinit.ConvergenceWarning")
def test_unfinished_searches_and_norms_beyond_range_are_not_compared() -> None:
    weights = torch.ones(300).double()
    weights[7] = 1.5
    problem = bare(4, 300).double(), lambda z, _: (weights * z**2).sum(), (torch.randn(1, 4).double(), None)
    found = hessinit.measure(*problem, max_iterations=1, details="jacobians")[0].jacobians
    assert found.rigorous_bound is None
    assert "did not converge; raise max_iterations" in found.reason
    model = nn.Sequential(*(bare(5, 5) for _ in range(20)))
    with torch.no_grad():
        for layer in model:
            layer.weight.mul_(1e3)
    report = measure(model, nn.MSELoss(), (torch.zeros(3, 5), torch.zeros(3, 5)), details="jacobians")
    assert math.isclose(report[0].norm, 0.0)
    assert "times ‖H‖" not in report.verdict
    assert "above the paper's bound" not in report.verdict


@pytest.mark.parametrize("seed", range(6))
def test_the_papers_bound_is_not_below_the_rigorous_one_of_bias_free_relu_networks(seed: int) -> None:
    torch.manual_seed(seed)
    body = nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=1 + seed % 2, bias=False), nn.ReLU(),
        nn.ConvTranspose2d(4, 2, 2, groups=1 + seed % 2, bias=False), nn.ReLU(), nn.Flatten(),
    )  # fmt: skip
    inputs = torch.randn(5, 2, 6, 6)
    model = nn.Sequential(body, bare(body(inputs).shape[1], 6), nn.ReLU(), bare(6, 3))
    report = measure(model, loss, (inputs, torch.randint(3, (5,))), dtype=torch.float64, details="jacobians")
    for row in report:
        # The layer's input is ‖F x‖ long here, at most ‖F‖ ‖x‖; both carry errors of up to a per cent.
        assert row.norm <= row.jacobians.rigorous_bound <= row.jacobians.paper_bound * 1.03
