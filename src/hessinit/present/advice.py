"""Describe advice on the learning rate, and word its reasons."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hessinit.present import document as doc
from hessinit.present import words as w
from hessinit.present.curvature import optimizer_chart
from hessinit.results.advice import Descent, LearningRateAdvice
from hessinit.results.initialization import Trial

FLAT = "The curvature is 0, so it sets no limit."
OVERFLOW = "The curvature is not finite: no learning rate is stable with these weights."
NO_WARMUP = "The trials of the learning rate went without."
MATRICES = {"gauss-newton": "Gauss-Newton", "hessian": "exact Hessian", "both": "exact Hessian"}


def describe_advice(advice: LearningRateAdvice) -> doc.Document:
    doubt = "" if advice.converged else "~"
    rate = doubt + w.format_number(advice.learning_rate)
    warmup = f"{advice.warmup.steps} steps" if advice.warmup.advised else "none"
    rows = [
        ("learning rate", rate, advice.learning_rate_reason),
        ("stable up to", doubt + w.format_number(advice.stable_learning_rate), advice.stable_reason),
        ("warmup", warmup, advice.warmup.reason),
    ]
    names, values, reasons = zip(*rows, strict=True)
    columns = [w.name_column("quantity", names), doc.Column("value", values, 9)]
    columns.append(w.name_column("reason", reasons, wraps=True))
    table = doc.Table("Advice on the learning rate.", columns)
    frozen = f", {advice.frozen:,} of them without gradient" if advice.frozen else ""
    measured = (
        f"{advice.optimizer} on {w.join_names(advice.weights)} ({w.count(advice.parameters, 'parameter')}"
        f"{frozen}); {MATRICES[advice.curvature]} on {w.count(advice.examples, 'example')}; "
        f"loss {w.format_number(advice.loss)}."
    )
    cost = w.tell_time(advice.seconds, advice.gradients)
    verdict = [measured, *([f"Measured{cost}."] if cost else [])]
    if not advice.converged:
        verdict.append(f"Not converged (marked ~): {w.unstopped(advice.norm.reason)}.")
    told = f"{advice.learning_rate_reason} {advice.stable_reason}"
    blocks: list[doc.Block] = [optimizer_chart(advice, told), table, *w.note_paragraphs(advice.notes)]
    return doc.Document(
        title=w.title("Learning rate", advice.versions), answer=f"learning rate: {rate}", verdict=verdict,
        numbers=[doc.KeyNumber(name.capitalize(), value) for name, value, _ in rows],
        sections=[doc.Section("Advice", blocks, "advice")],
    )  # fmt: skip


def explain_descent(descent: Descent, norm: float) -> tuple[str, str]:
    """Return why a rate of gradient descent has the largest guaranteed decrease, and why one is stable."""
    if not 0 < norm < math.inf:
        return (FLAT, FLAT) if norm == 0 else (OVERFLOW, OVERFLOW)
    what = f"‖H + {w.format_number(descent.weight_decay)}‖" if descent.weight_decay else "‖H‖"
    longer, momentum = descent.lasting, w.format_number(descent.momentum)
    why = "the step of the largest guaranteed decrease"
    if longer != 1:
        why = f"momentum makes steps {w.format_times(longer)} times as long"
    below = f"((1 + 2·{momentum})·{what})" if descent.nesterov else what
    above = f"(2 + 2·{momentum})" if descent.momentum else "2"
    return (
        f"{w.format_number(1 / longer)}/{what} with {what} = {w.format_number(norm)}: {why}.",
        f"{above}/{below}: above it the steps grow on a quadratic of this curvature.",
    )


def explain_adaptive(norm: float, best: float, stable: float, weight_decay: float) -> tuple[str, str]:
    """Return the same for Adam and AdamW, with the preconditioner P."""
    if not math.isfinite(norm):
        return OVERFLOW, OVERFLOW
    value = w.format_number(norm)
    if weight_decay:
        value = f"({value} + {w.format_number(weight_decay)})"
    why_best = (
        f"1/{value}, the norm of P^-½ H P^-½ with P the size of mini-batch gradients: the step of the "
        "largest guaranteed decrease in the norm of this preconditioner."
    )
    why_stable = "Above it the steps grow on a quadratic of this curvature, with P fixed."
    return FLAT if best == math.inf else why_best, FLAT if stable == math.inf else why_stable


NO_RATE_LEARNS = (
    "No trial lowered the loss by 2 %: at none of these rates the weights learn. New ones may: "
    "`hessinit initialize --lr auto`."
)


def explain_trials(
    trials: Sequence[Trial], rate: float, reach: float, part: float, times: float | None
) -> str:
    """Return how trials and a first step of a `part` of the weights, at `reach`, or a bound led there."""
    low, high = (w.format_number(end(trial.lr for trial in trials)) for end in (min, max))
    tried = (
        f"{w.count(len(trials), 'trial')} of {max(trial.steps for trial in trials)} steps, {low} to {high}"
    )
    if not rate > 0:
        return f"A quarter of the lowest rate tried: the loss blew up in every one of {tried}."
    best = f"{w.format_number(rate)}, near which the loss fell most in {tried}"
    if times is not None:
        return f"{times:g} times {best}."
    step = f"a first step of {100 * part:g} % of the weights' length ({w.format_number(reach)})"
    return f"From {step} and, with twice the weight, {best}."


def explain_warmup(rate: float, stable: float, *, is_flat: bool, is_hopeless: bool) -> str:
    """Return why to warm up, to lower the rate, or why neither is needed."""
    if stable == 0 or math.isnan(stable):
        return "No learning rate is stable, with or without warmup: initialize with smaller weights."
    if math.isinf(stable):
        return FLAT
    lr = w.format_number(rate)
    if rate <= stable:
        return f"lr = {lr} is stable, so smaller first steps gain nothing."
    reason = f"lr = {lr} is {w.format_times(rate / stable)} times the stable learning rate"
    if is_flat:
        return f"{reason}, and the initialization is too flat for a warmup to help: lower the learning rate."
    if is_hopeless:
        way = f"also lower it, or the curvature (initialize_ with lr={lr})"
        return f"{reason}, more than a warmup usually makes up for; {way}."
    return f"{reason}; smaller first steps give the curvature time to fall."


def flat_initialization(norm: float) -> str:
    """Return what to know about an initialization that is flatter than the network will be in training."""
    return (
        f"The initialization is flat (‖H‖ = {w.format_number(norm)}): the curvature usually grows within a "
        "few steps, and the stable learning rate falls with it."
    )
