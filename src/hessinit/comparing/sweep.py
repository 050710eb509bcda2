"""The verb `sweep`: how the size of the first weights sets the curvature, and what becomes of the loss."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Executor
from typing import Any

import torch

from hessinit.comparing.arguments import (
    FEWEST_STEPS,
    read_layers,
    read_positive,
    read_positive_numbers,
    read_seeds,
    read_warmup,
)
from hessinit.comparing.conducting import conduct
from hessinit.comparing.experiment import Build
from hessinit.comparing.optimizers import MakeOptimizer
from hessinit.comparing.preparing import prepare
from hessinit.comparing.starts import Normal, Start
from hessinit.problem.problem import Forward, Loss
from hessinit.problem.validate import check_whole
from hessinit.results.comparison import Comparison

STDS = (1.0, 0.5, 0.1, 0.075, 0.05, 0.005)  # of the paper's Table 4


def sweep(
    build: Build,
    loss: Loss,
    data: Any,
    *,
    stds: Iterable[float] = STDS,
    learning_rate: float = 0.01,
    layers: str | Iterable[str] | None = None,
    seeds: int | Iterable[int] = 3,
    steps: int = 200,
    batch_size: int = 64,
    optimizer: str | MakeOptimizer = "sgd",
    warmup: int | None = None,
    forward: Forward | None = None,
    curvature_at_start: bool = True,
    folder: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    device: str | torch.device | None = None,
    progress: bool = True,
) -> Comparison:
    """Draw the weights from N(0, std²) for each of `stds`, measure the curvature, train briefly.

    The experiment of the paper's Tables 4 and 5. Biases are 0; the same random numbers, scaled, serve every
    std. `layers` takes names or globs: other weights stay as build() gives them. With `warmup`, the rate
    rises linearly over that many steps. The rest is as for `compare`.

    >>> from hessinit.digits import load_digits
    >>> from torch import nn
    >>> comparison = sweep(
    ...     lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
    ...     nn.CrossEntropyLoss(), load_digits(), stds=[0.01, 0.1], seeds=1, steps=20, workers=1)
    >>> ratio = comparison.norm("std 0.1", layer="1") / comparison.norm("std 0.01", layer="1")
    >>> 80 < ratio < 120  # the curvature of one of two layers grows with the square of the other's weights
    True
    """
    steps = check_whole("steps", steps, at_least=FEWEST_STEPS)
    sizes = read_positive_numbers("stds", stds, "[0.5, 0.05]")
    chosen = read_layers(layers)
    warming = 0 if warmup is None else read_warmup(warmup, steps)
    experiment = prepare(
        "sweep", build, loss, data, starts=tuple(_start(std, chosen, warming) for std in sizes), steps=steps,
        batch_size=batch_size, optimizer=optimizer, forward=forward, device=device,
    )  # fmt: skip
    return conduct(
        experiment,
        (read_positive("learning_rate", learning_rate),),
        read_seeds(seeds),
        curvature_at_start=curvature_at_start,
        folder=folder,
        workers=workers,
        executor=executor,
        progress=progress,
        stds=sizes,
    )


def _start(std: float, layers: tuple[str, ...] | None, warmup: int) -> Start:
    return Start(f"std {std!r}", Normal(std, layers), warmup)
