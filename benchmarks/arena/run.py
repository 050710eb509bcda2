"""The arena: every scheme trains every task, at five learning rates over two decades, with three seeds.

    HESSINIT_DATA=folder python benchmarks/arena/run.py                 the CPU set
    HESSINIT_DATA=folder python benchmarks/arena/run.py --set quick     four of its tasks, in ten minutes
    HESSINIT_DATA=folder python benchmarks/arena/run.py --set gpu
    python benchmarks/arena/run.py --show                               the scores of the committed records

Finished runs are kept in --folder, so that a second call goes on where the first one stopped; the record of a
task is written when all of its runs are there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

# Before torch is loaded, here and in the workers: one thread for each run.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parents[1])]

import torch  # noqa: E402

from arena import figures, outcomes, report  # noqa: E402
from arena.own_rate import train_at_own_rate  # noqa: E402
from arena.schemes import OURS, schemes_of  # noqa: E402
from arena.tasks import CPU, GPU, Task  # noqa: E402
from hessinit.results.comparison import Comparison  # noqa: E402
from hessinit.results.result import write_text  # noqa: E402
from hessinit.training.compare import compare  # noqa: E402

SETS = {"cpu": CPU, "gpu": GPU, "quick": tuple(task for task in CPU if task.quick)}
RESULTS = Path(__file__).parents[1] / "results" / "arena"


def main() -> None:
    arguments = _read_arguments()
    tasks = [task for task in SETS[arguments.set] if not arguments.task or task.name in arguments.task]
    if not arguments.show:
        begun = time.perf_counter()
        with ProcessPoolExecutor(
            min(arguments.workers, arguments.seeds), get_context("spawn"), torch.set_num_threads, (1,)
        ) as pool:
            for task in tasks:
                _run(task, arguments, pool)
        print(f"{len(tasks)} tasks in {(time.perf_counter() - begun) / 60:.1f} minutes")
    _show(tasks, arguments.results)


def _run(task: Task, arguments: argparse.Namespace, pool: Executor) -> None:
    begun = time.perf_counter()
    arguments.results.mkdir(parents=True, exist_ok=True)
    work = 0.0
    if not arguments.own:
        comparison = compare(
            task.build, task.loss, task.data(), schemes=schemes_of(task), learning_rates=task.rates,
            seeds=arguments.seeds, steps=task.steps, batch_size=task.batch_size, optimizer=task.optimizer,
            device=task.device, folder=arguments.folder / task.name, workers=arguments.workers,
        )  # fmt: skip
        comparison.save(arguments.results / f"{task.name}.json")
        work = sum(run.seconds for run in comparison.runs)
    own = train_at_own_rate(task, range(arguments.seeds), pool)
    write_text(arguments.results / f"{task.name}-own-rate.json", json.dumps(own, indent=1) + "\n")
    print(f"{task.name:14s} {work:.0f} core seconds, {time.perf_counter() - begun:.0f} s", flush=True)


def _show(tasks: list[Task], results: Path) -> None:
    there = [task for task in tasks if (results / f"{task.name}.json").exists()]
    missing = sorted({task.name for task in tasks} - {task.name for task in there})
    if missing:
        print("no record yet of:", ", ".join(missing))
    if not there:
        return
    found = [
        outcomes.outcome_of(task.name, Comparison.load(results / f"{task.name}.json"), task.chance, {OURS})
        for task in there
    ]
    own = {
        task.name: [
            run["final_loss"] for run in json.loads((results / f"{task.name}-own-rate.json").read_text())
        ]
        for task in there
    }
    report.show(found, {OURS}, own)
    if not missing:
        name = f"arena-{'gpu' if there[0].device != 'cpu' else 'cpu' if len(there) == len(CPU) else 'quick'}"
        figures.draw(found, OURS, results.parent / f"{name}.png")


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", choices=list(SETS), default="cpu")
    parser.add_argument("--task", action="append", help="only this task of the set; repeat it for more")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--folder", type=Path, default=Path("build/arena"), help="where finished runs are kept"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="where records are written")
    parser.add_argument("--own", action="store_true", help="only the runs at our suggested rate")
    parser.add_argument("--show", action="store_true", help="train nothing; show the scores of the records")
    return parser.parse_args()


if __name__ == "__main__":
    main()
