"""When a warmup of the learning rate is worth it, and how long a one."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Measured on digits (benchmarks/learning_rates.py: three sharp and three gentle starts, each with SGD,
# momentum and Adam, one seed, 140 steps): at two to four times the stable rate warmups of 40 to 100 steps
# helped 4 of the 9 sharp pairs and none of the gentle ones, which have no sharpness to shed; at eight times
# next to nothing trained, at half of the stable rate they changed little. Thin evidence: one seed.
STEPS_PER_EDGE = 50
MOST_STEPS = 2000
RESCUED_BELOW = 4.0

# Starts below this were the gentle ones; SGD at 1/‖H‖ did not train from two of the three.
GENTLE = 1.0

# A fall of the curvature by this factor within the steps looked ahead makes room for a larger rate.
NOTABLE_FALL = 2.0


@dataclass(frozen=True, kw_only=True)
class Warmup:
    """Whether to raise the rate linearly over the first `steps`, and why."""

    advised: bool
    steps: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class LookAhead:
    """What `steps` trial steps at `learning_rate` lead to: the loss there, and the stable rate."""

    steps: int
    learning_rate: float
    loss: float
    stable_learning_rate: float


def judge_warmup(
    lr: float | None, best: float, stable: float, ahead: LookAhead | None = None, *, gentle: bool = False
) -> Warmup:
    """Advise a warmup where the rate is above the stable one at the start, or the curvature falls quickly.

    A `gentle` start has no sharpness to shed: there a rate that is too large stays too large.

    >>> judge_warmup(0.3, 0.05, 0.1).steps, judge_warmup(0.08, 0.05, 0.1).advised
    (150, False)
    """
    from hessinit.present import advice_sentences as say

    if stable == 0 or math.isnan(stable):
        return Warmup(advised=False, steps=0, reason=say.NO_RATE)
    rate = best if lr is None else lr
    if rate > stable and gentle:
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
    """In proportion to how far the rate is above the stable one, within bounds.

    >>> warmup_steps(2.0), warmup_steps(1e9)
    (100, 2000)
    """
    return min(MOST_STEPS, math.ceil(STEPS_PER_EDGE * ratio))
