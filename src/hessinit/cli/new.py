"""`hessinit new`: a file to begin with."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from hessinit.cli.calling import called_as
from hessinit.cli.failures import stop
from hessinit.cli.printing import print_text
from hessinit.cli.starter import write_starter

USUAL_NAME = "problem.py"


def new(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Its name, which ends in .py.")] = Path(
        USUAL_NAME
    ),
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Write a commented file that runs, to put your network in.

    It holds a small network and real digits, and works with measure, initialize, track, compare and sweep.

    \b
    Examples:
      hessinit new
      hessinit new experiments/net.py
      hessinit new net.py --force

    Exit status: 0 done, 2 wrong usage.
    """
    _check(path, force)
    from hessinit.results.result import write_text

    named = path.as_posix()
    if named.startswith("-"):
        named = f"./{named}"  # a command would take it for an option
    try:
        write_text(path, write_starter(shlex.quote(named)))
    except OSError as failure:
        stop(f"cannot write {path}: {failure.strerror or failure}.")
    except ValueError as refusal:
        stop(f"cannot write {path}: {refusal}.")
    print_text(f"Wrote {path}. It runs as it is; look into it to put your own network in.")
    print_text(f"Next: {called_as()} measure {shlex.quote(f'{named}:problem')}")


def _check(path: Path, force: bool) -> None:
    if path.is_dir():
        stop(f"{path} is a folder; give the name of a file in it, such as {path / USUAL_NAME}.")
    if path.name == ".py":
        stop(f"{path} has no name before .py; give one, such as {path.with_name(USUAL_NAME)}.")
    if path.suffix != ".py":
        stop(f"{path} must end in .py, such as {path.with_suffix('.py')}.")
    # Worker processes would load random.py in place of Python's own.
    if path.stem in sys.stdlib_module_names or path.stem in ("torch", "numpy", "hessinit"):
        stop(
            f"{path} would hide the module {path.stem!r} from Python; choose another name, such as "
            f"{path.with_name(f'my_{path.name}')}."
        )
    if not path.parent.is_dir():
        stop(f"{path} cannot be written: the folder {path.parent} does not exist. Create it first.")
    if path.exists() and not path.is_file():
        stop(f"{path} is there and is not a file; choose another name.")
    if path.exists() and not force:
        stop(f"{path} is there already and was left as it is; choose another name, or pass --force.")
