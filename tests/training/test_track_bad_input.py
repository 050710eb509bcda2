"""What cannot be tracked is refused before any work; what goes wrong later does not end a training."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from training_loops import LOSS, batches, tracked, train

import tiny
from hessinit.errors import ProblemError
from hessinit.training.track import track


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0 must be a whole number, 1 or more"),
        ({"every": 2.5}, "every=2.5 must be a whole number"),
        ({"max_overhead": 2}, "max_overhead=2 must be a number above 0, up to 1"),
        ({"max_overhead": 0}, "max_overhead=0 must be a number above 0"),
        ({"max_overhead": True}, "max_overhead=True must be"),
        ({"max_overhead": math.nan}, "max_overhead=nan must be"),
        ({"path": "missing/curvature.jsonl"}, "the folder missing does not exist. Create it first"),
        ({"path": "."}, "is a folder; give the name of a file"),
        ({"path": 3}, "path is a int; it must be the name of a file"),
        ({"path": None, "resume": True}, "resume=True needs the file to go on in"),
        ({"curvature": "hessain"}, "Did you mean 'hessian'"),
        ({"tolerance": 0}, "tolerance=0 must be a relative error"),
        ({"lr": -1.0}, "lr=-1.0 must be a finite number above 0"),
        ({"optimizer": "adma"}, "optimizer='adma' is unknown.* Did you mean 'adam'"),
        ({"optimizer": torch.optim.SGD}, "Pass an instance, not the class"),
        ({"optimizer": 3}, "optimizer is a int; it must be a torch.optim.Optimizer"),
        ({"layers": "conv*"}, "layers='conv\\*' fits no parameter"),
        ({"log_to": "tensorboard"}, "log_to='tensorboard' is unknown; pass 'auto', a SummaryWriter"),
        ({"log_to": [3]}, "log_to holds a int"),
        ({"path": os.devnull}, "is there and is not a file; give the name of a file, or None"),
        ({"warn": 1}, "warn=1 must be True or False"),
        ({"seed": -1}, "seed=-1 must be a whole number"),
    ],
)
def test_bad_options_are_refused_and_leave_no_file(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ProblemError, match=message):
        track(tiny.network(), LOSS, tiny.batch(), **options)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.ones(3, 4), "batch is a Tensor; it must be"),
        ((torch.ones(3, 5), torch.zeros(3, dtype=torch.long)), "shapes cannot be multiplied"),
        ((torch.full((3, 4), math.nan), torch.zeros(3, dtype=torch.long)), "the inputs hold 12 NaN or inf"),
    ],
)
@pytest.mark.parametrize("at_start", [True, False])
def test_a_batch_that_cannot_be_used_is_refused_at_once(
    batch: Any, message: str, at_start: bool, tmp_path: Path
) -> None:
    with pytest.raises((ProblemError, RuntimeError), match=message):
        track(tiny.network(), LOSS, batch, path=tmp_path / "file.jsonl", at_start=at_start)
    assert os.listdir(tmp_path) == []


def test_a_loss_without_curvature_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    model = torch.nn.Sequential(tiny.network(), torch.nn.LogSoftmax(1))
    with pytest.raises(ProblemError, match="log_softmax"):
        track(model, torch.nn.NLLLoss(), tiny.batch(), path=tmp_path / "file.jsonl")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("who", ["the model's output", "the loss"])
def test_random_numbers_that_cannot_be_frozen_are_refused(who: str) -> None:
    class Hidden:
        source = torch.Generator().manual_seed(0)  # attributes of classes are not looked at

    def noisy(*given: Any) -> torch.Tensor:
        value = LOSS(*given) if who == "the loss" else given[0](given[1])
        return value * torch.rand(1, generator=Hidden.source).squeeze()

    given = {"forward": noisy} if who != "the loss" else {}
    with pytest.raises(ProblemError, match=f"{who} changes from call to call"):
        track(tiny.network(), noisy if who == "the loss" else LOSS, tiny.batch(), path=None, **given)


def test_an_optimizer_of_another_model_is_refused() -> None:
    other = torch.optim.SGD(tiny.network().parameters(), lr=0.1)
    with pytest.raises(ProblemError, match="holds none of the measured weights of this model; build it from"):
        tracked(tiny.network(), tiny.batch(), other)


def test_a_closed_tracker_is_closed_and_closing_twice_is_fine() -> None:
    tracker = tracked(tiny.network(), tiny.batch())
    first = tracker.close()
    assert tracker.close() is first is tracker.tracking
    for call in (tracker.step, tracker.measure):
        with pytest.raises(ProblemError, match="this tracker is closed; call track"):
            call()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (torch.ones(2), r"has shape \(2,\); it must be a single number"),
        ([1.0], "is a list; it must be"),
        ("a", "is 'a'; it must be a number"),
        (True, "is True; it must be a number"),
        (torch.tensor(1 + 0j), r"has dtype torch.complex64; it must be a real number"),
        (torch.tensor(True), r"has dtype torch.bool; it must be a real number"),
    ],
)
def test_a_loss_that_is_no_number_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        tracked(tiny.network(), tiny.batch()).step(loss)


def test_a_rate_beside_an_optimizer_is_refused_for_it_would_hide_the_schedule() -> None:
    model = tiny.network()
    tracker = tracked(model, tiny.batch(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(
        ProblemError, match=r"lr=0.3 was given to step\(\), and the rate is read from the opt"
    ):
        tracker.step(lr=0.3)
    assert (tracker.steps, tracker.measure().lr) == (0, 0.1)


def test_a_saturated_loss_is_called_so() -> None:
    model = tiny.network()
    tracker = tracked(model, tiny.batch())
    with torch.no_grad():
        model[2].weight.mul_(1e6)
    point = tracker.step()
    assert point is not None
    assert point.note.startswith("the loss is saturated")
    assert math.isnan(point.norm)


def test_a_loss_of_nan_is_recorded() -> None:
    tracker = tracked(tiny.network(), tiny.batch(), every=100)
    for loss in (1.0, math.nan, torch.tensor(math.inf), torch.tensor([2.0], requires_grad=True)):
        tracker.step(loss)
    tracker.step()
    losses = tracker.close().losses
    assert [step for step, _ in losses] == [1, 2, 3, 4]
    assert str([loss for _, loss in losses]) == "[1.0, nan, inf, 2.0]"


def test_weights_of_nan_make_a_point_of_nan_and_training_goes_on() -> None:
    model = tiny.network()
    stepper = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = tracked(model, tiny.batch(), stepper)
    with torch.no_grad():
        model[0].weight.fill_(math.nan)
    train(model, batches(2), stepper, tracker)
    tracking = tracker.close()
    assert [math.isnan(point.norm) for point in tracking.points] == [False, True, True]
    assert tracking.points[1].lr == 0.1
    assert tracking.points[1].lr_over_limit is None
    assert "0.weight holds NaN or inf" in tracking.points[1].note
    assert tracking.notes[-1].startswith("Steps 1 to 2 (2 measurements): 0.weight holds NaN")
    assert "from 0.4" not in tracking.verdict  # one number is no course
    assert tracking.verdict.endswith("From step 1 on no measurement succeeded.")  # the losses say why
    assert tracking == type(tracking).from_json(tracking.to_json())


def test_a_measurement_that_fails_for_any_reason_is_noted() -> None:
    model, fails = tiny.network(), [False]

    def forward(network: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        if fails[0]:
            raise KeyError("a sensor is gone")
        return network(inputs)

    tracker = tracked(model, tiny.batch(), forward=forward)
    fails[0] = True
    point = tracker.step()
    assert point is not None
    assert "a sensor is gone" in point.note
    fails[0] = False
    assert math.isfinite(tracker.measure().norm)
    assert math.isfinite(tracker.tracking.points[1].norm)  # the same step, measured again


def test_a_rate_alone_is_that_of_gradient_descent() -> None:
    tracking = tracked(tiny.network(), tiny.batch(), lr=0.5).close()
    assert tracking.optimizer == "SGD"
    assert tracking.points[0].lr_over_limit == pytest.approx(0.5 * tracking.points[0].norm / 2)
