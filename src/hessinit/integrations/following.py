"""What both callbacks do: initialize before the first step, then follow the curvature, on the first rank."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hessinit.errors import ProblemError, did_you_mean
from hessinit.initializing.initialize import initialize_
from hessinit.integrations.ranks import check_whole_weights, on_first_rank, share_weights
from hessinit.integrations.training_step import initialization_options
from hessinit.problem.checks import check_whole, unwrap
from hessinit.problem.problem import Forward, Loss
from hessinit.report.initialization import Initialization
from hessinit.report.tracking import Tracking
from hessinit.tracking.budget import check_share
from hessinit.tracking.track import Tracker, track

FILE = "curvature.jsonl"
# Options of `track` that the trainer knows better.
_THE_TRAINERS = {"optimizer", "lr", "resume"}


@dataclass(frozen=True)
class Subject:
    """The model that trains, what it is measured on, and the optimizer that steps it."""

    model: nn.Module
    loss: Loss
    batch: Any
    forward: Forward | None
    optimizer: torch.optim.Optimizer | None


class Following:
    """One training run, followed; every rank makes the same calls, the first one does the work."""

    def __init__(
        self,
        *,
        every: int,
        share: float,
        initialize: bool | Mapping[str, Any],
        path: str | os.PathLike[str] | None,
        options: Mapping[str, Any],
    ) -> None:
        self._every = check_whole("every", every, at_least=1)
        self._share = check_share(share)
        self._initialize = _read_initialize(initialize)
        self._path = path
        self._options = _check_options(options)
        self._tracker: Tracker | None = None
        self._tracking: Tracking | None = None
        self.initialization: Initialization | None = None

    def begin(self, subject: Subject, *, folder: str | os.PathLike[str], log_to: Any, steps: int) -> None:
        """Before the first step of a run that has taken `steps` before: only a fresh one is initialized."""
        self.close()
        self._tracking = self.initialization = None
        model = unwrap(subject.model)
        check_whole_weights(model)
        if self._initialize is not None and not steps:
            options = self._initialize
            self.initialization = on_first_rank(
                lambda: _initialize(subject, options), model, doing="initializing"
            )
            share_weights(model)
        path = Path(folder) / FILE if self._path is None else Path(self._path)
        self._tracker = on_first_rank(
            lambda: self._track(subject, path, log_to, steps), model, doing="measuring at the start"
        )

    def step(self, steps: int, loss: Any = None) -> None:
        """After the optimizer has taken `steps` in all."""
        if self._tracker is None or steps <= self._tracker.steps:
            return
        self._tracker.steps = steps - 1  # several optimizers may have stepped since
        self._tracker.step(loss)

    def close(self) -> None:
        """The record is complete; a second call does nothing."""
        if self._tracker is not None:
            self._tracking = self._tracker.close()
            self._tracker = None

    @property
    def tracking(self) -> Tracking | None:
        """The record so far; None on the other ranks, and before the first step."""
        return self._tracking if self._tracker is None else self._tracker.tracking

    def _track(self, subject: Subject, path: Path, log_to: Any, steps: int) -> Tracker:
        path.parent.mkdir(parents=True, exist_ok=True)
        options = {"at_start": True, **self._options}
        measure_now = options.pop("at_start")
        tracker = track(
            subject.model,
            subject.loss,
            subject.batch,
            every=self._every,
            share=self._share,
            optimizer=subject.optimizer,
            forward=subject.forward,
            path=path,
            log_to=log_to,
            resume=steps > 0,
            at_start=False,
            **options,
        )
        tracker.steps = steps
        tracker.initialization = self.initialization or tracker.initialization
        try:
            if measure_now:
                self._measure_start(tracker)
        except BaseException:  # a warning that is an error, an interrupt
            tracker.close()
            raise
        return tracker

    def _measure_start(self, tracker: Tracker) -> None:
        point = tracker.measure()
        if self.initialization is not None and point.edge is not None and point.edge >= 1:
            # Weights that are made for a rate start beyond its edge: κ is 4, the edge of SGD 2.
            tracker.add_note(
                f"The start is beyond the edge of stability on purpose (lr·‖H‖ = {point.lr_times_norm:.3g}): "
                "so it was initialized."
            )


def _initialize(subject: Subject, given: Mapping[str, Any]) -> Initialization:
    options = initialization_options(subject.optimizer, unwrap(subject.model), given)
    return initialize_(subject.model, subject.loss, subject.batch, **{"forward": subject.forward, **options})


def _read_initialize(initialize: Any) -> dict[str, Any] | None:
    if isinstance(initialize, bool):
        return {} if initialize else None
    if not isinstance(initialize, Mapping):
        raise ProblemError(
            f"initialize={initialize!r} must be True, False, or a dict of options for hessinit.initialize_, "
            "such as {'lr': 0.1}."
        )
    _check_names("initialize", initialize, _keywords(initialize_))
    return dict(initialize)


def _check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    for name in _THE_TRAINERS & set(options):
        way = "; for the initialization, pass initialize={'lr': …}" if name == "lr" else ""
        raise ProblemError(f"{name}={options[name]!r} is read from the trainer; leave it out{way}.")
    known = [name for name in _keywords(track) if name not in _THE_TRAINERS]
    _check_names("the callback", options, known)
    return dict(options)


def _check_names(where: str, given: Mapping[str, Any], known: list[str]) -> None:
    for name in given:
        if name not in known:
            raise ProblemError(
                f"{where} does not know {name!r}; it takes {', '.join(known)}.{did_you_mean(name, known)}"
            )


def _keywords(function: Any) -> list[str]:
    return [
        one.name for one in inspect.signature(function).parameters.values() if one.kind is one.KEYWORD_ONLY
    ]
