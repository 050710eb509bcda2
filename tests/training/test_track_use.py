"""What a tracker refuses, how it keeps to its time, and training with the tracker built in."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training_loops import LOSS, FakeClock, tracked

import tiny
from calls import call
from hessinit import Problem, ProblemError, Tracking, track
from hessinit.training import track as track_module
from hessinit.training.loop import read_data, train_and_track


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "missing/curvature.jsonl"}, "must be a file in a folder that exists; create it, or pass"),
        ({"layer": "0"}, "unexpected keyword argument 'layer'"),
        ({"batch": (torch.ones(3, 5), torch.zeros(3).long()), "at_start": False}, "shapes cannot be multi"),
        ({"batch": (torch.full((3, 4), math.nan), torch.zeros(3).long())}, "the inputs hold 12 NaN or inf"),
    ],
)
def test_bad_options_are_refused_and_leave_no_file(options, message, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ProblemError, RuntimeError, TypeError), match=message):
        call(track, tiny.network(), LOSS, **{"batch": tiny.batch(), **options})
    assert os.listdir(tmp_path) == []


def test_what_a_tracker_refuses_later() -> None:
    model = tiny.network()
    with pytest.raises(ProblemError, match="holds none of the measured weights of this model; build it from"):
        tracked(tiny.network(), tiny.batch(), torch.optim.SGD(model.parameters(), lr=0.1))
    tracker = tracked(model, tiny.batch(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ProblemError, match=r"lr=0.3 was given, and it is read from the optimizer"):
        tracker.step(lr=0.3)
    for loss in (torch.ones(2), [1.0], "a"):
        with pytest.raises(ProblemError, match=r"given to step\(\) is .*; it must be a single real number"):
            tracked(model, tiny.batch()).step(loss)
    first = tracker.close()
    assert tracker.close() is first is tracker.tracking
    for refused in (tracker.step, tracker.measure):
        with pytest.raises(ProblemError, match="this tracker is closed; call track"):
            refused()


def test_weights_and_losses_of_nan_and_forwards_that_fail_are_noted_and_training_goes_on() -> None:
    model, fails = tiny.network(), [False]

    def forward(network: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        if fails[0]:
            raise KeyError("a sensor is gone")
        return network(inputs)

    tracker = tracked(model, tiny.batch(), "sgd", lr=0.1, forward=forward)
    fails[0] = True
    point = tracker.step(torch.tensor([2.0], requires_grad=True))
    assert point is not None
    assert "a sensor is gone" in point.note
    fails[0] = False
    assert math.isfinite(tracker.measure().norm)
    with torch.no_grad():
        model[0].weight.fill_(math.nan)
    tracker.step(math.nan)
    tracker.step(torch.tensor(math.inf))
    tracking = tracker.close()
    assert str([loss for _, loss in tracking.losses]) == "[2.0, nan, inf]"
    assert [math.isnan(point.norm) for point in tracking.points] == [False, False, True, True]
    assert (tracking.points[2].lr, tracking.points[2].lr_over_limit) == (0.1, None)
    assert tracking.notes[-1].startswith("Steps 2 to 3 (2 measurements): 0.weight holds NaN")
    assert tracking == type(tracking).from_json(tracking.to_json())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    made = FakeClock()
    monkeypatch.setattr("time.perf_counter", made)
    return made


def measuring_takes(clock: FakeClock, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"loss": 2.3, "norm": 4.0, "error": 0.01, "converged": True, "stable_learning_rate": 0.5}
    known = (fields, ["0.weight"], "")
    monkeypatch.setattr("hessinit.training.track._Subject.measure", clock.lasting(seconds, lambda *_: known))


def test_points_come_when_they_are_due_while_cheap_and_logging_counts(clock: FakeClock, monkeypatch) -> None:
    measuring_takes(clock, 0.04, monkeypatch)
    log = clock.lasting(0.06, lambda values, step: None)
    tracker = tracked(tiny.network(), tiny.batch(), every=10, max_overhead=0.1, log_to=log)
    for step in range(1, 51):
        clock.time += 1.0
        tracker.steps = step - 1  # as a trainer does that has its own count
        tracker.step()
    tracking = tracker.close()
    assert [point.step for point in tracking.points] == [0, 10, 20, 30, 40, 50]
    assert tracking.seconds == pytest.approx(50.6)
    assert tracking.overhead == tracker.overhead == pytest.approx(0.6 / 50.6)
    assert [point.measuring_seconds for point in tracking.points] == pytest.approx([0.04] * 6)
    assert tracking.points[1].seconds == pytest.approx(10.14)


def test_what_does_not_fit_is_put_off_and_not_lost(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 s a measurement and 1 s a step: at 25 % the next may start once 20 s are a quarter of the time."""
    measuring_takes(clock, 10.0, monkeypatch)
    tracker = tracked(tiny.network(), tiny.batch(), every=10, max_overhead=0.25)
    for _ in range(120):
        clock.time += 1.0
        tracker.step()
    # After n measurements and s steps: 10(n + 1) <= 0.25 (10 n + s), so s >= 30 n + 40; first for n = 1.
    assert [point.step for point in tracker.close().points] == [0, 70, 100]


def points_data() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(200, 4, generator=torch.Generator().manual_seed(4))
    return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()


def run(model: nn.Module, data: Any = None, **options: Any) -> Tracking:
    settings: dict[str, Any] = {"lr": 0.3, "steps": 40, "batch_size": 20, "max_overhead": 1.0}
    given = {**settings, **options}
    seed = given.pop("seed", 0)
    read = read_data(data or points_data(), given.pop("batch_size"), given["steps"])
    batch = read.tracked_batch(given.pop("examples", 256), seed)
    problem = Problem(model, tiny.LOSS, batch, seed=seed, forward=given.pop("forward", None))
    return train_and_track(problem, read, **given)


def test_it_trains_in_place_by_its_seed_leaves_the_generators_and_tracks_on_the_way() -> None:
    ends, seen = [], []
    for options in ({"every": 10}, {"every": 40}, {"seed": 1}):
        model = tiny.network()
        torch.manual_seed(11)
        before = torch.get_rng_state()
        tracking = run(model, on_step=lambda *call: seen.append(call), name="mine", **options)
        assert torch.equal(torch.get_rng_state(), before)
        ends.append(model[2].weight)
    assert torch.equal(ends[0], ends[1])  # how often one looks changes nothing
    assert not torch.equal(ends[0], ends[2])
    assert tuple(seen[80:]) == tracking.losses
    losses = [loss for _, loss in tracking.losses]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert (tracking.name, tracking.optimizer, tracking.examples) == ("mine", "SGD", 200)


def test_modes_come_back_and_dropout_works_in_between() -> None:
    modes: list[bool] = []
    watching = tiny.Net(lambda net, x: (modes.append(net.training), x)[1])
    model = nn.Sequential(nn.Linear(4, 5), watching, nn.Dropout(0.3), nn.Linear(5, 3)).eval()
    run(model, steps=3)
    assert all(modes)
    assert not any(module.training for module in model.modules())


def test_the_steps_are_those_of_the_optimizer_asked_for_and_one_that_explodes_ends_with_a_note() -> None:
    """One step of momentum with a warmup of two, by hand."""
    model, alone = tiny.network(), tiny.network()
    inputs, targets = tiny.batch()
    run(model, (inputs, targets), steps=1, batch_size=6, optimizer="momentum", warmup=2, lr=0.4)
    tiny.LOSS(alone(inputs), targets).backward()
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter -= 0.2 * parameter.grad
    assert torch.allclose(model[0].weight, alone[0].weight, atol=1e-7)
    tracking = run(tiny.network(), warmup=20, every=5, steps=25)
    # After five steps the optimizer still holds the rate that the fifth was made with.
    assert [point.lr for point in tracking.points] == pytest.approx([0.015, 0.075, 0.15, 0.225, 0.3, 0.3])
    exploded = run(tiny.network(), lr=1e38, every=1)
    assert len(exploded.losses) < 40
    assert not math.isfinite(exploded.losses[-1][1])
    assert any("training ended there" in note for note in exploded.notes)


def test_ready_batches_a_file_and_the_end_whatever_the_overhead(tmp_path: Path) -> None:
    inputs, targets = points_data()
    pairs = list(zip(inputs.split(25), targets.split(25), strict=True))
    tracking = run(tiny.network(), pairs, examples=60, path=tmp_path / "run.jsonl")
    assert tracking.examples == 75
    assert Tracking.load(tmp_path / "run.jsonl") == tracking
    # Five seconds of measuring are allowed in any case: a short run has the points that were asked for.
    assert [point.step for point in run(tiny.network(), steps=12, max_overhead=1e-9).points] == [0, 10, 12]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(track_module, "FREE_SECONDS", 0.0)
        assert [point.step for point in run(tiny.network(), steps=12, max_overhead=1e-9).points] == [0, 12]
    with pytest.raises(ProblemError, match="steps=0 must be a whole number"):
        run(tiny.network(), steps=0)
