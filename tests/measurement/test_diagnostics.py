"""Diagnostics against module hooks, closed forms, and units whose state is known."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hessinit.curvature.engine_choice import evaluate
from hessinit.measurement.diagnostics import SATURATED_BELOW, diagnose
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.problem import Problem
from hessinit.results.curvature_report import Diagnostics
from tiny import Net

LOSS = nn.CrossEntropyLoss()
SQUARED = nn.MSELoss()


def diagnosis(model: nn.Module, loss: Any, batch: Any, **options: Any) -> dict[str, Diagnostics]:
    """By layer, as the report names it."""
    problem = FunctionalProblem(Problem(model, loss, batch, **options))
    with problem.settings():
        found = diagnose(problem, evaluate(problem))
    assert list(found) == [layer.parameter for layer in problem.layers]
    return {layer.name: found[layer.parameter] for layer in problem.layers}


Values = dict[str, tuple[Tensor, Tensor]]


def watch(model: nn.Module, loss: Any, batch: Any, names: list[str]) -> tuple[Values, nn.Module]:
    """What modules gave and the loss gradient by it, by hooks on a copy, which keeps its `.grad`s."""
    model = copy.deepcopy(model)
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    for name in names:

        def hook(module: nn.Module, given: Any, output: Tensor, one: list[Tensor] = seen[name]) -> Tensor:
            output.retain_grad()
            one.append(output)
            return output.clone()  # the next module may go on in place

        model.get_submodule(name).register_forward_hook(hook)
    loss(model(batch[0]), batch[1]).backward()

    def joined(tensors: list[Tensor]) -> Tensor:
        return torch.cat([one.detach().flatten() for one in tensors])

    return {name: (joined(one), joined([x.grad for x in one])) for name, one in seen.items()}, model


def assert_like(found: Diagnostics, value: Tensor, gradient: Tensor, own: Tensor | None = None) -> None:
    """Means and standard deviations to six figures of what they are made of."""
    for kind, given in (("activation", value), ("gradient", gradient)):
        mean, std = getattr(found, f"{kind}_mean"), getattr(found, f"{kind}_std")
        truth = given.detach().double()
        size = float(truth.square().mean().sqrt())
        assert size > 0
        assert abs(mean - float(truth.mean())) < 2e-6 * size
        assert abs(std - float(truth.std(correction=0))) < 2e-6 * size
    if own is not None:
        assert found.preactivation_std == pytest.approx(float(own.double().std(correction=0)), rel=2e-6)


def labels(*shape: int) -> Tensor:
    return torch.randint(3, shape)


def residual_net() -> Net:
    """Additions of all kinds: of a bias apart, of the input, of another branch."""

    def run(net: Any, x: Any) -> Tensor:
        x = x + net.first(x)
        x = net.relu(x + net.second(x))
        return net.head(x)

    return Net(run, first=nn.Linear(6, 6), second=nn.Linear(6, 6), head=nn.Linear(6, 3), relu=nn.ReLU())


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
    "sequences, a layer used twice": (
        lambda: nn.Sequential(*[nn.Linear(4, 4), nn.Sigmoid()] * 2, nn.Linear(4, 3), nn.Flatten(0, 1)),
        lambda: (torch.randn(4, 3, 4), labels(12)),
        {"0": ("0", "1"), "4": ("4", "4")},
    ),
    "residual connections": (
        residual_net,
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
        assert_like(found[name], *after[last], before[own][0])
        norm = float(worked.get_parameter(f"{name}.weight").grad.norm())
        assert found[name].weight_gradient_norm == pytest.approx(norm, rel=1e-5)


def test_uneven_batches_give_the_numbers_of_the_whole() -> None:
    model, x, y = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), torch.randn(9, 5), labels(9)
    whole, split = (diagnosis(model, LOSS, one)["0"] for one in ((x, y), [(x[:2], y[:2]), (x[2:], y[2:])]))
    for name in ("activation_mean", "activation_std", "gradient_std", "weight_gradient_norm"):
        assert getattr(split, name) == pytest.approx(getattr(whole, name), rel=1e-5)


def test_attention_and_the_transformers_own_activation_are_found() -> None:
    model = nn.TransformerEncoderLayer(4, 2, dim_feedforward=6, batch_first=True, dropout=0.0)
    model = nn.Sequential(model, nn.Linear(4, 3), nn.Flatten(0, 1))
    batch = torch.randn(4, 3, 4), labels(12)
    found, (seen, _) = diagnosis(model, LOSS, batch), watch(model, LOSS, batch, ["0.linear1", "0.linear2"])
    assert_like(found["0.linear2"], *seen["0.linear2"])
    assert found["0.linear1"].activation == "relu"
    mean = F.relu(seen["0.linear1"][0]).mean().item()
    assert found["0.linear1"].activation_mean == pytest.approx(mean, rel=1e-5)
    attention, fused = model[0].self_attn, found["0.self_attn.in_proj_weight"]
    qkv = F.linear(batch[0], attention.in_proj_weight, attention.in_proj_bias).detach().double()
    assert fused.activation_mean == pytest.approx(float(qkv.mean()), rel=1e-4)
    assert fused.activation_std == pytest.approx(float(qkv.std(correction=0)), rel=1e-5)


def test_the_gates_of_an_lstm_are_those_of_one_written_by_hand() -> None:
    parts = {"lstm": nn.LSTM(2, 3, batch_first=True), "head": nn.Linear(3, 3)}
    model = Net(lambda net, x: net.head(net.lstm(x)[0][:, -1]), **parts)
    batch = torch.randn(5, 4, 2), labels(5)
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


def test_a_functional_model_is_seen_through_in_spite_of_overwriting() -> None:
    """No submodule at all: matrices, einsum, a bias added apart, everything overwritten in place."""
    taken: dict[str, Tensor] = {}

    def run(net: Any, x: Tensor) -> Tensor:
        own = (x @ net.first).add_(net.bias)
        taken["first"] = own.detach().clone()
        mixed = torch.einsum("ni,oi->no", own.view(2, -1, 6).relu_().view(-1, 6), net.second)
        taken["second"] = mixed.detach().clone()
        taken["tanh"] = torch.tanh(mixed)
        output = taken["tanh"] @ net.third
        taken["third"] = output.detach().clone()
        return output.mul_(2.0)

    shapes = {"first": (4, 6), "bias": (6,), "second": (5, 6), "third": (5, 3)}
    model = Net(run, **{name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()})
    batch = torch.randn(8, 4), labels(8)
    found = diagnosis(model, LOSS, batch)
    (gradient,) = torch.autograd.grad(LOSS(model(batch[0]), batch[1]), [taken["tanh"]])
    assert found["second"].activation == "tanh"
    assert_like(found["second"], taken["tanh"], gradient, taken["second"])
    # Written into through a view: torch's graph has no single node for the activation.
    for name, std in (("third", found["third"].activation_std), ("first", found["first"].preactivation_std)):
        assert std == pytest.approx(float(taken[name].double().std(correction=0)), rel=1e-6)


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * (x @ weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * gradient @ weight.t(), 2 * x.t() @ gradient


def test_a_function_of_ones_own_and_a_normalized_weight_are_followed_to_the_data() -> None:
    parts = {"weight": nn.Parameter(torch.randn(4, 5))}
    parts["head"] = nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))
    model = Net(lambda net, x: net.head(Doubling.apply(x, net.weight).relu_()), **parts)
    batch = torch.randn(8, 4), labels(8)
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


def test_an_embedding_is_its_rows_not_their_sum_with_the_positions_and_tied_weights_pool_their_uses() -> None:
    parts = {"words": nn.Embedding(7, 4), "head": nn.Linear(4, 3)}
    model = Net(lambda net, x: net.head((net.words(x) + net.positions).mean(dim=1)), **parts)
    model.positions = nn.Parameter(torch.randn(2, 4))
    batch = torch.randint(7, (6, 2)), labels(6)
    found = diagnosis(model, LOSS, batch)
    values, gradients = watch(model, LOSS, batch, ["words"])[0]["words"]
    assert_like(found["words"], values, gradients)
    assert_like(found["positions"], values + model.positions.detach().repeat(6, 1).flatten(), gradients)
    tied = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    tied[1].weight = tied[0].weight
    batch = torch.randint(5, (6,)), torch.randint(5, (6,))
    found = diagnosis(tied, LOSS, batch)
    seen, _ = watch(tied, LOSS, batch, ["0", "1"])
    assert list(found) == ["0"]
    assert_like(found["0"], *(torch.cat(pair) for pair in zip(seen["0"], seen["1"], strict=True)))


def kill(module: nn.Module, units: int) -> nn.Module:
    with torch.no_grad():
        module.bias.zero_()
        module.bias[:units] = -1000.0
        module.bias[units:] = 2.0
    return module


# The activation, the share of dead units where three of eight are killed, and whether entries can saturate.
ACTIVATIONS: dict[str, tuple[nn.Module, float | None, bool]] = {
    "relu": (nn.ReLU(), 3 / 8, False),
    "relu6": (nn.ReLU6(), 3 / 8, True),
    "hardtanh": (nn.Hardtanh(0.0, 2.5), 3 / 8, True),
    "threshold": (nn.Threshold(0.5, 0.0), 3 / 8, False),
    "leaky_relu": (nn.LeakyReLU(0.1), None, False),
    "gelu": (nn.GELU(), None, False),
    "selu": (nn.SELU(), None, False),
    "elu": (nn.ELU(), None, False),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("inplace", [False, True])
def test_dead_units_are_counted_where_units_can_die(name: str, inplace: bool) -> None:
    activation, dead, saturates = copy.deepcopy(ACTIVATIONS[name])
    activation.inplace = inplace
    model = nn.Sequential(kill(nn.Linear(4, 8), 3), activation, nn.Linear(8, 2))
    found = diagnosis(model, SQUARED, (torch.randn(20, 4), torch.randn(20, 2)))
    assert (found["0"].activation, found["0"].dead, found["2"].dead) == (name, dead, None)
    assert (found["0"].saturated is not None) == saturates


def test_a_unit_that_one_example_wakes_is_alive() -> None:
    inputs = -torch.ones(9, 1)
    inputs[4] = 1.0
    dense = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        dense.weight[:] = torch.tensor([[1.0], [0.0]])
    model = nn.Sequential(dense, nn.ReLU(), nn.Linear(2, 1))
    found = diagnosis(model, SQUARED, (inputs, torch.ones(9, 1)))
    assert found["0"].dead == 0.5
    batches = [(inputs[:4], torch.ones(4, 1)), (inputs[4:], torch.ones(5, 1))]
    assert diagnosis(model, SQUARED, batches)["0"].dead == 0.5
    assert diagnosis(model, SQUARED, batches[::-1])["0"].dead == 0.5
    assert diagnosis(model, SQUARED, batches[:1])["0"].dead == 1.0
    # The low end of relu6 is silence, not saturation.
    dense = nn.Linear(1, 1, bias=False)
    nn.init.ones_(dense.weight)
    inputs = torch.tensor([[-9.0], [-1.0], [1.0], [5.9], [6.0], [9.0], [70.0], [2.0]])
    found = diagnosis(nn.Sequential(dense, nn.ReLU6(), nn.Linear(1, 1)), SQUARED, (inputs, inputs))["0"]
    assert (found.saturated, found.dead) == (3 / 8, 0.0)


def test_units_are_the_channels_of_a_convolution_and_the_features_of_a_sequence() -> None:
    images = nn.Sequential(kill(nn.Conv2d(2, 5, 3), 2), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 9, 2))
    assert diagnosis(images, SQUARED, (torch.randn(4, 2, 5, 5), torch.randn(4, 2)))["0"].dead == 2 / 5
    parts = {"dense": kill(nn.Linear(4, 6), 1), "head": nn.Linear(7, 2)}
    turned = Net(lambda net, x: net.head(net.dense(x).transpose(1, 2).relu().mean(dim=1)), **parts)
    assert diagnosis(turned, SQUARED, (torch.randn(3, 7, 4), torch.randn(3, 2)))["dense"].dead == 1 / 6


BOUNDED: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor]]] = {
    "tanh": (nn.Tanh, torch.tanh),
    "sigmoid": (nn.Sigmoid, torch.sigmoid),
    "hardtanh": (lambda: nn.Hardtanh(-0.7, 1.3), lambda u: u.clamp(-0.7, 1.3)),
    "hardsigmoid": (nn.Hardsigmoid, nn.functional.hardsigmoid),
    "erf": (lambda: Net(lambda net, x: torch.erf(x)), torch.erf),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_saturated_entries_are_those_of_small_slope(name: str) -> None:
    build, function = BOUNDED[name]
    dense = nn.Linear(3, 50)
    with torch.no_grad():
        dense.weight.mul_(5)
    inputs = torch.randn(40, 3)
    own = dense(inputs).detach()
    model = nn.Sequential(dense, build(), nn.Linear(50, 2))
    found = diagnosis(model, SQUARED, (inputs, torch.randn(40, 2)))["0"]

    def slope(u: Tensor) -> Tensor:
        u = u.clone().requires_grad_()
        return torch.autograd.grad(function(u).sum(), u)[0]

    largest = slope(torch.linspace(-1, 1, 2001)).max()
    expected = (slope(own) < SATURATED_BELOW * largest).double().mean()
    assert found.activation == name
    assert 0.05 < expected < 0.95
    assert found.saturated == pytest.approx(float(expected), abs=1e-3)
    assert found.dead is None


def test_an_activation_that_is_not_the_only_consumer_is_not_the_layers() -> None:
    def shared(net: Any, x: Tensor) -> Tensor:
        own = net.dense(x)
        return own * own.sigmoid()

    gated = Net(shared, dense=nn.Linear(4, 2))
    assert diagnosis(gated, SQUARED, (torch.randn(9, 4), torch.randn(9, 2)))["dense"].activation == ""


@pytest.mark.parametrize("training", [True, False])
def test_units_behind_a_normalization_are_judged_by_what_the_activation_gets(training: bool) -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    model = nn.Sequential(*layers).train(training)
    with torch.no_grad():
        model[0].bias.fill_(-50.0)  # dead without the normalization, which revives them
        model[1].running_mean.fill_(-50.0)
        model[1].bias[:2] = -50.0  # dead because of it
    batch = torch.randn(9, 1, 6, 6), torch.randint(3, (9,))
    assert diagnosis(model, nn.CrossEntropyLoss(), batch)["0"].dead == 0.5
    tanh = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3)).train(training)
    with torch.no_grad():
        tanh[1].weight.fill_(100.0)
        tanh[0].weight.mul_(1e-3)
    batch = torch.randn(50, 5), torch.randint(3, (50,))
    assert diagnosis(tanh, LOSS, batch)["0"].saturated > 0.9


def test_unused_weights_those_without_data_and_biases() -> None:
    batch = torch.randn(9, 3), torch.randn(9, 2)
    model = nn.Sequential(nn.Linear(3, 2))
    model.add_module("spare", nn.Linear(4, 4))
    found = diagnosis(model, SQUARED, batch, forward=lambda net, x: net[0](x))
    assert found["spare"] == Diagnostics(reason="the forward does not use it")
    assert found["0"].activation_std is not None
    alone = diagnosis(nn.Embedding(9, 2), SQUARED, batch, forward=lambda net, x: net.weight)["weight"]
    assert (alone.activation_std, alone.reason) == (None, "it never meets a tensor of the batch")
    assert alone.weight_gradient_norm > 0
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    found = diagnosis(model, SQUARED, batch, layers=["0.bias", "0.weight"])
    assert (found["0.bias"].activation, found["0.bias"].activation_std) == ("relu", found["0"].activation_std)
