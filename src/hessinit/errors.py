"""Exceptions and warnings, and how a wrong choice or number is refused."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any


class ProblemError(ValueError):
    """The model, the loss or the batch cannot be measured as given.

    The message says the way out.
    """


class WeightsError(ProblemError):
    """The weights are the reason, not the call: weights or outputs not finite, or a saturated loss."""


class DerivativeError(ProblemError):
    """No curvature: torch has no second derivative, or finite differences show that the first ones
    differ.
    """


class ConvergenceWarning(UserWarning):
    """A value was returned that did not reach the tolerance.

    Its `error` says how far off it may be.
    """


class ConvergenceError(RuntimeError):
    """The same as `ConvergenceWarning`, raised because `strict=True` was asked for."""


class RankError(RuntimeError):
    """Another process of a distributed job failed or ended; the message names its rank."""


class EdgeOfStabilityWarning(UserWarning):
    """While training, the learning rate came to where steps along the sharpest direction no longer
    shrink.
    """


def did_you_mean(value: str, choices: list[str]) -> str:
    """A sentence that offers the nearest of `choices`, or nothing when none is near.

    >>> did_you_mean("hessain", ["gauss-newton", "hessian"])
    " Did you mean 'hessian'?"
    """
    import difflib

    near = difflib.get_close_matches(value, choices, n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def choose(
    name: str, value: object, choices: list[str], synonyms: Mapping[str, str] | None = None
) -> None:
    """Refuse a `value` of the argument `name` that is not one of `choices`.

    `synonyms` are other words.
    """
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        word = str(value).lower()
        stem = word.strip("_").removesuffix("_normal").removesuffix("_uniform")
        meant = stem if stem in choices else (synonyms or {}).get(stem)
        hint = f" Did you mean {meant!r}?" if meant else did_you_mean(word, choices)
        raise ProblemError(f"{name}={value!r} is unknown; choose from {listed}.{hint}")


def check_names(options: Mapping[str, object], known: Iterable[str]) -> None:
    """Refuse an option that a verb does not have, as Python does for those in its signature."""
    for name in options:
        if name not in (names := list(known)):
            raise TypeError(
                f"{name}= is no option.{did_you_mean(name, names)} Known are {', '.join(names)}."
            )


def options_of(kind: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the options that are fields of a dataclass, such as `Problem`."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in options.items() if name in names}


def accepts(function: Any, *arguments: object, wrapped: bool = True) -> bool:
    """Whether it can be called so, as far as the signature tells: its own, or that of what it
    wraps.
    """
    try:
        inspect.signature(function, follow_wrapped=wrapped).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a function without a signature
        pass
    return True


def check_callable(name: str, value: Any, call: str) -> None:
    """Refuse what cannot be called as in `call`, such as "loss(output, target)"."""
    arguments = filter(None, call.partition("(")[2].rstrip(")").split(", "))
    # A wrapper may take other arguments than what it wraps.
    if isinstance(value, type) or not accepts(value, *arguments, wrapped=False):
        raise ProblemError(
            f"{name}={value!r:.80} must be a function, or an instance, callable as {call}."
        )


def list_of(value: Any) -> list[Any]:
    """What an iterable gives, as a list; a string and what is no iterable give none."""
    try:
        return [] if isinstance(value, str) else list(value)
    except TypeError:
        return []


def check_number(name: str, value: object, is_allowed: Callable[[float], bool], rule: str) -> float:
    """The value as a float; refuses what is not `is_allowed`, and what is no number, as nan."""
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not is_allowed(number):
        raise ProblemError(f"{name}={value!r} must be {rule}.")
    return number


def check_positive(name: str, value: object, such_as: str = "such as 0.1") -> float:
    """The value as a float; refuses anything but a finite number above 0."""
    rule = f"a finite number above 0, {such_as}"
    return check_number(name, value, lambda number: 0 < number < math.inf, rule)
