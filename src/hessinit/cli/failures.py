"""Errors and interruptions on the command line: a paragraph or a traceback, and exit codes."""

from __future__ import annotations

import inspect
import shlex
import signal
import sysconfig
import traceback
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer

from hessinit.errors import Argument, ConvergenceError, MessageError, ProblemError

NOT_MET = 1  # not converged, not learned, or a target that is not met
WRONG_USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells have it

OUR_FOLDER = Path(__file__).parents[1]
LIBRARY_FOLDERS = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))
# How torch calls a module.
TORCH_CALLS = ("_wrapped_call_impl", "_call_impl", "_functional_call", "functional_call")


def show_argument(argument: Argument) -> str:
    """Return the option of that name with the value, as it is typed.

    >>> from hessinit.errors import argument
    >>> show_argument(argument("batch_size", 8)), show_argument(argument("layers", ["0", "conv*"]))
    ('--batch-size 8', "--layers '0,conv*'")
    """
    option = f"--{argument.name.replace('_', '-')}"
    if argument.literal in ("", "True"):
        return option
    return f"{option} {shlex.quote(argument.word)}"


def message_of(failure: MessageError, options: Container[str]) -> str:
    """Return the message with the options of a command in place of Python's arguments."""

    def show(part: str | Argument) -> str:
        if isinstance(part, Argument) and part.name in options:
            return show_argument(part)
        return str(part)

    return "".join(map(show, failure.args))


class UserCodeError(Exception):
    """The user's code failed; the message says where, and `__cause__` is the failure itself."""


def stop(message: str, code: int = WRONG_USAGE) -> NoReturn:
    """End the command with one paragraph on stderr."""
    typer.echo(f"Error: {message}" if code == WRONG_USAGE else message, err=True)
    raise typer.Exit(code)


def import_torch() -> None:
    """Import torch. Ctrl-C ends the process at once meanwhile: torch may swallow an exception."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    import torch  # noqa: F401

    signal.signal(signal.SIGINT, before)
    # kill and batch systems send SIGTERM: it ends a command as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@contextmanager
def failures_explained(
    command: Callable[..., None], doing: str, interrupted: str | None = None
) -> Iterator[None]:
    """Turn refusals into a paragraph, failures of the user's code into a traceback of their frames.

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
        stop(f"Interrupted: {str(interruption) or interrupted}", INTERRUPTED)
    except BaseException as failure:  # a user's own may be no Exception
        _explain(failure, doing, inspect.signature(command).parameters)


def _explain(failure: BaseException, doing: str, options: Container[str]) -> NoReturn:
    if isinstance(failure, ProblemError):
        stop(f"{message_of(failure, options)}{_name_the_way(failure, options)}")
    if isinstance(failure, ConvergenceError):
        stop(f"Not converged: {message_of(failure, options)}", NOT_MET)
    if isinstance(failure, OSError) and not _is_theirs(failure):
        raise failure  # a full disk, a name that is too long: `main` says so
    cause = failure
    failed = f"{doing} failed"
    if isinstance(failure, UserCodeError):
        cause = failure.__cause__ or failure
        failed = str(failure)
    if isinstance(cause, SystemExit):
        stop(
            f"{failed}: it called sys.exit({cause.code!r}). Keep what only a script does, such as "
            "reading the command line, under `if __name__ == '__main__':`."
        )
    if not isinstance(failure, UserCodeError) and not _is_theirs(failure):
        typer.echo("".join(traceback.format_exception(failure)), err=True, nl=False)
        stop(f"{failed} inside hessinit. Please report it, with the traceback above.")
    typer.echo(format_their_traceback(cause), err=True, nl=False)
    stop(f"{failed}, as shown above.")


def _name_the_way(failure: ProblemError, options: Container[str]) -> str:
    """Return where to put the arguments of the message that are no options of the command."""
    from hessinit.cli.problem_file import problem_options

    for part in failure.args:
        if (
            isinstance(part, Argument)
            and part.name in problem_options()
            and part.name not in options
        ):
            return " On the command line the function returns such arguments in a hessinit.Problem."
    return ""


def format_their_traceback(failure: BaseException) -> str:
    """Return the traceback from the first frame of the user's files on, or all frames but ours."""
    report = traceback.TracebackException.from_exception(failure)
    link: traceback.TracebackException | None = report
    while link is not None:
        frames = [frame for frame in link.stack if not _is_ours(frame)]
        theirs = [position for position, frame in enumerate(frames) if not _is_library(frame)]
        first = theirs[0] if theirs else 0
        link.stack[:] = frames[first:]
        link = link.__cause__ or link.__context__
    return "".join(report.format())


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
    """Whether the frame is ours, or a link between those that matter: importlib, a pool, torch."""
    path = Path(frame.filename)
    is_import = frame.filename.startswith("<frozen importlib")
    is_pool = path.parts[-3:-1] == ("concurrent", "futures")
    return OUR_FOLDER in path.parents or frame.name in TORCH_CALLS or is_import or is_pool


def _is_library(frame: traceback.FrameSummary) -> bool:
    return any(folder in Path(frame.filename).parents for folder in LIBRARY_FOLDERS)
