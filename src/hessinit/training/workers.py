"""Do jobs in this process, in worker processes, or on an executor."""

from __future__ import annotations

import contextlib
import functools
import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from hessinit._version import __version__
from hessinit.errors import ProblemError


@dataclass(frozen=True)
class Job:
    """One piece of work: `key` names its result."""

    key: str
    parameters: Any


# Makes a result from a job; to leave this process, both must be picklable.
Work = Callable[[Job], Any]
Results = Generator[tuple[Job, Any], None, None]
ONE_AT_A_TIME = threading.RLock()  # runs use global generators and settings, so threads take turns


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
            from hessinit.training.cluster import run_on_cluster

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
    from hessinit.problem.checks import check_whole

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
            "could not load the experiment. Pass fewer workers, or workers=1 to see what happens "
            "in this process."
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
    import torch

    from hessinit.problem.substitutes import default_device

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
            "defined at the top of a file (no lambdas), and data be plain tensors. Pass workers=1 "
            "to run everything in this process."
        ) from failure


def software_versions() -> str:
    """Return the versions that must be the same in all processes: not +cpu or +cu126."""
    import torch

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
            "`if __name__ == '__main__':`. Or pass workers=1 to run everything in this process."
        )


@functools.lru_cache(maxsize=1)
def _unpack(packed: bytes) -> PackedWork:
    """Load the work; what the user's files draw while they are imported is the same everywhere."""
    from hessinit.problem.preserve import untouched_random_state
    from hessinit.training.data import seed_generators

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
    import torch

    from hessinit.problem.substitutes import default_device

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
