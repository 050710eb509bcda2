"""How far the work is, on stderr, while someone watches."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Announce = Callable[[str, float], None]


@contextlib.contextmanager
def watched(
    doing: str, total: float, kept: float, wanted: bool, *, counts: bool = True
) -> Iterator[Announce]:
    """A bar over `total`, of which `kept` was there before; nothing where stderr is no terminal.

    `announce(latest, amount)` moves it on. `counts` says whether the amounts are numbers of runs to show.
    """
    from rich.console import Console

    console = Console(stderr=True)
    # Not console.is_terminal: FORCE_COLOR is a wish for colours, not for a bar in a file.
    if not wanted or not sys.stderr.isatty() or kept == total:
        yield lambda latest, amount: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    how_far: ProgressColumn = MofNCompleteColumn() if counts else TaskProgressColumn()
    columns = (TextColumn(doing, markup=False), BarColumn(), how_far, TimeRemainingColumn())
    shown = TextColumn("{task.fields[latest]}", markup=False)
    # The speed of the last minutes: the first runs may be unlike the later ones.
    with Progress(*columns, shown, console=console, transient=True, speed_estimate_period=180) as bar:
        task = bar.add_task("", total=total - kept, latest="")

        def announce(latest: str, amount: float) -> None:
            bar.update(task, advance=amount, latest=latest)

        yield announce


@contextlib.contextmanager
def waited_for(doing: str, wanted: bool) -> Iterator[None]:
    """A spinner for work of which nobody knows how long it takes; nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    if not wanted or not sys.stderr.isatty():
        yield
        return
    with console.status(Text(doing)):
        yield
