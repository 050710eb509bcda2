"""Errors and interruptions on the command line: one paragraph, or the user's own traceback; exit codes."""

from __future__ import annotations

import os
import re
import signal
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

NOT_CONVERGED = 1
WRONG_USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells have it

OUR_FOLDER = Path(__file__).parents[1]
LIBRARY_FOLDERS = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))
# Arguments of the library that no option has.
BY_FUNCTION = re.compile(r"\b(dropout|reduction|check|forward|dtype)=")

_interruptions: list[int] = []


class UserCodeError(Exception):
    """The user's own code failed while `doing`; the failure itself is the `__cause__`."""

    def __init__(self, doing: str) -> None:
        super().__init__(doing)  # unchanged: a worker sends it pickled, made anew from its arguments

    def __str__(self) -> str:
        return f"{self.args[0]} failed"


def stop(message: str, code: int = WRONG_USAGE) -> NoReturn:
    """End the command with one paragraph on stderr."""
    import typer

    typer.echo(f"Error: {message}" if code == WRONG_USAGE else message, err=True)
    raise typer.Exit(code)


@contextmanager
def failures_explained(doing: str) -> Iterator[None]:
    """Refusals become a paragraph, and failures of the user's code a traceback without our frames."""
    import typer

    try:
        yield
    except (typer.Exit, KeyboardInterrupt):
        raise
    except BaseException as failure:  # a user's own may be no Exception
        if _interruptions:  # what fails after an interruption is most likely its consequence
            raise KeyboardInterrupt from failure
        _explain(failure, doing)


def _explain(failure: BaseException, doing: str) -> NoReturn:
    import typer

    from hessinit.errors import ConvergenceError, ProblemError

    if isinstance(failure, ProblemError):
        message = str(failure)
        if BY_FUNCTION.search(message):
            message += " On the command line the function returns such arguments as a dict, its fourth value."
        stop(message)
    if isinstance(failure, ConvergenceError):
        stop(f"Not converged: {failure}", NOT_CONVERGED)
    cause = failure.__cause__ if isinstance(failure, UserCodeError) and failure.__cause__ else failure
    what = str(failure) if isinstance(failure, UserCodeError) else f"{doing} failed"
    if isinstance(cause, SystemExit):
        stop(
            f"{what}: it called sys.exit({cause.code!r}). Keep what only a script does, such as reading the "
            "command line, under `if __name__ == '__main__':`."
        )
    if not isinstance(failure, UserCodeError) and not _is_theirs(failure):
        typer.echo("".join(traceback.format_exception(failure)), err=True, nl=False)
        stop(f"{what} inside hessinit. Please report it, with the traceback above.")
    typer.echo(format_their_traceback(cause), err=True, nl=False)
    hint = ""
    if isinstance(cause, ImportError) and "no known parent package" in str(cause):
        hint = " Give a file of a package as package.module:function, from the folder that holds the package."
    stop(f"{what}, as shown above.{hint}")


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
    return any(not _is_library(frame) or "/torch/nn/" in Path(frame.filename).as_posix() for frame in frames)


def _is_ours(frame: traceback.FrameSummary) -> bool:
    """Ours, or a link between the frames that matter: importlib, a pool, or how torch calls a module."""
    path = Path(frame.filename)
    is_call = frame.name in {"_wrapped_call_impl", "_call_impl", "_functional_call", "functional_call"}
    is_link = frame.filename.startswith("<frozen importlib") or path.parts[-3:-1] == ("concurrent", "futures")
    return OUR_FOLDER in path.parents or is_call or is_link


def _is_library(frame: traceback.FrameSummary) -> bool:
    return any(folder in Path(frame.filename).parents for folder in LIBRARY_FOLDERS)


# Interruptions: Ctrl-C, and SIGTERM, which kill and batch systems send --------------------------------------


def exit_when_interrupted() -> None:
    """Until the work begins, an interruption ends the process at once.

    An exception would not do: torch and numpy, interrupted while they are imported, may swallow it or crash.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):  # nohup ignores them
            signal.signal(number, _exit)


def raise_when_interrupted() -> None:
    """From now on an interruption is a KeyboardInterrupt, so that everything is put in order."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is _exit:
            signal.signal(number, _raise)


@contextmanager
def interruption_explained(otherwise: str) -> Iterator[None]:
    """Print what was kept (the interruption says it, or `otherwise`), and exit with 130."""
    import typer

    try:
        yield
    except KeyboardInterrupt as interruption:
        said = str(interruption).replace("The same call", "The same command").replace("folder=", "--folder")
        typer.echo(f"Interrupted: {said or otherwise}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _exit(number: int, frame: FrameType | None) -> None:
    with suppress(OSError):
        if os.isatty(2) and os.environ.get("TERM", "dumb") != "dumb":
            os.write(2, b"\r\x1b[2K\x1b[?25h")  # remove the spinner's line, show the cursor again
        os.write(2, b"Interrupted: stopped before anything was done, and nothing was written.\n")
    os._exit(INTERRUPTED)


def _raise(number: int, frame: FrameType | None) -> None:
    _interruptions.append(number)
    raise KeyboardInterrupt
