"""The reasons of an advice on the learning rate, one sentence each."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hessinit.present.words import format_number, format_times

if TYPE_CHECKING:
    from hessinit.results.advice import Descent, LookAhead

FLAT = "The curvature is 0, so it sets no limit."
OVERFLOW = "The curvature is not finite: no rate is safe from this start."
NO_RATE = "No rate is safe from this start, and no warmup changes that: start from smaller weights."


def why_best(descent: Descent, norm: float) -> str:
    """Why a rate of gradient descent has the largest guaranteed decrease."""
    if not 0 < norm < math.inf:
        return FLAT if norm == 0 else OVERFLOW
    what, value = _matrix(descent.weight_decay), format_number(norm)
    if descent.lasting < 1:
        return f"1/{what} with {what} = {value}: the first step, which is not dampened, sets it."
    if descent.lasting == 1:
        return f"1/{what} with {what} = {value}: the step of the largest guaranteed decrease."
    share = format_number(1 / descent.lasting)
    return (
        f"{share}/{what} with {what} = {value}: under momentum a step lasts, and is in the end "
        f"{format_times(descent.lasting)} times as long."
    )


def why_edge(descent: Descent, norm: float) -> str:
    """Why gradient descent is stable up to a rate."""
    if not 0 < norm < math.inf:
        return FLAT if norm == 0 else OVERFLOW
    what, momentum = _matrix(descent.weight_decay), format_number(descent.momentum)
    if not descent.momentum:
        formula = f"2/{what}"
    elif descent.nesterov:
        formula = f"(2 + 2·{momentum})/((1 + 2·{momentum})·{what})"
    elif descent.dampening:
        formula = f"(2 + 2·{momentum})/((1 − {format_number(descent.dampening)})·{what})"
    else:
        formula = f"(2 + 2·{momentum})/{what}"
    return f"{formula}: above it the steps grow on a quadratic of this curvature."


def why_best_adaptive(
    norm: float, best: float, first: float, weight_decay: float, lasting: float, gradients: str
) -> str:
    """The same for Adam and its like; `first` is the best rate of the very first step."""
    if not math.isfinite(norm):
        return OVERFLOW
    if best == math.inf:
        return FLAT
    if first < best:
        return "The first step alone sets it: it lowers the quadratic model of the loss most at this rate."
    share = format_number(1 / lasting)
    decay = f" + {format_number(weight_decay)}" if weight_decay else ""
    value = f"({format_number(norm)}{decay})" if decay else format_number(norm)
    return (
        f"{share}/{value}, the norm of P^-½ H P^-½ with P the size of {gradients}: the step of the largest "
        "guaranteed decrease, as lengths count for this optimizer."
    )


def why_edge_adaptive(norm: float, frozen: float, first: float) -> str:
    """The same for the edge: of the frozen preconditioner, or of the first step."""
    if not math.isfinite(norm):
        return OVERFLOW
    if min(frozen, 2 * first) == math.inf:
        return FLAT
    if 2 * first <= frozen:
        return (
            "Above it the very first step, equally long in every weight, raises the quadratic model of the "
            f"loss; later, with P as it is, steps grow above {format_number(frozen)}."
        )
    return "Above it the steps grow on a quadratic of this curvature, with P as it is."


def too_fast(rate: float, stable: float, *, hopeless: bool) -> str:
    """Why a rate above the stable one wants a warmup."""
    reason = f"lr = {format_number(rate)} is {format_times(rate / stable)} times the stable rate at the start"
    if hopeless:
        return (
            f"{reason}, which is more than a warmup usually makes up for; lower it too, or the curvature "
            f"(initialize_ with lr={format_number(rate)})."
        )
    return f"{reason}; smaller steps first give the curvature time to fall."


def too_fast_for_gentle(rate: float, stable: float) -> str:
    """Why such a rate wants a smaller one instead, where the start is gentle."""
    return (
        f"lr = {format_number(rate)} is {format_times(rate / stable)} times the stable rate, and a start as "
        "gentle as this has no sharpness that smaller steps could shed: lower the rate."
    )


def falls_quickly(ahead: LookAhead, stable: float) -> str:
    """Why a quick fall of the curvature wants a warmup."""
    return (
        f"{ahead.steps} steps at {format_number(ahead.learning_rate)} raise the stable rate from "
        f"{format_number(stable)} to {format_number(ahead.stable_learning_rate)}, so the rate may grow, too."
    )


def slow_enough(rate: float, stable: float, *, given: bool) -> str:
    """Why a stable rate wants none."""
    if math.isinf(stable):
        return "The curvature sets no limit at the start, so smaller steps would buy nothing."
    name = "lr" if given else "learning_rate"
    return f"{name} = {format_number(rate)} is stable at the start, so smaller steps first buy nothing."


def gentle_start(norm: float) -> str:
    """What to know of a start that is flatter than training will find it."""
    return (
        f"From a start as gentle as this (‖H‖ = {format_number(norm)}) the curvature usually grows within a "
        "few steps, and the rates shrink with it; advise(..., look_ahead=5) shows it."
    )


def looked_ahead(ahead: LookAhead, loss: float, stable: float) -> str:
    """What the trial steps led to."""
    steps = (
        f"{ahead.steps} trial step{'' if ahead.steps == 1 else 's'} at {format_number(ahead.learning_rate)}"
    )
    if not math.isfinite(ahead.loss):
        return f"{steps} overflow: take a smaller rate."
    return (
        f"{steps} take the loss from {format_number(loss)} to {format_number(ahead.loss)} and the stable "
        f"rate from {format_number(stable)} to {format_number(ahead.stable_learning_rate)}."
    )


def _matrix(weight_decay: float) -> str:
    return f"‖H + {format_number(weight_decay)}‖" if weight_decay else "‖H‖"
