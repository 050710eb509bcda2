"""How far a download is, on stderr and only when someone watches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class DownloadBar:
    """A bar as pooch wants one: `total` is set, then come `update`, `reset` and `close`.

    It shows itself with the first of them: for a file that lies in the cache already, none is called.
    """

    def __init__(self, progress: Progress, title: str) -> None:
        self.progress = progress
        self.task = progress.add_task(title, total=None)

    @property
    def total(self) -> int:
        return int(self.progress.tasks[self.task].total or 0)

    @total.setter
    def total(self, total: int) -> None:
        self.progress.start()
        self.progress.update(self.task, total=total or None)  # 0 when the server does not say

    def update(self, count: int) -> None:
        self.progress.advance(self.task, count)

    def reset(self) -> None:
        self.progress.update(self.task, completed=0)

    def close(self) -> None:
        self.progress.refresh()


@contextmanager
def download_bar(title: str, console: Console | None = None) -> Iterator[DownloadBar | None]:
    """The bar while the body runs, stopped also when it fails; None where stderr is no terminal."""
    if console is None and not sys.stderr.isatty():
        yield None
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    shown = console or Console(stderr=True)
    progress = Progress(TextColumn("{task.description}", markup=False), *columns, console=shown)
    try:
        yield DownloadBar(progress, title)
    finally:
        if progress.live.is_started:
            progress.stop()
