"""What changes on the way: other weights, groups, settings, modes; the numbers follow, and a note says so."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from training_loops import LOSS, batches, quadratic, tracked, train

import tiny
from dense import dense_curvature, ends
from hessinit.training.optimizer_rules import YOUNG


def double_problem() -> tuple[nn.Sequential, tuple[torch.Tensor, torch.Tensor]]:
    return tiny.network(dtype=torch.float64), (tiny.inputs(12).double(), tiny.labels(12))


def truth(model: nn.Module, batch: Any, names: list[str]) -> float:
    """‖H‖ of these weights alone, from the dense matrix of all."""
    dense = dense_curvature(model, LOSS, batch, "gauss-newton")
    sizes = {name: block.shape[0] for name, block in dense.layers.items()}
    kept, place = [], 0
    for name, size in sizes.items():
        kept += list(range(place, place + size)) if name in names else []
        place += size
    return ends(dense.network[kept][:, kept]).norm


def test_weights_that_are_unfrozen_and_added_later_are_measured_and_noted() -> None:
    model, batch = double_problem()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    tracker = tracked(model, batch, optimizer, tolerance=1e-6)
    assert tracker.tracking.points[0].norm == pytest.approx(truth(model, batch, ["2"]), rel=1e-5)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.5})
    point = tracker.step()
    assert point is not None
    assert (point.lr, point.norm) == (0.5, pytest.approx(truth(model, batch, ["0", "2"]), rel=1e-5))
    matrix = dense_curvature(model, LOSS, batch, "gauss-newton").network
    fast = torch.tensor([1.0] * model[0].weight.numel() + [0.2] * model[2].weight.numel()).double().sqrt()
    assert point.stable_learning_rate == pytest.approx(2 / ends(fast[:, None] * matrix * fast).top, rel=1e-5)
    after = tracker.step()
    assert after is not None
    assert not after.note  # the change is told once
    assert "Step 1: Other weights are measured from here on: with 0.weight." in tracker.close().notes


def test_weights_that_are_frozen_later_count_no_more() -> None:
    model, batch = double_problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = tracked(model, batch, optimizer, tolerance=1e-6)
    model[0].requires_grad_(False)
    point = tracker.step()
    assert point is not None
    assert point.norm == pytest.approx(truth(model, batch, ["2"]), rel=1e-5)
    assert point.note == "Other weights are measured from here on: without 0.weight."
    model[2].requires_grad_(False)
    nothing = tracker.step()
    assert nothing is not None
    assert math.isnan(nothing.norm)
    assert nothing.lr is None
    assert "no trainable weight" in nothing.note


def test_groups_may_have_decays_of_their_own() -> None:
    """½(w₀² + 4 w₁²) with decays 2 and 0.5 as in the gradient: the curvatures are 3 and 4.5."""
    model = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)}).double()

    def forward(both: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([both["a"](inputs[:, :1]), 2 * both["b"](inputs[:, :1])], dim=1)

    batch = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 2, 1, dtype=torch.float64)
    groups = [
        {"params": model["a"].parameters(), "weight_decay": 2.0},
        {"params": model["b"].parameters(), "weight_decay": 0.5},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    tracking = tracked(model, batch, optimizer, nn.MSELoss(), forward=forward).close()
    assert tracking.points[0].norm == pytest.approx(4.0, rel=1e-6)
    assert tracking.points[0].stable_learning_rate == pytest.approx(2 / 4.5, rel=1e-6)
    assert tracking.notes == ()


@pytest.mark.parametrize("decays", [(0.3, 0.3), (40.0, 0.0), (0.0, 40.0)])
@pytest.mark.parametrize("rates", [(0.01, 0.01), (0.01, 0.04)])
def test_decoupled_decays_and_rates_of_groups_give_the_edge_of_the_whole_recursion(
    decays: tuple[float, float], rates: tuple[float, float]
) -> None:
    """The truth: the spectral radius of AdamW's steps on the quadratic, its preconditioner held still."""
    model, batch = double_problem()
    groups = [
        {"params": [model[place].weight], "lr": rate, "weight_decay": decay}
        for place, rate, decay in zip((0, 2), rates, decays, strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.6, 0.9))
    tracker = tracked(model, batch, optimizer, tolerance=1e-8, every=100)
    train(model, [(inputs.double(), targets) for inputs, targets in batches(7)], optimizer, tracker)
    point = tracker.measure()
    matrix = dense_curvature(model, LOSS, batch, "gauss-newton").network
    weights = [model[0].weight, model[2].weight]
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


def test_settings_that_part_in_the_middle_cost_the_edge_alone() -> None:
    model, batch = double_problem()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.5)
    tracker = tracked(model, batch, optimizer, tolerance=1e-6)
    optimizer.param_groups[1]["momentum"] = 0.9
    point = tracker.step()
    assert point is not None
    assert point.norm == pytest.approx(truth(model, batch, ["0", "2"]), rel=1e-5)
    assert (point.lr, point.lr_over_limit, math.isnan(point.stable_learning_rate)) == (0.1, None, True)
    assert point.note.startswith("No edge of stability: groups 0 and 1 of the optimizer step differently")
    optimizer.param_groups[0]["momentum"] = 0.9
    again = tracker.step()
    assert again is not None
    assert again.stable_learning_rate == pytest.approx(3.8 / again.norm, rel=1e-6)


@pytest.mark.parametrize("setting", ["maximize", "centered"])
def test_no_group_may_go_uphill_or_divide_by_something_else(setting: str) -> None:
    model, batch = double_problem()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), setting: True}]
    make = torch.optim.SGD if setting == "maximize" else torch.optim.RMSprop
    tracking = tracked(model, batch, make(groups, lr=0.1)).close()
    assert tracking.points[0].lr_over_limit is None
    assert any(setting in note for note in tracking.notes)


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.RMSprop])
def test_a_young_state_does_not_rule_the_edge(make: Any) -> None:
    """After one gradient P^-½ H P^-½ is ruled by weights whose gradient is small by chance."""
    torch.manual_seed(3)
    model, batch = nn.Sequential(nn.Linear(4, 60), nn.Tanh(), nn.Linear(60, 3)), batches(1, 24)[0]
    optimizer = make(model.parameters(), lr=1e-3)
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
    if "square_avg" in states[0]:
        roots, share, top = [state["square_avg"].sqrt() for state in states], 1.0, 2.0
    else:
        roots = [(state["exp_avg_sq"] / (1 - 0.999 ** float(state["step"]))).sqrt() for state in states]
        share, top = 0.1, 3.8
    scale = torch.cat([root.reshape(-1) for root in roots]).double().add(1e-8).rsqrt()
    return 1e-3 * share * ends(scale[:, None] * matrix * scale).top / top


def test_at_the_start_adaptive_groups_go_at_their_own_rates() -> None:
    """With a group that rests, the edge is that of the other one alone."""
    model, batch = double_problem()
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
    both = tracked(model, batch, torch.optim.Adam(groups, lr=0.01), tolerance=1e-6)
    alone = tracked(model, batch, torch.optim.Adam(model[2].parameters(), lr=0.01), tolerance=1e-6)
    even = tracked(model, batch, torch.optim.Adam(model.parameters(), lr=0.01), tolerance=1e-6)
    found, expected, other = (one.close().points[0].lr_over_limit for one in (both, alone, even))
    assert found == pytest.approx(expected, rel=1e-4)
    assert found != pytest.approx(other, rel=1e-2)


def test_another_mode_than_at_the_first_point_is_noted() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    tracker = tracked(model, tiny.batch())
    model.eval()
    tracker.step()
    tracker.step()
    model.train()
    tracker.step()
    model[1].eval()
    tracker.step()
    notes = tracker.close().notes
    differ = "mode, and in train mode at the first point: dropout and normalization may differ."
    assert f"Steps 1 to 2 (2 measurements): The model was in eval {differ}" in notes
    assert f"Step 4: 1 was in eval {differ}" in notes
    assert [bool(point.note) for point in tracker.tracking.points] == [False, True, True, False, True]


def test_what_is_trained_and_not_measured_is_noted_and_the_verdict_claims_no_more() -> None:
    """A bias of curvature 2 beside weights of 0.005: the training diverges, below the edge of its weights."""
    torch.manual_seed(0)
    model, loss = nn.Linear(3, 1).double(), nn.MSELoss()
    batch = torch.randn(50, 3).double() * 0.05, torch.ones(50, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.05)
    tracker = tracked(model, batch, optimizer, loss, every=25)
    losses = train(model, [batch] * 100, optimizer, tracker, loss)
    assert losses[-1] > losses[0]
    tracking = tracker.close()
    assert max(point.lr_over_limit or 0 for point in tracking.points) < 0.1
    assert tracking.notes == (
        'Not counted in the network\'s ‖H‖: 1 trained parameter (bias); layers="**" counts it.',
    )
    assert "For the measured weights the rate stayed below the edge" in tracking.verdict
    counted = tracked(model, batch, optimizer, loss, layers="**").close()
    assert counted.notes == ()
    assert (counted.points[0].lr_over_limit or 0) == pytest.approx(1.05, rel=1e-3)
    assert (counted.points[0].lr_over_limit or 0) > 1


def test_parameters_that_nothing_moves_are_not_missed() -> None:
    model, loss, batch = quadratic([1.0, 2.0])
    model.spare = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    assert tracked(model, batch, optimizer, loss).close().notes == ()
