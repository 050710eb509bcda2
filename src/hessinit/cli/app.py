"""The commands together, and what they have in common."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hessinit._version import __version__
from hessinit.cli.compare import compare
from hessinit.cli.demo import demo
from hessinit.cli.measure import measure
from hessinit.cli.output import print_text
from hessinit.cli.reproduce import reproduce
from hessinit.cli.show import show
from hessinit.cli.sweep import sweep

app = typer.Typer(
    name="hessinit",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: the examples stay as they are written, on any terminal
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo, measure, compare, sweep, reproduce, show):
    app.command()(command)


def main() -> None:
    """Run the command line: what the `hessinit` script calls."""
    for stream in (sys.stdout, sys.stderr):
        # An old terminal without ‖ shows a question mark; it must not end the command.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    app(prog_name="hessinit")


def _print_version(wanted: bool) -> None:
    if wanted:
        print_text(f"hessinit {__version__}")
        raise typer.Exit


@app.callback()
def describe(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """How sharp is each layer of a PyTorch network before the first step?

    And which learning rate does that allow? hessinit measures it; the network stays as it was.

    \b
    Examples:
      hessinit demo                      a small network
      hessinit measure net.py:problem    your network
      hessinit compare net.py:problem    which start is best
      hessinit sweep net.py:problem      the size of weights
      hessinit reproduce table-4         the paper's numbers
      hessinit show report.json          a saved result
    """
