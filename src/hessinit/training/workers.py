"""Run jobs in this process, in worker processes, or on an executor; show the progress, without torch."""

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
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hessinit.errors import ProblemError

if TYPE_CHECKING:
    from hessinit.curvature.progress import ProgressState


@dataclass(frozen=True)
class Job:
    """One piece of work: `key` names its result."""

    key: str
    parameters: Any


Work = Callable[
    [Job], Any
]  # makes a result from a job; both must be picklable to leave this process
Results = Generator[tuple[Job, Any], None, None]
Advance = Callable[[str, float], None]  # of a bar: the text beside it, and by how much
LONG = 10.0  # seconds: work that is expected to take longer is announced
UNITS = (3600, "hours"), (60, "minutes"), (1, "seconds")
ONE_AT_A_TIME = threading.RLock()  # runs use global generators and settings, so threads take turns


class WorkerLostError(ProblemError):
    """A worker process ended in the middle of its work."""


def run_jobs(
    work: Work, jobs: Sequence[Job], workers: int | None = None, executor: Executor | None = None
) -> tuple[Results, tuple[str, ...]]:
    """An iterator over (job, `work(job)`) as they finish, which ends workers when closed, and notes.

    `workers=None` means one process for each core, or this process where the work cannot be
    pickled.
    """
    if executor is not None:
        if type(executor).__module__.startswith("distributed."):
            from hessinit.training.cluster import run_on_cluster

            return run_on_cluster(work, jobs, executor), ()
        packed = pack(work)
        return _as_they_finish(lambda job: executor.submit(run_packed, packed, job), jobs), ()
    count = min(len(jobs), workers or count_cores())
    here = ((job, work(job)) for job in jobs)
    if count <= 1:
        return here, ()
    try:
        packed = pack(work)
        _check_main_file(b"__main__" in packed)
    except ProblemError as refusal:
        if workers is not None:
            raise
        return here, (f"All runs were made in one process, one after another: {refusal}",)
    return _run_in_processes(packed, jobs, count), ()


def count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_workers(workers: Any, executor: Any) -> None:
    from hessinit.problem.validate import check_whole

    if workers is not None:
        check_whole("workers", workers, at_least=1)
        if executor is not None:
            raise ProblemError(
                f"workers={workers} and executor= are both given; leave out one of them."
            )
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise ProblemError(
            f"executor is a {type(executor).__name__}; it must be a concurrent.futures.Executor, such as "
            "ProcessPoolExecutor() or a Dask client's get_executor()."
        )


def _run_in_processes(packed: bytes, jobs: Sequence[Job], workers: int) -> Results:
    """In spawned processes: threads of torch do not survive a fork.

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
            "a worker process ended before its run was done: it was killed, ran out of memory, or could not "
            "load the experiment. Pass fewer workers, or workers=1 to see what happens in this process."
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
    """The work, and the global settings of torch without which a worker's numbers would differ."""
    import torch

    from hessinit.problem.double_backward import default_device

    try:
        precision = torch.get_float32_matmul_precision()
        # Not as an argument of the process: torch would move the user's tensors to shared memory
        # for that.
        return dumps((work, torch.get_default_dtype(), str(default_device()), precision))
    except Exception as failure:
        raise ProblemError(
            f"the experiment cannot be sent to other processes: {failure}. Your functions must be defined at "
            "the top of a file (no lambdas), and data be plain tensors. Pass workers=1 to run everything in "
            "this process."
        ) from failure


def _check_main_file(uses_main: bool) -> None:
    """A new process runs the main file again: it must be a file, and must not start the work again."""
    name = getattr(sys.modules["__main__"], "__file__", None)
    if name is None and not uses_main:
        return
    file = Path(name or "")
    if not file.is_file() or "__main__" not in file.read_text(encoding="utf-8", errors="replace"):
        raise ProblemError(
            f"every worker process would run {name or 'this interactive session'} again. Put build and the "
            "other functions into a file and import it, and what a script does under "
            "`if __name__ == '__main__':`. Or pass workers=1 to run everything in this process."
        )


@functools.lru_cache(maxsize=1)
def _unpack(packed: bytes) -> tuple[Work, Any, str, str]:
    stream = io.BytesIO(packed)  # the user's files may come before the work
    return next(
        found for found in iter(lambda: pickle.load(stream), None) if isinstance(found, tuple)
    )


def run_packed(packed: bytes, job: Job) -> Any:
    """The result under the caller's settings of torch; those of the worker return at the end."""
    import torch

    from hessinit.problem.double_backward import default_device

    with ONE_AT_A_TIME, contextlib.ExitStack() as stack:
        work, dtype, device, precision = _unpack(packed)
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(dtype)
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision(precision)
        if torch.device(device) != default_device():
            stack.enter_context(torch.device(device))
        return work(job)


_received: list[bytes] = []  # in a worker process: the work that it was started with


def _begin_worker(packed: bytes, listening: Connection) -> None:
    def end_with_parent() -> None:
        with contextlib.suppress(EOFError, OSError):
            listening.recv_bytes()
        os._exit(1)

    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal sends it to all; the parent ends the workers
    threading.Thread(target=end_with_parent, daemon=True).start()
    _unpack(packed)
    _received.append(packed)


def _run_received(job: Job) -> Any:
    return run_packed(_received[0], job)


@contextlib.contextmanager
def progress_bar(
    label: str, total: float, done: float, wanted: bool, counted: bool = True
) -> Iterator[Advance]:
    """A bar on stderr, where that is a terminal, at `done` of `total`; `advance(latest, amount)` moves it.

    Unless `counted`, `latest` has to tell the numbers and the time left.
    """
    # Not rich's is_terminal: FORCE_COLOR asks for colours, not for a bar in a file.
    if not wanted or not sys.stderr.isatty() or done == total:
        yield lambda latest, amount: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn(label, markup=False),
        progress.BarColumn(),
        *((progress.MofNCompleteColumn(), progress.TimeRemainingColumn()) if counted else ()),
        progress.TextColumn("{task.fields[latest]}", markup=False),
    )
    # The speed of the last minutes: the first runs may be unlike the later ones.
    console = Console(stderr=True)
    with progress.Progress(
        *columns, console=console, transient=True, speed_estimate_period=180
    ) as bar:
        task = bar.add_task("", total=total - done, latest="")
        yield lambda latest, amount: bar.update(task, advance=amount, latest=latest)


def announce(seconds: float, shorter: str) -> None:
    """Before long work, one line on stderr: the time it is expected to take, and what makes it shorter."""
    if seconds >= LONG:
        size, unit = next((one, name) for one, name in UNITS if seconds >= 1.5 * one or one == 1)
        sys.stderr.write(f"This takes about {seconds / size:.0f} {unit}. {shorter}.\n")


@contextlib.contextmanager
def race_bar(wanted: bool, waiting: str = "") -> Iterator[Callable[[int, int, str], None]]:
    """A bar from the first `on_step(done, planned, name)` on, and until then a spinner, if it has a label."""
    with _bar_after_spinner(waiting, wanted and bool(waiting)) as bar:
        yield lambda done, planned, name: bar("Racing", planned, 0, wanted)(name, 1)


@contextlib.contextmanager
def measuring_bar(waiting: str) -> Iterator[Callable[[ProgressState], None]]:
    """A spinner, and from the first state on a bar by time, with layers, products and time left beside it."""
    with _bar_after_spinner(waiting, True) as bar:
        shown = 0.0

        def show(state: ProgressState) -> None:
            nonlocal shown
            advance = bar(waiting, 1.0, 0.0, True, counted=False)
            share = state.seconds / (state.seconds + state.seconds_left)
            latest = (
                f"{state.layers_done} of {state.layers} layers, {state.products} products, "
                f"{state.seconds_left:.0f} s left  {state.layer}"
            )
            advance(latest, share - shown)
            shown = share

        yield show


@contextlib.contextmanager
def _bar_after_spinner(waiting: str, spins: bool) -> Iterator[Callable[..., Advance]]:
    """Its first call ends the spinner and opens the `progress_bar`, which all later ones return."""
    with contextlib.ExitStack() as display:
        display.enter_context(spinner(waiting, spins))
        opened: list[Advance] = []

        def bar(*given: Any, **options: Any) -> Advance:
            if not opened:
                display.close()  # a terminal shows one at a time
                opened.append(display.enter_context(progress_bar(*given, **options)))
            return opened[0]

        yield bar


@contextlib.contextmanager
def spinner(label: str, wanted: bool) -> Iterator[None]:
    """A spinner on stderr, where stderr is a terminal, for work of unknown length."""
    if not wanted or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(label)):
        yield
