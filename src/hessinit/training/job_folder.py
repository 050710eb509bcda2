"""Jobs whose results are kept in a folder: the same call continues after an interruption."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from hessinit.errors import ProblemError
from hessinit.problem.preserve import deliver_interrupts
from hessinit.progress import OnProgress, StepCounter, check_progress, report_progress
from hessinit.results.result import Plain, to_plain, write_text
from hessinit.training.workers import Job, Work, check_workers, run_jobs

SCHEMA = 1
RECORD = "experiment.json"


def check_folder(folder: Any) -> None:
    """Refuse what is neither a path nor None."""
    if folder is not None and (not isinstance(folder, (str, os.PathLike)) or not str(folder)):
        raise ProblemError(
            f"folder={folder!r} must be the path of a folder, or None to keep nothing."
        )


class JobFolder:
    """Does jobs in worker processes or on an executor, and keeps their results in a folder.

    `folder=None` keeps them in memory only. By default there is one worker for each core;
    `executor` is any executor of `concurrent.futures`, also that of a Dask client. A result is
    plain data, as JSON can hold it. experiment.json records the settings, and runs/ has a file for
    each result, all written atomically.

    >>> folder = JobFolder(None, workers=1)
    >>> folder.open({"experiment": "squares"})
    >>> folder.run(lambda job: job.parameters**2, [Job("two", 2), Job("three", 3)], label="Squares")
    {'two': 4, 'three': 9}
    """

    def __init__(
        self,
        folder: Any,
        *,
        workers: int | None = None,
        executor: Executor | None = None,
        progress: bool | OnProgress = True,
    ) -> None:
        check_folder(folder)
        check_workers(workers, executor)
        check_progress(progress)
        self.folder = None if folder is None else Path(folder)
        self.results: dict[str, Plain] = {}
        self.notes: tuple[str, ...] = ()
        self._workers = workers
        self._executor = executor
        self._progress = progress
        self._experiment = ""  # a hash of the settings, which every result's file carries

    def open(self, settings: Mapping[str, Plain], named: Mapping[str, str] | None = None) -> None:
        """Read the results that the folder has; refuse a folder whose recorded settings differ.

        `named` describes parts of the experiment by name: new names may join, those recorded must
        not change.
        """
        if self.folder is None:
            return
        record = json.loads(_to_text({"settings": settings, "named": named or {}}))
        self._experiment = hashlib.sha256(_to_text(record["settings"]).encode()).hexdigest()[:16]
        try:
            self._open_record(self.folder, record)
            for path in sorted((self.folder / "runs").glob("*.json")):
                self._read_result(path)
        except OSError as failure:
            raise ProblemError(
                f"folder={str(self.folder)!r} cannot be used: {failure}. Pass a folder that can be "
                "read and written."
            ) from failure

    def run(self, work: Work, jobs: Sequence[Job], *, label: str) -> dict[str, Plain]:
        """Return the result of every job by its key; do the jobs whose results the folder lacks."""
        missing = [job for job in jobs if job.key not in self.results]
        if missing:
            finished, self.notes = run_jobs(work, missing, self._workers, self._executor)
            with report_progress(self._progress, label) as report, contextlib.closing(finished):
                counter = StepCounter("runs", report, len(jobs), len(jobs) - len(missing))
                try:
                    for job, result in finished:
                        self._add(job.key, result)
                        counter.step(job.key)
                        deliver_interrupts()  # one that came while the result was written
                except KeyboardInterrupt:
                    raise KeyboardInterrupt(self._describe_interruption(jobs)) from None
        return {job.key: self.results[job.key] for job in jobs}

    def path_of(self, key: str) -> Path:
        """Return the file of a result."""
        return (self.folder or Path()) / "runs" / file_name(key)

    def _add(self, key: str, result: Any) -> None:
        header = {"kind": "hessinit run", "schema": SCHEMA, "experiment": self._experiment}
        text = _to_text({**header, "key": key, "value": result})
        if self.folder is not None:
            try:
                write_text(self.path_of(key), text)
            except OSError as failure:
                raise ProblemError(
                    f"a run could not be written to {self.folder}: {failure}. Runs kept there: "
                    f"{len(self.results)}; once it can be written again, the same call continues "
                    "from them."
                ) from failure
        self.results[key] = json.loads(text)["value"]  # as it would be read from the file

    def _read_result(self, path: Path) -> None:
        data = _read(path, "hessinit run", "Delete it, and it is run again")
        if data.get("experiment") != self._experiment or file_name(str(data["key"])) != path.name:
            raise ProblemError(
                f"{path} belongs to another experiment or run than its folder and name say. "
                "Delete it, and it is run again, or pass another folder."
            )
        self.results[data["key"]] = data["value"]

    def _open_record(self, folder: Path, record: Plain) -> None:
        path = folder / RECORD
        if folder.exists() and not path.exists():
            names = sorted(entry.name for entry in folder.iterdir() if entry.name[0] != ".")
            if names and names != ["runs"]:
                raise ProblemError(
                    f"folder={str(folder)!r} holds other things ({', '.join(names[:3])}) but no "
                    f"{RECORD}; pass a folder of its own, such as {str(folder / 'comparison')!r}."
                )
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        header = {"kind": "hessinit experiment", "schema": SCHEMA}
        if not path.exists():
            write_text(path, _to_text({**header, **record}))
            return
        recorded = _read(path, "hessinit experiment", "Pass another folder")
        fixed = [("settings", name) for name in {**record["settings"], **recorded["settings"]}]
        fixed += [("named", name) for name in record["named"] if name in recorded["named"]]
        for part, name in fixed:
            before = recorded[part].get(name)
            now = record[part].get(name)
            if before != now:
                raise ProblemError(
                    f"folder={str(folder)!r} belongs to another experiment: {name} was "
                    f"{before!r:.80} there and is {now!r:.80} here. Pass another folder, or delete "
                    "this one to begin anew."
                )
        if record["named"].keys() - recorded["named"].keys():
            named = {**recorded["named"], **record["named"]}
            write_text(path, _to_text({**recorded, "named": named}))

    def _describe_interruption(self, jobs: Sequence[Job]) -> str:
        done = sum(job.key in self.results for job in jobs)
        if self.folder is None:
            return (
                f"stopped after {done} of {len(jobs)} runs, and none is kept; pass folder= to keep "
                "them next time."
            )
        return (
            f"stopped; {done} of {len(jobs)} runs are kept in {self.folder}. The same call "
            "continues from there."
        )


def file_name(key: str) -> str:
    """Return a readable file name, different for different keys.

    >>> file_name("he+warmup, lr 0.1, seed 2")
    'he-warmup-lr-0.1-seed-2_60348def.json'
    """
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", key).strip("-.")[:80]
    return f"{readable}_{hashlib.sha256(key.encode()).hexdigest()[:8]}.json"


def _to_text(data: Plain) -> str:
    return json.dumps(to_plain(data), indent=1, allow_nan=False) + "\n"


def _read(path: Path, kind: str, way_out: str) -> Plain:
    try:
        data = json.loads(path.read_bytes())
        if data["kind"] != kind or data["schema"] != SCHEMA:
            raise ValueError(f"no {kind} of schema {SCHEMA}")
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise ProblemError(
            f"{path} cannot be read ({problem}); was it edited? {way_out}."
        ) from problem
    return data
