"""What the caller asked for, checked before any work: the value, the rule, the way out."""

from __future__ import annotations

import math
from typing import Any

from hessinit.errors import ProblemError, choose
from hessinit.initializing import defaults
from hessinit.initializing.freedoms import FREEDOMS
from hessinit.initializing.wish import ADAPTIVE
from hessinit.problem.validate import check_whole
from hessinit.schemes.rules import SCHEMES, SYNONYMS


def read_aim(lr: Any, target: Any) -> tuple[float | str | None, float | None]:
    """A learning rate, "auto" or None; and a norm, where that was given instead.

    >>> read_aim(0.1, None), read_aim("auto", None), read_aim(None, 2)
    ((0.1, None), ('auto', None), (None, 2.0))
    """
    if lr is not None and target is not None:
        raise ProblemError(
            f"lr={lr!r} and target={target!r} both set the norm to aim at (lr means a target of "
            f"{defaults.KAPPA:g}/lr, or {defaults.KAPPA_NORMALIZED:g}/lr for a normalized network); pass one "
            "of them."
        )
    if lr is not None:
        return (lr if lr == "auto" else _positive("lr", lr, "a learning rate such as 0.1, or 'auto'")), None
    if target is not None:
        return None, _positive("target", target, "the ‖H‖ to aim at, such as 1.0")
    return None, None


def read_momentum(optimizer: Any, momentum: Any) -> float:
    """0 for optimizers without momentum, and for those whose steps do not grow with the gradient.

    >>> read_momentum("sgd", 0.9), read_momentum("momentum", 0.9)
    (0.0, 0.9)
    """
    choose("optimizer", optimizer, ["sgd", "momentum", "nesterov", *ADAPTIVE])
    number = _number(momentum)
    if not 0 <= number < 1:
        raise ProblemError(f"momentum={momentum!r} must be a number from 0 up to, but not, 1.")
    return number if optimizer in ("momentum", "nesterov") else 0.0


def check_choices(
    rule: Any, scheme: Any, freedom: Any, curvature: Any, biases: Any, residual: Any, dropout: Any
) -> None:
    """Words that are known."""
    choose("rule", rule, ["network", "layers"])
    choose("scheme", scheme, ["auto", "keep", *SCHEMES], SYNONYMS)
    choose("freedom", freedom, ["auto", *FREEDOMS])
    choose("curvature", curvature, ["gauss-newton", "hessian"])
    choose("biases", biases, ["auto", "zero", "keep"])
    choose("residual", residual, ["auto", "plain", "scaled"])
    choose("dropout", dropout, ["refuse", "freeze"])
    if rule == "layers" and freedom != "auto":
        raise ProblemError(
            f"freedom={freedom!r} has no meaning for rule='layers', which moves every weight; leave it out."
        )


def check_rule(rule: str, optimizer: str, lr: Any) -> None:
    """Adam's rate says nothing about curvature, so that the layers need a target."""
    if rule == "layers" and lr is not None and optimizer in ADAPTIVE:
        raise ProblemError(
            f"rule='layers' with optimizer={optimizer!r} and lr={lr!r}: its steps do not grow with the "
            "gradient, so that no rate says how sharp a layer may be; pass target= instead of lr=."
        )


def read_measurements(value: Any, rule: str) -> int:
    """How many measurements the search may take."""
    if value is None:
        return defaults.MOST_MEASUREMENTS[rule]
    return check_whole("max_measurements", value, at_least=1)


def read_most_sharpening(value: Any) -> float:
    """A factor from 1 up; inf for no limit."""
    number = _number(value)
    if not number >= 1:
        raise ProblemError(
            f"most_sharpening={value!r} must be 1 or more: how many times the loss of a silent network the "
            "loss at the start may be. Pass math.inf for no limit."
        )
    return number


def _positive(name: str, value: Any, meaning: str) -> float:
    number = _number(value)
    if not 0 < number < math.inf:
        raise ProblemError(f"{name}={value!r} must be a positive, finite number: {meaning}.")
    return number


def _number(value: Any) -> float:
    try:
        return math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError):
        return math.nan
