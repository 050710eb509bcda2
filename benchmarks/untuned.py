"""Nobody tuned it: which way to a learning rate and initial weights ends best after a whole training?

    export HESSINIT_DATA=folder
    python benchmarks/untuned.py --set development --workers 8      what is missing in the record
    python benchmarks/untuned.py --set held-out --workers 8         the tasks on which nothing was chosen
    python benchmarks/untuned.py --set held-out --show              the tables
    python benchmarks/untuned.py --set held-out --draw FILE.png     the picture; needs matplotlib
    python benchmarks/untuned.py --tasks LSTM --contestants 'fit*' advise --horizons 300 --seeds 0

Every cell is a full training with cosine decay to 0 from a contestant's weights and at its rate, judged by
the loss on held-out examples. The standard is the best of six rates from PyTorch's own weights, by the mean
over seeds. All contestants of a seed see the same mini-batches. Learning-rate-free optimizers (Prodigy,
D-Adaptation, DoG, Schedule-Free) run as their authors recommend. The cost of a search is its processor time
over that of a training step, measured beside it. A training that is not finite, or ends above the held-out
loss of PyTorch's own weights before training, counts with that loss and as a failure, and so does a
contestant that raises.

A finished cell is appended to the record at once, and what is there is not made again, unless --fresh is
given: then the newest counts. Of several records all are read, and the last is written. Tasks:
`untuned_tasks.py`; contestants: `untuned_contestants.py`; tables and picture: `untuned_report.py`. Needs the
packages prodigyopt, dadaptation, dog-optimizer, schedulefree and lightning.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import functools
import io
import json
import math
import os
import time
import warnings
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded, here and in the workers

import torch
from record import run_facts
from untuned_contestants import Bench, Contestant, Start, contestants_of
from untuned_report import Cell, Key, draw, key_of, read_records, show
from untuned_tasks import DEVELOPMENT, HELD_OUT, TASKS

from hessinit.training.loop import reproducible

SEEDS, ALL_SEEDS = (0, 1), (0, 1, 2, 3, 4)
ALL_HORIZONS = (300, 1000, 3000)
RECORD = Path(__file__).parent / "results" / "untuned.jsonl"


@dataclass(frozen=True)
class Job:
    """The trainings of one contestant, at all horizons: they may share a search."""

    task: str
    optimizer: str
    seed: int
    contestant: str
    horizons: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.task}, {self.optimizer}, seed {self.seed}, {self.contestant}"

    @property
    def row(self) -> Cell:
        return {
            "task": self.task, "optimizer": self.optimizer, "seed": self.seed, "contestant": self.contestant
        }  # fmt: skip

    def key(self, horizon: int) -> Key:
        return key_of({**self.row, "horizon": horizon})

    def find_contestant(self) -> Contestant:
        return next(one for one in contestants_of(self.optimizer) if one.name == self.contestant)

    def seconds(self) -> float:
        """About how long it takes."""
        contestant = self.find_contestant()
        searches = len(self.horizons) if contestant.sees_horizon else 1
        return (sum(self.horizons) + searches * contestant.guess) * TASKS[self.task].milliseconds / 1000


# --- Running ----------------------------------------------------------------------------------------------


def run(job: Job, record: Path, device: str) -> str:
    """Make the cells of a job, and append each to the record."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    bench = Bench(TASKS[job.task], job.optimizer, job.seed, torch.device(device))
    contestant = job.find_contestant()
    found: tuple[Start, float] | None = None
    lines = []
    with reproducible(), contextlib.redirect_stdout(io.StringIO()):  # some optimizers print
        first, _ = bench.task.evaluate(bench.model())
        warm_up(job.optimizer, job.contestant.split()[0], device)
        for horizon in job.horizons:
            begun = time.perf_counter()
            cell: Cell = {**job.row, "horizon": horizon, "first": first}
            try:
                if found is None or contestant.sees_horizon:
                    found = search(bench, contestant, horizon)
                start, steps = found
                cell |= {"lr": start.lr, "search": steps, **start.counts}
                if start.lr is not None and not 0 < start.lr < math.inf:
                    raise ValueError(f"no learning rate was found: {start.lr}")
                cell |= bench.train(start, job.contestant, horizon)
            except Exception as failure:
                is_missing = "unexpected keyword argument" in str(failure)
                if isinstance(failure, ImportError) or is_missing:
                    raise  # a package or a feature of hessinit that is not there: no result
                cell |= {"loss": None, "message": f"{type(failure).__name__}: {failure}"[:500]}
            cell["failed"] = cell["loss"] is None or not cell["loss"] < first
            cell["seconds"] = time.perf_counter() - begun
            append(record, {name: rounded(value) for name, value in cell.items()})
            shown = "failed" if cell["loss"] is None else f"{cell['loss']:.4g}"
            lines.append(f"{horizon}: {shown} {cell.get('message', '')}".rstrip())
    return f"{job.name}: {'; '.join(lines)} ({time.perf_counter() - started:.0f} s)"


def search(bench: Bench, contestant: Contestant, horizon: int) -> tuple[Start, float]:
    """The weights and the rate, and how many training steps it took to find them."""
    if not contestant.is_timed:
        return contestant.search(bench, horizon), 0.0
    return bench.time_search(lambda: contestant.search(bench, horizon))


@functools.cache
def warm_up(optimizer: str, kind: str, device: str) -> None:
    """Search once on a small task: what the first call of a process loads is no part of the cost."""
    bench = Bench(TASKS["robot arm"], optimizer, 0, torch.device(device))
    contestant = next(one for one in contestants_of(optimizer) if one.name.split()[0] == kind)
    if contestant.is_timed:
        with contextlib.suppress(Exception):
            search(bench, contestant, 20)


def rounded(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def append(record: Path, line: Cell) -> None:
    with record.open("a", encoding="utf-8") as lines:  # one short write: workers do not mix
        lines.write(json.dumps(line) + "\n")


def run_all(jobs: Iterable[Job], options: argparse.Namespace) -> None:
    """Run the jobs, the longest first; none is started after `options.seconds`."""
    started = time.perf_counter()
    waiting = sorted(jobs, key=Job.seconds)
    count = len(waiting)
    print(f"{count} jobs, about {sum(map(Job.seconds, waiting)) / 60:.0f} core-minutes", flush=True)
    record = options.record[-1]
    if record.exists() and not record.read_bytes().endswith(b"\n"):
        with record.open("a", encoding="utf-8") as lines:
            lines.write("\n")  # ends a line that was cut off
    append(record, run_facts("untuned.py", set=options.set, workers=options.workers, device=options.device))
    running: dict[Future[str], Job] = {}
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        while waiting or running:
            is_over = options.seconds is not None and time.perf_counter() - started > options.seconds
            if is_over:
                waiting.clear()
            while waiting and len(running) < options.workers:
                job = waiting.pop()
                running[pool.submit(run, job, record, options.device)] = job
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                failure = future.exception()
                print(future.result() if failure is None else f"{job.name}: {failure!r}", flush=True)
    print(f"{time.perf_counter() - started:.0f} s; record {record}")


# --- The command line -------------------------------------------------------------------------------------


def choose_jobs(options: argparse.Namespace, known: dict[Key, Cell]) -> list[Job]:
    """The jobs of the chosen cells, without the horizons that the record holds."""
    jobs = []
    for name in options.tasks:
        task = TASKS[name]
        horizons = options.horizons or (ALL_HORIZONS if options.full else task.horizons)
        for optimizer in task.optimizers:
            for contestant in contestants_of(optimizer):
                if not any(fnmatch.fnmatch(contestant.name, pattern) for pattern in options.contestants):
                    continue
                for seed in options.seeds:
                    job = Job(name, optimizer, seed, contestant.name, tuple(horizons))
                    missing = tuple(horizon for horizon in horizons if job.key(horizon) not in known)
                    if missing or options.fresh:
                        jobs.append(job if options.fresh else dataclasses.replace(job, horizons=missing))
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", choices=["development", "held-out", "all"], default="development")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), help="instead of a set")
    parser.add_argument("--contestants", nargs="+", default=["*"], help="names or globs, such as 'fit*'")
    parser.add_argument("--horizons", nargs="+", type=int, help="instead of those of each task")
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--full", action="store_true", help="five seeds, and 3,000 steps for every task")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="start no job after so many")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--record", type=Path, nargs="+", default=[RECORD])
    parser.add_argument("--fresh", action="store_true", help="make the chosen cells again")
    parser.add_argument("--show", action="store_true", help="train nothing; print the tables")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="train nothing; draw the picture")
    options = parser.parse_args()
    sets = {"development": DEVELOPMENT, "held-out": HELD_OUT, "all": tuple(TASKS)}
    options.tasks = options.tasks or sets[options.set]
    options.seeds = options.seeds or (ALL_SEEDS if options.full else SEEDS)
    known = read_records(options.record)
    if options.show:
        show(known, options.tasks, options.seeds)
    if options.draw:
        draw(known, options.tasks, options.seeds, options.draw)
    if not (options.show or options.draw):
        run_all(choose_jobs(options, known), options)


if __name__ == "__main__":
    main()
