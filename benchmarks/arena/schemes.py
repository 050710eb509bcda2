"""The schemes that meet in the arena, as functions that any worker process can load."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from arena.competitors.fixup import fixup_
from arena.competitors.gradinit import gradinit_
from arena.competitors.metainit import metainit_
from arena.tasks import BY_NAME, Task
from hessinit.init.apply_scheme import apply_scheme_

OURS = "hessinit"
OWN_RATE = "hessinit, own rate"
BATCHES = 8  # of GradInit
# On the GPU the learned schemes get fewer iterations: their double backward of 110 layers is dear.
ITERATIONS = {"cpu": (150, 100), "cuda": (60, 40)}


def schemes_of(task: Task) -> dict[str, str | Callable[..., Any]]:
    """All schemes that apply to the task, by name."""
    schemes: dict[str, str | Callable[..., Any]] = {
        name: name
        for name in (
            "default", "he", "glorot", "orthogonal", "lsuv",
            "default+warmup", "he+warmup", "lsuv+warmup", OURS,
        )
    }  # fmt: skip
    schemes["gradinit"] = functools.partial(_gradinit, task.name)
    schemes["metainit"] = functools.partial(_metainit, task.name)
    if hasattr(task.build(), "residual_branches"):
        schemes["fixup"] = _fixup
    return schemes


def _gradinit(task_name: str, model: nn.Module, loss: Any, batch: Any, lr: float, seed: int) -> None:
    """From He's weights, as in the paper, on eight batches."""
    task = BY_NAME[task_name]
    apply_scheme_(model, "he", sample=batch[0], generator=torch.Generator().manual_seed(seed))
    inputs, targets = task.data()
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed ^ 0x5EED))
    places = order[: BATCHES * task.batch_size].split(task.batch_size)
    batches = [(inputs[some].to(batch[0].device), targets[some].to(batch[1].device)) for some in places]
    optimizer = "adam" if task.optimizer == "adam" else "sgd"
    iterations = ITERATIONS[task.device][0]
    gradinit_(model, loss, batches, lr=lr, optimizer=optimizer, iterations=iterations, seed=seed)


def _metainit(task_name: str, model: nn.Module, loss: Any, batch: Any, lr: float, seed: int) -> None:
    """From Glorot's weights, on random inputs."""
    steps = ITERATIONS[BY_NAME[task_name].device][1]
    apply_scheme_(model, "glorot", sample=batch[0], generator=torch.Generator().manual_seed(seed))
    metainit_(model, loss, batch, steps=steps, seed=seed)


def _fixup(model: nn.Module, loss: Any, batch: Any, lr: float, seed: int) -> None:
    fixup_(model, seed=seed)
