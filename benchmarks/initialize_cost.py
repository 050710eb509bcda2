"""What `initialize_` costs, in gradients (a forward and a backward of the same batch), on the arena's tasks.

    HESSINIT_DATA=folder python benchmarks/initialize_cost.py

Each at its lowest, middle and highest rate; one thread; the median of three, both timed in one run.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path[:0] = [str(Path(__file__).parent)]

import torch  # noqa: E402

from arena.tasks import CPU, Task  # noqa: E402
from hessinit.training.initialize import initialize_  # noqa: E402

REPEATS = 3


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"{'task':12s} {'rate':>6s} {'gradients':>9s} {'seconds':>8s} {'looks':>5s}  lr·‖H‖  how")
    for task in CPU:
        gradient = _gradient_seconds(task)
        for rate in (task.rates[0], task.rates[2], task.rates[4]):
            _show(task, rate, gradient)
    print(f"torch {torch.__version__}, one thread, median of {REPEATS}")


def _show(task: Task, rate: float, gradient: float) -> None:
    batch = _batch(task)
    times, result = [], None
    for seed in range(REPEATS):
        torch.manual_seed(seed)
        model = task.build()
        begun = time.perf_counter()
        result = initialize_(model, task.loss, batch, lr=rate, seed=seed)
        times.append(time.perf_counter() - begun)
    assert result is not None
    assert result.after is not None
    seconds = statistics.median(times)
    product = rate * result.after.network.norm
    met = "" if result.converged else ", not met"
    print(
        f"{task.name:12s} {rate:6g} {seconds / gradient:9.0f} {seconds:8.2f} {len(result.measurements):5d} "
        f"{product:7.3g}  {result.scaling}{met}",
        flush=True,
    )


def _gradient_seconds(task: Task) -> float:
    model, (inputs, targets) = task.build(), _batch(task)

    def gradient() -> None:
        model.zero_grad()
        task.loss(model(inputs), targets).backward()

    return _seconds_of(gradient)


def _seconds_of(work: Callable[[], None]) -> float:
    for _ in range(5):
        work()
    times = []
    for _ in range(30):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def _batch(task: Task) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = task.data()
    return inputs[: task.batch_size], targets[: task.batch_size]


if __name__ == "__main__":
    main()
