"""How the command line says that something went wrong: one paragraph, or the user's own traceback."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer

from hessinit.cli.interrupts import was_interrupted
from hessinit.cli.remote_tracebacks import Part, read_parts
from hessinit.errors import ConvergenceError, ProblemError
from hessinit.problem_file import UserCodeError

NOT_CONVERGED = 1
WRONG_USE = 2

OUR_FOLDER = Path(__file__).parents[1]
LIBRARY_FOLDERS = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))


def stop(message: str, code: int = WRONG_USE) -> NoReturn:
    """End the command with one paragraph on stderr."""
    typer.echo(f"Error: {message}" if code == WRONG_USE else message, err=True)
    raise typer.Exit(code)


@contextmanager
def failures_explained(what: str, doing: str = "measuring") -> Iterator[None]:
    """Refusals become a paragraph, and failures of the user's code a traceback without our frames."""
    try:
        yield
    except (typer.Exit, KeyboardInterrupt):
        raise
    except BaseException as failure:  # a user's own may be no Exception, and would show our frames
        if was_interrupted():
            raise KeyboardInterrupt from failure
        _explain(failure, f"{doing} {what}")


def _explain(failure: BaseException, doing: str) -> NoReturn:
    if isinstance(failure, ProblemError):
        stop(str(failure))
    if isinstance(failure, ConvergenceError):
        stop(f"Not converged: {failure}", NOT_CONVERGED)
    if isinstance(failure, UserCodeError):
        _explain_theirs(failure)
    if isinstance(failure, SystemExit):
        stop(_say_how_not_to_exit(f"{doing} failed", failure))
    if not _is_theirs(failure):
        typer.echo("".join(traceback.format_exception(failure)), err=True, nl=False)
        stop(f"{doing} failed inside hessinit. Please report it, with the traceback above.")
    typer.echo(format_their_traceback(failure), err=True, nl=False)
    stop(f"{doing} failed, as shown above.")


def _explain_theirs(failure: UserCodeError) -> NoReturn:
    cause = failure.__cause__
    parts = read_parts(failure)
    if parts:
        typer.echo(_format_parts(parts[:-1] or parts), err=True, nl=False)
        stop(f"{failure}, as shown above.")
    if isinstance(cause, SystemExit):
        stop(_say_how_not_to_exit(str(failure), cause))
    typer.echo(format_their_traceback(cause or failure), err=True, nl=False)
    stop(f"{failure}, as shown above.{_say_how_to_import(cause)}")


def _say_how_to_import(failure: BaseException | None) -> str:
    if not isinstance(failure, ImportError) or "no known parent package" not in str(failure):
        return ""
    return " A file of a package is given as package.module:function, from the folder that holds the package."


def _say_how_not_to_exit(failed: str, exit_: SystemExit) -> str:
    return (
        f"{failed}: it called sys.exit({exit_.code!r}). Keep what only a script does, such as reading the "
        "command line, under `if __name__ == '__main__':`."
    )


def format_their_traceback(failure: BaseException) -> str:
    """The traceback from the first frame of the user's files on; without any, all frames but ours."""
    parts = read_parts(failure)
    if parts:
        return _format_parts(parts)
    whole = traceback.TracebackException.from_exception(failure)
    link: traceback.TracebackException | None = whole
    while link is not None:
        frames = [frame for frame in link.stack if not _is_machinery(frame)]
        theirs = [position for position, frame in enumerate(frames) if not _is_library(frame)]
        link.stack = traceback.StackSummary.from_list(frames[theirs[0] if theirs else 0 :])
        link = link.__cause__ or link.__context__
    return "".join(whole.format())


def _format_parts(parts: list[Part]) -> str:
    """The same for the traceback of a worker."""
    texts = []
    for part in parts:
        frames = [(frame, text) for frame, text in part.frames if not _is_machinery(frame)]
        theirs = [position for position, (frame, _) in enumerate(frames) if not _is_library(frame)]
        shown = frames[theirs[0] if theirs else 0 :]
        texts.append(part.before + "".join(text for _, text in shown) + part.after)
    return "\n".join(texts)


def _is_theirs(failure: BaseException) -> bool:
    """Whether it came out of the user's code, or of a torch module or loss that they chose."""
    frames = list(traceback.extract_tb(failure.__traceback__))
    frames += [frame for part in read_parts(failure) for frame, _ in part.frames]
    frames = [frame for frame in frames if not _is_machinery(frame)]
    return any(not _is_library(frame) or "/torch/nn/" in Path(frame.filename).as_posix() for frame in frames)


def _is_machinery(frame: traceback.FrameSummary) -> bool:
    """Ours, or a link between the frames that matter: importlib, a pool, or how torch calls a module."""
    path = Path(frame.filename)
    if path.parts[-3:-1] == ("concurrent", "futures"):
        return True
    is_call = frame.name in {"_wrapped_call_impl", "_call_impl", "_functional_call", "functional_call"}
    return OUR_FOLDER in path.parents or is_call or frame.filename.startswith("<frozen importlib")


def _is_library(frame: traceback.FrameSummary) -> bool:
    return any(folder in Path(frame.filename).parents for folder in LIBRARY_FOLDERS)
