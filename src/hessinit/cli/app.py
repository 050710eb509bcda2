"""The commands together, their grouped help, and the entry point."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hessinit._version import __version__
from hessinit.cli.demo import demo
from hessinit.cli.failures import WRONG_USAGE
from hessinit.cli.initialize import initialize
from hessinit.cli.measure import measure, show
from hessinit.cli.problem_file import new
from hessinit.cli.reproduce import reproduce
from hessinit.cli.runs import compare, sweep, track

GROUPS = {
    "Begin": (demo, new),
    "Your network": (measure, initialize, track),
    "Many short trainings": (compare, sweep),
    "The paper": (reproduce,),
    "Saved results": (show,),
}


class GroupedHelp(TyperGroup):
    """Lists the commands under headings."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.list_commands(ctx)))
        for heading, functions in GROUPS.items():
            commands = {function.__name__: self.get_command(ctx, function.__name__) for function in functions}
            with formatter.section(heading):
                formatter.write_dl(
                    [
                        (name.ljust(width), command.get_short_help_str(1000))  # folded, not cut
                        for name, command in commands.items()
                        if command is not None
                    ]
                )


app = typer.Typer(
    name="hessinit",
    cls=GroupedHelp,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: the examples stay as they are written, on any terminal
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for functions in GROUPS.values():
    for function in functions:
        app.command()(function)


def run() -> None:
    """Run the command that was asked for; click ends it quietly where the reader of a pipe has gone."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without ‖ shows a question mark
    try:
        app(prog_name="hessinit")
    except OSError as failure:
        if failure.filename is not None:  # a file's failure; stdout has no name
            raise
        typer.echo(f"Error: the result cannot be printed: {failure.strerror or failure}.", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to flush at exit
        raise SystemExit(WRONG_USAGE) from None


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hessinit {__version__}")
        raise typer.Exit


@app.callback()
def describe(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """How sharp is each layer of a PyTorch network before the first step?

    Which learning rate does that allow, and which initial weights give the sharpness you want? A network is
    given as FILE.py:FUNCTION; the function returns model, loss, batch.

    \b
    Examples:
      hessinit demo                      measure, initialize and train a network on embedded digits
      hessinit new net.py                a file to begin with
      hessinit measure net.py:problem    how sharp is each layer?
      hessinit initialize net.py:problem --lr 0.1
      hessinit track net.py:problem --lr 0.1
    """
