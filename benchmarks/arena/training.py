"""One run of the arena: weights are written, trained, and looked at on held-out data.

Weights and mini-batches are those of `hessinit.training.compare` for the same seed, so that its records and
these runs can stand side by side.
"""

from __future__ import annotations

import functools
import itertools
import math
import platform
import time
import warnings
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from arena.schemes import is_ours, read_other, write_ours_
from arena.tasks import BY_NAME, Task
from hessinit.errors import ProblemError
from hessinit.problem.problem import Problem
from hessinit.results.comparison import window
from hessinit.training import loop
from hessinit.training.loop import Data, copy_to, derive, read_data, reproducible, seed_everything
from hessinit.training.optimizers import Training

POINTS = 40  # of a loss curve
LONGEST_NOTE = 160
Key = tuple[str, str, float | str, int]  # task, start, learning rate or "auto", seed


def train(key: Key, device: str | None = None) -> dict[str, Any]:
    """Make one run; a start that refuses the model gives a run without losses, whose note says why."""
    name, start, lr, seed = key
    task = BY_NAME[name]
    device = device or task.device
    data, held_out = _load(task.name, device)
    run: dict[str, Any] = {"task": name, "start": start, "lr": lr, "seed": seed, "optimizer": task.optimizer}
    run |= {"torch": torch.__version__, "device": _describe(device)}
    with reproducible(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.backends.cuda.matmul.allow_tf32 = False
        seed_everything(seed, "build")
        model = task.build().to(device).train()
        begun, rate, warmup = time.perf_counter(), lr, 0
        batch = copy_to(data.initial_batch(seed), torch.device(device))
        try:
            if is_ours(start):
                seed_everything(seed, "start")
                examples = data.parts[0].inputs, data.parts[0].targets
                result = write_ours_(start, task, model, batch, lr, seed, examples)
                rate = result.lr if lr == "auto" else lr
                run |= _cost(result)
                run["note"] = str(result.reason or "")[:LONGEST_NOTE]
            else:
                other = read_other(start, task)
                warmup = other.warmup
                problem = Problem(model, task.loss, batch, seed=derive(seed, "start"))
                other.initialize_(problem, lr, seed, task.make_optimizer)
        except Exception as failure:
            is_bug = is_ours(start) and not isinstance(failure, ProblemError)
            if is_bug or isinstance(failure, torch.OutOfMemoryError):
                raise
            note = (str(failure) or type(failure).__name__)[:LONGEST_NOTE]
            return run | {"note": note, "loss": None, "seconds": time.perf_counter() - begun}
        run |= {"rate": rate, "start_seconds": _few(time.perf_counter() - begun)}
        begun = time.perf_counter()
        model.train()
        seed_everything(seed, "training")
        if device.startswith("cuda"):
            torch.cuda.empty_cache()  # processes share the device
            torch.backends.cuda.matmul.allow_tf32 = True  # as convolutions do by default; starts use float32
        optimizer = Training(task.make_optimizer).build(model, rate)
        schedule = CosineAnnealingLR(optimizer.optimizers[0], task.steps) if task.cosine else None
        looks: list[tuple[float, float]] = []

        def on_step(step: int, loss: float) -> None:
            if not math.isfinite(loss):
                return
            if schedule is not None:
                schedule.step()
            if step % (task.steps // task.looks) == 0:
                looks.append(look(model, task, held_out))

        minibatches = itertools.islice(data.minibatches(seed), task.steps)
        losses, failed = loop.train(
            model, task.loss, (copy_to(batch, torch.device(device)) for batch in minibatches),
            optimizer, warmup=warmup, on_step=on_step,
            build=lambda: task.build().to(device),
        )  # fmt: skip
    final = loop.final_loss(losses, window(task.steps))
    trained = math.isfinite(final) and len(looks) == task.looks
    return run | {
        "loss": float(f"{final:.7g}") if math.isfinite(final) else None,
        "first_loss": _few(losses[0]),
        "held_out_loss": _few(looks[-1][0]) if trained else None,
        "accuracy": _few(looks[-1][1]) if trained else None,
        "accuracies": [_few(accuracy) for _, accuracy in looks] if task.looks > 1 else None,
        "curve": [_few(mean) for mean in loop.chunk_means(losses, math.ceil(task.steps / POINTS))],
        "seconds": _few(time.perf_counter() - begun),
        "note": " ".join(filter(None, (run.get("note", ""), failed)))[:LONGEST_NOTE],
    }


@torch.no_grad()
def look(model: nn.Module, task: Task, held_out: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, float]:
    """Loss and accuracy on data that are never trained on, in eval mode."""
    model.eval()
    total, right, count = 0.0, 0.0, 0
    for inputs, targets in zip(held_out[0].split(500), held_out[1].split(500), strict=True):
        scores = model(inputs)
        total += float(task.loss(scores, targets)) * len(inputs)
        right += float((scores.argmax(-1) == targets).float().mean()) * len(inputs)
        count += len(inputs)
    model.train()
    return total / count, right / count


@functools.lru_cache(maxsize=8)
def _load(task_name: str, device: str) -> tuple[Data, tuple[torch.Tensor, torch.Tensor]]:
    task = BY_NAME[task_name]
    whole, held_out = (tuple(each.to(device) for each in task.data(held_out=part)) for part in (False, True))
    return read_data(whole, task.batch_size, task.steps), (held_out[0], held_out[1])


def _cost(result: Any) -> dict[str, Any]:
    """How many norms the search measured, and the steps of all candidates of a race."""
    trials = getattr(result, "trials", None) or ()
    return {
        "converged": bool(result.converged),
        "norms": len(result.measurements),
        "race_steps": sum(trial.steps for trial in trials),
        "winner": trials[0].name if trials else None,
    }


def _describe(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine()


def _few(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
