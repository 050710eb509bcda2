"""What `hessinit compare` and `hessinit sweep` share: the problem is loaded, trained, and shown."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

import typer

from hessinit.cli.failures import failures_explained
from hessinit.cli.interrupts import INTERRUPTED, raise_when_interrupted
from hessinit.cli.loading import name_unused
from hessinit.cli.output import Output
from hessinit.cli.progress import working
from hessinit.cli.wording import in_words_of, translate
from hessinit.errors import ConvergenceWarning
from hessinit.problem_file import file_read_for, find_problem

if TYPE_CHECKING:
    from hessinit.results.comparison import Comparison

# The library's arguments, as they are called here.
OPTIONS = {
    "schemes": "--start",
    "learning_rates": "--lr",
    "learning_rate": "--lr",
    "stds": "--std",
    "batch_size": "--batch-size",
    "folder": "--folder",
    "workers": "--workers",
    "steps": "--steps",
    "seeds": "--seeds",
    "warmup": "--warmup",
    "optimizer": "--optimizer",
    "device": "--device",
    "layers": "--layers",
}


def conduct(
    problem: str,
    load_verb: Callable[[dict[str, Any]], Callable[..., Comparison]],
    output: Output,
    **options: Any,
) -> None:
    """Load the problem, run the verb with the options that were given, and show what it found.

    `load_verb` gets these options, to refuse what it can before the user's file is run.
    """
    output.check(reads=file_read_for(problem))
    given = {name: value for name, value in options.items() if value is not None}
    try:
        with failures_explained(problem, "comparing starts of"), in_words_of(OPTIONS):
            place = find_problem(problem)
            with working(f"Loading {problem} …"):
                from hessinit.cli.rebuilding import load_rebuildable

                verb = load_verb(given)
                raise_when_interrupted()
                loaded = load_rebuildable(place)
            name_unused(problem, [name for name in loaded.loaded.keywords if name != "forward"])
            with stdout_for_the_result():
                comparison = verb(loaded.build, loaded.loss, loaded.data, forward=loaded.forward, **given)
    except KeyboardInterrupt as interruption:
        reason = translate(str(interruption), OPTIONS) or "stopped before the first run."
        typer.echo(f"Interrupted: {reason.replace('The same call', 'The same command')}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    output.give(comparison)


@contextmanager
def stdout_for_the_result() -> Iterator[None]:
    """What the user's code prints goes to stderr; worker processes have no other stdout anyway."""
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the notes say it
        yield
