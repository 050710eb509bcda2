"""Learning rates that follow from the curvature: gradient descent on a quadratic, warmup, and the advice."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from hessinit.errors import ProblemError, check_number, check_positive, choose
from hessinit.results.curvature_report import Estimate, largest_magnitude
from hessinit.results.initialization import Trial
from hessinit.results.result import LATER, Result, presenter

DESCENTS = ("sgd", "momentum", "nesterov")

# The curvature usually falls in the first steps, so initialize_ aims at twice the stable rate (κ = 4); with
# κ = 8 a network of those it was chosen on diverged. On another batch the two may look a quarter more.
MOST_TIMES_STABLE = 2.5  # at the initialization: later, 1 is the stability limit

# Measured on digits (benchmarks/learning_rates.py: three sharp and three flat initializations, each with SGD,
# momentum and Adam, one seed, 140 steps): at two to four times the stable rate warmups of 40 to 100 steps
# helped 4 of the 9 sharp pairs and none of the flat ones, which have no sharpness to lose; at eight times
# next to nothing trained, at half of the stable rate they changed little. Thin evidence: one seed.
WARMUP_STEPS_PER_LIMIT = 50
MOST_WARMUP_STEPS = 2000
RESCUED_BELOW = 4.0

# Initializations below this were the flat ones; SGD at 1/‖H‖ did not train from two of the three.
FLAT_INITIALIZATION = 1.0

# The advice over the rate that trials favour stays between these: on the development problems of
# benchmarks/advice.py it lay between 0.26 and 2, and above 1.5 the loss was higher.
TIMES_TRIALS = 0.25, 1.5


@dataclass(frozen=True, kw_only=True)
class Descent:
    """`torch.optim.SGD` as it steps: `b ← μ b + g`, then `w ← w − lr b`; Nesterov by `g + μ b`.

    On `½ a w²` heavy ball has the characteristic polynomial `z² − (1 + μ − lr a) z + μ`, whose roots leave
    the unit circle at `z = −1`, where `lr a = 2 + 2μ`; Nesterov's leave it where `lr (1 + 2μ) a = 2 + 2μ`.
    Under a constant gradient each step moves the weights by `lr/(1 − μ)` in all, so the rate at which this is
    `1/‖H‖` gives the largest guaranteed decrease.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_fraction("momentum", self.momentum)
        check_nonnegative("weight_decay", self.weight_decay)
        if self.nesterov and self.momentum == 0:
            raise ProblemError("Nesterov with momentum=0 does not exist; it needs a momentum above 0.")

    @property
    def lasting(self) -> float:
        """How far a unit of rate moves a weight in the end, under a constant gradient of 1."""
        return 1 / (1 - self.momentum) if self.momentum else 1.0

    def best(self, norm: float) -> float:
        """Return the rate at which neither the first nor the lasting step is longer than `1/norm`."""
        first = 1 + self.momentum if self.nesterov else 1.0
        return 1 / (norm * max(self.lasting, first)) if norm else math.inf

    def stability_limit(self, norm: float) -> float:
        """Return the largest stable rate on a quadratic of this norm."""
        strength = 1 + 2 * self.momentum if self.nesterov else 1
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
    """Return the descent of that name; "momentum" and "nesterov" have a momentum of 0.9 unless given."""
    choose("optimizer", optimizer, list(DESCENTS))
    if optimizer == "sgd" and momentum:
        why = f"momentum={momentum!r} and optimizer='sgd' do not go together: plain gradient descent has none"
        raise ProblemError(f"{why}. Pass optimizer='momentum' or 'nesterov', or leave it out.")
    usual = 0.0 if optimizer == "sgd" else 0.9
    given, decay = usual if momentum is None else momentum, weight_decay or 0.0
    return Descent(momentum=given, nesterov=optimizer == "nesterov", weight_decay=decay)


def check_fraction(name: str, value: object) -> float:
    rule = "a number from 0 up to, not including, 1, such as 0.9"
    return check_number(name, value, lambda number: 0 <= number < 1, rule)


def check_nonnegative(name: str, value: object) -> float:
    return check_number(name, value, lambda number: 0 <= number < math.inf, "a finite number, 0 or more")


def check_rate(lr: object) -> float | None:
    return None if lr is None else check_positive("lr", lr, "such as 0.1; leave it out for none")


@dataclass(frozen=True, kw_only=True)
class WarmupAdvice:
    """Whether to raise the rate linearly over the first `steps`, and why."""

    advised: bool
    steps: int
    reason: str


def judge_warmup(lr: float | None, best: float, stable: float, *, flat: bool = False) -> WarmupAdvice:
    """Advise a warmup where the rate is above the stable one, in proportion to how far.

    A `flat` initialization has no sharpness to lose: there a rate that is too large stays too large.
    """
    rate, steps = best if lr is None else lr, 0
    if 0 < stable < rate and not flat:
        steps = min(MOST_WARMUP_STEPS, math.ceil(WARMUP_STEPS_PER_LIMIT * (rate / stable)))
    is_hopeless = rate > RESCUED_BELOW * stable
    reason = presenter("advice").explain_warmup(rate, stable, is_flat=flat, is_hopeless=is_hopeless)
    return WarmupAdvice(advised=steps > 0, steps=steps, reason=reason)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LearningRateAdvice(Result):
    """The rate to train with, the stability limit, and whether to warm up to `lr`.

    `trials` are those from which `learning_rate` follows; without any it is the rate of the largest
    guaranteed decrease. That rate and the limit follow from `norm`: ‖H‖ for gradient descent, the norm of the
    preconditioned curvature for Adam and AdamW. `weights` are the parameters counted, `frozen` the number of
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


def advise_descent(
    descent: Descent, top: Estimate, bottom: Estimate, *, lr: float | None, notes: tuple[str, ...],
    **facts: Any,
) -> LearningRateAdvice:  # fmt: skip
    """Return the advice that follows from both ends of the network's spectrum; `facts` are other fields."""
    say, norm = presenter("advice"), descent.norm(top, bottom)
    why_best, why_stable = say.explain_descent(descent, norm.value)
    best, stable = descent.best(norm.value), descent.stability_limit(norm.value)
    flat = 0 < norm.value < FLAT_INITIALIZATION
    return LearningRateAdvice(
        optimizer=str(descent), lr=lr, learning_rate=best, learning_rate_reason=why_best,
        stable_learning_rate=stable, stable_reason=why_stable,
        warmup=judge_warmup(lr, best, stable, flat=flat), norm=norm,
        notes=(*notes, say.flat_initialization(norm.value)) if flat else notes, **facts,
    )  # fmt: skip


def with_trials(
    advice: LearningRateAdvice, rate: float, trials: tuple[Trial, ...], moved: float, part: float
) -> LearningRateAdvice:
    """The advice of trials that favour `rate`; where all blew up, a quarter of the lowest.

    `moved` is the first step over the length of the weights, per unit of rate. The advice is the geometric
    mean of `rate`, counted twice, and of the rate at which the first step is a `part` of that length.
    """
    say, guaranteed = presenter("advice"), advice.learning_rate
    reach, times = (part / moved if 0 < moved < math.inf else 0.0), 0.0
    if not rate > 0:
        best = min(guaranteed, min(trial.lr for trial in trials) / 4)
    else:
        times = min(max((reach / rate) ** (1 / 3), TIMES_TRIALS[0]), TIMES_TRIALS[1])
        best = times * rate
    reason = say.explain_trials(trials, rate, reach, part, times if times in TIMES_TRIALS else None)
    warmup = advice.warmup
    if advice.lr is None:  # the trials had none
        warmup = WarmupAdvice(advised=False, steps=0, reason=say.NO_WARMUP)
    ends = [trial.score for trial in trials if trial.survived]
    stuck = (say.NO_RATE_LEARNS,) if advice.loss > 0 and ends and min(ends) > 0.98 * advice.loss else ()
    return replace(
        advice, learning_rate=best, learning_rate_reason=reason, trials=trials, warmup=warmup,
        notes=(*stuck, *advice.notes),
    )  # fmt: skip
