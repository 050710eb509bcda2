"""Worker processes on this machine: each gets the work once, and ends when its parent does."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from hessinit.errors import ProblemError


class Work(Protocol):
    """What the processes do together, piece by piece."""

    def begin(self) -> None:
        """Called once in every other process, before the first piece."""

    def do(self, job: Any) -> Any:
        """One piece; what it returns travels back."""


_received: dict[bytes, Work] = {}


def pack(work: Work) -> bytes:
    """The work as bytes that another process can read; refuses what cannot travel."""
    try:
        # Not as an argument of the process: torch would move the user's tensors to shared memory for that.
        packed = pickle.dumps(work)
    except Exception as failure:
        raise ProblemError(
            f"the experiment cannot be sent to other processes: {failure}. build, loss, forward, optimizer "
            "and starts must be functions defined at the top of a file (no lambdas, nothing inside a "
            "function), and data plain tensors. Pass workers=1 to run everything in this process."
        ) from failure
    trouble = _trouble_with_main(b"__main__" in packed)
    if trouble:
        raise ProblemError(f"{trouble} Or pass workers=1 to run everything in this process.")
    return packed


def _trouble_with_main(uses_main: bool) -> str:
    """A new process runs the main file again: it must be a file, and must not start the work again."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None:
        if not uses_main:
            return ""
        return (
            "build, or something else of the experiment, is defined in an interactive session, where other "
            "processes cannot find it. Put it into a file and import it."
        )
    name = getattr(getattr(main, "__spec__", None), "name", "")
    if name.endswith("__main__"):
        return ""  # a package run with -m is not run again
    if not Path(file).is_file():
        return (
            f"the program comes from {file}, no file that other processes can run again. Put it into a file."
        )
    if "__main__" in Path(file).read_text(encoding="utf-8", errors="replace"):
        return ""
    return (
        f"{Path(file).name} would run as a whole in every worker process, and start all this again. "
        "Put what it does under `if __name__ == '__main__':`."
    )


def do_packed(packed: bytes, name: bytes, job: Any) -> Any:
    """One piece of work that came as bytes, in a process or on a machine of somebody's executor."""
    if name not in _received:
        _received.clear()
        work: Work = pickle.loads(packed)
        work.begin()
        _received[name] = work
    return _do(_received[name], job)


def do_received(job: Any) -> Any:
    """One piece in a worker that `_receive` has set up."""
    return _do(_received[b""], job)


def _do(work: Work, job: Any) -> Any:
    """One piece; a failure that could not be sent back, and would break the pool, is sent as its words."""
    try:
        return work.do(job)
    except Exception as failure:
        try:
            pickle.loads(pickle.dumps(failure))
        except Exception:
            raise RuntimeError(f"{type(failure).__name__}: {failure}") from failure
        raise


@contextlib.contextmanager
def local_processes(packed: bytes, workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that are started anew, not forked: threads of torch do not survive a fork.

    They end at once when the block is left, whatever they are doing, and when this process is killed: each
    listens to a pipe whose other end is held here, and which the system closes.
    """
    context = multiprocessing.get_context("spawn")
    listening, held = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, context, initializer=_receive, initargs=(packed, listening))
    try:
        yield pool
    except BaseException:
        held.close()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        held.close()
        listening.close()


@contextlib.contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Processes started in here do not hear Ctrl-C, which the terminal sends to all: the parent ends them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _receive(packed: bytes, listening: Connection) -> None:
    threading.Thread(target=_end_with_parent, args=(listening,), daemon=True).start()
    work: Work = pickle.loads(packed)
    work.begin()
    _received[b""] = work


def _end_with_parent(listening: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        listening.recv_bytes()
    os._exit(1)
