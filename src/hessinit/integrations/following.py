"""What both callbacks do: initialize before the first step, then follow the curvature, on the first rank."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from hessinit.errors import ProblemError, did_you_mean
from hessinit.initializing.initialize import initialize_
from hessinit.integrations.ranks import check_whole_weights, on_first_rank, share_weights
from hessinit.integrations.remembering import Memory, digest_examples, digest_start
from hessinit.integrations.training_step import initialization_options
from hessinit.problem.problem import Forward, Loss
from hessinit.problem.validate import check_whole, unwrap
from hessinit.results.initialization import Initialization
from hessinit.results.track_record import Tracking
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

    _open: ClassVar[set[Path | None]] = set()  # the files of all callbacks: no two write to the same one

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
        self._file: Path | None = None
        self._memory: Memory | None = None
        self.initialization: Initialization | None = None

    def begin(
        self,
        model: nn.Module,
        make: Callable[[], Subject],
        *,
        folder: str | os.PathLike[str],
        log_to: Any,
        steps: int,
    ) -> None:
        """Before the first step of a run that has taken `steps` before: only a fresh one is initialized.

        One that goes on does so in the file that is remembered, and never in another one's. The subject is
        made on the first rank only.
        """
        self.close()
        self._tracking = self.initialization = None
        model = unwrap(model)
        check_whole_weights(model)
        subject: Any = on_first_rank(make, model, doing="reading the batch")
        if self._initialize is not None and not steps:
            options = self._initialize
            self.initialization = on_first_rank(
                lambda: _initialize(subject, options), model, doing="initializing"
            )
            share_weights(model)
        self._tracker = on_first_rank(
            lambda: self._track(subject, Path(folder), log_to, steps), model, doing="measuring at the start"
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
            self._open.discard(self._file)

    @property
    def key(self) -> str:
        """What is asked for, in a word: another file, curvature or choice of layers is another record."""
        asked = None if self._path is None else os.fspath(self._path)
        return f"{asked} {self._options.get('curvature', 'gauss-newton')} {self._options.get('layers')}"

    @property
    def memory(self) -> dict[str, str] | None:
        """For a checkpoint; None on the other ranks, and before the first point."""
        if self._memory is not None and not self._memory.first_point:
            found = digest_start(Path(self._memory.file))
            self._memory = replace(self._memory, first_point=found)
        return None if self._memory is None or not self._memory.first_point else self._memory.plain()

    def recall(self, memory: Any) -> None:
        """What the checkpoint that training goes on from holds, if it holds anything."""
        self._memory = Memory.read(memory)

    def add_note(self, note: str) -> None:
        """A remark for the record, on the rank that keeps it."""
        if self._tracker is not None:
            self._tracker.add_note(note)

    @property
    def tracking(self) -> Tracking | None:
        """The record so far; None on the other ranks, and before the first step."""
        return self._tracking if self._tracker is None else self._tracker.tracking

    def _track(self, subject: Subject, folder: Path, log_to: Any, steps: int) -> Tracker:
        earlier = self._memory if steps else None
        file = None if earlier is None else earlier.find_file(folder)
        resumed = file is not None and file.absolute() not in self._open
        path = file if file is not None and resumed else self._wanted(folder)
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
            resume="anyway" if resumed else False,  # a later run may have written beside it
            at_start=False,
            **options,
        )
        try:
            self._remember(tracker, subject)
            tracker.steps = steps
            tracker.initialization = self.initialization or tracker.initialization
            if steps and not resumed:
                tracker.add_note(
                    f"Training went on at step {steps}; the record of the steps before is not known."
                )
            elif earlier is not None and self._memory is not None:
                _compare_examples(tracker, earlier, self._memory)
            if measure_now:
                self._measure_start(tracker)
        except BaseException:  # a warning that is an error, an interrupt
            tracker.close()
            self._open.discard(self._file)
            raise
        return tracker

    def _wanted(self, folder: Path) -> Path:
        path = folder / FILE if self._path is None else Path(self._path)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _remember(self, tracker: Tracker, subject: Subject) -> None:
        assert tracker.path is not None
        self._file = tracker.path.absolute()
        self._open.add(self._file)
        self._memory = Memory(str(self._file), digest_start(self._file), digest_examples(subject.batch))

    def _measure_start(self, tracker: Tracker) -> None:
        point = tracker.measure()
        if self.initialization is not None and point.lr_over_limit is not None and point.lr_over_limit >= 1:
            # Weights that are made for a rate start beyond its edge: κ is 4, the edge of SGD 2.
            tracker.add_note(
                f"The start is beyond the edge of stability on purpose (lr·‖H‖ = {point.lr_times_norm:.3g}): "
                "so it was initialized."
            )


def _compare_examples(tracker: Tracker, earlier: Memory, now: Memory) -> None:
    if earlier.examples and now.examples and earlier.examples != now.examples:
        tracker.add_note(
            f"From step {tracker.steps} on other examples are measured than before, so that norms before and "
            "after it do not compare. Pass batch= to keep to the same ones."
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
    layers = options.get("layers")
    if layers is None or isinstance(layers, str):
        return dict(options)
    return {**options, "layers": list(layers)}  # once and for all: an iterator gives them only once


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
