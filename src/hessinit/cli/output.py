"""Where results go: the terminal, stdout as JSON, files."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import typer

from hessinit.cli.failures import NOT_CONVERGED, stop

if TYPE_CHECKING:
    from hessinit.report import CurvatureReport
    from hessinit.report.reproduction import Reproduction


PICTURES = (".png", ".pdf", ".svg")


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

    def check(self) -> None:
        """Refuse a file that cannot be written, before any work is done."""
        options = {"--html": self.html, "--save": self.save, "--picture": self.picture}
        named: dict[Path, str] = {}
        for option, path in options.items():
            if path is None:
                continue
            other = named.setdefault(path.resolve(), option)
            if other != option:
                stop(f"{other} and {option} both name {options[other]}; give them different files.")
        for option, path in options.items():
            if path is not None:
                check_writable(option, path)
        if self.picture is not None and self.picture.suffix.lower() not in PICTURES:
            stop(f"--picture {self.picture} must end in one of {', '.join(PICTURES)}.")

    def give(self, record: Record, after: str | None = None) -> None:
        """Print the result, then write the files: a full disk does not take the result from the screen.

        `after` is a sentence to go with the table; next to JSON it goes to stderr.
        """
        try:
            if self.json:
                sys.stdout.write(record.to_json())
            else:
                print_report(record)
                if after is not None:
                    print_text(after)
            sys.stdout.flush()
        except BrokenPipeError:
            stop_printing()  # the files are still wanted
        if self.json and after is not None:
            typer.echo(after, err=True)
        self.write_files(record)

    def exit_by(self, report: CurvatureReport) -> None:
        """End with status 1 when the report did not converge."""
        if not report.converged:
            stop(
                f"Not converged: the report marks what did not reach tolerance {report.tolerance:g}.",
                NOT_CONVERGED,
            )

    def write_files(self, record: Record) -> None:
        """Write what was asked for, each file whole or not at all, and say so on stderr."""
        if self.html is not None:
            _write(self.html, record.to_html)
        if self.save is not None:
            _write(self.save, record.save)
        if self.picture is not None:
            _write(self.picture, lambda path: _draw(record, path))


def print_report(record: Record) -> None:
    """Print in colour and as wide as the terminal is; into a pipe, what print(record) gives."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        try:
            console.print(record)
        except SystemExit:  # what rich makes of a reader that has gone
            raise BrokenPipeError from None
    else:
        sys.stdout.write(f"{record}\n")


def print_reports(records: Sequence[Reproduction]) -> None:
    """One after the other, and what they say together."""
    for number, record in enumerate(records):
        sys.stdout.write("\n" if number else "")
        print_report(record)
    if len(records) > 1:
        from hessinit.present.reproduction_summary import summarize

        print_text(f"\n{summarize(records)}")


def print_text(text: str) -> None:
    """Print on stdout, long lines wrapped between words to the width that a report has.

    A command to go on with stays whole, to be copied.
    """
    from hessinit.present.grid import WIDTH_WITHOUT_TERMINAL

    width = shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 24)).columns
    for line in text.split("\n"):
        is_command = line.startswith("Next: ")
        shown = line if is_command else textwrap.fill(line, width, break_on_hyphens=False)
        sys.stdout.write(f"{shown}\n")


def stop_printing() -> None:
    """Whoever read has gone, as `| head -1` does; Python would complain once more when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _write(path: Path, write: Callable[[Path], None]) -> None:
    try:
        write(path)
    except OSError as failure:
        stop(f"cannot write {path}: {failure}.")
    typer.echo(f"Wrote {path}.", err=True)


def _draw(record: Record, path: Path) -> None:
    try:
        figure = _figure_of(record)
    except ValueError as refusal:  # a reproduction may have no figure
        stop(f"--picture {path} cannot be drawn: {refusal}")
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:  # whole or not at all, like the other files
        figure.savefig(temporary, format=path.suffix[1:].lower(), dpi=200)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _figure_of(record: Record) -> Any:
    from hessinit.report.comparison import Comparison

    if isinstance(record, Comparison):
        from hessinit.present.comparison_figure import draw_comparison

        return draw_comparison(record)
    import matplotlib

    matplotlib.use("Agg")  # into a file: no window, wherever this runs
    return cast("Any", record).plot().figure


def check_writable(option: str, path: Path) -> None:
    """Refuse a file that cannot be written; `option` is how the user named it."""
    folder = path.resolve().parent
    if path.is_dir():
        stop(f"{option} {path} is a folder; give the name of a file.")
    if path.exists() and not path.is_file():
        stop(f"{option} {path} is there and is not a file; give the name of a file.")
    if not folder.is_dir():
        stop(f"{option} {path} cannot be written: the folder {path.parent} does not exist. Create it first.")
    if not os.access(folder, os.W_OK):
        stop(f"{option} {path} cannot be written: the folder {path.parent} is read-only for you.")
