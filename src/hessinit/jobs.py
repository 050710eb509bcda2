"""Jobs whose results are kept in a folder: after an interruption the same call continues."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor

from hessinit.problem.validate import check_switches
from hessinit.results.result import Plain
from hessinit.training.data import derive as derive
from hessinit.training.data import generator as generator
from hessinit.training.data import reproducible as reproducible
from hessinit.training.run_folder import RunFolder, describe_interruption
from hessinit.training.workers import Job as Job
from hessinit.training.workers import check_workers, progress_bar, run_jobs
from hessinit.training.workers import spinner as spinner


class JobFolder:
    """Runs jobs in worker processes or on an executor, and keeps the results in a folder.

    `folder=None` keeps them in memory only. By default there is one worker for each core;
    `executor` is any `concurrent.futures` executor, also that of a Dask client. A result is plain
    data, as JSON can hold it.

    >>> jobs = [Job("two", 2), Job("three", 3)]
    >>> folder = JobFolder(None, workers=1)
    >>> folder.open({"experiment": "squares"})
    >>> folder.run(lambda job: job.parameters**2, jobs, label="Squares")
    {'two': 4, 'three': 9}
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        *,
        workers: int | None = None,
        executor: Executor | None = None,
        progress: bool = True,
    ) -> None:
        check_switches(progress=progress)
        check_workers(workers, executor)
        self._folder = RunFolder(folder)
        self._workers = workers
        self._executor = executor
        self._progress = progress

    def open(self, settings: Mapping[str, Plain]) -> None:
        """Read the results that the folder has; refuse a folder whose recorded settings differ."""
        self._folder.open(settings)

    def run(
        self, work: Callable[[Job], Plain], jobs: Sequence[Job], *, label: str
    ) -> dict[str, Plain]:
        """Return the result of every job by its key; only those that the folder lacks are run."""
        results = self._folder.results
        missing = [job for job in jobs if job.key not in results]
        done = len(jobs) - len(missing)
        with progress_bar(label, len(jobs), done, self._progress) as advance:
            try:
                finished, _ = run_jobs(work, missing, self._workers, self._executor)
                with contextlib.closing(finished):
                    for job, result in finished:
                        self._folder.add(job.key, result)
                        advance(job.key, 1)
            except KeyboardInterrupt:
                done = sum(job.key in results for job in jobs)
                message = describe_interruption(self._folder.folder, done, len(jobs))
                raise KeyboardInterrupt(message) from None
        return {job.key: results[job.key] for job in jobs}
