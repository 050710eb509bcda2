"""How far a comparison is, on stderr, while someone watches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from hessinit.report.run import Run

Announce = Callable[[Run], None]


@contextlib.contextmanager
def watched(total: int, kept: int, wanted: bool) -> Iterator[Announce]:
    """A bar over `total` runs, of which `kept` were there before; nothing where stderr is no terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not wanted or not console.is_terminal or kept == total:
        yield lambda run: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("Training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    shown = TextColumn("{task.fields[latest]}", markup=False)
    with Progress(*columns, shown, console=console, transient=True) as bar:
        task = bar.add_task("", total=total - kept, latest="")

        def announce(run: Run) -> None:
            latest = f"{run.start}, rate {run.learning_rate:g}: loss {run.final_loss:.3g}"
            bar.update(task, advance=1, latest=latest)

        yield announce
