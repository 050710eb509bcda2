"""The last measurement of a tracked training, also of one that diverges."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import tiny
from hessinit.results.track_record import Tracking
from hessinit.training.train_and_track import train_and_track


def run(**options: Any) -> Tracking:
    inputs = torch.randn(200, 4, generator=torch.Generator().manual_seed(4))
    settings: dict[str, Any] = {"lr": 0.3, "steps": 12, "batch_size": 20, "max_overhead": 1.0, "every": 5}
    data = inputs, (inputs[:, 0] > 0).long()
    return train_and_track(tiny.network(), tiny.LOSS, data, **{**settings, **options})


def test_the_end_is_measured_whatever_the_overhead():
    assert [point.step for point in run().points] == [0, 5, 10, 12]
    assert [point.step for point in run(steps=10).points] == [0, 5, 10]
    hurried = run(max_overhead=1e-9)
    assert [point.step for point in hurried.points] == [0, 12]
    assert "1 of 3 measurements, one every 5 steps, were skipped" in " ".join(str(hurried).split())


def test_a_training_that_diverges_says_so_first():
    data = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(40, 1)
    tracking = train_and_track(
        nn.Linear(4, 1), nn.MSELoss(), data, lr=1e12, steps=50, every=100, batch_size=20, max_overhead=0.5
    )
    step, loss = tracking.losses[-1]
    assert tracking.verdict.startswith(f"Training diverged: the loss became {loss} at step {step}.")
    assert tracking.points[-1].step == step
