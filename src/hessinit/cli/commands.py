"""The commands together, and what they have in common."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hessinit._version import __version__
from hessinit.cli.bash_words import complete_for_bash, is_asked_by_bash
from hessinit.cli.clean_stdout import stdout_kept_clean
from hessinit.cli.compare import compare
from hessinit.cli.demo import demo
from hessinit.cli.grouped_help import GroupedHelp
from hessinit.cli.initialize import initialize
from hessinit.cli.installing import installed_with_care
from hessinit.cli.measure import measure
from hessinit.cli.new import new
from hessinit.cli.printing import print_text, unprinted_explained
from hessinit.cli.reproduce import reproduce
from hessinit.cli.show import show
from hessinit.cli.sweep import sweep
from hessinit.cli.track import track

app = typer.Typer(
    name="hessinit",
    cls=GroupedHelp,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: the examples stay as they are written, on any terminal
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo, new, measure, initialize, track, compare, sweep, reproduce, show):
    app.command()(command)


def run() -> None:
    """Run the command that was asked for, in a process of its own."""
    if is_asked_by_bash():
        sys.stdout.write(complete_for_bash(lambda: app(prog_name="hessinit")) + "\n")
        return
    with stdout_kept_clean(), unprinted_explained(), installed_with_care():
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

    Which learning rate does that allow, and which first weights give the sharpness you want? A network is
    given as FILE.py:FUNCTION; the function returns model, loss, batch.

    \b
    Examples:
      hessinit demo                      the whole story
      hessinit new net.py                a file to begin with
      hessinit measure net.py:problem    how sharp is it?
      hessinit initialize net.py:problem --lr 0.1
      hessinit track net.py:problem --lr 0.1
    """
