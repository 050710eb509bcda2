"""What was tried for the trial and the race of `initialize_`, on development tasks near their highest rates.

    HESSINIT_DATA=folder python benchmarks/arena/trial_and_race.py build/trials.jsonl   trains what is missing
    python benchmarks/arena/trial_and_race.py build/trials.jsonl --show                 the two tables

Every candidate is trained to the end, so that any race between them can be played from the curves. The fitted
weights are also tried by `try_weights` at several times the rate, whatever came of it, so that any rule of
the trial can be played, too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parents[1])]

import numpy as np  # noqa: E402
import torch  # noqa: E402

from arena.outcomes import count_losses  # noqa: E402
from arena.records import read_lines  # noqa: E402
from arena.schemes import read_other  # noqa: E402
from arena.tasks import BY_NAME  # noqa: E402
from arena.training import _load  # noqa: E402
from hessinit.problem.problem import Problem  # noqa: E402
from hessinit.results.comparison import window  # noqa: E402
from hessinit.training import initialize, loop  # noqa: E402
from hessinit.training.loop import copy_to, derive, reproducible, seed_everything  # noqa: E402
from hessinit.training.optimizers import Training  # noqa: E402
from hessinit.training.trial import VERDICT  # noqa: E402
from hessinit.training.weight_trials import SURVIVAL  # noqa: E402

CELLS = (
    ("relu-3", 0.09), ("relu-3", 0.3), ("relu-10", 0.09), ("relu-10", 0.3), ("tanh-10", 0.09),
    ("tanh-10", 0.3), ("tanh-30", 0.09), ("tanh-30", 0.3), ("residual-20", 0.03), ("residual-20", 0.09),
    ("lenet", 0.3), ("pre-ln", 0.3), ("pre-ln", 1.0),
)  # fmt: skip
FEWER_SEEDS = ("lenet", "pre-ln")
OTHERS = ("lsuv", "orthogonal", "default")
FLATTER = (1.0, 2.0, 4.0, 8.0)  # κ divided by these
MARGINS = (1.0, 1.25, 1.5, 2.0)
MARGIN = SURVIVAL.margin
Handicaps = tuple[float, float]  # of flatter and the user's own weights, and of LSUV and orthogonal ones
HANDICAPS: tuple[Handicaps, ...] = (
    (0.0, 0.0), (0.05, 0.05), (0.1, 0.1), (0.2, 0.2), (0.3, 0.3), (0.1, 0.3), (0.05, 0.3),
)  # fmt: skip
Job = tuple[str, float, int, str, float]  # task, rate, seed, start, divisor of κ


def jobs() -> Iterator[Job]:
    for (task, rate), seed in itertools.product(CELLS, range(8)):
        if seed >= 5 and task in FEWER_SEEDS:
            continue
        yield from ((task, rate, seed, start, 1.0) for start in OTHERS)
        yield from ((task, rate, seed, "hessinit", by) for by in FLATTER)
        if task == "residual-20":
            yield from ((task, rate, seed, "small branches", by) for by in FLATTER)


def train(job: Job) -> dict[str, Any]:
    name, rate, seed, start, by = job
    task, cpu = BY_NAME[name], torch.device("cpu")
    data, _ = _load(name, "cpu")
    survived: dict[str, bool] = {}
    with reproducible(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seed_everything(seed, "build")
        model = task.build().train()
        batch = copy_to(data.initial_batch(seed), cpu)
        if start in OTHERS:
            problem = Problem(model, task.loss, batch, seed=derive(seed, "start"))
            read_other(start, task).initialize_(problem, rate, seed, task.make_optimizer)
        else:
            seed_everything(seed, "start")
            survived = _fit_(model, task, batch, job)
        model.train()
        seed_everything(seed, "training")
        optimizer = Training(task.make_optimizer).build(model, rate)
        minibatches = itertools.islice(data.minibatches(seed), task.steps)
        batches = (copy_to(batch, cpu) for batch in minibatches)
        losses, _ = loop.train(model, task.loss, batches, optimizer, build=task.build)
    shown = [float(f"{loss:.5g}") for loss in losses]
    return {
        "task": name,
        "lr": rate,
        "seed": seed,
        "start": start,
        "by": by,
        "survived": survived,
        "losses": shown,
    }


def _fit_(model: Any, task: Any, batch: Any, job: Job) -> dict[str, bool]:
    """Fit κ divided by the job's number, and try it at every margin, in the place of the trial."""
    _, rate, seed, start, by = job
    survived: dict[str, bool] = {}
    kept = initialize.survive_

    def survive_(weights: Any, result: Any, request: Any) -> Any:
        branches = "small" if start == "small branches" else "auto"
        request = replace(request, lr=rate, flatter=by).with_options(residual=branches)
        result = weights.fit_(request)
        for margin in MARGINS:
            survived[str(margin)] = weights.trial(rate, margin).survived
        return result, request

    initialize.survive_ = survive_
    try:
        problem = Problem(model, task.loss, batch, seed=derive(seed, "start"))
        initialize.initialize_(problem, lr=rate, optimizer=task.optimizer)
    finally:
        initialize.survive_ = kept
    return survived


# --- The tables -------------------------------------------------------------------------------------------


class Curves:
    def __init__(self, runs: Sequence[dict[str, Any]]) -> None:
        self.runs = {(run["task"], run["lr"], run["seed"], run["start"], run["by"]): run for run in runs}

    def seeds(self, cell: tuple[str, float]) -> list[int]:
        return sorted({key[2] for key in self.runs if key[:2] == cell})

    def final(self, key: Job) -> float:
        task, losses = BY_NAME[key[0]], self.runs[key]["losses"]
        final = loop.final_loss(losses, window(task.steps)) if len(losses) == task.steps else math.nan
        return float(count_losses([final], task.chance)[0])

    def after_trial(self, cell: tuple[str, float], seed: int, margin: float) -> Job:
        """The first weights that survive at so many times the rate, in the order of `initialize_`."""
        order: list[tuple[str, float]] = [("hessinit", by) for by in FLATTER]
        if cell[0] == "residual-20":
            order[2:] = [("small branches", by) for by in FLATTER]
        tried = [(*cell, seed, *one) for one in order]
        return next((key for key in tried if self.runs[key]["survived"][str(margin)]), tried[-1])

    def race(self, cell: tuple[str, float], seed: int, by: float, handicaps: Handicaps, steps: int) -> Job:
        """The winner among what the trial leaves, the same with κ/`by`, and the others."""
        chance, fitted = BY_NAME[cell[0]].chance, self.after_trial(cell, seed, MARGIN)
        flatter = (*fitted[:4], by * fitted[4])
        alive = [fitted, *([flatter] if flatter in self.runs else [])]
        alive += [(*cell, seed, start, 1.0) for start in OTHERS]

        def rank(key: Job, end: int) -> float:
            losses = np.array(self.runs[key]["losses"][:end])
            last = losses[-math.ceil(end / 3) :]
            is_whole = len(losses) == end and bool(np.isfinite(losses).all())
            if not is_whole or np.median(last) > 3 * max(losses[0], chance):
                return math.inf
            score = float(last.mean())
            if chance - score <= VERDICT.fall * chance:
                return chance
            handicap = handicaps[1] if key[3] in OTHERS[:2] else handicaps[0]
            return score + handicap * (key != fitted) * (chance - score)

        for part in (1, 2, 3):
            end = math.ceil(steps * part / 3)
            ranks = {key: rank(key, end) for key in alive}
            best = sorted((key for key in alive if ranks[key] < math.inf), key=ranks.__getitem__)
            alive = best[: len(best) if part == 3 else max(2, math.ceil(len(alive) / 2))] or [fitted]
        return alive[0]


def show(curves: Curves) -> None:
    cells = [cell for cell in CELLS if curves.seeds(cell)]

    def means(choose: Any) -> list[float]:
        return [
            float(np.mean([curves.final(choose(cell, seed)) for seed in curves.seeds(cell)]))
            for cell in cells
        ]

    print("Mean final loss by the margin of the trial")
    print(f"{'':24s}" + "".join(f"{task} {rate:g}".rjust(17) for task, rate in cells))
    for margin in MARGINS:
        found = means(lambda cell, seed, margin=margin: curves.after_trial(cell, seed, margin))
        print(f"{margin:<24g}" + "".join(f"{value:17.3f}" for value in found))
    plain = means(lambda cell, seed: curves.after_trial(cell, seed, MARGIN))
    print("\nFinal loss after a race / without: geometric mean and largest over these cells")
    for by, steps, handicaps in itertools.product((2.0, 4.0, 8.0), (48, 96), HANDICAPS):
        choose = lambda cell, seed: curves.race(cell, seed, by, handicaps, steps)  # noqa: B023, E731
        ratios = np.array(means(choose)) / plain
        first, second = (f"{100 * one:.0f} %" for one in handicaps)
        told = f"κ/{by:g}, {steps} steps, handicap {first}, of other schemes {second}"
        print(f"{told:54s}{np.exp(np.log(ratios).mean()):7.3f}{ratios.max():7.3f}")
    print(f"{len(curves.runs)} runs")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    runs = read_lines([arguments.file]) if arguments.file.exists() else []
    if not arguments.show:
        done = {(run["task"], run["lr"], run["seed"], run["start"], run["by"]) for run in runs}
        missing = [job for job in jobs() if job not in done]
        arguments.file.parent.mkdir(parents=True, exist_ok=True)
        with (
            ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool,
            open(arguments.file, "a", encoding="utf-8") as lines,
        ):
            for run in pool.map(train, missing):
                lines.write(json.dumps(run) + "\n")
                lines.flush()
                runs.append(run)
    show(Curves(runs))


if __name__ == "__main__":
    main()
