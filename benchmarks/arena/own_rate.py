"""What our own suggestion of a learning rate is worth: no rate is given, and nothing is tuned."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor
from typing import Any

import torch

from arena.tasks import BY_NAME, Task
from hessinit.training.initialize import initialize_
from hessinit.training.compare import compare


def train_at_own_rate(task: Task, seeds: Iterable[int], executor: Executor) -> list[dict[str, Any]]:
    """One run for each seed, at the rate that `initialize_(lr="auto")` suggests for it."""
    futures = [executor.submit(_train_one, task.name, seed) for seed in seeds]
    return [future.result() for future in futures]


def _train_one(task_name: str, seed: int) -> dict[str, Any]:
    task = BY_NAME[task_name]
    inputs, targets = task.data()
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed ^ 0x0A7E))
    some = order[: task.batch_size]
    torch.manual_seed(seed)
    model = task.build().to(task.device)
    batch = (inputs[some].to(task.device), targets[some].to(task.device))
    optimizer = "adam" if task.optimizer == "adam" else "sgd"
    rate = initialize_(model, task.loss, batch, lr="auto", optimizer=optimizer, seed=seed).lr
    comparison = compare(
        task.build, task.loss, (inputs, targets), schemes=["hessinit"], learning_rates=[rate], seeds=[seed],
        steps=task.steps, batch_size=task.batch_size, optimizer=task.optimizer, device=task.device,
        measure_curvature=False, workers=1, progress=False,
    )  # fmt: skip
    run = comparison.runs[0]
    return {"seed": seed, "learning_rate": rate, "final_loss": run.final_loss, "first_loss": run.first_loss}
