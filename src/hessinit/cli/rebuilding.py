"""A user's problem, called again for every new model, in this process or in a worker.

What workers get is pickled: a place always can be, a lambda or a function inside a function cannot.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import random
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from hessinit.errors import ProblemError
from hessinit.problem_file import LoadedProblem, Place, call_problem, load_function


@dataclass(frozen=True)
class ModelOf:
    """Builds the problem's model anew: the function of that place is called, and its model is kept."""

    place: Place

    def __call__(self) -> Any:
        return _call_silently(self.place).model


@dataclass(frozen=True)
class LossOf:
    """The problem's loss, found again in each process by its place."""

    place: Place

    def __call__(self, *arguments: Any) -> Any:
        return _load_once(self.place).loss(*arguments)


@dataclass(frozen=True)
class ForwardOf:
    """The problem's `forward`, found again in each process by its place."""

    place: Place

    def __call__(self, *arguments: Any) -> Any:
        return _load_once(self.place).keywords["forward"](*arguments)


@dataclass(frozen=True)
class Rebuildable:
    """A problem whose parts can be sent to worker processes; `loaded` is what the function returned here."""

    build: ModelOf
    loss: Any
    data: Any
    forward: Any
    loaded: LoadedProblem


def load_rebuildable(place: Place) -> Rebuildable:
    """Call the function once, and say how workers find its parts again."""
    if place.is_file:
        place = replace(place, source=str(Path(place.source).resolve()))
        _check_name(Path(place.source))
    function = _function(place)
    _seed()
    loaded = call_problem(function, place)
    forward = loaded.keywords.get("forward")
    return Rebuildable(
        build=ModelOf(place),
        loss=loaded.loss if _can_travel(loaded.loss, place) else LossOf(place),
        data=loaded.batch,
        forward=forward if forward is None or _can_travel(forward, place) else ForwardOf(place),
        loaded=loaded,
    )


def _check_name(path: Path) -> None:
    """Refuse a random.py: a worker that starts in its folder would load it in place of the library's."""
    other = sys.modules.get(path.stem)
    origin = getattr(other, "__file__", None)
    if other is None or (origin is not None and Path(origin).resolve() == path):
        return
    installed = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
    is_library = path.stem in sys.stdlib_module_names or path.stem == "hessinit"
    if is_library or (origin is not None and any(folder in Path(origin).parents for folder in installed)):
        raise ProblemError(
            f"{path.name} has the name of a module that hessinit itself needs, {path.stem}, and worker "
            f"processes would mistake one for the other; rename the file, such as my_{path.stem}.py."
        )


def _can_travel(part: Any, place: Place) -> bool:
    """Whether a worker can unpickle it without running the user's file on its own, from any random state."""
    from torch import nn

    own = place.source if not place.is_file else Path(place.source).stem
    renamed = f"_hessinit_{own}"  # what a file is called whose name was taken; no worker finds it under that
    try:
        modules = _modules_of(pickle.dumps(part))
    except Exception:  # pickle raises what it likes: PicklingError, AttributeError, TypeError, RuntimeError
        return False
    # A loss that is a module is copied and moved to the device, so it travels as what it is.
    return renamed not in modules and (own not in modules or isinstance(part, nn.Module))


def _modules_of(pickled: bytes) -> set[str]:
    """The modules that unpickling imports from."""
    found: set[str] = set()

    class Watching(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found.add(module)
            return super().find_class(module, name)

    Watching(io.BytesIO(pickled)).load()
    return found


@cache
def _function(place: Place) -> Callable[[], Any]:
    """The function of that place; its file is run once in a process, from the same random state in each."""
    from hessinit.problem.preserve import untouched_random_state

    with untouched_random_state():
        _seed()
        return load_function(place)


@cache
def _load_once(place: Place) -> LoadedProblem:
    from hessinit.problem.preserve import untouched_random_state

    with untouched_random_state():
        _seed()
        return _call_silently(place)


def _seed() -> None:
    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)  # noqa: NPY002 - the user's code may draw from the old global state
    torch.manual_seed(0)


def _call_silently(place: Place) -> LoadedProblem:
    """What it prints was shown when it was called first; ninety times is too often."""
    with contextlib.redirect_stdout(io.StringIO()):
        return call_problem(_function(place), place)
