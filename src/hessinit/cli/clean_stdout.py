"""Stdout for results alone: whatever else writes to it, a library or a program of the user's, gets stderr."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn, TextIO


class ClosedStdout(io.TextIOBase):
    """In place of a stdout that was closed (`>&-`): writing fails, as on any other that cannot take it."""

    encoding = "utf-8"

    def write(self, text: str) -> NoReturn:
        raise OSError(errno.EBADF, "stdout is closed")


@contextmanager
def stdout_kept_clean() -> Iterator[None]:
    """`sys.stdout` keeps the way out; descriptor 1, which others know it by, leads to stderr from now on.

    At the end so does `sys.stdout`: what runs when Python ends may print, too.
    """
    _open_stderr()
    sys.stdout = sys.__stdout__ = results = _take_stdout()  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        sys.stdout = sys.stderr
        with suppress(OSError):
            results.flush()


def stop_printing() -> None:
    """Nobody reads any more, as after `| head -1`; Python would complain once more when it ends."""
    with suppress(OSError, ValueError):  # a stream that is no file complains of nothing
        out = sys.stdout.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, out)
        os.close(nowhere)


def _take_stdout() -> TextIO:
    try:
        kept = os.dup(1)
    except OSError:
        _open_nowhere(1)
        return ClosedStdout()  # type: ignore[return-value]
    os.dup2(2, 1)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    # An old terminal without ‖ shows a question mark; it must not end the command.
    return open(kept, "w", encoding=encoding, errors="replace", buffering=1 if os.isatty(kept) else -1)


def _open_stderr() -> None:
    if sys.stderr is None or not _is_open(2):
        _open_nowhere(2)
        sys.stderr = sys.__stderr__ = open(os.devnull, "w", encoding="utf-8")  # type: ignore[misc] # noqa: SIM115
    elif hasattr(sys.stderr, "reconfigure"):
        sys.stderr.reconfigure(errors="replace")


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _open_nowhere(descriptor: int) -> None:
    """A closed descriptor would be given to the next file that is opened, and that would be written to."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
