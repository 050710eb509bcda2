"""Jobs in this process, in workers or on an executor, with their results kept in a folder."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hessinit._version import __version__
from hessinit.errors import ProblemError, argument
from hessinit.problem.checks import check_whole
from hessinit.problem.preserve import deliver_interrupts, untouched_random_state
from hessinit.problem.substitutes import default_device
from hessinit.progress import OnProgress, StepCounter, check_progress, report_progress
from hessinit.results.result import Plain, to_plain, write_text
from hessinit.training.loop import ONE_AT_A_TIME, seed_generators


@dataclass(frozen=True)
class Job:
    """One piece of work: `key` names its result."""

    key: str
    parameters: Any


# Makes a result from a job; to leave this process, both must be picklable.
Work = Callable[[Job], Any]
Results = Generator[tuple[Job, Any], None, None]


class WorkerLostError(ProblemError):
    """A worker process ended in the middle of its work."""


class PackedWork(NamedTuple):
    """The work with the global settings of torch without which a worker's numbers would differ."""

    work: Work
    dtype: Any
    device: str
    precision: str
    versions: str


def run_jobs(
    work: Work, jobs: Sequence[Job], workers: int | None = None, executor: Executor | None = None
) -> tuple[Results, tuple[str, ...]]:
    """Return an iterator over (job, `work(job)`) as they finish, and notes.

    Closing it ends the workers. `workers=None` means one process for each core, or this process
    where the work cannot be pickled.
    """
    if executor is not None:
        if type(executor).__module__.startswith("distributed."):
            from hessinit.training.cluster import run_on_cluster  # which needs Dask

            return run_on_cluster(work, jobs, executor), ()
        packed = pack(work)
        return _as_they_finish(lambda job: executor.submit(run_packed, packed, job), jobs), ()
    count = min(len(jobs), workers or count_cores())
    in_this_process = ((job, work(job)) for job in jobs)
    if count <= 1:
        return in_this_process, ()
    try:
        packed = pack(work)
        _check_main_file(b"__main__" in packed)
    except ProblemError as refusal:
        if workers is not None:
            raise
        note = f"All runs were made in one process, one after another: {refusal}"
        return in_this_process, (note,)
    return _run_in_processes(packed, jobs, count), ()


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_workers(workers: Any, executor: Any) -> None:
    """Raise ProblemError if both are given, or if one is not what it must be."""
    if workers is not None:
        check_whole("workers", workers, at_least=1)
        if executor is not None:
            raise ProblemError(
                f"workers={workers} and executor= are both given; leave out one of them."
            )
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise ProblemError(
            f"executor is a {type(executor).__name__}; it must be a concurrent.futures.Executor, "
            "such as ProcessPoolExecutor() or a Dask client's get_executor()."
        )


def _run_in_processes(packed: bytes, jobs: Sequence[Job], workers: int) -> Results:
    """Do the jobs in spawned processes: threads of torch do not survive a fork.

    They end with the iterator or with this process: each listens to a pipe whose other end is held
    here.
    """
    context = multiprocessing.get_context("spawn")
    listening, held = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(
        workers, context, initializer=_begin_worker, initargs=(packed, listening)
    )
    try:
        yield from _as_they_finish(lambda job: pool.submit(_run_received, job), jobs)
    except BaseException as failure:
        held.close()
        if not isinstance(failure, BrokenProcessPool):
            raise
        raise WorkerLostError(
            "a worker process ended before its run was done: it was killed, ran out of memory, or "
            "could not load the experiment. Pass fewer workers, or ",
            argument("workers", 1),
            " to see what happens in this process.",
        ) from failure
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        held.close()
        listening.close()


def _as_they_finish(submit: Callable[[Job], Future[Any]], jobs: Sequence[Job]) -> Results:
    futures: dict[Future[Any], Job] = {}
    try:
        for job in jobs:
            futures[submit(job)] = job
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        for future in futures:
            future.cancel()


def pack(work: Work, dumps: Callable[[Any], bytes] = pickle.dumps) -> bytes:
    """Return the pickled `PackedWork`; raise ProblemError if the work cannot be pickled."""
    packed = PackedWork(
        work,
        torch.get_default_dtype(),
        str(default_device()),
        torch.get_float32_matmul_precision(),
        software_versions(),
    )
    try:
        # Not as an argument of the process: torch would move the user's tensors to shared memory.
        return dumps(packed)
    except Exception as failure:
        raise ProblemError(
            f"the experiment cannot be sent to other processes: {failure}. Your functions must be "
            "defined at the top of a file (no lambdas), and data be plain tensors. Pass ",
            argument("workers", 1),
            " to run everything in this process.",
        ) from failure


def software_versions() -> str:
    """Return the versions that must be the same in all processes: not +cpu or +cu126."""
    return f"hessinit {__version__}, torch {torch.__version__.partition('+')[0]}"


def _check_main_file(uses_main: bool) -> None:
    """Refuse a main file that a new process cannot run again without starting the work again."""
    name = getattr(sys.modules["__main__"], "__file__", None)
    if name is None and not uses_main:
        return
    file = Path(name or "")
    if not file.is_file() or "__main__" not in file.read_text(encoding="utf-8", errors="replace"):
        raise ProblemError(
            f"every worker process would run {name or 'this interactive session'} again. Put build "
            "and the other functions into a file and import it, and what a script does under "
            "`if __name__ == '__main__':`. Or pass ",
            argument("workers", 1),
            " to run everything in this process.",
        )


@functools.lru_cache(maxsize=1)
def _unpack(packed: bytes) -> PackedWork:
    """Load the work; what the user's files draw while they are imported is the same everywhere."""
    with untouched_random_state(), contextlib.redirect_stdout(io.StringIO()):
        seed_generators(0)
        work: PackedWork = pickle.loads(packed)
    if work.versions != software_versions():
        raise ProblemError(
            f"a worker has {software_versions()}, and this process {work.versions}: their numbers "
            "may differ. Install the same versions."
        )
    return work


def run_packed(packed: bytes, job: Job) -> Any:
    """Return the result under the caller's settings of torch, and restore those of the worker."""
    with ONE_AT_A_TIME, contextlib.ExitStack() as stack:
        unpacked = _unpack(packed)
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(unpacked.dtype)
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision(unpacked.precision)
        if torch.device(unpacked.device) != default_device():
            stack.enter_context(torch.device(unpacked.device))
        return unpacked.work(job)


_received: list[bytes] = []  # in a worker process: the work that it was started with


def _begin_worker(packed: bytes, listening: Connection) -> None:
    def end_with_parent() -> None:
        with contextlib.suppress(EOFError, OSError):
            listening.recv_bytes()
        os._exit(1)

    # A terminal sends it to all processes; the parent ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    _unpack(packed)
    _received.append(packed)


def _run_received(job: Job) -> Any:
    return run_packed(_received[0], job)


SCHEMA = 1
RECORD = "experiment.json"


def check_folder(folder: Any) -> None:
    """Refuse what is neither a path nor None."""
    if folder is not None and (not isinstance(folder, (str, os.PathLike)) or not str(folder)):
        raise ProblemError(
            argument("folder", folder), " must be the path of a folder, or None to keep nothing."
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
                argument("folder", str(self.folder)),
                f" cannot be used: {failure}. Pass a folder that can be read and written.",
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
                    argument("folder", str(folder)),
                    f" holds other things ({', '.join(names[:3])}) but no "
                    f"{RECORD}; pass a folder of its own, such as {str(folder / 'comparison')!r}.",
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
                    argument("folder", str(folder)),
                    f" belongs to another experiment: {name} was "
                    f"{before!r:.80} there and is {now!r:.80} here. Pass another folder, or delete "
                    "this one to begin anew.",
                )
        if record["named"].keys() - recorded["named"].keys():
            named = {**recorded["named"], **record["named"]}
            write_text(path, _to_text({**recorded, "named": named}))

    def _describe_interruption(self, jobs: Sequence[Job]) -> str:
        done = sum(job.key in self.results for job in jobs)
        if self.folder is None:
            return (
                f"stopped after {done} of {len(jobs)} runs, and none is kept; name a folder to "
                "keep them next time."
            )
        return (
            f"stopped; {done} of {len(jobs)} runs are kept in {self.folder}. The same call "
            "or command continues from there."
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
