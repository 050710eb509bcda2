"""Exceptions and warnings, and how a wrong choice or number is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping


class ProblemError(ValueError):
    """The model, the loss or the batch cannot be measured as given; the message says the way out."""


class WeightsError(ProblemError):
    """The weights are the reason, not the call: weights or outputs not finite, or a saturated loss."""


class DerivativeError(ProblemError):
    """No curvature: torch has no second derivative, or finite differences show that the first ones differ."""


class ConvergenceWarning(UserWarning):
    """A value was returned that did not reach the tolerance; its `error` says how far off it may be."""


class ConvergenceError(RuntimeError):
    """The same as `ConvergenceWarning`, raised because `strict=True` was asked for."""


class RankError(RuntimeError):
    """Another process of a distributed job failed or ended; the message names its rank."""


class EdgeOfStabilityWarning(UserWarning):
    """While training, the learning rate came to where steps along the sharpest direction no longer shrink."""


def did_you_mean(value: str, choices: list[str]) -> str:
    """A sentence that offers the nearest of `choices`, or nothing when none is near.

    >>> did_you_mean("hessain", ["gauss-newton", "hessian"])
    " Did you mean 'hessian'?"
    """
    import difflib

    near = difflib.get_close_matches(value, choices, n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def choose(name: str, value: object, choices: list[str], synonyms: Mapping[str, str] | None = None) -> None:
    """Refuse a `value` of the argument `name` that is not one of `choices`; `synonyms` are other words."""
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        word = str(value).lower()
        stem = word.strip("_").removesuffix("_normal").removesuffix("_uniform")
        meant = stem if stem in choices else (synonyms or {}).get(stem)
        hint = f" Did you mean {meant!r}?" if meant else did_you_mean(word, choices)
        raise ProblemError(f"{name}={value!r} is unknown; choose from {listed}.{hint}")


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
