"""Where results go: the terminal, stdout as JSON, files."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer

from hessinit.cli.failures import NOT_CONVERGED, stop

if TYPE_CHECKING:
    from hessinit.report import CurvatureReport
    from hessinit.report.comparison import Comparison
    from hessinit.report.reproduction import Reproduction


PICTURES = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class Output:
    """The output options of a command."""

    json: bool = False
    html: Path | None = None
    save: Path | None = None
    picture: Path | None = None  # of a comparison

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
                _check_writable(option, path)
        if self.picture is not None and self.picture.suffix.lower() not in PICTURES:
            stop(f"--picture {self.picture} must end in one of {', '.join(PICTURES)}.")

    def give(self, report: CurvatureReport | Comparison | Reproduction) -> None:
        """Print the report, then write the files: a full disk does not take the result from the screen."""
        if self.json:
            sys.stdout.write(report.to_json())
        else:
            print_report(report)
        sys.stdout.flush()
        self.write_files(report)

    def exit_by(self, report: CurvatureReport) -> None:
        """End with status 1 when the report did not converge."""
        if not report.converged:
            stop(
                f"Not converged: the report marks what did not reach tolerance {report.tolerance:g}.",
                NOT_CONVERGED,
            )

    def write_files(self, report: CurvatureReport | Comparison | Reproduction) -> None:
        """Write what was asked for, each file whole or not at all, and say so on stderr."""

        def draw(path: Path) -> None:
            _draw(cast("Comparison", report), path)

        for path, write in ((self.html, report.to_html), (self.save, report.save), (self.picture, draw)):
            if path is None:
                continue
            try:
                write(path)
            except OSError as failure:
                stop(f"cannot write {path}: {failure}.")
            typer.echo(f"Wrote {path}.", err=True)


def print_report(report: CurvatureReport | Comparison | Reproduction) -> None:
    """Print in colour and as wide as the terminal is; into a pipe, what print(report) gives."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        console.print(report)
    else:
        sys.stdout.write(f"{report}\n")


def print_reports(records: Sequence[Reproduction]) -> None:
    """One after the other, and what they say together."""
    for number, record in enumerate(records):
        sys.stdout.write("\n" if number else "")
        print_report(record)
    if len(records) > 1:
        from hessinit.present.reproduction_summary import summarize

        print_text(f"\n{summarize(records)}")


def print_text(text: str) -> None:
    """Print on stdout, long lines wrapped between words to the width that a report has."""
    from hessinit.present.grid import WIDTH_WITHOUT_TERMINAL

    width = shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 24)).columns
    for line in text.split("\n"):
        sys.stdout.write(textwrap.fill(line, width, break_on_hyphens=False) + "\n")


def _draw(comparison: Comparison, path: Path) -> None:
    from hessinit.present.comparison_figure import draw_comparison

    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:  # whole or not at all, like the other files
        draw_comparison(comparison).savefig(temporary, format=path.suffix[1:].lower(), dpi=200)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _check_writable(option: str, path: Path) -> None:
    folder = path.resolve().parent
    if path.is_dir():
        stop(f"{option} {path} is a folder; give the name of a file.")
    if path.exists() and not path.is_file():
        stop(f"{option} {path} is there and is not a file; give the name of a file.")
    if not folder.is_dir():
        stop(f"{option} {path} cannot be written: the folder {path.parent} does not exist. Create it first.")
    if not os.access(folder, os.W_OK):
        stop(f"{option} {path} cannot be written: the folder {path.parent} is read-only for you.")
