"""Where results go: stdout, as a table or as JSON, and files; progress on stderr."""

from __future__ import annotations

import io
import json
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from hessinit import present
from hessinit.cli.failures import INTERRUPTED, WRONG_USAGE, import_torch, stop
from hessinit.cli.options import ResultOptions
from hessinit.errors import ConvergenceWarning
from hessinit.present.document import Document
from hessinit.progress import OnProgress, progress_bar
from hessinit.results.result import replacing, write_text

PICTURES = (".png", ".pdf", ".svg")


@contextmanager
def progress(label: str) -> Iterator[OnProgress]:
    """Show a bar, and yield the function that it gets the progress from.

    What the user's code prints goes to stderr: stdout is for results.
    """
    import_torch()
    with progress_bar(label) as report, stdout_for_results():
        yield report


@contextmanager
def stdout_for_results() -> Iterator[None]:
    """Send what the user's code prints to stderr, and leave convergence warnings to the result."""
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


@dataclass(frozen=True)
class Output:
    """The output options of a command; the log of a training is written while it runs.

    A file that cannot be written, or that the command `reads`, is refused before any work is done.
    """

    options: ResultOptions = field(default_factory=ResultOptions)
    weights: Path | None = None
    log: Path | None = None
    reads: Path | None = None

    def __post_init__(self) -> None:
        paths = {
            "save": self.options.save,
            "weights": self.weights,
            "html": self.options.html,
            "picture": self.options.picture,
            "log": self.log,
        }
        taken = {self.reads and self.reads.resolve(): "the file that this command reads"}
        for option, path in paths.items():
            if path is None:
                continue
            target = path.resolve()
            named = f"--{option} {path}"
            if target in taken:
                stop(f"{named} is {taken[target]}; give the name of another.")
            taken[target] = f"the file of --{option}, too"
            if target.exists() and not target.is_file():
                stop(f"{named} is not a file; give the name of a file.")
            if not os.access(target.parent, os.W_OK):
                stop(
                    f"{named} cannot be written: the folder {path.parent} is missing, or read-only "
                    "for you."
                )
        picture = self.options.picture
        if picture is not None and picture.suffix.lower() not in PICTURES:
            stop(f"--picture {picture} must end in one of {', '.join(PICTURES)}.")

    def write(self, result: Any, *, before: Any = None, after: str | None = None) -> None:
        """Print the result and write the files; all others are still written where one fails.

        `before` is a result to print first, which JSON contains; next to JSON, `after` goes to
        stderr.
        """
        writes = {
            self.options.save: lambda path: result.save(path),
            self.weights: lambda path: result.save_weights(path),
            self.options.html: lambda path: write_page(result, path),
            self.options.picture: lambda path: draw(result, path),
        }
        try:
            try:
                self._print(result, before, after)
            finally:
                done = [
                    write_file(path, write) for path, write in writes.items() if path is not None
                ]
        except KeyboardInterrupt:
            stop("Interrupted: not everything was written.", INTERRUPTED)
        if not all(done):
            raise typer.Exit(WRONG_USAGE)

    def _print(self, result: Any, before: Any, after: str | None) -> None:
        if self.options.as_json and isinstance(result, list):
            records = [record.to_dict() for record in result]
            sys.stdout.write(json.dumps(records, allow_nan=False) + "\n")
        elif self.options.as_json:
            sys.stdout.write(result.to_json())
        else:
            if before is not None:
                print_result(before)
                sys.stdout.write("\n")
            print_result(result)
        sys.stdout.flush()
        if after is not None and self.options.as_json:
            typer.echo(after, err=True)
        elif after is not None:
            print_text(after)


def print_result(result: Any) -> None:
    """Print a result or a document: in colour on a terminal, as print(result) does into a pipe."""
    from hessinit.present.terminal import render_text

    document = result if isinstance(result, Document) else present.describe(result)
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    sys.stdout.write(render_text(document, color=sys.stdout.isatty() and not plain) + "\n")


def print_text(text: str) -> None:
    """Print, long lines wrapped between words; a command to copy stays whole."""
    from hessinit.present.terminal import terminal_width

    for line in text.split("\n"):
        if not line.startswith(("Next: ", "file:")):
            line = textwrap.fill(line, terminal_width(), break_on_hyphens=False)
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def write_file(path: Path, write: Callable[[Path], object]) -> bool:
    """Write it whole or not at all, and say so on stderr; returns whether it could be written."""
    try:
        write(path)
    except Exception as failure:  # a full disk: safetensors and matplotlib have errors of their own
        reason = str(getattr(failure, "strerror", None) or failure).rstrip(".")
        typer.echo(f"Error: cannot write {path}: {reason}.", err=True)
        return False
    typer.echo(f"Wrote {path}.", err=True)
    return True


def draw(result: Any, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # into a file: no window
    drawn = io.BytesIO()
    present.to_figure(result).savefig(drawn, format=path.suffix[1:].lower(), dpi=200)
    with replacing(path) as temporary:
        Path(temporary).write_bytes(drawn.getvalue())


def write_page(result: Any, path: Path) -> None:
    write_text(path, present.to_page(result))
