"""Advice for gradient descent, which follows from the two ends of the network's curvature alone."""

from __future__ import annotations

from typing import Any

from hessinit.estimate import Estimate
from hessinit.report.advice import LearningRateAdvice
from hessinit.report.descent import Descent
from hessinit.report.warmup import GENTLE, LookAhead, judge_warmup


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
    """The advice, with its reasons; `facts` are the other fields."""
    from hessinit.present import advice_sentences as say

    norm = descent.norm(top, bottom)
    best, edge = descent.best(norm.value), descent.edge(norm.value)
    gentle = 0 < norm.value < GENTLE
    if gentle:
        notes = (*notes, say.gentle_start(norm.value))
    return LearningRateAdvice(
        optimizer=str(descent),
        lr=lr,
        learning_rate=best,
        learning_rate_reason=say.why_best(descent, norm.value),
        stable_learning_rate=edge,
        stable_reason=say.why_edge(descent, norm.value),
        warmup=judge_warmup(lr, best, edge, ahead, gentle=gentle),
        norm=norm,
        ahead=ahead,
        notes=notes,
        **facts,
    )
