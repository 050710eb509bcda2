"""How far a call is: the state that a function of the user receives, and the bar on a terminal.

It needs no torch, so that the command line can show something before torch is imported.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hessinit.errors import ProblemError, check_callable


@dataclass(frozen=True)
class Pace:
    """How often and when progress is reported, in seconds."""

    quiet: float = 2.0  # a measurement that is shorter reports nothing
    between: float = 0.25  # from one state of a measurement to the next
    announced: float = 10.0  # work that is expected to take longer is announced


PACE = Pace()


@dataclass(frozen=True)
class ProgressState:
    """How far a call is: `done` of `total` layers, training steps or runs, as `unit` says.

    `name` is what it works on: a layer, "network" or "spectrum", a trial, or the last run; "" at
    the end. `products` counts those with curvature matrices. The first states know little about
    `seconds_left`.

    >>> print(ProgressState("layers", done=3, total=12, seconds=4.0, seconds_left=8.0, name="fc3"))
    3 of 12 layers, 8 seconds left: fc3
    """

    unit: str
    done: int
    total: int
    seconds: float
    seconds_left: float
    name: str = ""
    products: int = 0

    def __str__(self) -> str:
        parts = [f"{self.done} of {self.total} {self.unit}"]
        if self.products:
            parts.append(f"{self.products} products")
        parts.append(f"{in_words(self.seconds_left)} left")
        return ": ".join(filter(None, (", ".join(parts), self.name)))


OnProgress = Callable[[ProgressState], object]


class StepCounter:
    """Reports every step; those to come are expected to take as long as those so far."""

    def __init__(
        self, unit: str, report: OnProgress | None = None, total: int = 0, done: int = 0
    ) -> None:
        self._unit = unit
        self._report = report
        self._total = total
        self._done = done
        self._counted = 0
        self._started = time.perf_counter()

    def expect(self, steps: int) -> None:
        """Add steps to those that are to come."""
        self._total += steps

    def step(self, name: str) -> None:
        """Report that another step is done."""
        self._done += 1
        self._counted += 1
        self._total = max(self._done, self._total)
        if self._report is None:
            return
        seconds = time.perf_counter() - self._started
        to_come = seconds / self._counted * (self._total - self._done)
        self._report(ProgressState(self._unit, self._done, self._total, seconds, to_come, name))


def check_progress(progress: object) -> None:
    """Raise ProblemError if `progress` is neither a switch nor a function of a `ProgressState`."""
    if callable(progress):
        check_callable("progress", progress, "progress(state)")
    elif not isinstance(progress, bool):
        raise ProblemError(
            f"progress={progress!r} must be True, False or a function, callable as progress(state)."
        )


@contextlib.contextmanager
def report_progress(progress: bool | OnProgress, label: str) -> Iterator[OnProgress]:
    """Yield a function that reports progress to the user's own one, to a bar, or to nobody."""
    if callable(progress):
        yield progress
    elif progress:
        with progress_bar(label) as report:
            yield report
    else:
        yield lambda state: None


@contextlib.contextmanager
def progress_bar(label: str) -> Iterator[OnProgress]:
    """Show a bar by time on stderr if that is a terminal; it pulses until the first report."""
    # Not rich's is_terminal: FORCE_COLOR asks for colours, not for a bar in a file.
    if not sys.stderr.isatty():
        yield lambda state: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.TextColumn("{task.fields[state]}", markup=False),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None, state="")

        def report(state: ProgressState) -> None:
            total = state.seconds + state.seconds_left
            bar.update(task, completed=state.seconds, total=total, state=str(state))

        yield report


def announce(seconds: float, shorter: str) -> None:
    """Say on stderr how long work is expected to take if that is long, and what shortens it."""
    if seconds >= PACE.announced:
        sys.stderr.write(f"This takes about {in_words(seconds)}. {shorter}.\n")


def in_words(seconds: float) -> str:
    """Return a duration in a unit that suits it.

    >>> in_words(12.4), in_words(200)
    ('12 seconds', '3 minutes')
    """
    for size, unit in ((3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
