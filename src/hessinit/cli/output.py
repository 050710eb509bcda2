"""Where results go: stdout, as a table or as JSON, and files."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import typer

from hessinit.cli.failures import NOT_CONVERGED, WRONG_USE, stop
from hessinit.cli.interrupts import INTERRUPTED, raise_when_interrupted
from hessinit.cli.options import UNREAD_HOME, is_unread_home
from hessinit.cli.printing import print_report, print_text, try_printing

if TYPE_CHECKING:
    from hessinit.results.curvature_report import CurvatureReport

PICTURES = (".png", ".pdf", ".svg")
Write = Callable[[Path], object]


class UndrawableError(Exception):
    """There is no picture of it, and the message says why."""


class Record(Protocol):
    """What every result can do: print as a table, become JSON or a page, be saved."""

    def to_json(self) -> str: ...
    def to_html(self, path: str | os.PathLike[str]) -> None: ...
    def save(self, path: str | os.PathLike[str]) -> None: ...


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
        given = {option: path for option, path in options.items() if path is not None}
        for (one, path), (other, same) in combinations(given.items(), 2):
            if is_same_file(path, same):
                stop(f"{one} and {other} both name {path}; give them different files.")
        for option, path in given.items():
            if reads is not None and is_same_file(path, reads):
                stop(f"{option} {path} is the file that this command reads; give the name of another.")
            check_writable(option, path)
        if self.picture is not None and self.picture.suffix.lower() not in PICTURES:
            stop(f"--picture {self.picture} must end in one of {', '.join(PICTURES)}.")

    def give(
        self,
        record: Record,
        *,
        before: Record | None = None,
        after: str | None = None,
        also: Mapping[Path, Write] | None = None,
    ) -> None:
        """Print the result and write the files: where one of them fails, the others are there all the same.

        `before` is another table to go with it, which JSON has inside; `after` a sentence, which next to JSON
        goes to stderr. `also` are files that the command has options of its own for, and how to write them.
        """
        files: dict[Path, Write] = {}
        if self.save is not None:
            files[self.save] = record.save
        files.update(also or {})
        if self.html is not None:
            files[self.html] = record.to_html
        if self.picture is not None:
            files[self.picture] = lambda path: _draw(record, path)
        try:
            raise_when_interrupted()  # `hessinit show` did nothing until now that would need it
            done = [try_printing(lambda: self._print(record, before, after))]
            if self.json and after is not None:
                typer.echo(after, err=True)
            done += [write_file(path, write) for path, write in files.items()]
        except KeyboardInterrupt:
            typer.echo("Interrupted: not everything was written.", err=True)
            raise typer.Exit(INTERRUPTED) from None
        if not all(done):
            raise typer.Exit(WRONG_USE)

    def _print(self, record: Record, before: Record | None, after: str | None) -> None:
        if self.json:
            sys.stdout.write(record.to_json())
            return
        if before is not None:
            print_report(before)
            print_text("")
        print_report(record)
        if after is not None:
            print_text(after)

    def exit_by(self, report: CurvatureReport) -> None:
        """End with status 1 when the report did not converge."""
        if not report.converged:
            stop(
                f"Not converged: the report marks what did not reach tolerance {report.tolerance:g}.",
                NOT_CONVERGED,
            )


def write_file(path: Path, write: Write) -> bool:
    """Write it whole or not at all, and say so on stderr; whether it could be written."""
    try:
        write(path)
    except OSError as failure:
        typer.echo(f"Error: cannot write {path}: {failure.strerror or failure}.", err=True)
        return False
    except UndrawableError as refusal:
        typer.echo(f"Error: --picture {path} cannot be drawn: {refusal}", err=True)
        return False
    typer.echo(f"Wrote {path}.", err=True)
    return True


def _draw(record: Record, path: Path) -> None:
    try:
        figure = _figure_of(record)
    except ValueError as refusal:  # a reproduction may have no figure
        raise UndrawableError(str(refusal)) from refusal
    from hessinit.results.result import replacing

    content = io.BytesIO()  # on a full disk matplotlib's PDF fails with an AttributeError of its own
    figure.savefig(content, format=path.suffix[1:].lower(), dpi=200)
    with replacing(path) as temporary:
        temporary.write_bytes(content.getvalue())


def _figure_of(record: Record) -> Any:
    from hessinit.results.comparison import Comparison

    if isinstance(record, Comparison):
        from hessinit.present.comparison_figure import draw_comparison

        return draw_comparison(record)
    import matplotlib

    matplotlib.use("Agg")  # into a file: no window, wherever this runs
    return cast("Any", record).plot().figure


def is_same_file(one: Path, other: Path) -> bool:
    """Also by another way to it: a link, a hard link, another spelling."""
    try:
        return one.samefile(other)
    except OSError:  # one of them is not there yet
        return one.resolve() == other.resolve()


def check_writable(option: str, path: Path) -> None:
    """Refuse a file that cannot be written; `option` is how the user named it."""
    folder = path.resolve().parent
    if is_unread_home(path):
        stop(f"{option} {path} {UNREAD_HOME}")
    if path.is_dir():
        stop(f"{option} {path} is a folder; give the name of a file.")
    if path.exists() and not path.is_file():
        stop(f"{option} {path} is there and is not a file; give the name of a file.")
    if not folder.is_dir():
        stop(f"{option} {path} cannot be written: the folder {path.parent} does not exist. Create it first.")
    if not os.access(folder, os.W_OK):
        stop(f"{option} {path} cannot be written: the folder {path.parent} is read-only for you.")
