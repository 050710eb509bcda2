"""Train a model for some steps and track its curvature: what `hessinit track` and the demo do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hessinit.problem.double_backward import in_mode
from hessinit.problem.preserve import untouched_random_state
from hessinit.problem.problem import Forward, Loss
from hessinit.problem.validate import check_arguments, check_whole
from hessinit.results.track_record import Tracking
from hessinit.training import loop
from hessinit.training.data import copy_to, device_of, read_data
from hessinit.training.seeds import seed_everything


def train_and_track(
    model: nn.Module,
    loss: Loss,
    data: Any,
    *,
    lr: float,
    steps: int = 200,
    batch_size: int = 64,
    optimizer: str | loop.MakeOptimizer = "sgd",
    warmup: int = 0,
    examples: int = 256,
    forward: Forward | None = None,
    seed: int = 0,
    name: str = "",
    progress: Callable[[int, float], object] | None = None,
    **options: Any,
) -> Tracking:
    """Train `model` in place on mini-batches of `data`, and track its curvature on `examples` of them.

    `data`, `batch_size`, `optimizer` and `warmup` are as in `compare`; `options` are those of `track`, with
    every=10 and path=None unless given. A loss that is not finite ends the training. `progress(step, loss)`
    is called after every step. The end is measured whatever the `max_overhead`, as the start is. The same
    seed gives the same weights, and the caller's random generators are not touched.
    """
    from hessinit.training.track import track

    check_arguments(model, loss, forward, None, "freeze")
    rate = loop.read_positive("lr", lr)
    at_least_one = {"steps": steps, "batch_size": batch_size, "examples": examples}
    steps, batch_size, examples = (check_whole(name, value, 1) for name, value in at_least_one.items())
    warmup, seed = check_whole("warmup", warmup, at_least=0), check_whole("seed", seed, at_least=0)
    loop.check_optimizer(optimizer)
    read = read_data(data, batch_size, steps)
    tracked = [(one.inputs, one.targets) for one in read.tracked_batches(examples, seed)]
    with (
        in_mode(model, training=True),
        untouched_random_state(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        seed_everything(seed, "training")
        stepper = loop.make_optimizer(optimizer, model, rate)
        ramp = loop.Warmup(stepper, warmup)
        ramp.set(0)
        with track(
            model, loss, tracked[0] if len(tracked) == 1 else tracked, optimizer=stepper, forward=forward,
            seed=seed, **{"every": 10, "path": None, "log_to": None, "warn": False, **options},
        ) as tracker:  # fmt: skip
            tracker.name = name

            def on_step(step: int, value: float) -> None:
                tracker.step(value)
                if progress is not None:
                    progress(step, value)
                if not math.isfinite(value):
                    tracker.add_note(
                        f"The loss became {value} at step {tracker.steps}; training ended there."
                    )

            batches = (copy_to(batch, device_of(model)) for batch in read.minibatches(seed))
            loop.train(
                model, loss, batches, stepper, steps=steps, warmup=ramp, forward=forward, on_step=on_step
            )
            if tracker.tracking.points[-1].step < tracker.steps:
                tracker.measure()
        return tracker.close()
