"""Training with the tracker built in."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiny
from hessinit.errors import ProblemError
from hessinit.results.track_record import Tracking
from hessinit.training.train_and_track import train_and_track


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(200, 4, generator=generator)
    return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()


def run(model: nn.Module, data: Any = None, **options: Any) -> Tracking:
    settings: dict[str, Any] = {"lr": 0.3, "steps": 40, "batch_size": 20, "max_overhead": 1.0}
    return train_and_track(model, tiny.LOSS, data or digits(), **{**settings, **options})


def test_it_trains_in_place_and_tracks_on_the_way() -> None:
    model, seen = tiny.network(), []
    tracking = run(model, progress=lambda *call: seen.append(call), name="mine", each_layer=True)
    assert [point.step for point in tracking.points] == [0, 10, 20, 30, 40]
    assert tuple(seen) == tracking.losses
    assert [step for step, _ in seen] == list(range(1, 41))
    losses = [loss for _, loss in seen]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert not torch.equal(model[0].weight, tiny.network()[0].weight)
    assert (tracking.name, tracking.optimizer, tracking.examples) == ("mine", "SGD", 200)
    assert list(tracking.points[0].layers) == ["0", "2"]


def test_the_same_seed_gives_the_same_weights_and_leaves_the_generators() -> None:
    ends = []
    for every in (10, 40):  # how often one looks changes nothing
        model = tiny.network()
        torch.manual_seed(11)
        before = torch.get_rng_state()
        run(model, every=every)
        assert torch.equal(torch.get_rng_state(), before)
        ends.append(model)
    assert torch.equal(ends[0][2].weight, ends[1][2].weight)
    other = tiny.network()
    run(other, seed=1)
    assert not torch.equal(ends[0][2].weight, other[2].weight)


def test_the_steps_are_those_of_the_optimizer_asked_for() -> None:
    """One step of momentum with a warmup of two, by hand."""
    model, alone = tiny.network(), tiny.network()
    inputs, targets = tiny.batch()
    run(model, (inputs, targets), steps=1, batch_size=6, optimizer="momentum", warmup=2, lr=0.4)
    tiny.LOSS(alone(inputs), targets).backward()
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter -= 0.2 * parameter.grad
    assert torch.allclose(model[0].weight, alone[0].weight, atol=1e-7)


def test_the_rate_of_a_warmup_is_followed() -> None:
    tracking = run(tiny.network(), warmup=20, every=5, steps=25)
    # After five steps the optimizer still holds the rate that the fifth was made with.
    assert [point.lr for point in tracking.points] == pytest.approx([0.015, 0.075, 0.15, 0.225, 0.3, 0.3])


def test_a_training_that_explodes_ends_with_a_note() -> None:
    data = (digits()[0], torch.zeros(200, 1))
    tracking = train_and_track(
        nn.Linear(4, 1), nn.MSELoss(), data, lr=1e20, steps=50, every=1, max_overhead=1.0, batch_size=20
    )
    assert len(tracking.losses) < 50
    assert not math.isfinite(tracking.losses[-1][1])
    assert any("training ended there" in note for note in tracking.notes)


def test_modes_come_back_and_dropout_works_in_between() -> None:
    modes = []

    class Watching(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            modes.append(self.training)
            return inputs

    model = nn.Sequential(nn.Linear(4, 5), Watching(), nn.Dropout(0.3), nn.Linear(5, 3)).eval()
    run(model, steps=3)
    assert all(modes)
    assert not any(module.training for module in model.modules())


def test_ready_batches_and_a_file(tmp_path: Path) -> None:
    inputs, targets = digits()
    pairs = list(zip(inputs.split(25), targets.split(25), strict=True))
    tracking = run(tiny.network(), pairs, examples=60, path=tmp_path / "run.jsonl")
    assert tracking.examples == 75
    assert Tracking.load(tmp_path / "run.jsonl") == tracking


def test_an_error_of_the_users_own_passes() -> None:
    calls = []

    def broken(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 30:
            raise KeyError("mine")
        return tiny.LOSS(output, targets)

    with pytest.raises(KeyError, match="mine"):
        train_and_track(tiny.network(), broken, digits(), lr=0.1, every=1000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps=0 must be a whole number"),
        ({"lr": 0}, "0 in lr must be a number above 0"),
        ({"batch_size": 201}, "the data hold 200 examples, fewer than batch_size=201"),
        ({"optimizer": "lion"}, "optimizer='lion' is unknown"),
        ({"examples": 0}, "examples=0 must be"),
        ({"every": 0}, "every=0 must be"),
        ({"max_overhead": 0}, "max_overhead=0 must be"),
    ],
)
def test_bad_options_are_refused_before_a_step(options: dict[str, Any], message: str) -> None:
    model = tiny.network()
    with pytest.raises(ProblemError, match=message):
        run(model, **options)
    assert torch.equal(model[0].weight, tiny.network()[0].weight)
