"""Describe advice on the learning rate, and word its reasons."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hessinit.present import document as doc
from hessinit.present import words as w

if TYPE_CHECKING:
    from hessinit.results.advice import Descent, LearningRateAdvice

FLAT = "The curvature is 0, so it sets no limit."
OVERFLOW = "The curvature is not finite: no learning rate is stable with these weights."
NO_RATE = "No learning rate is stable, with or without warmup: initialize with smaller weights."
MATRIX_NAMES = {"gauss-newton": "Gauss-Newton", "hessian": "exact Hessian", "both": "exact Hessian"}


def describe_advice(advice: LearningRateAdvice) -> doc.Document:
    """Return the document of an advice on the learning rate."""
    doubt = "" if advice.converged else "~"
    warmup = f"{advice.warmup.steps} steps" if advice.warmup.advised else "none"
    rows = [
        ("learning rate", doubt + w.format_number(advice.learning_rate), advice.learning_rate_reason),
        ("stable up to", doubt + w.format_number(advice.stable_learning_rate), advice.stable_reason),
        ("warmup", warmup, advice.warmup.reason),
    ]
    names, values, reasons = zip(*rows, strict=True)
    reason = w.name_column("reason", reasons, wraps=True)
    table = doc.Table(
        "Advice on the learning rate.",
        [w.name_column("quantity", names), doc.Column("value", values, 9), reason],
    )
    frozen = f", {advice.frozen:,} of them without gradient" if advice.frozen else ""
    measured = (
        f"{advice.optimizer} on {w.join_names(advice.weights)} ({w.count(advice.parameters, 'parameter')}"
        f"{frozen}); {MATRIX_NAMES[advice.curvature]} on {w.count(advice.examples, 'example')}; "
        f"loss {w.format_number(advice.loss)}."
    )
    verdict = [measured]
    if not advice.converged:
        verdict.append(f"Not converged (marked ~): {w.unstopped(advice.norm.reason)}.")
    section = doc.Section("Advice", [table, *w.note_paragraphs(advice.notes)], "advice")
    return doc.Document(title="Learning rate", verdict=verdict, sections=[section])


def why_best(descent: Descent, norm: float) -> str:
    """Return why a learning rate of gradient descent has the largest guaranteed decrease."""
    if not 0 < norm < math.inf:
        return FLAT if norm == 0 else OVERFLOW
    what, longer = _matrix(descent.weight_decay), descent.lasting
    why = "the step of the largest guaranteed decrease"
    if longer != 1:
        why = f"momentum makes steps {w.format_times(longer)} times as long"
    return f"{w.format_number(1 / longer)}/{what} with {what} = {w.format_number(norm)}: {why}."


def why_stable(descent: Descent, norm: float) -> str:
    """Return why gradient descent is stable up to a learning rate."""
    if not 0 < norm < math.inf:
        return FLAT if norm == 0 else OVERFLOW
    what, momentum = _matrix(descent.weight_decay), w.format_number(descent.momentum)
    below = f"((1 + 2·{momentum})·{what})" if descent.nesterov else what
    above = f"(2 + 2·{momentum})" if descent.momentum else "2"
    return f"{above}/{below}: above it the steps grow on a quadratic of this curvature."


def why_best_adaptive(norm: float, best: float, weight_decay: float, lasting: float, gradients: str) -> str:
    """Return the same for Adam and AdamW; `gradients` says which ones the preconditioner P averages."""
    if not math.isfinite(norm):
        return OVERFLOW
    if best == math.inf:
        return FLAT
    decay = f" + {w.format_number(weight_decay)}" if weight_decay else ""
    value = f"({w.format_number(norm)}{decay})" if decay else w.format_number(norm)
    return (
        f"{w.format_number(1 / lasting)}/{value}, the norm of P^-½ H P^-½ with P the size of {gradients}: "
        "the step of the largest guaranteed decrease in the norm of this preconditioner."
    )


def why_stable_adaptive(norm: float, stable: float) -> str:
    """Return why Adam and AdamW are stable up to a learning rate."""
    if not math.isfinite(norm):
        return OVERFLOW
    if stable == math.inf:
        return FLAT
    return "Above it the steps grow on a quadratic of this curvature, with P fixed."


def too_fast(rate: float, stable: float, *, is_flat: bool, is_hopeless: bool) -> str:
    """Return what to do about a learning rate above the stable one: warm up, or lower it."""
    reason = f"lr = {w.format_number(rate)} is {w.format_times(rate / stable)} times the stable learning rate"
    if is_flat:
        return (
            f"{reason}, and the initialization is so flat that a warmup has no sharpness to reduce: lower "
            "the learning rate."
        )
    if is_hopeless:
        return (
            f"{reason}, more than a warmup usually makes up for; also lower it, or the curvature "
            f"(initialize_ with lr={w.format_number(rate)})."
        )
    return f"{reason}; smaller first steps give the curvature time to fall."


def slow_enough(rate: float, stable: float, *, given: bool) -> str:
    """Return why a stable learning rate needs no warmup."""
    if math.isinf(stable):
        return "The curvature sets no limit, so smaller first steps gain nothing."
    name = "lr" if given else "learning_rate"
    return f"{name} = {w.format_number(rate)} is stable, so smaller first steps gain nothing."


def flat_initialization(norm: float) -> str:
    """Return what to know about an initialization that is flatter than the network will be in training."""
    return (
        f"The initialization is flat (‖H‖ = {w.format_number(norm)}): the curvature usually grows within a "
        "few steps, and the stable learning rate falls with it."
    )


def _matrix(weight_decay: float) -> str:
    return f"‖H + {w.format_number(weight_decay)}‖" if weight_decay else "‖H‖"
