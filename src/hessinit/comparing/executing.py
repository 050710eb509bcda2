"""Make the runs that are missing: in this process, in worker processes, or on somebody's executor."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future, as_completed
from concurrent.futures.process import BrokenProcessPool

from hessinit.comparing.experiment import Experiment, Job
from hessinit.comparing.store import RunStore
from hessinit.comparing.training import train_one
from hessinit.comparing.watching import watched
from hessinit.comparing.workers import (
    deaf_to_interrupts,
    local_processes,
    pack,
    train_packed,
    train_received,
)
from hessinit.errors import ProblemError
from hessinit.report.run import Run

Runs = Generator[Run, None, None]

ALONE = "All runs were made in this process, one after the other: "


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
    runs, remarks = _choose_place(experiment, jobs, workers, executor)
    with watched(total, total - len(jobs), progress) as announce:
        try:
            with contextlib.closing(runs):
                for run in runs:
                    store.add(run)
                    announce(run)
        except KeyboardInterrupt:
            missing = sum((job.start, job.learning_rate, job.seed) not in store.runs for job in jobs)
            raise KeyboardInterrupt(_how_to_go_on(store, total, total - missing)) from None
        except BrokenProcessPool as failure:
            raise ProblemError(
                "a worker process ended before its run was done: it was killed, ran out of memory, or could "
                "not load the experiment (its own message is above). Pass fewer workers, or workers=1 to see "
                "what happens in this process."
            ) from failure
    return remarks


def _choose_place(
    experiment: Experiment, jobs: Sequence[Job], workers: int | None, executor: Executor | None
) -> tuple[Runs, tuple[str, ...]]:
    if executor is not None:
        return _on_executor(executor, pack(experiment), jobs), ()
    count = min(len(jobs), workers or _default_workers(experiment))
    if count == 1:
        return _in_this_process(experiment, jobs), ()
    try:
        packed = pack(experiment)
    except ProblemError as refusal:
        if workers is not None:  # only what was asked for is refused
            raise
        return _in_this_process(experiment, jobs), (f"{ALONE}{refusal}",)
    return _in_processes(packed, jobs, count), ()


def _default_workers(experiment: Experiment) -> int:
    if experiment.device is not None and not experiment.device.startswith("cpu"):
        return 1  # one accelerator has one memory
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _in_this_process(experiment: Experiment, jobs: Sequence[Job]) -> Runs:
    for job in jobs:
        yield train_one(experiment, job)


def _in_processes(packed: bytes, jobs: Sequence[Job], workers: int) -> Runs:
    with local_processes(packed, workers) as pool:

        def submit(job: Job) -> Future[Run]:
            with deaf_to_interrupts():
                return pool.submit(train_received, job)

        yield from _as_they_finish(submit, jobs)


def _on_executor(executor: Executor, packed: bytes, jobs: Sequence[Job]) -> Runs:
    name = hashlib.sha256(packed).digest()
    yield from _as_they_finish(lambda job: executor.submit(train_packed, packed, name, job), jobs)


def _as_they_finish(submit: Callable[[Job], Future[Run]], jobs: Sequence[Job]) -> Runs:
    futures: list[Future[Run]] = []
    try:
        futures.extend(submit(job) for job in jobs)
        for future in as_completed(futures):
            yield future.result()
    finally:
        for future in futures:
            future.cancel()


def _how_to_go_on(store: RunStore, total: int, done: int) -> str:
    if store.folder is None:
        return f"stopped after {done} of {total} runs, and none is kept; pass folder= to keep them next time."
    return f"stopped; {done} of {total} runs are kept in {store.folder}. The same call goes on from there."
