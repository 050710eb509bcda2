"""Ctrl-C, and a request to end (SIGTERM, which kill and batch systems send), which is taken as Ctrl-C."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
LISTENED_TO = (signal.SIGINT, signal.SIGTERM)

_seen: list[int] = []


def leave_when_interrupted() -> None:
    """Until the work begins, an interruption ends the process at once.

    An exception would not do: torch and numpy, interrupted while they are imported, swallow it, make another
    one of it, or crash.
    """
    for number in LISTENED_TO:
        if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):  # nohup ignores them
            signal.signal(number, _leave)


def raise_when_interrupted() -> None:
    """The work begins: from now on an interruption is a KeyboardInterrupt, so that all is put in order."""
    for number in LISTENED_TO:
        if signal.getsignal(number) is _leave:
            signal.signal(number, _raise)


def was_interrupted() -> bool:
    """Whether an interruption came; what fails after it is most likely its consequence."""
    return bool(_seen)


@contextmanager
def interruption_explained(doing: str) -> Iterator[None]:
    """Ctrl-C ends a command that keeps nothing with a line, not with a traceback."""
    import typer

    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"Interrupted: {doing} was not finished, and nothing was written.", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _leave(number: int, frame: FrameType | None) -> None:
    with suppress(OSError):
        if os.isatty(2) and os.environ.get("TERM", "dumb") != "dumb":
            os.write(2, b"\r\x1b[2K\x1b[?25h")  # the spinner's line goes, the cursor that it hid comes back
        os.write(2, b"Interrupted: stopped before anything was done, and nothing was written.\n")
    os._exit(INTERRUPTED)


def _raise(number: int, frame: FrameType | None) -> None:
    _seen.append(number)
    raise KeyboardInterrupt
