"""What follows for the learning rate from a report alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hessinit.errors import ProblemError
from hessinit.report.advice import LearningRateAdvice
from hessinit.report.descent import check_rate, named_descent
from hessinit.report.descent_advice import advise_descent

if TYPE_CHECKING:
    from hessinit.report.report import CurvatureReport

ADAPTIVE = ("adam", "adamw", "rmsprop")


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
