"""Learning rates that follow from the curvature: gradient descent on a quadratic, warmup, and the advice."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from hessinit.errors import ProblemError, choose
from hessinit.results.curvature_report import largest_magnitude
from hessinit.results.estimates import Estimate
from hessinit.results.result import Result

if TYPE_CHECKING:
    from hessinit.results.curvature_report import CurvatureReport

DESCENTS = ("sgd", "momentum", "nesterov")
ADAPTIVE = ("adam", "adamw", "rmsprop")
USUAL_MOMENTUM = 0.9

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

# A fall of the curvature by this factor within the steps looked ahead makes room for a larger rate.
NOTABLE_FALL = 2.0


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
        return largest_magnitude(
            *(replace(end, value=end.value + self.weight_decay) for end in (top, bottom))
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


@dataclass(frozen=True, kw_only=True)
class Warmup:
    """Whether to raise the rate linearly over the first `steps`, and why."""

    advised: bool
    steps: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class LookAhead:
    """The loss and the stable rate after `steps` trial steps at `learning_rate`."""

    steps: int
    learning_rate: float
    loss: float
    stable_learning_rate: float


def judge_warmup(
    lr: float | None, best: float, stable: float, ahead: LookAhead | None = None, *, flat: bool = False
) -> Warmup:
    """Advise a warmup where the rate is above the stable one, or the curvature falls quickly.

    A `flat` initialization has no sharpness to lose: there a rate that is too large stays too large.

    >>> judge_warmup(0.3, 0.05, 0.1).steps, judge_warmup(0.08, 0.05, 0.1).advised
    (150, False)
    """
    from hessinit.present import advice_sentences as say

    if stable == 0 or math.isnan(stable):
        return Warmup(advised=False, steps=0, reason=say.NO_RATE)
    rate = best if lr is None else lr
    if rate > stable and flat:
        return Warmup(advised=False, steps=0, reason=say.too_fast_for_gentle(rate, stable))
    if rate > stable:
        reason = say.too_fast(rate, stable, hopeless=rate > RESCUED_BELOW * stable)
        return Warmup(advised=True, steps=warmup_steps(rate / stable), reason=reason)
    if ahead is not None and NOTABLE_FALL * stable <= ahead.stable_learning_rate < math.inf:
        ratio = ahead.stable_learning_rate / stable
        reason = say.falls_quickly(ahead, stable)
        return Warmup(advised=True, steps=warmup_steps(ratio), reason=reason)
    return Warmup(advised=False, steps=0, reason=say.slow_enough(rate, stable, given=lr is not None))


def warmup_steps(ratio: float) -> int:
    """Return a number of steps in proportion to the rate over the stable one, within bounds.

    >>> warmup_steps(2.0), warmup_steps(1e9)
    (100, 2000)
    """
    return min(MOST_WARMUP_STEPS, math.ceil(WARMUP_STEPS_PER_LIMIT * ratio))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LearningRateAdvice(Result):
    """The rate of the largest guaranteed decrease, the stability limit, and whether to warm up.

    The rates follow from `norm`: ‖H‖ for gradient descent, the norm of the preconditioned curvature for Adam
    and AdamW. `first_step` is, for these, the rate at which the very first step lowers the loss's quadratic
    model most. `weights` names the parameters that the numbers are about, `frozen` counts the entries among
    them that no gradient moves. `lr` is the rate that the advice was asked about, if any.
    """

    KIND: ClassVar[str] = "hessinit learning-rate advice"

    optimizer: str
    lr: float | None = None
    learning_rate: float
    learning_rate_reason: str
    stable_learning_rate: float
    stable_reason: str
    warmup: Warmup
    norm: Estimate
    first_step: float | None = None
    curvature: str
    loss: float
    examples: int
    weights: tuple[str, ...]
    parameters: int
    frozen: int = 0
    ahead: LookAhead | None = None
    seconds: float | None = None
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def converged(self) -> bool:
        """Whether the norm behind the rates reached the tolerance."""
        return self.norm.converged

    def __repr__(self) -> str:
        rates = (
            f"learning_rate={self.learning_rate:.3g}, stable_learning_rate={self.stable_learning_rate:.3g}"
        )
        return f"<LearningRateAdvice for {self.optimizer}: {rates}, warmup={self.warmup.advised}>"


def advise_descent(
    descent: Descent,
    top: Estimate,
    bottom: Estimate,
    *,
    lr: float | None,
    ahead: LookAhead | None = None,
    notes: tuple[str, ...] = (),
    **facts: Any,
) -> LearningRateAdvice:
    """Return the advice for gradient descent, which follows from both ends of the network's curvature.

    `facts` are the other fields.
    """
    from hessinit.present import advice_sentences as say

    norm = descent.norm(top, bottom)
    best, edge = descent.best(norm.value), descent.edge(norm.value)
    flat = 0 < norm.value < FLAT_INITIALIZATION
    if flat:
        notes = (*notes, say.gentle_start(norm.value))
    return LearningRateAdvice(
        optimizer=str(descent),
        lr=lr,
        learning_rate=best,
        learning_rate_reason=say.why_best(descent, norm.value),
        stable_learning_rate=edge,
        stable_reason=say.why_edge(descent, norm.value),
        warmup=judge_warmup(lr, best, edge, ahead, flat=flat),
        norm=norm,
        ahead=ahead,
        notes=notes,
        **facts,
    )


def advise_from_report(
    report: CurvatureReport,
    optimizer: object,
    lr: float | None,
    momentum: float | None,
    dampening: float | None,
    weight_decay: float | None,
) -> LearningRateAdvice:
    """The advice for gradient descent on the report's network."""
    if not isinstance(optimizer, str) or optimizer in ADAPTIVE:
        name = optimizer if isinstance(optimizer, str) else type(optimizer).__name__
        raise ProblemError(
            f"a report cannot advise on {name!r}: it takes the word 'sgd', 'momentum' or 'nesterov', and "
            "adaptive rates need the gradient. Use hessinit.advise(model, loss, batch, optimizer=...)."
        )
    network = report.network
    return advise_descent(
        named_descent(optimizer, momentum, dampening, weight_decay),
        network.top,
        network.bottom,
        lr=check_rate(lr),
        curvature=report.curvature,
        loss=report.loss,
        examples=report.examples,
        weights=report.names,
        parameters=network.parameters,
        notes=report.notes,
        versions=report.versions,
    )
