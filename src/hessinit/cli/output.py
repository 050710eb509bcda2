"""Where results go: stdout, as a table or as JSON, and files; progress on stderr."""

from __future__ import annotations

import io
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import typer

from hessinit.cli.failures import WRONG_USAGE, interruption_explained, raise_when_interrupted, stop
from hessinit.errors import ConvergenceWarning

PICTURES = (".png", ".pdf", ".svg")
Write = Callable[[Path], object]


@contextmanager
def progress(doing: str) -> Iterator[None]:
    """A spinner while someone watches. What the user's code prints goes to stderr: stdout is for results."""
    from hessinit.training.workers import spinner

    with spinner(doing, wanted=True), stdout_for_results():
        yield


@contextmanager
def stdout_for_results() -> Iterator[None]:
    """Send what the user's code prints to stderr, and leave warnings of convergence to the result."""
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


@dataclass(frozen=True)
class Output:
    """The output options of a command."""

    json: bool = False
    html: Path | None = None
    save: Path | None = None
    picture: Path | None = None

    def check(self, reads: Path | None = None, more: Mapping[str, Path | None] | None = None) -> None:
        """Refuse a file that cannot be written, or that the command `reads`, before any work is done.

        `more` are files that the command has options of its own for.
        """
        options = {"--save": self.save, "--html": self.html, "--picture": self.picture, **(more or {})}
        files = {option: path for option, path in options.items() if path is not None}
        for (one, path), (other, same) in combinations(files.items(), 2):
            if _is_same_file(path, same):
                stop(f"{one} and {other} both name {path}; give them different files.")
        for option, path in files.items():
            if reads is not None and _is_same_file(path, reads):
                stop(f"{option} {path} is the file that this command reads; give the name of another.")
            _check_writable(option, path)
        if self.picture is not None and self.picture.suffix.lower() not in PICTURES:
            stop(f"--picture {self.picture} must end in one of {', '.join(PICTURES)}.")

    def write(
        self,
        result: Any,
        *,
        before: Any = None,
        after: str | None = None,
        also: Mapping[Path, Write] | None = None,
    ) -> None:
        """Print the result and write the files; where one of them fails, the others are still written.

        `before` is another result to print first, which JSON contains; `after` a sentence, which next to JSON
        goes to stderr. `also` are files that the command has options of its own for, and how to write them.
        """
        files: dict[Path, Write] = {}
        if self.save is not None:
            files[self.save] = result.save
        files.update(also or {})
        if self.html is not None:
            files[self.html] = lambda path: write_page(result, path)
        if self.picture is not None:
            files[self.picture] = lambda path: draw(result, path)
        with interruption_explained("not everything was written."):
            raise_when_interrupted()
            try:
                self._print(result, before, after)
            finally:
                done = [write_file(path, write) for path, write in files.items()]
        if not all(done):
            raise typer.Exit(WRONG_USAGE)

    def _print(self, result: Any, before: Any, after: str | None) -> None:
        if self.json:
            sys.stdout.write(_to_json(result))
            if after is not None:
                typer.echo(after, err=True)
        else:
            if before is not None:
                print_result(before)
                sys.stdout.write("\n")
            print_result(result)
            if after is not None:
                print_text(after)
        sys.stdout.flush()


def print_result(result: Any) -> None:
    """Print a result or a document, in colour on a terminal; into a pipe, what print(result) gives."""
    from hessinit.present import describe
    from hessinit.present.document import Document
    from hessinit.present.terminal import render_text

    document = result if isinstance(result, Document) else describe(result)
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    color = sys.stdout.isatty() and not plain
    sys.stdout.write(render_text(document, color=color) + "\n")


def print_text(text: str) -> None:
    """Print, long lines wrapped between words; a command to copy stays whole."""
    from hessinit.present.terminal import terminal_width

    for line in text.split("\n"):
        is_command = line.startswith(("Next: ", "file:"))
        shown = line if is_command else textwrap.fill(line, terminal_width(), break_on_hyphens=False)
        sys.stdout.write(f"{shown}\n")
    sys.stdout.flush()


def write_file(path: Path, write: Write) -> bool:
    """Write it whole or not at all, and say so on stderr; returns whether it could be written."""
    try:
        write(path)
    except OSError as failure:
        typer.echo(f"Error: cannot write {path}: {failure.strerror or failure}.", err=True)
        return False
    except ValueError as refusal:  # a reproduction may have no figure
        typer.echo(f"Error: {path} cannot be drawn: {refusal}", err=True)
        return False
    typer.echo(f"Wrote {path}.", err=True)
    return True


def draw(result: Any, path: Path) -> None:
    """Write the result's figure into a picture file."""
    import matplotlib

    matplotlib.use("Agg")  # into a file: no window
    from hessinit import present
    from hessinit.results.result import replacing

    content = io.BytesIO()  # on a full disk matplotlib's PDF fails with an AttributeError of its own
    present.to_figure(result).savefig(content, format=path.suffix[1:].lower(), dpi=200)
    with replacing(path) as temporary:
        temporary.write_bytes(content.getvalue())


def _to_json(result: Any) -> str:
    if not isinstance(result, list):
        return str(result.to_json())
    import json

    return json.dumps([one.to_dict() for one in result], allow_nan=False) + "\n"


def write_page(result: Any, path: Path) -> None:
    """Write the result's web page."""
    from hessinit import present
    from hessinit.results.result import write_text

    write_text(path, present.to_page(result))


def _is_same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one of them does not exist yet
        return one.resolve() == other.resolve()


def _check_writable(option: str, path: Path) -> None:
    folder = path.resolve().parent
    if path.exists() and not path.is_file():
        stop(f"{option} {path} is not a file; give the name of a file.")
    if not folder.is_dir():
        stop(f"{option} {path} cannot be written: the folder {path.parent} does not exist. Create it first.")
    if not os.access(folder, os.W_OK):
        stop(f"{option} {path} cannot be written: the folder {path.parent} is read-only for you.")
