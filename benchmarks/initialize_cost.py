"""What `initialize_` costs, in gradients (a forward and a backward of the same batch), on the arena's tasks.

    HESSINIT_DATA=folder python benchmarks/initialize_cost.py [task ...]

Each at its lowest, middle and highest rate; one thread; the median of three, all timed in one run. The trial
of 24 steps is counted apart. Where several fits were needed, since weights did not survive it, all count.
A norm is what measuring the network's ‖H‖ alone costs, at the user's own weights, unchecked.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path[:0] = [str(Path(__file__).parent)]

import torch  # noqa: E402

from arena.tasks import CPU, NORMALIZED, Task  # noqa: E402
from hessinit.init.scales import ProblemFactory, ScaledModel  # noqa: E402
from hessinit.problem.problem import Problem  # noqa: E402
from hessinit.training import initialize, weight_trials  # noqa: E402

REPEATS = 3


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tasks = (*CPU, *(task for task in NORMALIZED if "adam" not in task.name))
    numbers = f"{'gradients':>9s} {'norms':>5s} {'trial':>5s} {'seconds':>8s} {'looks':>5s}"
    print(f"{'task':12s} {'rate':>6s} {numbers}  lr·‖H‖  how")
    for task in tasks:
        if not sys.argv[1:] or task.name in sys.argv[1:]:
            for rate in (task.rates[0], task.rates[len(task.rates) // 2], task.rates[-1]):
                _show(task, rate)
    load = os.getloadavg()[1] if hasattr(os, "getloadavg") else float("nan")
    machine = f"load {load:.1f} on {os.cpu_count()} cores"
    print(f"torch {torch.__version__}, one thread, median of {REPEATS}, {machine}")


def _show(task: Task, rate: float) -> None:
    batch, times, trials, result = _batch(task), [], [], None
    gradient, norm = _gradient_seconds(task), _norm_seconds(task)
    for seed in range(REPEATS):
        torch.manual_seed(seed)
        model = task.build()
        with _Stopwatch(weight_trials, "try_weights") as trial:
            begun = time.perf_counter()
            result = initialize.initialize_(Problem(model, task.loss, batch, seed=seed), lr=rate)
            times.append(time.perf_counter() - begun - trial.seconds)
        trials.append(trial.seconds)
    assert result is not None
    seconds = statistics.median(times)
    product = float("nan") if result.after is None else rate * result.after.network.norm
    met = "" if result.converged else ", not met"
    print(
        f"{task.name:12s} {rate:6g} {seconds / gradient:9.0f} {seconds / norm:5.1f} "
        f"{statistics.median(trials) / gradient:5.0f} {seconds:8.2f} {len(result.measurements):5d} "
        f"{product:7.3g}  {result.scaling}{met}",
        flush=True,
    )


class _Stopwatch:
    """Adds up the time that a function of a module takes."""

    def __init__(self, module: Any, name: str) -> None:
        self._module, self._name, self._function, self.seconds = module, name, getattr(module, name), 0.0

    def __enter__(self) -> _Stopwatch:
        setattr(self._module, self._name, self._timed)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(self._module, self._name, self._function)

    def _timed(self, *args: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        try:
            return self._function(*args, **options)
        finally:
            self.seconds += time.perf_counter() - begun


def _norm_seconds(task: Task) -> float:
    problem = Problem(task.build(), task.loss, _batch(task), check=False)
    factory = ProblemFactory(problem, "gauss-newton")
    return _seconds_of(lambda: ScaledModel(factory, [], 0.01).network_norm(), 5)


def _gradient_seconds(task: Task) -> float:
    model, (inputs, targets) = task.build(), _batch(task)

    def gradient() -> None:
        model.zero_grad()
        task.loss(model(inputs), targets).backward()

    return _seconds_of(gradient, 30)


def _seconds_of(work: Callable[[], object], repeats: int) -> float:
    for _ in range(1 + repeats // 6):
        work()
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def _batch(task: Task) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = task.data()[:2]
    return inputs[: task.batch_size], targets[: task.batch_size]


if __name__ == "__main__":
    main()
