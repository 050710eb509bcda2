"""Do all jobs of some work, in the order in which they happen to finish."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from hessinit.errors import ProblemError
from hessinit.jobs.processes import Work, deaf_to_interrupts, do_packed, do_received, local_processes

Results = Generator[Any, None, None]


class WorkerLostError(ProblemError):
    """A worker process ended in the middle of its work."""


def do_here(work: Work, jobs: Sequence[Any]) -> Results:
    """One after the other, in this process."""
    for job in jobs:
        yield work.do(job)


def do_in_processes(packed: bytes, jobs: Sequence[Any], workers: int) -> Results:
    """In so many new processes, from what `pack` gave."""
    try:
        with local_processes(packed, workers) as pool:

            def submit(job: Any) -> Future[Any]:
                with deaf_to_interrupts():
                    return pool.submit(do_received, job)

            yield from _as_they_finish(submit, jobs)
    except BrokenProcessPool as failure:
        raise WorkerLostError(
            "a worker process ended before its run was done: it was killed, ran out of memory, or could "
            "not load the experiment (its own message is above). Pass fewer workers, or workers=1 to see "
            "what happens in this process."
        ) from failure


def do_on_executor(executor: Executor, packed: bytes, jobs: Sequence[Any]) -> Results:
    """Wherever somebody's executor has its workers."""
    name = hashlib.sha256(packed).digest()
    yield from _as_they_finish(lambda job: executor.submit(do_packed, packed, name, job), jobs)


def count_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _as_they_finish(submit: Callable[[Any], Future[Any]], jobs: Sequence[Any]) -> Results:
    futures: list[Future[Any]] = []
    try:
        futures.extend(submit(job) for job in jobs)
        for future in as_completed(futures):
            yield future.result()
    finally:
        for future in futures:
            future.cancel()
