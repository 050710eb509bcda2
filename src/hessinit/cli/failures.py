"""Errors and interruptions on the command line: one paragraph, or the user's own traceback; exit codes."""

from __future__ import annotations

import re
import signal
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer

from hessinit.errors import ConvergenceError, ProblemError

NOT_MET = 1  # not converged, not learned, or a target that is not met
WRONG_USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells have it

OUR_FOLDER = Path(__file__).parents[1]
LIBRARY_FOLDERS = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))
# Arguments of the library that no option has.
BY_FUNCTION = re.compile(r"\b(dropout|reduction|check|forward|dtype)=")
# Arguments that are options of the same name; and a value as messages write it, up to the
# punctuation.
OPTIONS = (
    "lr|optimizer|momentum|target|rule|scheme|scaling|layers|curvature|tolerance|precision|seed|device|report"
    "|overwrite|trial_steps|batch_size|steps|every|warmup|max_overhead|schemes|learning_rates?|stds|seeds|folder|workers"
)
VALUE = r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|[^\s;,)]*[^\s;,.:)]"


def in_options(text: str) -> str:
    """The text with options in place of arguments; what stands in a call of Python stays.

    >>> in_options("lr=-1 must be above 0; name others with layers='**', or call advise(…, lr=0.1).")
    "--lr -1 must be above 0; name others with --layers '**', or call advise(…, lr=0.1)."
    """

    def replaced(found: re.Match[str]) -> str:
        if found["name"] is None:
            return found[0]
        value = re.sub(r"[\[\]\"' ]", "", found["value"] or "")
        shown = f"'{value}'" if "*" in value else value
        return f"--{found['name'].replace('_', '-')}" + f" {shown}" * (shown not in ("", "True"))

    text = re.sub(
        rf"\w\([^()]*\)|(?<![\w.])(?P<name>{OPTIONS})=(?P<value>{VALUE})?", replaced, text
    )
    return text.replace("initialize_ with", "hessinit initialize with")


class UserCodeError(Exception):
    """The user's own code failed; the message says where, and the failure itself is the `__cause__`."""


def stop(message: str, code: int = WRONG_USAGE) -> NoReturn:
    """End the command with one paragraph on stderr."""
    typer.echo(f"Error: {message}" if code == WRONG_USAGE else message, err=True)
    raise typer.Exit(code)


def import_torch() -> None:
    """Import torch; meanwhile Ctrl-C ends the process at once, because torch may swallow an exception."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    import torch  # noqa: F401

    signal.signal(signal.SIGINT, before)
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # of kill and batch systems: as Ctrl-C


@contextmanager
def failures_explained(doing: str, interrupted: str | None = None) -> Iterator[None]:
    """Refusals become a paragraph, and failures of the user's code a traceback without our frames.

    An interruption prints what was kept, or `interrupted`; without the latter it is left to the
    caller.
    """
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt as interruption:
        if interrupted is None:
            raise
        said = (
            str(interruption)
            .replace("The same call", "The same command")
            .replace("folder=", "--folder")
        )
        stop(f"Interrupted: {said or interrupted}", INTERRUPTED)
    except BaseException as failure:  # a user's own may be no Exception
        _explain(failure, doing)


def _explain(failure: BaseException, doing: str) -> NoReturn:
    if isinstance(failure, ProblemError):
        message = in_options(str(failure))
        if BY_FUNCTION.search(message):
            message += " On the command line the function returns such arguments as a dict, its fourth value."
        stop(message)
    if isinstance(failure, ConvergenceError):
        stop(f"Not converged: {in_options(str(failure))}", NOT_MET)
    if isinstance(failure, OSError) and not _is_theirs(failure):
        raise failure  # a full disk, a name that is too long: `main` says so
    cause = failure
    what = f"{doing} failed"
    if isinstance(failure, UserCodeError):
        cause = failure.__cause__ or failure
        what = str(failure)
    if isinstance(cause, SystemExit):
        stop(
            f"{what}: it called sys.exit({cause.code!r}). Keep what only a script does, such as reading the "
            "command line, under `if __name__ == '__main__':`."
        )
    if not isinstance(failure, UserCodeError) and not _is_theirs(failure):
        typer.echo("".join(traceback.format_exception(failure)), err=True, nl=False)
        stop(f"{what} inside hessinit. Please report it, with the traceback above.")
    typer.echo(format_their_traceback(cause), err=True, nl=False)
    stop(f"{what}, as shown above.")


def format_their_traceback(failure: BaseException) -> str:
    """The traceback from the first frame of the user's files on; without any, all frames but ours."""
    whole = traceback.TracebackException.from_exception(failure)
    link: traceback.TracebackException | None = whole
    while link is not None:
        frames = [frame for frame in link.stack if not _is_ours(frame)]
        theirs = [position for position, frame in enumerate(frames) if not _is_library(frame)]
        link.stack = traceback.StackSummary.from_list(frames[theirs[0] if theirs else 0 :])
        link = link.__cause__ or link.__context__
    return "".join(whole.format())


def _is_theirs(failure: BaseException) -> bool:
    """Whether it came out of the user's code, or of a torch module or loss that they chose."""
    if type(failure.__cause__).__name__ == "_RemoteTraceback":  # a worker's: its frames are text
        return True
    frames = [frame for frame in traceback.extract_tb(failure.__traceback__) if not _is_ours(frame)]
    return any(
        not _is_library(frame) or "/torch/nn/" in Path(frame.filename).as_posix()
        for frame in frames
    )


def _is_ours(frame: traceback.FrameSummary) -> bool:
    """Ours, or a link between the frames that matter: importlib, a pool, or how torch calls a module."""
    path = Path(frame.filename)
    is_call = frame.name in {
        "_wrapped_call_impl",
        "_call_impl",
        "_functional_call",
        "functional_call",
    }
    is_link = frame.filename.startswith("<frozen importlib") or path.parts[-3:-1] == (
        "concurrent",
        "futures",
    )
    return OUR_FOLDER in path.parents or is_call or is_link


def _is_library(frame: traceback.FrameSummary) -> bool:
    return any(folder in Path(frame.filename).parents for folder in LIBRARY_FOLDERS)
