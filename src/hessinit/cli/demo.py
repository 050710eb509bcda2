"""`hessinit demo`: the whole story on the embedded digits, with a page and a picture."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hessinit.cli.calling import called_as
from hessinit.cli.failures import WRONG_USE, failures_explained, stop
from hessinit.cli.interrupts import interruption_explained, raise_when_interrupted
from hessinit.cli.options import LARGEST_SEED, check_rate, read_folder
from hessinit.cli.printing import open_console, print_report, print_text, try_printing
from hessinit.cli.progress import working

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hessinit.present.demonstration import Story, Try
    from hessinit.results.curvature_report import CurvatureReport
    from hessinit.results.initialization import Initialization
    from hessinit.results.track_record import Tracking

FOLDER = Path("demo-output")
PAGE, PICTURE = "demo.html", "curves.png"
KIND = "hessinit demonstration"


def demo(
    lr: Annotated[
        float | None,
        typer.Option(callback=check_rate, metavar="X", help="Learning rate of both.  [default: 0.3]"),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, metavar="N", help="Seed of weights and mini-batches.")
    ] = 0,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder",
            parser=read_folder,
            metavar="DIR",
            help="Where the page and the picture go.  [default: demo-output]",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, and nothing else; files only with --folder.")
    ] = False,
) -> None:
    """Start a deep network twice, train it twice, on the embedded digits.

    Once as PyTorch starts it, once with weights whose curvature fits the learning rate.

    \b
    Examples:
      hessinit demo
      hessinit demo --lr 0.03 --seed 1
      hessinit demo --json --folder results
    """
    target = folder if folder is not None else None if as_json else FOLDER
    if target is not None:
        _check_folder(target)
    started = time.perf_counter()
    with interruption_explained("the demo"), failures_explained("the demo", "running"):
        telling = _Telling(lr, seed, silent=as_json)
        telling.measure()
        telling.initialize()
        telling.train()
        telling.try_other_seeds()
        page, picture = telling.draw() if target is not None else ("", b"")
        if target is not None:
            _write(target, page, picture)
    printed = telling.printed
    if as_json:
        text = json.dumps(telling.to_dict(), indent=2, allow_nan=False) + "\n"
        printed = try_printing(lambda: sys.stdout.write(text))
    if target is not None:
        telling.say_where(target, time.perf_counter() - started)
    if not (printed and telling.printed):
        raise typer.Exit(WRONG_USE)


class _Telling:
    """The story, part by part: each is printed when it is known."""

    report: CurvatureReport
    initialization: Initialization
    trackings: list[tuple[str, Tracking]]
    story: Story

    def __init__(self, lr: float | None, seed: int, silent: bool) -> None:
        self.seed, self.silent, self.printed = seed, silent, True
        with working("Loading torch …"):
            import torch

            from hessinit.demo import network, trying

            raise_when_interrupted()
            # So small a network gains nothing from threads, and on a busy machine they wait for each other.
            torch.set_num_threads(1)
        self._trying = trying
        self.lr = network.LEARNING_RATE if lr is None else lr
        self._tries: list[Try] = []

    def measure(self) -> None:
        from hessinit.demo.network import EXAMPLES, problem
        from hessinit.measurement.measure import measure

        with working(f"Measuring the network on {EXAMPLES} digits …"):
            self.report = measure(*problem(self.seed), seed=self.seed)
        self._say(
            f"1. Ten dense layers with tanh, as PyTorch starts them, on {EXAMPLES} real handwritten digits. "
            "‖H‖ is how sharply the loss bends with a layer's weights.\n"
        )
        self._print(lambda: print_report(self.report))

    def initialize(self) -> None:
        with working(f"Finding weights for lr = {self.lr:g} …"):
            self._ours, made = self._trying.prepare("hessinit", self.lr, self.seed)
        assert made is not None
        self.initialization = made
        self._say(f"\n2. New weights, scaled until the curvature fits lr = {self.lr:g}.\n")
        self._print(lambda: print_report(made))

    def train(self) -> None:
        trying, done = self._trying, []
        theirs, _ = trying.prepare("default", self.lr, self.seed)
        for start, model in (("default", theirs), ("hessinit", self._ours)):
            with working(f"Training from {start}: {trying.STEPS} steps …"):
                done.append(trying.train(model, start, self.lr, self.seed, trying.TRACKED_EVERY))
        self._tries += [tried for _, tried in done]
        self.trackings = [(tracking.name, tracking) for tracking, _ in done]
        self.story = trying.gather(self._tries, self.lr, self.seed)
        self._say(
            f"\n3. Both trained alike: {self.story.steps} steps of plain SGD at lr = {self.lr:g}, batches of "
            f"{self.story.batch_size} out of {self.story.trained_on:,} digits; the other "
            f"{self.story.held_out} are held out, and the last column says how many of them are read right.\n"
        )
        from hessinit.present.demonstration_text import blocks_for, pair_renderables

        blocks = blocks_for(sys.stdout.encoding)
        trackings = [tracking for _, tracking in self.trackings]
        self._show(lambda width: pair_renderables(self.story, trackings, width, blocks))

    def try_other_seeds(self) -> None:
        from hessinit.present.demonstration_text import seeds_renderables

        trying = self._trying
        with working(f"The same with {trying.SEEDS} seeds, and from two more starts …"):
            self._tries += trying.try_others(self._tries, self.lr, self.seed)
        self.story = trying.gather(self._tries, self.lr, self.seed)
        self._say("\n4. Is it luck? The same with other seeds, and two well-known starts beside them.\n")
        self._show(lambda width: seeds_renderables(self.story, width))

    def draw(self) -> tuple[str, bytes]:
        with working("Drawing …"):
            from hessinit.present.demonstration_figure import demonstration_png
            from hessinit.present.page.demonstration import demonstration_page
            from hessinit.present.page.render import render_page

            page = demonstration_page(self.initialization, self.trackings, self.story)
            return render_page(page), demonstration_png(self.trackings, self.lr)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "schema": 1,
            **{key: value for key, value in self.story.to_dict().items() if key != "tries"},
            "before": self.report.to_dict(),
            "after": None if self.initialization.after is None else self.initialization.after.to_dict(),
            "initialization": self.initialization.to_dict(),
            "trackings": {name: tracking.to_dict() for name, tracking in self.trackings},
            "tries": self.story.to_dict()["tries"],
        }

    def say_where(self, folder: Path, seconds: float) -> None:
        page, picture = folder / PAGE, folder / PICTURE
        if self.silent:
            typer.echo(f"Wrote {page} and {picture}.", err=True)
            return
        command = called_as()
        self._say(
            f"\nLook at {page} (a page that opens in any browser) and at {picture}:\n"
            f"{page.resolve().as_uri()}\n\n"
            f"Another rate:      {command} demo --lr 0.03\n"
            f"Your own network:  {command} new problem.py\n"
            f"                   {command} measure problem.py:problem --html report.html\n\n"
            f"All of it in {seconds:.0f} s."
        )

    def _say(self, text: str) -> None:
        self._print(lambda: print_text(text))

    def _print(self, write: Callable[[], None]) -> None:
        """Part by part, at once; when the reader has gone, the files are still wanted."""
        if self.silent:
            return

        def write_to_a_reader() -> None:
            try:
                write()
                sys.stdout.flush()
            except BrokenPipeError:
                self.silent = True
                raise

        self.printed &= try_printing(write_to_a_reader)
        self.silent |= not self.printed

    def _show(self, parts_for: Callable[[int], Iterable[RenderableType]]) -> None:
        self._print(lambda: _print_parts(parts_for))


def _print_parts(parts_for: Callable[[int], Iterable[RenderableType]]) -> None:
    """In colour on a terminal, as plain text into a pipe."""
    from hessinit.present.grid import render, terminal_width

    console = open_console()
    if console.is_terminal:
        for part in parts_for(console.width):
            console.print(part)
    else:
        width = terminal_width()
        sys.stdout.write(render(parts_for(width), width) + "\n")


def _check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written to, before any work is done."""
    if folder.exists() and not folder.is_dir():
        stop(f"--folder {folder} is there and is not a folder; give another name.")
    for name in (PAGE, PICTURE):
        if (folder / name).is_dir():
            stop(f"--folder {folder} holds a folder called {name}, where a file has to go; remove it.")
    there = folder if folder.is_dir() else folder.absolute().parent
    if not there.is_dir():
        stop(f"--folder {folder} cannot be made: {folder.parent} does not exist. Create it first.")
    if not os.access(there, os.W_OK):
        stop(f"--folder {folder} cannot be written: {there} is read-only for you.")


def _write(folder: Path, page: str, picture: bytes) -> None:
    """Both files, each whole or not at all."""
    from hessinit.results.result import replacing, write_text

    try:
        folder.mkdir(exist_ok=True)
        with replacing(folder / PICTURE) as temporary:
            temporary.write_bytes(picture)
            write_text(folder / PAGE, page)
    except OSError as failure:
        stop(f"cannot write to {folder}: {failure.strerror or failure}.")
