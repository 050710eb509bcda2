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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from hessinit import present
from hessinit.cli.failures import INTERRUPTED, WRONG_USAGE, import_torch, in_options, stop
from hessinit.errors import ConvergenceWarning
from hessinit.present.document import Column, Document, Paragraph, Table
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
    """Send what the user's code prints to stderr, and leave warnings of convergence to the result."""
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


@dataclass(frozen=True)
class Output:
    """The output options of a command; the log of a training is written while it runs.

    A file that cannot be written, or that the command `reads`, is refused before any work is done.
    """

    json: bool = False
    html: Path | None = None
    save: Path | None = None
    picture: Path | None = None
    weights: Path | None = None
    log: Path | None = None
    reads: Path | None = None

    def __post_init__(self) -> None:
        taken = {self.reads and self.reads.resolve(): "the file that this command reads"}
        for option in ("save", "weights", "html", "picture", "log"):
            if (path := getattr(self, option)) is None:
                continue
            target = path.resolve()
            what = f"--{option} {path}"
            if target in taken:
                stop(f"{what} is {taken[target]}; give the name of another.")
            taken[target] = f"the file of --{option}, too"
            if target.exists() and not target.is_file():
                stop(f"{what} is not a file; give the name of a file.")
            if not os.access(target.parent, os.W_OK):
                stop(
                    f"{what} cannot be written: the folder {path.parent} is missing, or read-only for you."
                )
        if self.picture is not None and self.picture.suffix.lower() not in PICTURES:
            stop(f"--picture {self.picture} must end in one of {', '.join(PICTURES)}.")

    def write(self, result: Any, *, before: Any = None, after: str | None = None) -> None:
        """Print the result and write the files; where one of them fails, the others are still written.

        `before` is a result to print first, which JSON contains; next to JSON, `after` goes to
        stderr.
        """
        writes = {
            self.save: lambda path: result.save(path),
            self.weights: lambda path: result.save_weights(path),
            self.html: lambda path: write_page(result, path),
            self.picture: lambda path: draw(result, path),
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
        if self.json:
            if isinstance(result, list):
                sys.stdout.write(
                    json.dumps([one.to_dict() for one in result], allow_nan=False) + "\n"
                )
            else:
                sys.stdout.write(result.to_json())
        else:
            if before is not None:
                print_result(before)
                sys.stdout.write("\n")
            print_result(result)
        sys.stdout.flush()
        if after is not None and self.json:
            typer.echo(after, err=True)
        elif after is not None:
            print_text(in_options(after))


def print_result(result: Any) -> None:
    """Print a result or a document, in colour on a terminal; into a pipe, what print(result) gives."""
    from hessinit.present.terminal import render_text

    document = _in_options(result if isinstance(result, Document) else present.describe(result))
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    sys.stdout.write(render_text(document, color=sys.stdout.isatty() and not plain) + "\n")


def _in_options(document: Document) -> Document:
    """The texts with the options of the command in place of Python's arguments."""

    def reworded(one: Any) -> Any:
        if isinstance(one, Paragraph):
            return replace(one, text=in_options(one.text))
        if isinstance(one, Table):
            return replace(one, columns=list(map(reworded, one.columns)))
        is_text = isinstance(one, Column) and one.wraps
        return replace(one, cells=list(map(in_options, one.cells))) if is_text else one

    sections = [replace(one, blocks=list(map(reworded, one.blocks))) for one in document.sections]
    return replace(document, verdict=list(map(in_options, document.verdict)), sections=sections)


def print_text(text: str) -> None:
    """Print, long lines wrapped between words; a command to copy stays whole."""
    from hessinit.present.terminal import terminal_width

    for line in text.split("\n"):
        is_command = line.startswith(("Next: ", "file:"))
        shown = (
            line if is_command else textwrap.fill(line, terminal_width(), break_on_hyphens=False)
        )
        sys.stdout.write(f"{shown}\n")
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
