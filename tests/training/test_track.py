"""The numbers of every point against dense fp64 matrices; training with a tracker is training without one."""

from __future__ import annotations

import random
import warnings
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from training_loops import LOSS, batches, quadratic, tracked, train

import tiny
from dense import dense_curvature, ends
from hessinit import EdgeOfStabilityWarning, track
from hessinit.training.optimizer_rules import YOUNG


def double_problem() -> tuple[nn.Sequential, tuple[torch.Tensor, torch.Tensor]]:
    return tiny.network(dtype=torch.float64), (tiny.inputs(12).double(), tiny.labels(12))


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_every_point_has_the_norms_of_the_weights_at_that_step(curvature: str) -> None:
    model, batch = double_problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tracker = tracked(model, batch, optimizer, curvature=curvature, each_layer=True, tolerance=1e-6)
    truth = [dense_curvature(model, LOSS, batch, curvature)]
    for step in batches(3):
        train(model, [(step[0].double(), step[1])], optimizer, tracker)
        truth.append(dense_curvature(model, LOSS, batch, curvature))
    points = tracker.close().points
    assert [point.step for point in points] == [0, 1, 2, 3]
    for point, dense in zip(points, truth, strict=True):
        whole = ends(dense.network)
        assert point.norm == pytest.approx(whole.norm, rel=1e-5)
        assert point.stable_learning_rate == pytest.approx(2 / whole.top, rel=1e-5)
        assert point.lr_times_norm == pytest.approx(0.5 * whole.norm, rel=1e-5)
        assert point.lr_over_limit == pytest.approx(0.5 * whole.top / 2, rel=1e-5)
        norms = {name: ends(block).norm for name, block in dense.layers.items()}
        assert point.layers == pytest.approx(norms, rel=1e-5)
    assert len({point.norm for point in points}) == 4  # the weights moved, and so did the numbers
    assert points[-1].loss == pytest.approx(LOSS(model(batch[0]), batch[1]).item(), rel=1e-9)


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, 2 / 4), ({"momentum": 0.9}, 3.8 / 4), ({"momentum": 0.5, "nesterov": True}, 1.5 / 4),
        ({"weight_decay": 1.0}, 2 / 5),
    ],
)  # fmt: skip
def test_the_limit_of_descent_on_a_quadratic_is_the_closed_form(settings: Any, limit: float) -> None:
    model, loss, batch = quadratic([1.0, 4.0, 0.1])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.02 * limit, **settings)
    tracker = tracked(model, batch, optimizer, loss, every=1000)
    losses = train(model, [batch] * 600, optimizer, tracker, loss)
    (point,) = tracker.close().points
    assert (point.norm, point.stable_learning_rate) == pytest.approx((4.0, limit), rel=1e-6)
    assert (point.lr_over_limit, point.stable_norm) == pytest.approx((1.02, 4 / 1.02), rel=1e-6)
    assert not losses[-1] < losses[0]  # nan, where it overflowed


@pytest.mark.parametrize(
    "settings", [{}, {"amsgrad": True, "betas": (0.5, 0.9)}, {"weight_decay": 0.3}], ids=str
)
@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_adam_is_measured_with_the_preconditioner_of_its_own_state(settings: Any, curvature: str) -> None:
    model, batch = double_problem()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, **settings)
    doubles = [(inputs.double(), targets) for inputs, targets in batches(7)]
    tracker = tracked(model, batch, optimizer, every=7, curvature=curvature, tolerance=1e-6)
    train(model, doubles, optimizer, tracker)
    point, (group,) = tracker.close().points[-1], optimizer.param_groups
    second = "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
    states = [optimizer.state[parameter][second] for parameter in (model[0].weight, model[2].weight)]
    roots = torch.cat([(state / (1 - group["betas"][1] ** 7)).sqrt().reshape(-1) for state in states])
    matrix, scale = dense_curvature(model, LOSS, batch, curvature).network, (roots + group["eps"]).rsqrt()
    matrix = matrix + group["weight_decay"] * torch.eye(len(matrix))
    beta = group["betas"][0]
    stable = (2 + 2 * beta) / ((1 - beta) * ends(scale[:, None] * matrix * scale).top)
    assert point.stable_learning_rate == pytest.approx(stable, rel=1e-4)
    assert point.lr_over_limit == pytest.approx(0.01 / stable, rel=1e-4)


@pytest.mark.parametrize("decays", [(0.3, 0.3), (40.0, 0.0), (0.0, 40.0)])
@pytest.mark.parametrize("rates", [(0.01, 0.01), (0.01, 0.04)])
def test_decoupled_decays_and_rates_of_groups_give_the_limit_of_the_whole_recursion(
    decays: tuple[float, float], rates: tuple[float, float]
) -> None:
    """The truth: the spectral radius of AdamW's steps on the quadratic, its preconditioner fixed."""
    model, batch = double_problem()
    weights = [model[0].weight, model[2].weight]
    settings = zip(weights, rates, decays, strict=True)
    groups = [{"params": [p], "lr": r, "weight_decay": d} for p, r, d in settings]
    optimizer = torch.optim.AdamW(groups, betas=(0.6, 0.9))
    tracker = tracked(model, batch, optimizer, tolerance=1e-8, every=100)
    train(model, [(inputs.double(), targets) for inputs, targets in batches(7)], optimizer, tracker)
    point = tracker.measure()
    matrix = dense_curvature(model, LOSS, batch, "gauss-newton").network
    roots = [(optimizer.state[one]["exp_avg_sq"] / (1 - 0.9**7)).sqrt() + 1e-8 for one in weights]
    divisor = torch.cat([root.reshape(-1) for root in roots])
    sizes = torch.tensor([one.numel() for one in weights])
    pace = torch.repeat_interleave(torch.tensor(rates).double() / max(rates), sizes)
    decay = torch.repeat_interleave(torch.tensor(decays).double(), sizes)

    def radius(lr: float) -> float:
        one, step = torch.eye(len(matrix)).double(), lr * pace
        moment = 0.4 * matrix
        inverse = torch.diag(step / divisor)
        rows = [one - torch.diag(step * decay) - inverse @ moment, -0.6 * inverse]
        whole = torch.cat([torch.cat(rows, 1), torch.cat([moment, 0.6 * one], 1)])
        return float(torch.linalg.eigvals(whole).abs().max())

    assert radius(0.999 * point.stable_learning_rate) <= 1 + 1e-9
    assert radius(1.001 * point.stable_learning_rate) > 1 + 1e-6


def test_a_young_state_does_not_set_the_limit() -> None:
    """After one gradient P^-½ H P^-½ is dominated by weights whose gradient is small by chance."""
    torch.manual_seed(3)
    model, batch = nn.Sequential(nn.Linear(4, 60), nn.Tanh(), nn.Linear(60, 3)), batches(1, 24)[0]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    tracker = tracked(model, batch, optimizer)
    own = []
    for step in batches(YOUNG + 1, 24):
        train(model, [step], optimizer, tracker)
        own.append(edge_of_own_state(model, batch, optimizer))
    edges = [point.lr_over_limit or 0.0 for point in tracker.close().points]
    assert own[0] > 5 * own[-1]  # so it would jump,
    assert all(0.5 < edge / edges[-1] < 2.5 for edge in edges[1:YOUNG])  # and does not
    assert edges[YOUNG:] == pytest.approx(own[YOUNG - 1 :], rel=0.02)


def edge_of_own_state(model: Any, batch: Any, optimizer: Any) -> float:
    matrix = dense_curvature(model.double(), LOSS, (batch[0].double(), batch[1]), "gauss-newton").network
    model.float()
    states = [optimizer.state[one] for one in (model[0].weight, model[2].weight)]
    roots = [(state["exp_avg_sq"] / (1 - 0.999 ** float(state["step"]))).sqrt() for state in states]
    scale = torch.cat([root.reshape(-1) for root in roots]).double().add(1e-8).rsqrt()
    return 1e-3 * 0.1 * ends(scale[:, None] * matrix * scale).top / 3.8


def test_weights_that_are_added_or_frozen_later_and_modes_that_change_are_followed_and_noted() -> None:
    model, batch = double_problem()
    dense = dense_curvature(model, LOSS, batch, "gauss-newton")
    norms = [ends(matrix).norm for matrix in (dense.layers["2"], dense.network, dense.layers["0"])]
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    tracker = tracked(model, batch, optimizer, tolerance=1e-6)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.5})
    tracker.step()
    model[2].requires_grad_(False)  # layers frozen later are left out
    tracker.step()
    model[0].eval()
    tracker.step()
    tracker.step()
    points, changed = tracker.close().points, "Since the last point, the measured weights or modes of modules"
    assert [point.norm for point in points] == pytest.approx([*norms, norms[2], norms[2]], rel=1e-5)
    assert [point.lr for point in points] == [0.1, 0.5, 0.5, 0.5, 0.5]
    assert [point.note.startswith(changed) for point in points] == [False, True, True, True, False]
    fast = torch.tensor([1.0] * model[0].weight.numel() + [0.2] * model[2].weight.numel()).double().sqrt()
    limit = 2 / ends(fast[:, None] * dense.network * fast).top
    assert points[1].stable_learning_rate == pytest.approx(limit, rel=1e-5)


def test_settings_that_part_in_the_middle_have_the_dense_limit_and_schedules_are_followed() -> None:
    model, batch = double_problem()
    matrix = dense_curvature(model, LOSS, batch, "gauss-newton").network
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.2, momentum=0.5)
    tracker = tracked(model, batch, optimizer, tolerance=1e-6)
    optimizer.param_groups[1]["momentum"] = 0.9
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    point = tracker.step()
    assert point is not None
    assert point.norm == tracker.tracking.points[0].norm
    # An alternating gradient moves heavy ball by 1/(1 + momentum).
    sizes = torch.tensor([model[0].weight.numel(), model[2].weight.numel()])
    root = torch.repeat_interleave(torch.tensor([1 / 1.5, 1 / 1.9]).double(), sizes).sqrt()
    limit = 2 / float(torch.linalg.eigvalsh(root[:, None] * matrix * root).max())
    assert (point.lr, point.stable_learning_rate) == (0.1, pytest.approx(limit, rel=1e-3))
    optimizer.param_groups[0]["momentum"] = 0.9
    again = tracker.step()
    assert again is not None
    assert again.stable_learning_rate == pytest.approx(3.8 / again.norm, rel=1e-6)

    class LookAhead(torch.optim.Optimizer):  # a wrapper that steps in its own way
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(optimizer.param_groups, {})
            self.optimizer = optimizer

    tracking = tracked(model, batch, LookAhead(optimizer)).close()
    (point,) = tracking.points
    assert (point.lr, point.lr_over_limit, tracking.optimizer) == (0.1, None, "LookAhead")
    assert "No stability limit of LookAhead: it cannot step on copies" in point.note


def test_a_name_and_a_rate_do_as_well_as_an_optimizer_and_none_is_needed() -> None:
    model, loss, batch = quadratic([1.0, 4.0])
    tracker = tracked(model, batch, "momentum", loss, lr=0.19)
    point = tracker.step(lr=0.38)
    assert tracker.tracking.points[0].lr_over_limit == pytest.approx(0.19 * 4 / 3.8, rel=1e-6)
    assert point is not None
    assert point.lr_over_limit == pytest.approx(0.38 * 4 / 3.8, rel=1e-6)
    with torch.no_grad():  # without a rate: the sharpness alone
        (bare,) = tracked(nn.DataParallel(model), batch, None, loss).close().points
    assert (bare.lr, bare.lr_times_norm, bare.lr_over_limit) == (None, None, None)
    assert bare.stable_learning_rate == pytest.approx(0.5, rel=1e-6)


def test_negative_curvature_sets_no_limit() -> None:
    """Of ½(w₀² − 5 w₁²) along 5, every rate leads away; the limit is that along 1."""
    model = nn.Linear(2, 1, bias=False).double()

    def saddle(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output[:, 0].square() * target).sum() / 2

    batch = torch.eye(2, dtype=torch.float64), torch.tensor([1.0, -5.0], dtype=torch.float64)
    tracker = tracked(model, batch, "sgd", saddle, lr=0.5, curvature="hessian")
    (point,) = tracker.close().points
    assert (point.norm, point.stable_learning_rate) == pytest.approx((5.0, 2.0), rel=1e-6)


def test_the_warning_comes_once_for_each_crossing_and_says_what_to_do() -> None:
    model, loss, batch = quadratic([4.0])
    tracker = tracked(model, batch, "sgd", loss, lr=0.1, warn=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rate in (0.6, 0.6, 0.49, 0.55, 0.3, 0.51):
            tracker.step(lr=rate)
    assert [one.category for one in caught] == [EdgeOfStabilityWarning] * 2
    first, second = (str(one.message) for one in caught)
    assert first.startswith("step 1: lr = 0.6 is at or above the stability limit 0.5 of SGD: ‖H‖ = 4, so")
    assert "hessinit.initialize_(…, lr=0.6)" in first
    assert second.startswith("step 6: ")
    assert caught[0].filename == __file__
    assert tracker.close().crossings == (1, 6)


def test_an_initial_rate_somewhat_above_the_limit_is_tolerated_until_the_next_measurement() -> None:
    """As initialize_ leaves it: at twice the stable rate. Warnings are errors here."""
    model, loss, batch = quadratic([4.0])
    with pytest.warns(EdgeOfStabilityWarning, match="step 0") as caught:
        track(model, loss, batch, optimizer="sgd", lr=1.3, path=None)  # 2.6 times the stable rate
    assert caught[0].filename == __file__
    falls, stays = (tracked(model, batch, "sgd", loss, lr=1.2, warn=True) for _ in range(2))
    falls.step(lr=0.4)
    assert falls.close().crossings == (0,)
    with pytest.warns(EdgeOfStabilityWarning, match="step 1: lr = 1.2"):
        stays.step()
    stays.step()  # once is enough


def test_what_is_trained_and_not_measured_is_noted() -> None:
    """A bias of curvature 2 beside weights of 0.005."""
    torch.manual_seed(0)
    model, loss = nn.Linear(3, 1).double(), nn.MSELoss()
    batch = torch.randn(50, 3).double() * 0.05, torch.ones(50, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.05)
    tracking = tracked(model, batch, optimizer, loss).close()
    assert (tracking.points[0].lr_over_limit or 0) < 0.1
    (note,) = tracking.notes
    assert note.endswith("1 trained parameter (bias); the pattern '**' for layers counts it.")
    counted = tracked(model, batch, optimizer, loss, layers="**").close()
    assert counted.notes == ()
    assert (counted.points[0].lr_over_limit or 0) == pytest.approx(1.05, rel=1e-3)


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_weights_states_and_random_numbers_are_those_of_a_training_alone(curvature: str) -> None:
    ends = []
    for follows in (False, True):
        torch.manual_seed(3)
        hidden = (nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.4))
        model = nn.Sequential(nn.Linear(4, 8), *hidden, nn.Linear(8, 3))
        stepper = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
        torch.manual_seed(7)
        random.seed(7)
        numpy.random.seed(7)  # noqa: NPY002 - the caller's old global state is at stake
        tracker = None
        if follows:
            tracker = tracked(model, batches(1, 16)[0], stepper, curvature=curvature, each_layer=True)
        losses = train(model, batches(6), stepper, tracker)
        if tracker is not None:
            assert len(tracker.close().points) == 7
            assert all(point.converged for point in tracker.tracking.points)
        drawn = (torch.rand(3).tolist(), random.random(), numpy.random.random())  # noqa: NPY002
        ends.append((model, stepper, losses, drawn))
    (alone, alone_stepper, *alone_rest), (followed, followed_stepper, *followed_rest) = ends
    assert alone_rest == followed_rest
    for name, tensor in alone.state_dict().items():
        assert torch.equal(tensor, followed.state_dict()[name]), name
    for one, other in zip(alone.parameters(), followed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
        for name, entry in alone_stepper.state[one].items():
            same = followed_stepper.state[other][name]
            assert torch.equal(entry, same) if isinstance(entry, torch.Tensor) else entry == same


def test_examples_are_copied_also_inside_objects_and_iterators() -> None:
    model, (inputs, targets) = tiny.network(), tiny.batch()
    graph = SimpleNamespace(nodes=inputs.clone())  # not a structure that hessinit knows
    trackers = [
        tracked(model, (inputs, targets)),
        tracked(model, (graph, targets), forward=lambda network, one: network(one.nodes)),
        tracked(model, iter([(inputs, targets)])),
    ]
    for tensor in (inputs, targets, graph.nodes):
        tensor.zero_()
    expected = tracked(model, tiny.batch()).tracking
    assert {tracker.measure().norm for tracker in trackers} == {expected.points[0].norm}
    assert {tracker.tracking.examples for tracker in trackers} == {6}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("fused", [False, True])
def test_points_on_the_gpu_are_those_on_the_cpu(fused: bool) -> None:
    ends = []
    for device in ("cpu", "cuda"):
        model = tiny.network(device=device, dtype=torch.float64)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused and device == "cuda")
        doubles = [(inputs.double().to(device), targets.to(device)) for inputs, targets in batches(5)]
        batch = tiny.batch()[0].double(), tiny.batch()[1]  # on the CPU, whatever the model's device
        tracker = tracked(model, batch, optimizer, each_layer=True, tolerance=1e-6)
        train(model, doubles, optimizer, tracker)
        ends.append(tracker.close())
    for one, other in zip(*(tracking.points for tracking in ends), strict=True):
        assert one.norm == pytest.approx(other.norm, rel=1e-5)
        assert one.lr_over_limit == pytest.approx(other.lr_over_limit, rel=1e-5)
        assert one.layers == pytest.approx(other.layers, rel=1e-5)
    assert [loss for _, loss in ends[0].losses] == pytest.approx([loss for _, loss in ends[1].losses])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_loss_on_the_gpu_is_not_read_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = tracked(tiny.network(device="cuda"), tiny.batch(), every=100)
    reads: list[int] = []
    plain = torch.Tensor.__float__
    monkeypatch.setattr(torch.Tensor, "__float__", lambda tensor: reads.append(1) or plain(tensor))
    buffer = torch.zeros((), device="cuda")
    for step in range(5):
        buffer.fill_(step)  # used again, as under CUDA graphs
        tracker.step(buffer)
    assert not reads
    assert tracker.close().losses == tuple((step + 1, float(step)) for step in range(5))
