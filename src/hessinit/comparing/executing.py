"""Make the runs that are missing: in this process, in worker processes, or on somebody's executor."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from hessinit.comparing.experiment import Experiment, Job
from hessinit.comparing.store import RunStore
from hessinit.comparing.training import train_one
from hessinit.errors import ProblemError
from hessinit.jobs.doing import Results, count_cores, do_here, do_in_processes, do_on_executor
from hessinit.jobs.processes import pack
from hessinit.jobs.watching import watched
from hessinit.results.comparison import Run

ALONE = "All runs were made in this process, one after the other: "


@dataclass(frozen=True)
class Training:
    """The work of an experiment: a job is a run."""

    experiment: Experiment

    def begin(self) -> None:
        self.experiment.settings.apply()

    def do(self, job: Job) -> Run:
        return train_one(self.experiment, job)


def execute(
    experiment: Experiment,
    jobs: Sequence[Job],
    store: RunStore,
    *,
    total: int,
    workers: int | None,
    executor: Executor | None,
    progress: bool,
) -> tuple[str, ...]:
    """Make the runs and store each as soon as it is finished; returns remarks for the reader."""
    if not jobs:
        return ()
    runs, remarks = _choose_place(Training(experiment), jobs, workers, executor)
    with watched("Training", total, total - len(jobs), progress) as announce:
        try:
            with contextlib.closing(runs):
                for run in runs:
                    store.add(run)
                    announce(f"{run.scheme}, rate {run.learning_rate:g}: loss {run.final_loss:.3g}", 1)
        except KeyboardInterrupt:
            missing = sum((job.start, job.learning_rate, job.seed) not in store.runs for job in jobs)
            raise KeyboardInterrupt(_how_to_go_on(store, total, total - missing)) from None
    return remarks


def _choose_place(
    work: Training, jobs: Sequence[Job], workers: int | None, executor: Executor | None
) -> tuple[Results, tuple[str, ...]]:
    if executor is not None:
        return do_on_executor(executor, pack(work), jobs), ()
    count = min(len(jobs), workers or _default_workers(work.experiment))
    if count == 1:
        return do_here(work, jobs), ()
    try:
        packed = pack(work)
    except ProblemError as refusal:
        if workers is not None:  # only what was asked for is refused
            raise
        return do_here(work, jobs), (f"{ALONE}{refusal}",)
    return do_in_processes(packed, jobs, count), ()


def _default_workers(experiment: Experiment) -> int:
    if experiment.device is not None and not experiment.device.startswith("cpu"):
        return 1  # one accelerator has one memory
    return count_cores()


def _how_to_go_on(store: RunStore, total: int, done: int) -> str:
    if store.folder is None:
        return f"stopped after {done} of {total} runs, and none is kept; pass folder= to keep them next time."
    return f"stopped; {done} of {total} runs are kept in {store.folder}. The same call goes on from there."
