"""Results on stdout: as wide as it is, in colour where someone looks, and what if it takes nothing."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from hessinit.cli.clean_stdout import stop_printing
from hessinit.cli.failures import WRONG_USE

if TYPE_CHECKING:
    from rich.console import Console

    from hessinit.results.reproduction import Reproduction


def open_console() -> Console:
    """Rich on stdout, as wide as our own sentences: it takes every dumb terminal for one of 80 columns."""
    from rich.console import Console

    from hessinit.present.grid import terminal_width

    return Console(width=terminal_width(), height=25)


def print_report(record: object) -> None:
    """Print in colour and as wide as the terminal is; into a pipe, what print(record) gives."""
    console = open_console()
    if console.is_terminal:
        try:
            console.print(record)
        except SystemExit:  # what rich makes of a reader that has gone
            raise BrokenPipeError from None
    else:
        sys.stdout.write(f"{record}\n")


def print_records(records: Sequence[Reproduction], as_json: bool) -> None:
    """A JSON list, or one after the other and what they say together."""
    if as_json:
        sys.stdout.write(json.dumps([each.to_dict() for each in records], allow_nan=False) + "\n")
        return
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
    from hessinit.present.grid import terminal_width

    width = terminal_width()
    for line in text.split("\n"):
        is_command = line.startswith("Next: ")
        shown = line if is_command else textwrap.fill(line, width, break_on_hyphens=False)
        sys.stdout.write(f"{shown}\n")


def try_printing(write: Callable[[], object]) -> bool:
    """Print at once; where stdout does not take it, say so, and let the command go on to its files.

    A reader that has gone, as `| head -1` does, has what it wanted.
    """
    try:
        write()
        sys.stdout.flush()
    except BrokenPipeError:
        stop_printing()
    except OSError as failure:
        stop_printing()
        _say_unprinted(failure)
        return False
    return True


@contextmanager
def unprinted_explained() -> Iterator[None]:
    """The same for what is printed without further care, such as help."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        stop_printing()
    except OSError as failure:
        if failure.filename is not None:  # some file's failure; stdout has no name
            raise
        stop_printing()
        _say_unprinted(failure)
        raise SystemExit(WRONG_USE) from None


def _say_unprinted(failure: OSError) -> None:
    typer.echo(f"Error: the result cannot be printed: {failure.strerror or failure}.", err=True)
