"""Describe advice on the learning rate, and word its reasons."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hessinit.present import document as doc
from hessinit.present import words as w
from hessinit.present.curvature import optimizer_chart, write_rate
from hessinit.results.advice import Descent, LearningRateAdvice, TriedRates
from hessinit.results.initialization import DID_NOT_LEARN, DIVERGED, Trial

FLAT = "The curvature is 0, so it sets no limit."
OVERFLOW = "The curvature is not finite: no learning rate is stable with these weights."
NOT_LEARNED = "No learning rate: the network did not learn in any trial"
WAYS_TO_LEARN = (
    "normalization layers, residual connections, another activation, fewer layers or more data"
)
MATRICES = {"gauss-newton": "Gauss-Newton", "hessian": "exact Hessian", "both": "exact Hessian"}


def describe_advice(advice: LearningRateAdvice) -> doc.Document:
    doubt = "" if advice.converged else "~"
    rate = doubt * advice.learns + write_rate(advice.learning_rate)
    warmup = f"{advice.warmup.steps} steps" if advice.warmup.advised else "none"
    rows = [
        ("learning rate", rate, advice.learning_rate_reason),
        ("stable up to", doubt + _write_limit(advice.stable_learning_rate), advice.stable_reason),
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
    blocks: list[doc.Block] = [
        optimizer_chart(advice, told),
        table,
        *w.note_paragraphs(advice.notes),
    ]
    answer = f"learning rate: {rate}" if advice.learns else f"{NOT_LEARNED}."
    return doc.Document(
        title=w.title("Learning rate", advice.versions),
        answer=answer,
        verdict=verdict,
        numbers=[doc.KeyNumber(name.capitalize(), value) for name, value, _ in rows],
        sections=[doc.Section("Advice", blocks, "advice")],
    )


def _write_limit(rate: float) -> str:
    return "unknown" if math.isnan(rate) else write_rate(rate)


def explain_descent(descent: Descent, norm: float) -> tuple[str, str]:
    """Return why a rate of gradient descent has the largest guaranteed decrease, and why one is stable."""
    if not 0 < norm < math.inf:
        return (FLAT, FLAT) if norm == 0 else (OVERFLOW, OVERFLOW)
    what = f"‖H + {w.format_number(descent.weight_decay)}‖" if descent.weight_decay else "‖H‖"
    longer = descent.lasting
    momentum = w.format_number(descent.momentum)
    why = "the step of the largest guaranteed decrease on a quadratic"
    if longer != 1:
        why = f"momentum makes steps {w.format_times(longer)} times as long"
    below = f"((1 + 2·{momentum})·{what})" if descent.nesterov else what
    above = f"(2 + 2·{momentum})" if descent.momentum else "2"
    return (
        f"{w.format_number(1 / longer)}/{what} with {what} = {w.format_number(norm)}: {why}.",
        f"{above}/{below}: above it the steps grow on a quadratic of this curvature.",
    )


def explain_adaptive(
    norm: float, best: float, stable: float, weight_decay: float
) -> tuple[str, str]:
    """Return the same for Adam and AdamW, with the preconditioner P."""
    if not math.isfinite(norm):
        return OVERFLOW, OVERFLOW
    value = w.format_number(norm)
    if weight_decay:
        value = f"({value} + {w.format_number(weight_decay)})"
    why_best = (
        f"1/{value}, the norm of P^-½ H P^-½ with P the size of mini-batch gradients: the step of the "
        "largest guaranteed decrease on a quadratic, in the norm of this preconditioner."
    )
    why_stable = "Above it the steps grow on a quadratic of this curvature, with P fixed."
    return FLAT if best == math.inf else why_best, FLAT if stable == math.inf else why_stable


def explain_unknown(why: str) -> str:
    """Return why there is no stability limit: the curvature was refused."""
    return f"Not known, as there is no curvature: {why}"


def explain_trials(tried: TriedRates) -> str:
    """Return how the trials led to the rate, or how they ended where none learned."""
    trials = tried.trials
    low, high = (w.format_number(end(trial.lr for trial in trials)) for end in (min, max))
    made = (
        f"{w.count(len(trials), 'trial')} of {_steps(trials)} steps at rates from {low} to {high}"
    )
    if math.isnan(tried.rate):
        ways = f"{WAYS_TO_LEARN}; other weights: `hessinit initialize --lr auto`"
        return f"In {made} {_tell_failures(trials)}. What may help: {ways}."
    times = w.format_number(tried.rate / tried.favoured, 2)
    end = ", the last of them" if tried.stopped_at_end else ""
    return (
        f"{times} times {w.format_number(tried.favoured)}, near which the loss fell lowest in {made}{end}: "
        "short trials survive rates at which a training fails."
    )


def explain_limit(reason: str, limit: float, trials: Sequence[Trial]) -> str:
    """Return the reason of a stability limit, and what the trials below it say against it."""
    diverged = [trial.lr for trial in trials if trial.outcome == DIVERGED and trial.lr <= limit]
    if not diverged:
        return reason
    return f"{reason} A network is not a quadratic: the trial at {w.format_number(min(diverged))} diverged."


def describe_trial(trial: Trial, lr: float | None, where: str = "on this batch") -> str:
    """Return what became of the loss in a short training, as a sentence."""
    margin = "" if lr in (None, trial.lr) else f", {trial.lr / lr:.3g} times yours"
    steps = (
        f"{w.count(trial.steps, 'trial step')} {where} at lr {w.format_number(trial.lr)}{margin}"
    )
    first, last = (w.format_number(loss) for loss in (trial.losses[0], trial.losses[-1]))
    change = "fell" if trial.losses[-1] < trial.losses[0] else "rose"
    told = (
        f"the loss {change} from {first} to {last}"
        if first != last
        else f"the loss stayed at {first}"
    )
    if trial.outcome == DID_NOT_LEARN:
        told += ", not below that of a constant output"
    return f"{steps}: {told if trial.survived else w.unstopped(trial.reason)}."


def _steps(trials: Sequence[Trial]) -> str:
    fewest = min(trial.steps for trial in trials)
    most = max(trial.steps for trial in trials)
    return f"{most}" if fewest == most else f"up to {most}"


def _tell_failures(trials: Sequence[Trial]) -> str:
    lost = sum(not trial.survived for trial in trials)
    if lost == len(trials):
        return "the loss diverged every time"
    falls = [trial.losses[0] - trial.score for trial in trials if trial.survived]
    best = max(falls)
    told = f"fell by {w.format_number(best)} at most" if best > 0 else "never fell"
    ending = f", and diverged in {lost}" if lost else ""
    return f"the loss {told}, not below that of a constant output{ending}"


def explain_no_warmup(lr: float | None, best: float) -> str:
    """Return why no warmup was tried."""
    if lr is None:
        return "The trials of the learning rate went without."
    rate = f"lr = {w.format_number(lr)}"
    if lr <= best:
        return f"{rate} is not above the advised rate; a warmup was not tried."
    return f"{rate} is above the advised rate; whether a warmup helps there was not tried."


def explain_tried_warmup(advised: bool, steps: int, without: Trial, warmed: Trial) -> str:
    """Return how two short trainings ended, one of them with a warmup."""
    ends = [
        f"ended at {w.format_number(trial.score)}" if trial.survived else "diverged"
        for trial in (warmed, without)
    ]
    verdict = "it helps" if advised else "it does not help"
    if not (warmed.survived or without.survived):
        verdict = "lower the learning rate"
    return (
        f"At lr = {w.format_number(without.lr)} a trial of {len(warmed.losses)} steps with {steps} of warmup "
        f"{ends[0]}, one without {ends[1]}: {verdict}."
    )


def flat_initialization(norm: float) -> str:
    """Return what to know about an initialization that is flatter than the network will be in training."""
    return (
        f"The initialization is flat (‖H‖ = {w.format_number(norm)}): the curvature usually grows within a "
        "few steps, and the stable learning rate falls with it."
    )
