"""The verb `compare`: which start trains best, over learning rates and seeds."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from typing import Any

import torch

from hessinit.comparing.arguments import FEWEST_STEPS, read_positive_numbers, read_seeds, read_warmup
from hessinit.comparing.conducting import conduct
from hessinit.comparing.experiment import Build
from hessinit.comparing.optimizers import MakeOptimizer
from hessinit.comparing.preparing import prepare
from hessinit.comparing.starts import Start, WriteWeights, read_starts
from hessinit.errors import ProblemError
from hessinit.problem.problem import Forward, Loss
from hessinit.problem.validate import check_whole
from hessinit.results.comparison import Comparison

STARTS = ("default", "he", "glorot", "orthogonal", "lsuv", "hessinit")
LEARNING_RATES = (0.003, 0.01, 0.03, 0.1, 0.3)


def compare(
    build: Build,
    loss: Loss,
    data: Any,
    *,
    schemes: str | Iterable[str] | Mapping[str, str | WriteWeights] = STARTS,
    learning_rates: Iterable[float] = LEARNING_RATES,
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
    """Train briefly from several starts, at several learning rates, with several seeds, and compare.

    `build()` makes a new model, which is trained in train mode; torch, random and numpy are seeded before.
    `data` is `(inputs, targets)` with all examples along the first dimension, or an iterable of ready batches
    (which have a size of their own).

    A start is a scheme of `apply_scheme_`, "default" (what build() gives), "hessinit" (`initialize_` for that
    rate), or any of them with "+warmup": the rate rises linearly over `warmup` steps (by default a fifth).
    A mapping names starts of your own: functions `start(model, loss, batch, lr, seed)` that write the weights
    in place; all starts of a seed see the same batch. `optimizer` is "sgd", "momentum" (0.9), "adam" or a
    function `(parameters, lr)`. A start that fails on this model stops nothing: its runs say why.

    With `folder`, every finished run is kept there, and the same call goes on where it was interrupted; more
    starts, rates and seeds are welcome, another experiment is refused. Runs are made in `workers` processes
    (by default one for each core), for which build and its like must be functions of a file; `workers=1`
    stays in this process; `executor` is any of concurrent.futures. The numbers depend on the seeds only.

    Costs `steps` training steps for each run, and 20 to 50 more where the curvature at the start is measured.

    >>> from hessinit.digits import load_digits
    >>> from torch import nn
    >>> comparison = compare(
    ...     lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
    ...     nn.CrossEntropyLoss(), load_digits(), schemes=["default", "he"], learning_rates=[0.1],
    ...     seeds=1, steps=30, workers=1)
    >>> comparison.best
    ('he', 0.1)
    """
    steps = check_whole("steps", steps, at_least=FEWEST_STEPS)
    experiment = prepare(
        "compare", build, loss, data, starts=_read_starts(schemes, warmup, steps), steps=steps,
        batch_size=batch_size, optimizer=optimizer, forward=forward, device=device,
    )  # fmt: skip
    return conduct(
        experiment,
        read_positive_numbers("learning_rates", learning_rates, "[0.01, 0.1]"),
        read_seeds(seeds),
        curvature_at_start=curvature_at_start,
        folder=folder,
        workers=workers,
        executor=executor,
        progress=progress,
    )


def _read_starts(schemes: Any, warmup: int | None, steps: int) -> tuple[Start, ...]:
    starts = read_starts(schemes, read_warmup(warmup, steps))
    if warmup is not None and not any(start.warmup for start in starts):
        name = next((start.name for start in starts if isinstance(start.how, str)), "he")
        raise ProblemError(
            f"warmup={warmup} would change nothing, for no start has a warmup; name one with it, such as "
            f"'{name}+warmup', or leave warmup out."
        )
    return starts
