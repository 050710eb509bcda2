"""From a measurement to a point: timed, logged, and compared with the edge of stability."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch

from hessinit.errors import EdgeOfStabilityWarning, ProblemError
from hessinit.present.tracking_sentences import warn_of_edge
from hessinit.problem.validate import unwrap
from hessinit.results.advice import MOST_TIMES_STABLE
from hessinit.results.track_record import TrackedPoint, find_crossings
from hessinit.tracking.budget import Budget, now
from hessinit.tracking.changes import Changes
from hessinit.tracking.sharpness import Sharpness, Subject
from hessinit.tracking.sinks import Sink, scalars
from hessinit.tracking.stepping import Stepping

_FAILED = Sharpness(math.nan, math.nan, math.nan, False, math.nan, {}, 0)


class Pointing:
    """Makes points, sends them to the sinks, and warns."""

    def __init__(self, subject: Subject, sinks: list[Sink], warn: bool) -> None:
        self._subject = subject
        self._sinks = sinks
        self._warn = warn
        self._is_start_beyond = False
        self._changes = Changes()
        self.notes: list[str] = []

    @property
    def stepping(self) -> Stepping:
        return self._subject.stepping

    def measure(self, step: int, training_loss: float | None, budget: Budget, *, must: bool) -> TrackedPoint:
        """A point of nan with a note where measuring fails, unless it `must` succeed."""
        self._wait()  # what training still has to compute is not our time
        started = now()
        try:
            found = self._subject.measure()
            remarks = self._changes.remark(unwrap(self._subject.model), found.weights)
            note = " ".join([*([found.note] if found.note else []), *remarks])
        except Exception as failure:  # whatever it is, training goes on
            if must:
                raise
            found, note = _FAILED, str(failure) or type(failure).__name__
        self._wait()
        seconds = now() - started
        budget.count(seconds)
        lr = self._rate()
        return TrackedPoint(
            step=step,
            seconds=budget.elapsed,
            measuring_seconds=seconds,
            loss=found.loss,
            training_loss=training_loss,
            lr=lr,
            norm=found.norm,
            error=found.error,
            converged=found.converged,
            lr_times_norm=None if lr is None else lr * found.norm,
            stable_learning_rate=found.stable_learning_rate,
            lr_over_limit=_edge(lr, found.stable_learning_rate),
            layers=found.layers,
            products=found.products,
            note=note,
        )

    def announce(self, points: Sequence[TrackedPoint], stacklevel: int) -> None:
        """Log the last point, and warn if it crossed the edge."""
        point = points[-1]
        for sink in list(self._sinks):
            try:
                sink(scalars(point), point.step)
            except Exception as failure:  # a full disk or a lost connection is no reason to stop training
                self._sinks.remove(sink)
                self.notes.append(
                    f"Logging stopped at step {point.step}: {type(failure).__name__}: {failure}"
                )
        if self._crosses(points) and self._warn:
            message = warn_of_edge(point, self.stepping.name)
            warnings.warn(message, EdgeOfStabilityWarning, stacklevel=stacklevel)

    def _crosses(self, points: Sequence[TrackedPoint]) -> bool:
        """Whether to warn of the last point. A start somewhat beyond the edge gets until the next to calm."""
        point, edge = points[-1], points[-1].lr_over_limit or 0.0
        crossed = point.step in find_crossings(points)[-1:]
        waited, self._is_start_beyond = self._is_start_beyond, False
        if crossed and point.step == 0 and edge <= MOST_TIMES_STABLE:
            self._is_start_beyond = True
            return False
        return crossed or (waited and edge >= 1)

    def _rate(self) -> float | None:
        """None also where the optimizer moves none of the weights any more: all of them may be frozen."""
        try:
            return self.stepping.lr
        except ProblemError:
            return None

    def _wait(self) -> None:
        device = next(unwrap(self._subject.model).parameters()).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _edge(lr: float | None, stable: float) -> float | None:
    if lr is None or math.isnan(stable):
        return None
    return lr / stable if stable else math.inf
