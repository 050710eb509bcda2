"""Call a verb with the options of its problem and its own together, as the tests of both need it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import hessinit

T = TypeVar("T")
OF_A_PROBLEM = {field.name for field in fields(hessinit.Problem)}


def call(verb: Callable[..., T], model: Any, loss: Any, batch: Any, **options: Any) -> T:
    if "problem" not in inspect.signature(verb).parameters:
        return verb(model, loss, batch, **options)
    of_the_problem = {name: value for name, value in options.items() if name in OF_A_PROBLEM}
    own = {name: value for name, value in options.items() if name not in OF_A_PROBLEM}
    return verb(hessinit.Problem(model, loss, batch, **of_the_problem), **own)


def measure(model: Any, loss: Any, batch: Any, **options: Any) -> hessinit.CurvatureReport:
    return call(hessinit.measure, model, loss, batch, **options)
