"""Call a verb with the options of its problem and its own together, as the tests of both need it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import hessinit
from hessinit.errors import options_of

T = TypeVar("T")
# What a verb takes in one argument: the options of that argument may stand beside it.
PARTS = {"fit": hessinit.Fit, "settings": hessinit.TrackSettings}


def call(verb: Callable[..., T], model: Any, loss: Any, batch: Any, **options: Any) -> T:
    parameters = inspect.signature(verb).parameters
    if "problem" not in parameters:
        return verb(model, loss, batch, **options)
    of_the_problem = options_of(hessinit.Problem, options)
    own = {name: value for name, value in options.items() if name not in of_the_problem}
    for part, kind in PARTS.items():
        if part in parameters and (part == "fit" or verb is hessinit.track):
            of_the_part = options_of(kind, own)
            own = {name: value for name, value in own.items() if name not in of_the_part}
            own.setdefault(part, kind(**of_the_part))
    return verb(hessinit.Problem(model, loss, batch, **of_the_problem), **own)


def measure(model: Any, loss: Any, batch: Any, **options: Any) -> hessinit.CurvatureReport:
    return call(hessinit.measure, model, loss, batch, **options)


def initialize_(model: Any, loss: Any, batch: Any, **options: Any) -> hessinit.Initialization:
    return call(hessinit.initialize_, model, loss, batch, **options)
