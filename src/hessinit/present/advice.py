"""Describe advice on the learning rate, and word its reasons."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hessinit.present import document as doc
from hessinit.present import words as w
from hessinit.present.curvature import MATRIX_OF_NORM, optimizer_chart, write_rate
from hessinit.results.advice import FLAT_INITIALIZATION, Descent, LearningRateAdvice, TriedRates
from hessinit.results.curvature_report import Estimate
from hessinit.results.initialization import DID_NOT_LEARN, DIVERGED, Trial

FLAT = "The curvature is 0, so it sets no limit."
FIRST_STEP = "The first step sets it: it lowers the quadratic model of the loss most at this rate."
OVERFLOW = "The curvature is not finite: no learning rate is stable with these weights."
NOT_LEARNED = "No learning rate: the network did not learn in any trial"
WAYS_TO_LEARN = (
    "normalization layers, residual connections, another activation, fewer layers or more data"
)

WAYS_TO_ADAPT = "adapters in more layers, a larger rank, or more data"
NO_GRADIENT_YET = (
    "Entries without a gradient, as those of A in LoRA while B is 0, are not in the stability "
    "limit: they move from the second step on. The trials include them."
)


def describe_advice(advice: LearningRateAdvice) -> doc.Document:
    """Return the rate, its stability limit and the warmup, each with the reason."""
    answer = f"{NOT_LEARNED}."
    rate = write_rate(advice.learning_rate)
    if advice.learns:
        rate = w.mark_doubt(rate, advice.converged)
        answer = f"learning rate: {rate}"
    stable = advice.stable_learning_rate
    limit = "unknown" if math.isnan(stable) else w.mark_doubt(write_rate(stable), advice.converged)
    warmup = f"{advice.warmup.steps} steps" if advice.warmup.advised else "none"
    rows = [
        ("learning rate", rate, advice.learning_rate_reason),
        ("stable up to", limit, advice.stable_reason),
        ("warmup", warmup, advice.warmup.reason),
    ]
    names, values, reasons = zip(*rows, strict=True)
    columns = [
        w.name_column("quantity", names),
        doc.Column("value", values, 9),
        w.name_column("reason", reasons, wraps=True),
    ]
    blocks: list[doc.Block] = [
        optimizer_chart(advice, f"{advice.learning_rate_reason} {advice.stable_reason}"),
        doc.Table("Advice on the learning rate.", columns),
        *w.note_paragraphs(advice.notes),
    ]
    return doc.Document(
        title=w.title("Learning rate", advice.versions),
        answer=answer,
        verdict=_tell_basis(advice),
        numbers=[doc.KeyNumber(name.capitalize(), value) for name, value, _ in rows],
        sections=[doc.Section("Advice", blocks, "advice")],
    )


def _tell_basis(advice: LearningRateAdvice) -> list[str]:
    """Return what was measured, its cost, and whether it is to be doubted."""
    parameters = w.count(advice.parameters, "parameter")
    frozen = w.text_if(advice.frozen, f", {advice.frozen:,} of them without gradient")
    data = f"{MATRIX_OF_NORM[advice.curvature]} on {w.count(advice.examples, 'example')}"
    weights = f"{advice.optimizer} on {w.join_names(advice.weights)} ({parameters}{frozen})"
    sentences = [f"{weights}; {data}; loss {w.format_number(advice.loss)}."]
    if cost := w.tell_time(advice.seconds, advice.gradients):
        sentences.append(f"Measured{cost}.")
    if not advice.converged:
        sentences.append(f"Not converged (marked ~): {w.unstopped(advice.norm.reason)}.")
    return sentences


def explain_descent(descent: Descent, norm: float) -> tuple[str, str]:
    """Return why a rate of gradient descent is the best guaranteed one, and why one is stable."""
    if norm == 0:
        return FLAT, FLAT
    if not math.isfinite(norm):
        return OVERFLOW, OVERFLOW
    curvature = "‖H‖"
    if descent.weight_decay:
        curvature = f"‖H + {w.format_number(descent.weight_decay)}‖"
    lasting = descent.lasting
    reason = "the step of the largest guaranteed decrease on a quadratic"
    if lasting != 1:
        reason = f"momentum makes steps {w.format_times(lasting)} times as long"
    momentum = w.format_number(descent.momentum)
    numerator = f"(2 + 2·{momentum})" if descent.momentum else "2"
    denominator = f"((1 + 2·{momentum})·{curvature})" if descent.nesterov else curvature
    best = f"{w.format_number(1 / lasting)}/{curvature}"
    return (
        f"{best} with {curvature} = {w.format_number(norm)}: {reason}.",
        f"{numerator}/{denominator}: above it the steps grow on a quadratic of this curvature.",
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
        f"1/{value}, the norm of P^-½ H P^-½ with P the size of mini-batch gradients: the step of "
        "the largest guaranteed decrease on a quadratic, in the norm of this preconditioner."
    )
    why_stable = "Above it the steps grow on a quadratic of this curvature, with P fixed."
    return FLAT if best == math.inf else why_best, FLAT if stable == math.inf else why_stable


def explain_first_step(later: float) -> str:
    """Return why a rate is stable for Adam, whose first step raises the loss first."""
    return (
        "Above it the first step, equally long in every weight, raises the quadratic model of the "
        f"loss; with P fixed, later steps grow above {w.format_number(later)}."
    )


def explain_response(norm: Estimate, optimizer: str) -> str:
    """Return why the limit that follows from an optimizer's response is stable, or is unknown."""
    if math.isnan(norm.value):
        return f"No rate follows from the curvature: {norm.reason.rstrip('.')}."
    if norm.value == 0:
        return FLAT
    return (
        f"2/{w.format_number(norm.value)}, the norm of S^½ H S^½ with S the response of "
        f"{optimizer} to a gradient that alternates in sign: above it the steps grow on a "
        "quadratic of this curvature."
    )


def explain_self_tuning(optimizer: str) -> str:
    """Return why the rate of an optimizer that finds it is 1."""
    return (
        f"{optimizer} finds the rate itself while it trains, and lr multiplies what it finds: at "
        "1.0 that is taken as it is. A schedule may lower it."
    )


def explain_clipping(clip_norm: float | None, length: float, stable: float) -> str:
    """Return what clipping does to the stability limit at these weights, if it does."""
    if clip_norm is None or length <= clip_norm or not math.isfinite(stable):
        return ""
    return (
        f" That is without clipping, which shortens steps: the gradient is "
        f"{w.format_times(length / clip_norm)} times as long as clip_norm={clip_norm:g}."
    )


def explain_trials(tried: TriedRates) -> str:
    """Return how the trials led to the rate, or how they ended where none learned."""
    trials = tried.trials
    low, high = (w.format_number(end(trial.lr for trial in trials)) for end in (min, max))
    held = (
        f"{w.count(len(trials), 'trial')} of {_steps(trials)} steps at rates from {low} to {high}"
    )
    if math.isnan(tried.rate):
        ways_out = f"{WAYS_TO_LEARN}; other weights: `hessinit initialize --lr auto`"
        if tried.trained_before:
            ways_out = WAYS_TO_ADAPT
        return f"In {held} {_tell_failures(trials)}. What may help: {ways_out}."
    end = w.text_if(tried.stopped_at_end, ", the last of them")
    if tried.fresh:
        return f"At this rate the loss fell lowest in {held} on fresh mini-batches{end}."
    return (
        f"{w.format_number(tried.rate / tried.favoured, 2)} times "
        f"{w.format_number(tried.favoured)}, near which the loss fell lowest in {held}{end}: short "
        "trials survive rates at which a training fails."
    )


def explain_limit(reason: str, limit: float, trials: Sequence[Trial]) -> str:
    """Return the reason of a stability limit, and what the trials below it say against it."""
    diverged = [trial.lr for trial in trials if trial.outcome == DIVERGED and trial.lr <= limit]
    if not diverged:
        return reason
    lowest = w.format_number(min(diverged))
    return f"{reason} A network is not a quadratic: the trial at {lowest} diverged."


def describe_trial(trial: Trial, lr: float | None, where: str = "on this batch") -> str:
    """Return how the loss of a short training ended, as a sentence."""
    margin = "" if lr in (None, trial.lr) else f", {trial.lr / lr:.3g} times yours"
    training = (
        f"{w.count(trial.steps, 'trial step')} {where} at lr {w.format_number(trial.lr)}{margin}"
    )
    if not trial.survived:
        return f"{training}: {w.unstopped(trial.reason)}."
    first, last = (w.format_number(loss) for loss in (trial.losses[0], trial.losses[-1]))
    course = f"stayed at {first}"
    if first != last:
        verb = "fell" if trial.losses[-1] < trial.losses[0] else "rose"
        course = f"{verb} from {first} to {last}"
    chance = w.text_if(trial.outcome == DID_NOT_LEARN, ", not below that of a constant output")
    return f"{training}: the loss {course}{chance}."


def _steps(trials: Sequence[Trial]) -> str:
    steps = {trial.steps for trial in trials}
    return f"{w.text_if(len(steps) > 1, 'up to ')}{max(steps)}"


def _tell_failures(trials: Sequence[Trial]) -> str:
    falls = [trial.losses[0] - trial.score for trial in trials if trial.survived]
    if not falls:
        return "the loss diverged every time"
    best = max(falls)
    fall = f"fell by {w.format_number(best)} at most" if best > 0 else "never fell"
    diverged = len(trials) - len(falls)
    ending = w.text_if(diverged, f", and diverged in {diverged}")
    return f"the loss {fall}, not below that of a constant output{ending}"


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
    verdict = "it helps" if advised else "it does not help"
    if not (warmed.survived or without.survived):
        verdict = "lower the learning rate"
    return (
        f"At lr = {w.format_number(without.lr)} a trial of {len(warmed.losses)} steps with {steps} "
        f"of warmup {_tell_end(warmed)}, one without {_tell_end(without)}: {verdict}."
    )


def _tell_end(trial: Trial) -> str:
    return f"ended at {w.format_number(trial.score)}" if trial.survived else "diverged"


def flat_initialization(norm: float) -> tuple[str, ...]:
    """Return the warning that the weights are flatter than the network will soon be, if so."""
    if not 0 < norm < FLAT_INITIALIZATION:
        return ()
    return (
        (
            f"These weights are flat (‖H‖ = {w.format_number(norm)}): the curvature usually grows "
            "within a few steps, and the stable learning rate falls with it."
        ),
    )
