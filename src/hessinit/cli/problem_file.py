"""The problem file: `hessinit new` writes one; the other commands load `file.py:function` from it."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import io
import os
import pickle
import random
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from hessinit.cli.failures import UserCodeError, raise_when_interrupted, stop
from hessinit.errors import ProblemError, did_you_mean

EXAMPLE = "net.py:problem"
USUAL_NAME = Path("problem.py")
SIMILAR = 0.8  # of 0 to 1; two letters exchanged in a word of six leave 0.83

STARTER = '''\
"""A problem for hessinit: a model, its loss, and data. It runs as it is; put your own in.

    hessinit measure {name}:problem                how sharp is each layer?
    hessinit initialize {name}:problem --lr 0.1    weights that fit a learning rate
    hessinit track {name}:problem --lr 0.1         sharpness while it trains
    hessinit compare {name}:problem                which initialization trains best?
    hessinit sweep {name}:problem                  how large should weights be?
"""

import torch
from hessinit.digits import load_digits
from torch import nn


class Net(nn.Module):
    """Your model. Layers are named in the tables as these attributes are."""

    def __init__(self):
        super().__init__()
        self.hidden1 = nn.Linear(64, 32)
        self.hidden2 = nn.Linear(32, 32)
        self.output = nn.Linear(32, 10)

    def forward(self, images):
        signal = torch.tanh(self.hidden1(images.flatten(1)))
        signal = torch.tanh(self.hidden2(signal))
        return self.output(signal)  # logits: the softmax belongs to the loss


def problem():
    """Called without arguments, and again for every training that is compared.

    So build the model in here: every training needs a new one. Random numbers may be drawn freely: hessinit
    seeds torch, numpy and random before the call.
    """
    model = Net()

    # Any function of (output, targets), or a loss of torch.nn. It should average over examples.
    loss = nn.CrossEntropyLoss()

    # (inputs, targets), the examples along the first dimension: tensors, or tuples and dicts of them. A list
    # of such pairs, or a DataLoader, is fine, too. A few hundred examples are enough to measure.
    images, labels = load_digits()  # 1,797 real handwritten digits of 8×8 pixels
    data = images[:1000], labels[:1000]

    return model, loss, data

    # A model that is not called as model(inputs) says how in a fourth value:
    #
    #     def forward(model, inputs):
    #         return model(inputs["tokens"], mask=inputs["mask"]).logits
    #
    #     return model, loss, data, {{"forward": forward}}
'''


def new(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Its name, which ends in .py.")] = USUAL_NAME,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file of that name.")] = False,
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
    if path.is_dir():
        stop(f"{path} is a folder; give the name of a file in it, such as {path / USUAL_NAME}.")
    if path.suffix != ".py" or path.name == ".py":
        stop(f"{path} must be a name that ends in .py, such as {path.parent / USUAL_NAME}.")
    if path.stem in sys.stdlib_module_names or path.stem in ("torch", "numpy", "hessinit"):
        stop(
            f"{path} would hide the module {path.stem!r} from Python; choose another name, such as "
            f"{path.with_name(f'my_{path.name}')}."
        )
    if path.exists() and not force:
        stop(f"{path} exists and was left as it is; choose another name, or pass --force.")
    from hessinit.results.result import write_text

    named = path.as_posix()
    if named.startswith("-"):
        named = f"./{named}"  # a command would take it for an option
    try:
        write_text(path, STARTER.format(name=shlex.quote(named)))
    except (OSError, ValueError) as failure:
        stop(f"cannot write {path}: {getattr(failure, 'strerror', None) or failure}.")
    typer.echo(f"Wrote {path}. It runs as it is; look into it to put your own network in.")
    typer.echo(f"Next: hessinit measure {shlex.quote(f'{named}:problem')}")


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
    """Return the place `file.py:function`; a missing file is refused before anything is imported.

    >>> find_problem("package.module:problem")
    Place(source='package.module', function='problem', is_file=False)
    """
    source, colon, function = text.rpartition(":")
    is_file = _is_file_name(source)
    if not colon or _is_file_name(function):  # C:\net.py has a colon, but names no function
        way = f"{text}:problem" if text.endswith(".py") else EXAMPLE
        raise ProblemError(f"{text!r} names no function; write it after a colon, such as {way}.")
    if not function.isidentifier() or not (is_file or all(map(str.isidentifier, source.split(".")))):
        raise ProblemError(
            f"{text!r} is not of the form file.py:function or package.module:function, such as {EXAMPLE}."
        )
    if is_file:
        _check_file(Path(source))
    return Place(source, function, is_file)


def file_of(text: str) -> Path | None:
    """Return the file that holds the problem `file.py:function`, or a module of the working folder."""
    source = text.rpartition(":")[0]
    if not source or _is_file_name(source):
        return Path(source) if source else None
    place = Path(*source.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def _is_file_name(source: str) -> bool:
    return source.endswith(".py") or "/" in source or os.sep in source


def _check_file(path: Path) -> None:
    if path.is_file() and path.suffix == ".py":
        return
    if path.is_dir():
        raise ProblemError(f"{path} is a folder; give a file in it, such as {path / EXAMPLE}.")
    if path.exists():
        raise ProblemError(f"{path} is not a Python file; its name must end in .py, as in {EXAMPLE}.")
    if not path.parent.is_dir():
        raise ProblemError(f"{path} does not exist, nor does the folder {path.parent}.")
    similar = similar_name(path.name, (each.name for each in path.parent.glob("*.py")))
    raise ProblemError(f"{path} does not exist (looked in {path.parent.resolve()}).{similar}")


def similar_name(name: str, choices: Iterable[str]) -> str:
    """Return a sentence that offers the name most similar to a mistyped one, or nothing.

    >>> similar_name("nett.py", ["net.py", "syn.py"]), similar_name("no.py", ["net.py", "syn.py"])
    (" Did you mean 'net.py'?", '')
    """
    near = difflib.get_close_matches(name, list(choices), n=1, cutoff=SIMILAR)
    return f" Did you mean {near[0]!r}?" if near else ""


# Loading


def load_problem(place: Place, *, seed: int | None, device: str | None, threads: int | None) -> LoadedProblem:
    """Seed what the file may draw from, call its function, and move the model; a batch follows the model.

    The file's folder (for a module, the working folder) is put on `sys.path`, as `python file.py` does.
    """
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    if device is not None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as failure:
            reason = str(failure).strip().splitlines()[0].rstrip(".")
            stop(f"--device {device} cannot be used here: {reason}.")
    raise_when_interrupted()
    _seed(seed or 0)
    loaded = _call(_load_function(place), place)
    if device is not None and hasattr(loaded.model, "to"):
        loaded.model.to(device)
    return loaded


def shared_keywords(loaded: LoadedProblem, shared: Iterable[str], problem: str) -> dict[str, Any]:
    """The keyword arguments for `measure` that mean the same to another verb; the others are named on stderr.

    `curvature="both"` is left out: other verbs need one of them.
    """
    taken = {name: value for name, value in loaded.keywords.items() if name in shared}
    if taken.get("curvature") == "both":
        del taken["curvature"]
    unused = ", ".join(name for name in loaded.keywords if name not in taken)
    if unused:
        typer.echo(f"{problem} also returns {unused}, which only hessinit measure uses.", err=True)
    return taken


def _seed(seed: int) -> None:
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002 - the user's code may draw from the old global state
    torch.manual_seed(seed)


def _load_function(place: Place) -> Callable[[], Any]:
    module = _run_file(Path(place.source)) if place.is_file else _import_module(place.source)
    return _find_function(module, place)


def _call(function: Callable[[], Any], place: Place) -> LoadedProblem:
    with _user_code(f"{place.function}() of {place.source}"):
        result = function()
    return _check_result(result, place)


@contextlib.contextmanager
def _user_code(doing: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as failure:
        raise UserCodeError(doing) from failure


def _run_file(path: Path) -> ModuleType:
    path = path.resolve()
    is_taken = _is_name_taken(path)
    _put_on_path(str(path.parent), first=not is_taken)
    # Under its own name, so that worker processes find it again; but a torch.py must not replace torch.
    name = f"_hessinit_{path.stem}" if is_taken else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _user_code(f"running {path.name}"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_name_taken(path: Path) -> bool:
    """Whether another module than the file itself has its name, loaded or only installed."""
    if path.stem in sys.modules:
        return True
    try:
        spec = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
    except (ImportError, ValueError):
        return True
    return spec is not None and not (spec.origin and Path(spec.origin).resolve() == path.resolve())


def _import_module(name: str) -> ModuleType:
    _put_on_path(os.getcwd())
    try:
        with _user_code(f"importing {name}"):
            return importlib.import_module(name)
    except UserCodeError as failure:
        missing = failure.__cause__.name if isinstance(failure.__cause__, ModuleNotFoundError) else None
        # A missing import inside the module is the user's to see; a missing module is a wrong name.
        if missing is None or not f"{name}.".startswith(f"{missing}."):
            raise
        file = Path(*name.split(".")).with_suffix(".py")
        hint = f" For the file, write {file}:function." if file.is_file() else ""
        raise ProblemError(
            f"there is no module {missing!r}, neither installed nor in {os.getcwd()}.{hint}"
        ) from None


def _put_on_path(folder: str, *, first: bool = True) -> None:
    if folder not in sys.path:
        sys.path.insert(0 if first else len(sys.path), folder)


def _find_function(module: ModuleType, place: Place) -> Callable[[], Any]:
    from torch import nn

    if not hasattr(module, place.function):
        names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        own = [name for name in names if vars(module)[name].__module__ == module.__name__]
        similar = similar_name(place.function, names)
        listed = f" Its functions are {', '.join(own or names)}." if names else " It defines no function."
        raise ProblemError(f"{place.source} has no {place.function!r}.{similar or listed}")
    function: Any = getattr(module, place.function)
    if not callable(function) or isinstance(function, nn.Module):
        raise ProblemError(
            f"{place.source}:{place.function} is {_name_type(function)}; "
            "it must be a function that returns model, loss, batch."
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in callables have none
        return function
    try:
        signature.bind()
    except TypeError:
        raise ProblemError(
            f"{place.function}{signature} of {place.source} needs arguments, and is called without any; "
            "give them defaults."
        ) from None
    return function


def _check_result(result: Any, place: Place) -> LoadedProblem:
    import hessinit

    rule = "it must return model, loss, batch, and may add a dict of keyword arguments for hessinit.measure"
    who = f"{place.function}() of {place.source} returned"
    if not isinstance(result, (tuple, list)):
        raise ProblemError(f"{who} {'None' if result is None else _name_type(result)}; {rule}.")
    if len(result) not in (3, 4):
        kinds = ", ".join(type(value).__name__ for value in result)
        raise ProblemError(f"{who} {len(result)} values ({kinds}); {rule}.")
    keywords = result[3] if len(result) == 4 else {}
    if not isinstance(keywords, dict):
        raise ProblemError(f"{who} {_name_type(keywords)} as its fourth value; {rule}.")
    parameters = inspect.signature(hessinit.measure).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for name in keywords:
        if name not in known:
            raise ProblemError(
                f"{who} the keyword argument {name!r}, which hessinit.measure does not have; choose from "
                f"{', '.join(known)}.{did_you_mean(str(name), known)}"
            )
    model, loss, batch = result[:3]
    return LoadedProblem(model, loss, batch, dict(keywords))


def _name_type(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"


# A problem that worker processes can load again


@dataclass(frozen=True)
class PartOf:
    """A part of a problem that can be pickled: each process loads the problem again by its place.

    A "model", called, is built anew by the problem's function; "loss" and "forward" are those of one call.
    """

    place: Place
    part: str

    def __call__(self, *arguments: Any) -> Any:
        if self.part == "model":
            return _call_silently(self.place).model
        loaded = _load_once(self.place)
        return (loaded.loss if self.part == "loss" else loaded.keywords["forward"])(*arguments)


def load_rebuildable(place: Place) -> LoadedProblem:
    """Call the function once; model, loss and forward of the answer can be sent to worker processes."""
    if place.is_file:
        place = replace(place, source=str(Path(place.source).resolve()))
    function = _function(place)
    _seed(0)
    loaded = _call(function, place)
    keywords = dict(loaded.keywords)
    if keywords.get("forward") is not None:
        keywords["forward"] = PartOf(place, "forward")
    loss = loaded.loss if _travels(loaded.loss) else PartOf(place, "loss")
    return LoadedProblem(PartOf(place, "model"), loss, loaded.batch, keywords)


def _travels(loss: Any) -> bool:
    """Whether the loss itself can be sent: a loss that is a module is copied and moved to the device."""
    from torch import nn

    if not isinstance(loss, nn.Module) or type(loss).__module__.startswith("_hessinit_"):
        return False
    try:
        return bool(pickle.dumps(loss))
    except Exception:  # pickle raises what it likes
        return False


@cache
def _function(place: Place) -> Callable[[], Any]:
    """Return the function of that place; its file is run once in a process, always from the same seed."""
    with _seeded():
        return _load_function(place)


@cache
def _load_once(place: Place) -> LoadedProblem:
    with _seeded():
        return _call_silently(place)


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    from hessinit.problem.preserve import untouched_random_state

    with untouched_random_state():
        _seed(0)
        yield


def _call_silently(place: Place) -> LoadedProblem:
    with contextlib.redirect_stdout(io.StringIO()):  # what it prints was shown at the first call
        return _call(_function(place), place)
