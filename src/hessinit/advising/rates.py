"""For adaptive optimizers: the norm of the preconditioned curvature, and the first step's best rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hessinit.advising.adaptive import Adaptive
from hessinit.advising.preconditioned import Preconditioned, preconditioned_norm
from hessinit.advising.second_moment import measure_moments
from hessinit.curvature.engines import Effort, Engine, gauss_newton_engine, hessian_engine
from hessinit.curvature.evaluation import Evaluation
from hessinit.results.advice import FLAT_INITIALIZATION
from hessinit.results.estimates import Estimate

MOMENTS = ["mini-batches", "first step"]


@dataclass(frozen=True)
class AdaptiveRates:
    """`norm` of the preconditioned curvature, the best rate of the first step, and how many entries rest.

    `gentle` says whether ‖H‖ itself is small; it is looked at only where a rate is above the stable one.
    """

    norm: Estimate
    first_step: float
    still: int
    notes: tuple[str, ...] = ()
    gentle: bool = False

    def stable_rate(self, rule: Adaptive) -> float:
        """Where the first step, or those of the frozen preconditioner, stop being stable.

        Seen on nine nets for digits: training broke down between a sixth of this rate and three times it.
        """
        return min(rule.edge(self.norm.value), 2 * self.first_step)


def build_engine(evaluations: Sequence[Evaluation], curvature: str, effort: Effort) -> Engine:
    """What finds the ends of the curvature and multiplies with it."""
    if curvature == "hessian":
        return hessian_engine(evaluations, effort)
    return gauss_newton_engine(evaluations, effort, "auto")


def adaptive_rates(
    rule: Adaptive,
    lr: float | None,
    evaluations: Sequence[Evaluation],
    curvature: str,
    second_moment: str,
    effort: Effort,
    slowness: Tensor | None = None,
) -> AdaptiveRates:
    """Costs a few gradients, and about ten products with the curvature.

    The norm takes `P = √v + eps` with `v` the mean square of mini-batch gradients, or that of the first step
    alone; the first step itself is the exact one of the optimizer, `g/(|g| + eps)` for Adam (without AdamW's
    decay, which is no descent). Where groups have rates of their own, `slowness` is the largest rate over
    that of each weight, and the rates found are for the largest.
    """
    problem = evaluations[0].problem
    engine, names = build_engine(evaluations, curvature, effort), list(problem.leaves)
    operator = engine.operator(names)
    moments = measure_moments(evaluations)
    gradient = moments.gradient
    single = second_moment == "first step"
    square = gradient.square() if single else moments.second
    notes = []
    if moments.noise is None and not single:
        notes.append("The batch could not be cut into parts, so P is the size of this one gradient.")
    if rule.gradient_decay:
        # Where the decay alone moves a weight, P follows the weight to 0: no P to hold still.
        notes.append("The weight decay, here a part of the gradient, is left out of the advice.")
    moves = square > 0
    divisor = torch.where(moves, square.sqrt() + rule.eps, torch.inf)
    if slowness is not None:
        divisor = divisor * slowness
    preconditioned = Preconditioned(operator, divisor)
    still = int((~moves).sum())
    if still == moves.numel():
        norm = Estimate(0.0, 0.0, True, "the gradient is zero: no weight moves", 0)
        return AdaptiveRates(norm, math.inf, still, tuple(notes))
    norm = preconditioned_norm(preconditioned, effort, semidefinite=curvature == "gauss-newton")
    size = rule.first_share * gradient.abs() + rule.eps
    step = torch.where(gradient != 0, gradient / size, torch.zeros_like(gradient))
    if slowness is not None:
        step = step / slowness
    slope = float(gradient @ step)
    bend = float(step @ (operator @ step))
    rates = AdaptiveRates(norm, _best_step(slope, bend), still, tuple(notes))
    if lr is None or lr <= rates.stable_rate(rule):
        return rates
    return replace(rates, gentle=0 < engine.ends(names).norm.value < FLAT_INITIALIZATION)


def _best_step(slope: float, bend: float) -> float:
    """Where `−t slope + t²/2 bend` is smallest; no limit where it falls for good, 0 where it overflows."""
    if not (math.isfinite(slope) and math.isfinite(bend)):
        return 0.0
    return slope / bend if bend > 0 else math.inf
