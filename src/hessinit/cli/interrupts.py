"""Ctrl-C, and a request to end that is taken as Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

INTERRUPTED = 130  # 128 + SIGINT, as shells have it


@contextmanager
def interruption_explained(doing: str) -> Iterator[None]:
    """Ctrl-C ends a command that keeps nothing with a line, not with a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"Interrupted: {doing} was not finished, and nothing was written.", err=True)
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def ended_gently() -> Iterator[None]:
    """SIGTERM, which kill and batch systems send, ends the work like Ctrl-C: with word of what is kept."""
    try:
        before = signal.signal(signal.SIGTERM, _interrupt)
    except ValueError:  # not in the main thread, which alone may listen
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
