"""Exceptions and warnings, and how a wrong choice or number is refused."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple


class Argument(NamedTuple):
    """An argument as messages name it: `layers='fc'` in Python, `--layers fc` on the command line.

    It holds texts, so that an error can be sent between processes whatever the value was.
    """

    name: str
    literal: str = ""
    word: str = ""

    def __str__(self) -> str:
        return f"{self.name}={self.literal}"


def argument(name: str, *values: object) -> Argument:
    """Return the argument, with its value if one is passed.

    >>> print(argument("layers", ["fc1", "conv*"]), argument("layers"))
    layers=['fc1', 'conv*'] layers=
    """
    if not values:
        return Argument(name)
    (value,) = values
    items = value if isinstance(value, (list, tuple)) else [value]
    return Argument(name, repr(value), ",".join(map(str, items)))


class MessageError(Exception):
    """An error whose message comes in parts: strings, and the arguments that it names.

    >>> str(MessageError(argument("lr", -1), " must be above 0; leave out ", argument("lr")))
    'lr=-1 must be above 0; leave out lr='
    """

    def __init__(self, *parts: str | Argument) -> None:
        super().__init__(*parts)

    def __str__(self) -> str:
        return "".join(map(str, self.args))


class ProblemError(MessageError, ValueError):
    """The model, the loss or the batch cannot be measured as given.

    The message says the way out.
    """


class WeightsError(ProblemError):
    """The weights are the reason, not the call: values not finite, or a saturated loss."""


class DerivativeError(ProblemError):
    """No curvature: torch has no second derivative, or finite differences show that the first ones
    differ.
    """


class ConvergenceWarning(UserWarning):
    """A value was returned that did not reach the tolerance.

    Its `error` says how far off it may be.
    """


class ConvergenceError(MessageError, RuntimeError):
    """The same as `ConvergenceWarning`, raised because `strict=True` was asked for."""


class RankError(RuntimeError):
    """Another process of a distributed job failed or ended; the message names its rank.

    The process group can still be used unless the message says otherwise.
    """


class EdgeOfStabilityWarning(UserWarning):
    """While training, the learning rate came to where steps along the sharpest direction no longer
    shrink.
    """


def did_you_mean(value: str, choices: list[str]) -> str:
    """Return a sentence that offers the nearest of `choices`, or nothing when none is near.

    >>> did_you_mean("hessain", ["gauss-newton", "hessian"])
    " Did you mean 'hessian'?"
    """
    import difflib

    near = difflib.get_close_matches(value, choices, n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def choose(
    name: str, value: object, choices: list[str], synonyms: Mapping[str, str] | None = None
) -> None:
    """Raise ProblemError unless the `value` of the argument `name` is one of `choices`.

    `synonyms` are other words for them, which the message understands.
    """
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        word = str(value).lower()
        stem = word.strip("_").removesuffix("_normal").removesuffix("_uniform")
        meant = stem if stem in choices else (synonyms or {}).get(stem)
        hint = f" Did you mean {meant!r}?" if meant else did_you_mean(word, choices)
        raise ProblemError(argument(name, value), f" is unknown; choose from {listed}.{hint}")


def options_of(kind: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the options that are fields of a dataclass, such as `Problem`."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in options.items() if name in names}


def accepts(function: Any, *arguments: object, wrapped: bool = True) -> bool:
    """Whether it can be called so, as far as its signature tells, or that of what it wraps."""
    try:
        inspect.signature(function, follow_wrapped=wrapped).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a function without a signature
        pass
    return True


def check_callable(name: str, value: Any, call: str) -> None:
    """Raise ProblemError if it cannot be called as in `call`, such as "loss(output, target)"."""
    arguments = filter(None, call.partition("(")[2].rstrip(")").split(", "))
    # A wrapper may take other arguments than what it wraps.
    if isinstance(value, type) or not accepts(value, *arguments, wrapped=False):
        shown = f"{value!r:.80}"
        raise ProblemError(
            Argument(name, shown, shown),
            f" must be a function, or an instance, callable as {call}.",
        )


def list_of(value: Any) -> list[Any]:
    """Return the items of an iterable; none for a string, or for what is no iterable."""
    try:
        return [] if isinstance(value, str) else list(value)
    except TypeError:
        return []


def check_number(name: str, value: object, is_allowed: Callable[[float], bool], rule: str) -> float:
    """Return the value as a float; raise ProblemError if `is_allowed` rejects it, or NaN for it.

    What is no number counts as NaN.
    """
    number = math.nan
    if not isinstance(value, bool | str):
        with contextlib.suppress(TypeError, ValueError):
            number = float(value)  # type: ignore[arg-type]
    if not is_allowed(number):
        raise ProblemError(argument(name, value), f" must be {rule}.")
    return number


def check_positive(name: str, value: object, such_as: str = "such as 0.1") -> float:
    """Return the value as a float; raise ProblemError unless it is finite and above 0."""
    rule = f"a finite number above 0, {such_as}"
    return check_number(name, value, lambda number: 0 < number < math.inf, rule)
