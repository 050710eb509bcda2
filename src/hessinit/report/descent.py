"""Gradient descent on a quadratic, with momentum and weight decay: the best rate and the last stable one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hessinit.errors import ProblemError, choose
from hessinit.estimate import Estimate

DESCENTS = ("sgd", "momentum", "nesterov")
USUAL_MOMENTUM = 0.9

# The curvature usually falls in the first steps, so initialize_ aims at twice the stable rate (κ = 4); with
# κ = 8 a network of those it was chosen on diverged. On another batch the two may look a quarter more.
MOST_TIMES_STABLE = 2.5  # at the start: later, 1 is the edge


@dataclass(frozen=True, kw_only=True)
class Descent:
    """`torch.optim.SGD` as it steps: `b ← μ b + (1 − τ) g`, then `w ← w − lr b`; Nesterov by `g + μ b`.

    On `½ a w²` heavy ball has the characteristic polynomial `z² − (1 + μ − lr (1 − τ) a) z + μ`, whose roots
    leave the unit circle at `z = −1`, where `lr (1 − τ) a = 2 + 2μ`; Nesterov's leave it where
    `lr (1 + 2μ) a = 2 + 2μ`. Under a steady gradient each step lasts: it moves the weights by
    `lr (1 − τ)/(1 − μ)` in all, so the rate whose lasting step is `1/‖H‖` is the best guaranteed one.

    >>> Descent(momentum=0.9).edge(2.0), Descent().best(2.0)
    (1.9, 0.5)
    """

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_fraction("momentum", self.momentum)
        check_fraction("dampening", self.dampening)
        check_nonnegative("weight_decay", self.weight_decay)
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ProblemError(
                f"Nesterov with momentum={self.momentum:g} and dampening={self.dampening:g} does not exist; "
                "it needs a momentum above 0 and no dampening."
            )

    @property
    def lasting(self) -> float:
        """How far a unit of rate moves a weight in the end, under a steady gradient of 1."""
        return (1 - self.dampening) / (1 - self.momentum) if self.momentum else 1.0

    @property
    def first(self) -> float:
        """How far it does in the first step; torch does not dampen that one."""
        return 1 + self.momentum if self.nesterov else 1.0

    def best(self, norm: float) -> float:
        """The rate at which neither the first nor the lasting step is longer than `1/norm`."""
        return 1 / (norm * max(self.lasting, self.first)) if norm else math.inf

    def edge(self, norm: float) -> float:
        """The largest stable rate on a quadratic of this norm."""
        if not self.momentum:
            return 2 / norm if norm else math.inf
        strength = 1 + 2 * self.momentum if self.nesterov else 1 - self.dampening
        return (2 + 2 * self.momentum) / (strength * norm) if norm else math.inf

    def norm(self, top: Estimate, bottom: Estimate) -> Estimate:
        """‖H + weight decay‖, from both ends of the spectrum of H."""
        ends = [replace(end, value=end.value + self.weight_decay) for end in (top, bottom)]
        lesser, greater = sorted(ends, key=lambda end: (math.isnan(end.value), abs(end.value)))
        reach = abs(lesser.value) + lesser.error
        doubtful = not lesser.converged and not reach <= abs(greater.value)
        return Estimate(
            abs(greater.value),
            max(greater.error, reach - abs(greater.value)) if doubtful else greater.error,
            greater.converged and not doubtful,
            lesser.reason if doubtful and greater.converged else greater.reason,
            top.products + bottom.products,
        )

    def __str__(self) -> str:
        named = {"momentum": self.momentum, "dampening": self.dampening, "weight_decay": self.weight_decay}
        shown = [f"{name}={value:g}" for name, value in named.items() if value]
        return f"SGD({', '.join(shown + ['nesterov'] * self.nesterov)})" if shown else "SGD"


def named_descent(
    optimizer: str, momentum: float | None, dampening: float | None, weight_decay: float | None
) -> Descent:
    """The descent that a word and what was given with it mean; "momentum" and "nesterov" start from 0.9."""
    choose("optimizer", optimizer, list(DESCENTS))
    if optimizer == "sgd" and (momentum or dampening):
        name, value = ("momentum", momentum) if momentum else ("dampening", dampening)
        raise ProblemError(
            f"{name}={value!r} and optimizer='sgd' do not go together: plain gradient descent has none. "
            "Pass optimizer='momentum' or 'nesterov', or leave it out."
        )
    usual = 0.0 if optimizer == "sgd" else USUAL_MOMENTUM
    return Descent(
        momentum=usual if momentum is None else momentum,
        dampening=0.0 if dampening is None else dampening,
        nesterov=optimizer == "nesterov",
        weight_decay=0.0 if weight_decay is None else weight_decay,
    )


def check_fraction(name: str, value: object) -> float:
    """A number from 0 up to, not including, 1."""
    number = _number(value)
    if not 0 <= number < 1:
        raise ProblemError(f"{name}={value!r} must be a number from 0 up to, not including, 1, such as 0.9.")
    return number


def check_nonnegative(name: str, value: object) -> float:
    """A finite number, 0 or more."""
    number = _number(value)
    if not 0 <= number < math.inf:
        raise ProblemError(f"{name}={value!r} must be a finite number, 0 or more.")
    return number


def check_rate(lr: object) -> float | None:
    """A learning rate, or None."""
    if lr is None:
        return None
    rate = _number(lr)
    if not 0 < rate < math.inf:
        raise ProblemError(f"lr={lr!r} must be a finite number above 0, such as 0.1; leave it out for none.")
    return rate


def _number(value: object) -> float:
    if isinstance(value, bool | str):
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan
