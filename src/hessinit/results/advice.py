"""Learning rates that follow from the curvature: descent on a quadratic, warmup, the advice."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

from hessinit.errors import ProblemError, argument, check_number, check_positive, choose
from hessinit.results.curvature_report import Estimate, largest_magnitude
from hessinit.results.initialization import Trial
from hessinit.results.result import LATER, Result, presenter

DESCENTS = ("sgd", "momentum", "nesterov")

# The curvature usually falls in the first steps, so initialize_ aims at twice the stable rate
# (κ = 4); with κ = 8 a network of those it was chosen on diverged. On another batch the two may
# look a quarter more.
MOST_TIMES_STABLE = 2.5  # at the initialization: later, 1 is the stability limit

# Initializations below this were the flat ones; SGD at 1/‖H‖ did not train from two of the three.
FLAT_INITIALIZATION = 1.0


@dataclass(frozen=True, kw_only=True)
class Descent:
    """`torch.optim.SGD` as it steps: `b ← μ b + g`, then `w ← w − lr b`; Nesterov by `g + μ b`.

    On `½ a w²` heavy ball has the characteristic polynomial `z² − (1 + μ − lr a) z + μ`, whose
    roots leave the unit circle at `z = −1`, where `lr a = 2 + 2μ`; Nesterov's leave it where `lr (1
    + 2μ) a = 2 + 2μ`. Under a constant gradient each step moves the weights by `lr/(1 − μ)` in all,
    so the rate at which this is `1/‖H‖` gives the largest guaranteed decrease.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_fraction("momentum", self.momentum)
        check_nonnegative("weight_decay", self.weight_decay)
        if self.nesterov and self.momentum == 0:
            raise ProblemError(
                "Nesterov with momentum=0 does not exist; it needs a momentum above 0."
            )

    @property
    def lasting(self) -> float:
        """How far a unit of rate moves a weight in the end, under a constant gradient of 1."""
        return 1 / (1 - self.momentum)

    def best(self, norm: float) -> float:
        """Return the rate at which no step, nor what lasts of it, is longer than `1/norm`."""
        longest = max(self.lasting, 1 + self.momentum * self.nesterov)
        return 1 / (norm * longest) if norm else math.inf

    def stability_limit(self, norm: float) -> float:
        """Return the largest stable rate on a quadratic of this norm."""
        strength = 1 + 2 * self.momentum * self.nesterov
        return (2 + 2 * self.momentum) / (strength * norm) if norm else math.inf

    def norm(self, top: Estimate, bottom: Estimate) -> Estimate:
        """Return ‖H + weight decay‖, from both ends of the spectrum of H."""
        extremes = [replace(end, value=end.value + self.weight_decay) for end in (top, bottom)]
        return largest_magnitude(*extremes)

    def __str__(self) -> str:
        named = {"momentum": self.momentum, "weight_decay": self.weight_decay}
        shown = [f"{name}={value:g}" for name, value in named.items() if value]
        return f"SGD({', '.join(shown + ['nesterov'] * self.nesterov)})" if shown else "SGD"


def named_descent(optimizer: str, momentum: float | None, weight_decay: float | None) -> Descent:
    """Return the descent of that name; the momentum is 0.9, except for "sgd", unless given."""
    choose("optimizer", optimizer, list(DESCENTS))
    usual = {"sgd": 0.0}.get(optimizer, 0.9)
    strength = usual if momentum is None else check_fraction("momentum", momentum)
    if optimizer == "sgd" and strength:
        raise ProblemError(
            argument("momentum", momentum),
            " and ",
            argument("optimizer", "sgd"),
            " do not go together: plain gradient descent has none. Pass ",
            argument("optimizer", "momentum"),
            " or 'nesterov', or leave it out.",
        )
    decay = 0.0 if weight_decay is None else weight_decay
    return Descent(momentum=strength, nesterov=optimizer == "nesterov", weight_decay=decay)


def check_fraction(name: str, value: object) -> float:
    rule = "a number from 0 up to, not including, 1, such as 0.9"
    return check_number(name, value, lambda number: 0 <= number < 1, rule)


def check_nonnegative(name: str, value: object) -> float:
    return check_number(
        name, value, lambda number: 0 <= number < math.inf, "a finite number, 0 or more"
    )


def check_rate(lr: object) -> float | None:
    return None if lr is None else check_positive("lr", lr, "such as 0.1; leave it out for none")


@dataclass(frozen=True, kw_only=True)
class WarmupAdvice:
    """Whether to raise the rate linearly over the first `steps`, and the trials that decided."""

    advised: bool
    steps: int
    reason: str
    trials: tuple[Trial, ...] = field(default=(), metadata=LATER)


def untried_warmup(lr: float | None, best: float) -> WarmupAdvice:
    """No warmup: at the advised rate and below none is needed, and above it none was tried."""
    return WarmupAdvice(
        advised=False, steps=0, reason=presenter("advice").explain_no_warmup(lr, best)
    )


@dataclass(frozen=True, kw_only=True)
class TriedRates:
    """What trials say of the learning rate.

    `rate` is nan where the network did not learn in any of them. `favoured` is the rate at which
    the trials end lowest. `stopped_at_end`: the best rate is the last one that was tried.
    `trained_before`: the model has frozen weights or adapters. `fresh`: the trials saw other
    examples at every step.
    """

    trials: tuple[Trial, ...]
    rate: float = math.nan
    favoured: float = math.nan
    stopped_at_end: bool = False
    trained_before: bool = False
    fresh: bool = False

    @property
    def best_on_data(self) -> Trial | None:
        """The trial at the rate that was found on fresh mini-batches."""
        at_rate = (trial for trial in self.trials if trial.lr == self.rate and self.fresh)
        return next(at_rate, None)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LearningRateAdvice(Result):
    """The rate to train with, the stability limit, and whether to warm up to `lr`.

    `trials` are those from which `learning_rate` follows, nan where the network did not learn in
    any; without trials it is the rate of the largest guaranteed decrease on a quadratic. That rate
    and the limit follow from `norm`: ‖H‖ for gradient descent, the norm of the preconditioned
    curvature for Adam and AdamW. `weights` are the parameters counted, `frozen` the number of
    entries that no gradient moves.
    """

    KIND: ClassVar[str] = "hessinit learning-rate advice"
    SCHEMA: ClassVar[int] = 2

    optimizer: str
    lr: float | None = None
    learning_rate: float
    learning_rate_reason: str
    stable_learning_rate: float
    stable_reason: str
    warmup: WarmupAdvice
    norm: Estimate
    curvature: str
    loss: float
    examples: int
    weights: tuple[str, ...]
    parameters: int
    frozen: int = 0
    seconds: float | None = None
    gradients: float | None = field(default=None, metadata=LATER)
    trials: tuple[Trial, ...] = field(default=(), metadata=LATER)
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def converged(self) -> bool:
        """Whether the norm behind the rates reached the tolerance."""
        return self.norm.converged

    @property
    def learns(self) -> bool:
        """Whether the network learned in a trial; without trials, whether its gradient is not 0."""
        return 0 < self.learning_rate < math.inf
