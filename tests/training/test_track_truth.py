"""The numbers of every point, against dense matrices in fp64 and closed forms."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from training_loops import LOSS, batches, quadratic, tracked, train

import tiny
from dense import dense_curvature, ends
from hessinit.errors import EdgeOfStabilityWarning
from hessinit.training.track import track


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_every_point_has_the_norms_of_the_weights_at_that_step(curvature: str) -> None:
    model, batch = tiny.network(dtype=torch.float64), (tiny.inputs(12).double(), tiny.labels(12))
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
        assert point.layers == pytest.approx(
            {name: ends(block).norm for name, block in dense.layers.items()}, rel=1e-5
        )
    assert len({point.norm for point in points}) == 4  # the weights moved, and so did the numbers
    assert points[1].loss == pytest.approx(LOSS(tiny_after_one_step()(batch[0]), batch[1]).item(), rel=1e-9)


def tiny_after_one_step() -> nn.Module:
    model = tiny.network(dtype=torch.float64)
    step = batches(1)[0]
    train(model, [(step[0].double(), step[1])], torch.optim.SGD(model.parameters(), lr=0.5))
    return model


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, 2.0),
        ({"momentum": 0.9}, 2 * 1.9),
        ({"momentum": 0.5, "nesterov": True}, 3 / 2),
    ],
)
def test_the_stable_rate_of_gradient_descent_is_the_closed_form(settings: dict, limit: float) -> None:
    model, loss, batch = quadratic([1.0, 4.0, 0.1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **settings)
    (point,) = tracked(model, batch, optimizer, loss).close().points
    assert point.norm == pytest.approx(4.0, rel=1e-6)
    assert point.stable_learning_rate == pytest.approx(limit / 4, rel=1e-6)
    assert point.stable_norm == pytest.approx(limit / 0.1, rel=1e-6)


def test_weight_decay_takes_its_part_of_the_stable_rate() -> None:
    model, loss, batch = quadratic([1.0, 4.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1.0)
    (point,) = tracked(model, batch, optimizer, loss).close().points
    assert (point.norm, point.stable_learning_rate) == pytest.approx((4.0, 2 / 5), rel=1e-6)


@pytest.mark.parametrize("share_of_edge", [0.5, 0.98, 1.02, 1.5])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_descent_on_a_quadratic_diverges_exactly_beyond_the_edge(
    share_of_edge: float, momentum: float
) -> None:
    model, loss, batch = quadratic([1.0, 3.0])
    lr = share_of_edge * (2 + 2 * momentum) / 3
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    tracker = tracked(model, batch, optimizer, loss, every=1000)
    losses = train(model, [batch] * 600, optimizer, tracker, loss)
    (point,) = tracker.close().points
    assert point.lr_over_limit == pytest.approx(share_of_edge, rel=1e-6)
    assert (not losses[-1] < losses[0]) == (point.lr_over_limit > 1)  # nan, where it overflowed


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True, betas=(0.5, 0.9)),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01, weight_decay=0.3),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.3),
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.4),
    ],
    ids=["adam", "amsgrad", "adam with decay", "adamw", "rmsprop"],
)
@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_adaptive_optimizers_are_measured_with_the_preconditioner_of_their_own_state(
    make, curvature: str
) -> None:
    model, batch = tiny.network(dtype=torch.float64), (tiny.inputs(12).double(), tiny.labels(12))
    optimizer = make(model.parameters())
    doubles = [(inputs.double(), targets) for inputs, targets in batches(7)]
    tracker = tracked(model, batch, optimizer, every=7, curvature=curvature, tolerance=1e-6)
    train(model, doubles, optimizer, tracker)
    point = tracker.close().points[-1]
    assert point.step == 7
    matrix = dense_curvature(model, LOSS, batch, curvature).network
    divisors, (group,) = [], optimizer.param_groups
    for parameter in (model[0].weight, model[2].weight):
        state = optimizer.state[parameter]
        if "square_avg" in state:
            divisors.append(state["square_avg"].sqrt() + group["eps"])
        else:
            second = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
            divisors.append((second / (1 - group["betas"][1] ** 7)).sqrt() + group["eps"])
    scale = torch.cat([one.reshape(-1) for one in divisors]).rsqrt()
    decay = group["weight_decay"]
    if type(optimizer) is torch.optim.Adam:
        matrix = matrix + decay * torch.eye(len(matrix))
    top = ends(scale[:, None] * matrix * scale).top
    if "alpha" in group:
        stable = (2 + 2 * 0.4) / top
    else:
        beta = group["betas"][0]
        decoupled = decay if isinstance(optimizer, torch.optim.AdamW) else 0.0
        stable = (2 + 2 * beta) / ((1 - beta) * top + (1 + beta) * decoupled)
    assert point.stable_learning_rate == pytest.approx(stable, rel=1e-4)
    assert point.lr_over_limit == pytest.approx(0.01 / stable, rel=1e-4)


def test_groups_of_different_rates_share_one_edge() -> None:
    """Rates 0.1 and 0.4 along curvatures 4 and 1: both at lr·a = 0.4, a fifth of the edge."""
    model = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)}).double()

    def forward(both: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([both["a"](inputs[:, :1]) * 2**0.5, both["b"](inputs[:, :1]) / 2**0.5], dim=1)

    batch = torch.ones(1, 1, dtype=torch.float64) * 2**0.5, torch.zeros(1, 2, 1, dtype=torch.float64)
    groups = [
        {"params": model["a"].parameters(), "lr": 0.1},
        {"params": model["b"].parameters(), "lr": 0.4},
    ]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    (point,) = tracked(model, batch, optimizer, nn.MSELoss(), forward=forward).close().points
    assert point.norm == pytest.approx(4.0, rel=1e-6)
    assert (point.lr, point.lr_over_limit) == (0.4, pytest.approx(0.2, rel=1e-6))


def test_the_rate_is_that_of_the_moment_whatever_the_schedule() -> None:
    model, loss, batch = quadratic([1.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 * step)
    tracker = tracked(model, batch, optimizer, loss)
    for _ in range(3):
        train(model, [batch], optimizer, loss=loss)
        schedule.step()
        tracker.step()
    assert [point.lr for point in tracker.close().points] == pytest.approx([0.0, 0.1, 0.2, 0.3])


def test_a_word_and_a_rate_do_as_well_as_an_optimizer() -> None:
    model, loss, batch = quadratic([1.0, 4.0])
    tracker = tracked(model, batch, "momentum", loss, lr=0.19)
    point = tracker.step(lr=0.38)
    assert tracker.tracking.points[0].lr_over_limit == pytest.approx(0.19 * 4 / 3.8, rel=1e-6)
    assert point is not None
    assert point.lr_over_limit == pytest.approx(0.38 * 4 / 3.8, rel=1e-6)


def test_without_a_rate_there_is_sharpness_alone() -> None:
    model, loss, batch = quadratic([1.0, 4.0])
    (point,) = tracked(model, batch, None, loss).close().points
    assert (point.lr, point.lr_times_norm, point.lr_over_limit) == (None, None, None)
    assert point.stable_learning_rate == pytest.approx(0.5, rel=1e-6)


def test_an_optimizer_of_unknown_steps_has_a_rate_and_no_edge() -> None:
    model, loss, batch = quadratic([1.0, 4.0])
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    tracking = tracked(model, batch, optimizer, loss).close()
    (point,) = tracking.points
    assert point.lr_times_norm == pytest.approx(0.4, rel=1e-6)
    assert math.isnan(point.stable_learning_rate)
    assert point.lr_over_limit is None
    assert "Adagrad" in tracking.notes[0]


def test_a_wrapper_that_steps_in_its_own_way_has_no_edge_of_what_is_inside() -> None:
    class LookAhead(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(optimizer.param_groups, {})
            self.optimizer = optimizer

    model, loss, batch = quadratic([1.0, 4.0])
    optimizer = LookAhead(torch.optim.SGD(model.parameters(), lr=0.1))
    tracking = tracked(model, batch, optimizer, loss).close()
    assert (tracking.points[0].lr, tracking.points[0].lr_over_limit, tracking.optimizer) == (
        0.1,
        None,
        "LookAhead",
    )
    assert "LookAhead, whose steps are not known" in tracking.notes[0]


def test_negative_curvature_does_not_count_as_the_edge() -> None:
    """Of ½(w₀² − 5 w₁²) along 5, every rate leads away; the limit is that along 1."""
    model = nn.Linear(2, 1, bias=False).double()

    def saddle(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output[:, 0].square() * target).sum() / 2

    batch = torch.eye(2, dtype=torch.float64), torch.tensor([1.0, -5.0], dtype=torch.float64)
    tracker = tracked(model, batch, "sgd", saddle, lr=0.5, curvature="hessian")
    (point,) = tracker.close().points
    assert (point.norm, point.stable_learning_rate) == pytest.approx((5.0, 2.0), rel=1e-6)


def test_full_batch_descent_sharpens_up_to_the_edge_and_is_warned() -> None:
    """Cohen et al. (2021): the sharpness rises to 2/lr and stays there, while the loss goes on falling."""
    torch.manual_seed(0)
    inputs = torch.linspace(-1, 1, 20)[:, None]
    batch = inputs, torch.sin(4 * inputs)
    model = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 1))
    weights = ["0", "0.bias", "2", "2.bias"]
    lr = 0.08
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    tracker = tracked(
        model, batch, optimizer, nn.MSELoss(), every=200, layers=weights, curvature="hessian", warn=True
    )
    with pytest.warns(EdgeOfStabilityWarning, match=r"lr·‖H‖ = 2.* stable up to lr·‖H‖ = 2\. If"):
        train(model, [batch] * 6000, optimizer, tracker, nn.MSELoss())
    tracking = tracker.tracking
    edges = [point.lr_over_limit or 0 for point in tracking.points]
    assert edges[0] < 0.9  # it began below,
    assert all(0.9 < edge < 1.1 for edge in edges[-10:])  # rose to the edge and stayed there,
    assert tracking.points[-1].loss < tracking.points[len(edges) // 2].loss  # and trained all the same
    assert min(tracking.crossings) > 0


def test_the_warning_comes_once_for_each_crossing_and_says_what_to_do() -> None:
    model, loss, batch = quadratic([4.0])
    tracker = tracked(model, batch, "sgd", loss, lr=0.1, warn=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rate in (0.6, 0.6, 0.49, 0.55, 0.3, 0.51):
            tracker.step(lr=rate)
    assert [one.category for one in caught] == [EdgeOfStabilityWarning] * 2
    first, second = (str(one.message) for one in caught)
    assert first == (
        "step 1: the learning rate 0.6 is at or beyond the edge of stability, 0.5 for SGD: ‖H‖ = 4, so "
        "lr·‖H‖ = 2.4, and steps are stable up to lr·‖H‖ = 2. If the loss rises or jumps, lower the "
        "rate below 0.5, warm up more slowly, or start with hessinit.initialize_(…, lr=0.6)."
    )
    assert second.startswith("step 6: the learning rate 0.51 ")
    assert caught[0].filename == __file__
    assert tracker.close().crossings == (1, 6)


def test_a_start_far_beyond_the_edge_warns_at_once() -> None:
    model, loss, batch = quadratic([4.0])
    with pytest.warns(EdgeOfStabilityWarning, match="step 0") as caught:
        track(model, loss, batch, optimizer="sgd", lr=1.3, path=None)  # 2.6 times the stable rate
    assert caught[0].filename == __file__


def test_a_start_somewhat_beyond_the_edge_has_until_the_next_measurement_to_calm() -> None:
    """As initialize_ leaves it: at twice the stable rate. Warnings are errors here."""
    model, loss, batch = quadratic([4.0])
    calms = track(model, loss, batch, optimizer="sgd", lr=1.2, every=1, max_overhead=1.0, path=None)
    calms.step(lr=0.4)
    assert calms.close().crossings == (0,)
    stays = track(model, loss, batch, optimizer="sgd", lr=1.2, every=1, max_overhead=1.0, path=None)
    with pytest.warns(EdgeOfStabilityWarning, match="step 1: the learning rate 1.2"):
        stays.step()
    stays.step()  # once is enough


def test_a_copy_of_the_model_measured_alone_has_the_same_numbers() -> None:
    model, optimizer_of = tiny.network(), torch.optim.SGD
    optimizer = optimizer_of(model.parameters(), lr=0.3)
    tracker = tracked(model, tiny.batch(), optimizer)
    train(model, batches(2), optimizer, tracker)
    again = tracked(copy.deepcopy(model), tiny.batch(), "sgd", lr=0.3)
    assert tracker.close().points[-1].norm == again.close().points[0].norm
