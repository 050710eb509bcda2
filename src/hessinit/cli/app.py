"""The commands together, and the entry point."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from hessinit._version import __version__
from hessinit.cli.demo import demo
from hessinit.cli.failures import WRONG_USAGE
from hessinit.cli.measure import advise, initialize, measure, show
from hessinit.cli.problem_file import new
from hessinit.cli.runs import compare, reproduce, sweep, track

app = typer.Typer(
    name="hessinit",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: the examples stay as they are written, on any terminal
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for function in (demo, new, measure, advise, initialize, track, compare, sweep, reproduce, show):
    app.command()(function)


def main() -> None:
    """Run the command; click ends it quietly where the reader of a pipe has gone."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without ‖ shows a question mark
    try:
        app(prog_name="hessinit")
    except OSError as failure:
        # On leaving, Python tries a full stdout once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        typer.echo(
            f"Error: {failure.filename or 'the output'} cannot be read or written: "
            f"{failure.strerror or failure}.",
            err=True,
        )
        sys.exit(WRONG_USAGE)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hessinit {__version__}")
        raise typer.Exit


@app.callback()
def describe(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """How sharp is each layer of a PyTorch network before the first step?

    Which learning rate does that allow, and which initial weights give the sharpness you want? A
    network is given as FILE.py:FUNCTION; the function returns model, loss, batch.

    \b
    Examples:
      hessinit demo                      measure, initialize and train a network on embedded digits
      hessinit new net.py                a file to begin with
      hessinit measure net.py:problem    how sharp is each layer?
      hessinit advise net.py:problem --optimizer adamw
      hessinit initialize net.py:problem --lr 0.1
      hessinit track net.py:problem --lr 0.1
    """
