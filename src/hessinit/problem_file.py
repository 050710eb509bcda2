"""A user's problem by name: `path/to/file.py:function` or `package.module:function`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from hessinit.errors import ProblemError, did_you_mean

EXAMPLE = "net.py:problem"
LEAST_ALIKE = 0.65  # of 0 to 1; two letters exchanged in a word of six leave 0.83


class UserCodeError(Exception):
    """The user's own code failed while `doing`; the failure itself is the `__cause__`."""

    def __init__(self, doing: str) -> None:
        super().__init__(doing)  # as it came, for a worker sends it pickled: made anew from its arguments

    def __str__(self) -> str:
        return f"{self.args[0]} failed"


@dataclass(frozen=True)
class Place:
    """Where a problem is defined; nothing of it has been run yet."""

    source: str
    function: str
    is_file: bool


@dataclass(frozen=True)
class LoadedProblem:
    """What the function returned."""

    model: Any
    loss: Any
    batch: Any
    keywords: dict[str, Any] = field(default_factory=dict)


def find_problem(text: str) -> Place:
    """Read `file.py:function`; a file that is not there is refused before anything is imported.

    >>> find_problem("package.module:problem")
    Place(source='package.module', function='problem', is_file=False)
    """
    source, colon, function = text.rpartition(":")
    is_file = source.endswith(".py") or os.sep in source or "/" in source
    if not colon or os.sep in function or "/" in function:  # C:\net.py has a colon, but names no function
        way = f"{text}:problem" if text.endswith(".py") else EXAMPLE
        raise ProblemError(f"{text!r} names no function; write it after a colon, such as {way}.")
    if not function.isidentifier() or not (is_file or all(map(str.isidentifier, source.split(".")))):
        raise ProblemError(
            f"{text!r} is not of the form file.py:function or package.module:function, such as {EXAMPLE}."
        )
    if is_file:
        _check_file(Path(source))
    return Place(source, function, is_file)


def file_of(source: str) -> Path:
    """The file that `source` of source:function names; a module's is looked for in the working folder."""
    if source.endswith(".py") or "/" in source or os.sep in source:
        return Path(source)
    place = Path(*source.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def file_read_for(text: str) -> Path | None:
    """The file that holds the problem, if `text` is one; whether it can be loaded is for `find_problem`."""
    source = text.rpartition(":")[0]
    return file_of(source) if source else None


def load_problem(place: Place) -> LoadedProblem:
    """Run the file or import the module, call the function, and check what it returned.

    The file's folder (for a module, the working folder) is put on `sys.path`, as `python file.py` does.
    """
    return call_problem(load_function(place), place)


def load_function(place: Place) -> Callable[[], Any]:
    """Run the file or import the module, and find the function; it is not called yet."""
    module = _run_file(Path(place.source)) if place.is_file else _import_module(place.source)
    return _find_function(module, place)


def call_problem(function: Callable[[], Any], place: Place) -> LoadedProblem:
    """Call the function of that place, and check what it returned."""
    try:
        result = function()
    except KeyboardInterrupt:
        raise
    except BaseException as failure:
        raise UserCodeError(f"{place.function}() of {place.source}") from failure
    return _check_result(result, place)


def _check_file(path: Path) -> None:
    if path.is_file() and path.suffix == ".py":
        return
    if path.is_file():
        raise ProblemError(f"{path} is not a Python file; its name must end in .py.")
    if path.is_dir():
        raise ProblemError(f"{path} is a folder; give a file in it, such as {path / EXAMPLE}.")
    if path.exists():
        raise ProblemError(f"{path} is not a file; give a Python file, such as {EXAMPLE}.")
    if not path.parent.is_dir():
        raise ProblemError(f"{path} does not exist, nor does the folder {path.parent}.")
    near = did_you_mean_file(path, sorted(path.parent.glob("*.py")))
    raise ProblemError(f"{path} does not exist (looked in {path.parent.resolve()}).{near}")


def did_you_mean_file(path: Path, files: list[Path]) -> str:
    """The file there whose name is nearest; its ending, which they all share, does not make it near.

    >>> did_you_mean_file(Path("nett.py"), [Path("net.py"), Path("syn.py")])
    " Did you mean 'net.py'?"
    >>> did_you_mean_file(Path("no.py"), [Path("net.py"), Path("syn.py")])
    ''
    """
    return did_you_mean(path.name, [each.name for each in files if is_alike(path.stem, each.stem)])


def is_alike(one: str, other: str) -> bool:
    """Whether a slip of the finger makes one of the other; `did_you_mean` alone looks further.

    >>> is_alike("probelm", "problem"), is_alike("missing", "exitsmsg")
    (True, False)
    """
    return difflib.SequenceMatcher(None, one, other).ratio() >= LEAST_ALIKE


def name_type(value: object) -> str:
    """What it is, with its article.

    >>> name_type(1), name_type([])
    ('an int', 'a list')
    """
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"


def is_name_taken(path: Path) -> bool:
    """Whether another module than the file itself goes by its name, loaded or only installed.

    >>> is_name_taken(Path("random.py")), is_name_taken(Path("some_net.py"))
    (True, False)
    """
    if path.stem in sys.modules:
        return True
    try:
        spec = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
    except (ImportError, ValueError):
        return True
    return spec is not None and not (spec.origin and Path(spec.origin).resolve() == path.resolve())


def _run_file(path: Path) -> ModuleType:
    path = path.resolve()
    is_taken = is_name_taken(path)
    _put_on_path(str(path.parent), first=not is_taken)
    # Under its own name, so that worker processes find it again; but a torch.py must not take torch's place.
    name = f"_hessinit_{path.stem}" if is_taken else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:  # the name ends in .py, so both are there
        raise ProblemError(f"{path} cannot be loaded as Python.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as failure:
        del sys.modules[name]
        if isinstance(failure, KeyboardInterrupt):
            raise
        raise UserCodeError(f"running {path.name}") from failure
    return module


def _import_module(name: str) -> ModuleType:
    _put_on_path(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as failure:
        # A missing import inside the module is the user's to see; a missing module is a wrong name.
        if failure.name is None or not f"{name}.".startswith(f"{failure.name}."):
            raise UserCodeError(f"importing {name}") from failure
        file = Path(*name.split(".")).with_suffix(".py")
        hint = f" For the file, write {file}:function." if file.is_file() else ""
        raise ProblemError(
            f"there is no module {failure.name!r}, neither installed nor in {os.getcwd()}.{hint}"
        ) from None
    except KeyboardInterrupt:
        raise
    except BaseException as failure:
        raise UserCodeError(f"importing {name}") from failure


def _put_on_path(folder: str, *, first: bool = True) -> None:
    if folder not in sys.path:
        sys.path.insert(0 if first else len(sys.path), folder)


def _find_function(module: ModuleType, place: Place) -> Callable[[], Any]:
    from torch import nn

    if not hasattr(module, place.function):
        names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        offered = did_you_mean(place.function, [name for name in names if is_alike(place.function, name)])
        if not offered:
            own = [name for name in names if vars(module)[name].__module__ == module.__name__]
            names = own or names  # what a file imports, such as load_digits, is not what is looked for
            offered = f" Its functions are {', '.join(names)}." if names else " It defines no function."
        raise ProblemError(f"{place.source} has no {place.function!r}.{offered}")
    function: Any = getattr(module, place.function)
    if not callable(function) or isinstance(function, nn.Module):
        raise ProblemError(
            f"{place.source}:{place.function} is {name_type(function)}; "
            "it must be a function that returns model, loss, batch."
        )
    try:
        inspect.signature(function).bind()
    except TypeError:
        raise ProblemError(
            f"{place.function}{inspect.signature(function)} of {place.source} needs arguments, and is called "
            "without any; give them defaults."
        ) from None
    except ValueError:
        pass  # some built-in callables do not tell their signature
    return function


def _check_result(result: Any, place: Place) -> LoadedProblem:
    rule = "it must return model, loss, batch, and may add a dict of keyword arguments for hessinit.measure"
    who = f"{place.function}() of {place.source}"
    if not isinstance(result, (tuple, list)):
        found = "nothing (None)" if result is None else name_type(result)
        raise ProblemError(f"{who} returned {found}; {rule}.")
    if len(result) not in (3, 4):
        kinds = ", ".join(type(value).__name__ for value in result)
        things = "1 value" if len(result) == 1 else f"{len(result)} values"
        raise ProblemError(f"{who} returned {things} ({kinds}); {rule}.")
    keywords = result[3] if len(result) == 4 else {}
    if not isinstance(keywords, dict):
        raise ProblemError(f"{who} returned {name_type(keywords)} as its fourth value; {rule}.")
    known = _measure_keywords()
    for name in keywords:
        if name not in known:
            offered = did_you_mean(str(name), known)
            raise ProblemError(
                f"{who} returned the keyword argument {name!r}, which hessinit.measure does not know; "
                f"choose from {', '.join(known)}.{offered}"
            )
    model, loss, batch = result[:3]
    return LoadedProblem(model, loss, batch, dict(keywords))


def _measure_keywords() -> list[str]:
    from hessinit.measurement.measure import measure

    parameters = inspect.signature(measure).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
