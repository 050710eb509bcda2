"""Train a model for some steps and follow its curvature."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hessinit.comparing.arguments import read_positive
from hessinit.comparing.batching import Data, Examples, place, read_data
from hessinit.comparing.optimizers import MakeOptimizer, Warmup, check_optimizer, make_optimizer
from hessinit.comparing.seeds import generator, seed_everything
from hessinit.comparing.training import device_of, evaluate_loss
from hessinit.problem.batches import Batch
from hessinit.problem.double_backward import in_mode
from hessinit.problem.preserve import untouched_random_state
from hessinit.problem.problem import Forward, Loss
from hessinit.problem.validate import check_arguments, check_loss_value, check_whole
from hessinit.results.track_record import Tracking
from hessinit.tracking.track import Tracker, track

Progress = Callable[[int, float], object]


def train_and_track(
    model: nn.Module,
    loss: Loss,
    data: Any,
    *,
    lr: float,
    steps: int = 200,
    batch_size: int = 64,
    optimizer: str | MakeOptimizer = "sgd",
    warmup: int = 0,
    every: int = 10,
    examples: int = 256,
    each_layer: bool = False,
    curvature: str = "gauss-newton",
    layers: Any = None,
    forward: Forward | None = None,
    reduction: str = "auto",
    check: bool = True,
    share: float = 0.5,
    path: str | os.PathLike[str] | None = None,
    seed: int = 0,
    name: str = "",
    progress: Progress | None = None,
) -> Tracking:
    """Train `model` in place on mini-batches of `data`, and track its curvature on `examples` of them.

    `data` is `(inputs, targets)` with all examples, or an iterable of ready batches, as in `compare`;
    `optimizer` is "sgd", "momentum", "adam" or a function of parameters and lr; `warmup` raises the rate over
    so many steps. A loss that is not finite ends the training. `progress(step, loss)` is called after every
    step. The end is measured whatever the `share`, as the start is, and what it takes counts. The same seed
    gives the same weights, and the caller's generators stay where they are.
    """
    check_arguments(model, loss, forward, None, "freeze", reduction, check)
    rate = read_positive("lr", lr)
    steps = check_whole("steps", steps, at_least=1)
    batch_size = check_whole("batch_size", batch_size, at_least=1)
    examples = check_whole("examples", examples, at_least=1)
    warmup = check_whole("warmup", warmup, at_least=0)
    seed = check_whole("seed", seed, at_least=0)
    check_optimizer(optimizer)
    read = read_data(data, batch_size, steps)
    tracked = [(one.inputs, one.targets) for one in choose_tracked(read, examples, seed)]
    with (
        in_mode(model, training=True),
        untouched_random_state(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        seed_everything(seed, "training")
        stepper = make_optimizer(optimizer, model, rate)
        ramp = Warmup(stepper, warmup)
        ramp.set(0)
        with track(
            model, loss, tracked[0] if len(tracked) == 1 else tracked, every=every, optimizer=stepper,
            path=path, share=share, each_layer=each_layer, curvature=curvature, layers=layers,
            forward=forward, reduction=reduction, check=check, seed=seed, log_to=None, warn=False,
        ) as tracker:  # fmt: skip
            tracker.name = name
            minibatches = read.minibatches(seed)
            for step in range(steps):
                ramp.set(step)
                value = _step(model, loss, place(next(minibatches), device_of(model)), forward, stepper)
                tracker.step(value)
                if progress is not None:
                    progress(step + 1, value)
                if not math.isfinite(value):
                    _say_where(tracker, value)
                    break
            if tracker.tracking.points[-1].step < tracker.steps:
                tracker.measure()
        return tracker.close()


def _step(
    model: nn.Module, loss: Loss, batch: Batch, forward: Forward | None, optimizer: torch.optim.Optimizer
) -> float:
    """One step, unless the loss is not finite."""
    optimizer.zero_grad(set_to_none=True)
    try:
        value = evaluate_loss(model, loss, batch, forward)
    except Exception:
        if all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters()):
            raise
        return math.nan  # some functions refuse nan and inf instead of passing them on
    check_loss_value(value)
    number = value.item()
    if math.isfinite(number):
        value.backward()
        optimizer.step()
    return number


def _say_where(tracker: Tracker, value: float) -> None:
    tracker.add_note(f"The loss became {value} at step {tracker.steps}; training ended there.")


def choose_tracked(data: Data, examples: int, seed: int) -> list[Batch]:
    """So many examples, drawn by the seed; of ready batches, as many as it takes to have them."""
    source = generator(seed, "tracked batch")
    if isinstance(data, Examples):
        order = torch.randperm(data.whole.size, generator=source)
        return [data.whole.take(order[:examples])]
    chosen: list[Batch] = []
    for index in torch.randperm(len(data.batches), generator=source).tolist():
        if sum(batch.size for batch in chosen) < examples:
            chosen.append(data.batches[index])
    return chosen
