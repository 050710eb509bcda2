"""The verb `track`: follow ‖H‖ and the edge of stability through a training loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from hessinit.curvature.engines import Effort
from hessinit.errors import ProblemError, choose
from hessinit.problem.problem import Forward, Loss
from hessinit.problem.validate import check_arguments, check_switches, check_tolerance, check_whole, unwrap
from hessinit.results.advice import check_rate
from hessinit.results.initialization import Initialization
from hessinit.results.track_record import TrackedPoint, Tracking, describe_notes
from hessinit.tracking.budget import Budget, check_share
from hessinit.tracking.examples import own_examples
from hessinit.tracking.lines import Lines, check_path, open_lines
from hessinit.tracking.losses import Losses
from hessinit.tracking.pointing import Pointing
from hessinit.tracking.resuming import go_on_with
from hessinit.tracking.sharpness import Subject
from hessinit.tracking.sinks import find_sinks
from hessinit.tracking.stepping import Stepping


def track(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    every: int = 100,
    optimizer: torch.optim.Optimizer | str | None = None,
    lr: float | None = None,
    path: str | os.PathLike[str] | None = "curvature.jsonl",
    resume: bool | str = False,
    share: float = 0.1,
    each_layer: bool = False,
    curvature: str = "gauss-newton",
    layers: str | Iterable[str] | None = None,
    forward: Forward | None = None,
    dropout: str = "freeze",
    reduction: str = "auto",
    check: bool = True,
    tolerance: float = 1e-2,
    max_steps: int = 200,
    seed: int = 0,
    log_to: Any = "auto",
    at_start: bool = True,
    warn: bool = True,
) -> Tracker:
    """Measure the curvature now, and then every so many steps; call `tracker.step(loss)` after each of yours.

    `batch` is what the curvature is measured on, the same all along. `optimizer` is the one that trains: its
    rate, settings and state are read whenever they are needed; a word such as "sgd" with `lr` does as well.
    Measured are the weights that the optimizer moves at that time, of two or more dimensions unless `layers`
    names others. Measuring takes at most `share` of the time (1: no limit): what does not fit is put off.
    Training is not changed by a bit, and a measurement that fails is a point of nan with a note, no
    exception. Every point goes to `path` as a line of JSON (an existing file is kept, and the next free name
    taken; `resume` goes on in it), and its scalars to `log_to`: a SummaryWriter, a W&B run, a function of a
    dict and a step, or several. When the rate reaches what the optimizer can stand, there is an
    `EdgeOfStabilityWarning`.

    >>> model, inputs = nn.Linear(2, 1, bias=False).double(), torch.eye(2, dtype=torch.float64)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.5)
    >>> batch = inputs, torch.zeros(2, 1)
    >>> with track(model, nn.MSELoss(), batch, optimizer=optimizer, path=None) as tracker:
    ...     point = tracker.measure()
    >>> round(point.norm, 6), round(point.lr_over_limit, 6)  # closed form: H = I, stable up to 2
    (1.0, 0.75)
    """
    choose("curvature", curvature, ["gauss-newton", "hessian"])
    if resume != "anyway":
        check_switches(resume=resume)
    check_switches(each_layer=each_layer, at_start=at_start, warn=warn)
    every = check_whole("every", every, at_least=1)
    share = check_share(share)
    seed = check_whole("seed", seed, at_least=0)
    effort = Effort(check_tolerance(tolerance), check_whole("max_steps", max_steps, at_least=1), seed)
    check_arguments(model, loss, forward, None, dropout, reduction, check)
    if path is not None:
        check_path(path)
    elif resume:
        raise ProblemError("resume=True needs the file to go on in; pass its path=, or leave resume out.")
    sinks = find_sinks(log_to)
    layers = list(layers) if layers is not None and not isinstance(layers, str) else layers
    stepping = Stepping(optimizer, lr, unwrap(model), layers)
    subject = Subject(
        model, loss, own_examples(batch), stepping, layers, forward, dropout, reduction, curvature,
        each_layer, effort,
    )  # fmt: skip
    facts = subject.look(check)
    lines = None if path is None else open_lines(path, resume)
    record = Tracking(
        optimizer=stepping.name, curvature=curvature, every=every, max_overhead=share, seed=seed, **facts
    )
    tracker = Tracker(Pointing(subject, sinks, warn), record, lines)
    if at_start and not tracker.steps:
        tracker._begin()
    return tracker


class Tracker:
    """What `track` returns: `step` after every optimizer step, `close` at the end, or use it in a `with`.

    Set `steps` when training goes on from elsewhere; `initialization` and `name` go into the record.
    """

    def __init__(self, pointing: Pointing, record: Tracking, lines: Lines | None) -> None:
        self._pointing = pointing
        self._lines = lines
        earlier = None if lines is None else lines.earlier
        self._record = record if lines is None or earlier is None else go_on_with(earlier, record, lines.path)
        self._points: list[TrackedPoint] = list(self._record.points)
        self._losses = Losses(self._record.losses)
        last = self._points[-1].measuring_seconds if self._points else 0.0
        self._budget = Budget(record.max_overhead, self._record.seconds, self._record.measuring_seconds, last)
        self._closed: Tracking | None = None
        self._notes: list[str] = []
        self.name = self._record.name
        self.initialization: Initialization | None = self._record.initialization
        seen = [*(point.step for point in self._points[-1:]), *(step for step, _ in self._record.losses[-1:])]
        self._steps = max(seen, default=0)
        self._due = self._next_due()
        if lines is not None and earlier is None:
            come_later = ("points", "losses", "seconds", "spent")
            lines.begin({name: value for name, value in record.to_dict().items() if name not in come_later})
        elif lines is not None:
            lines.resume(self._settings(self._record.notes), self._losses)

    def step(self, loss: float | Tensor | None = None, *, lr: float | None = None) -> TrackedPoint | None:
        """Call once after every optimizer step; returns a point when one was measured.

        `loss` is the training loss, only recorded; `lr` is the rate, where the tracker has no optimizer to
        read it from.
        """
        self._check_open()
        if lr is not None and self._pointing.stepping.reads_rate:
            raise ProblemError(
                f"lr={lr!r} was given to step(), and the rate is read from the optimizer, whose schedule it "
                "would hide; leave it out."
            )
        if lr is not None:
            self._pointing.stepping.given_lr = check_rate(lr)
        self._steps += 1
        if loss is not None:
            self._losses.add(self.steps, loss)
        if self.steps < self._due or not self._budget.affords():
            return None
        return self._measure()

    def measure(self) -> TrackedPoint:
        """Measure now, whatever the budget; what it takes counts."""
        self._check_open()
        return self._measure()

    def add_note(self, note: str) -> None:
        """A remark for the record."""
        self._notes.append(note)

    def close(self) -> Tracking:
        """Write the last line, and return the whole record; a second call changes nothing."""
        if self._closed is None:
            tracking = self.tracking
            if self._lines is not None:
                start = None if tracking.initialization is None else tracking.initialization.to_dict()
                facts = {
                    **self._settings(tracking.notes), "seconds": tracking.seconds, "spent": tracking.spent,
                    "name": tracking.name, "initialization": start,
                }  # fmt: skip
                self._write(lambda lines: lines.end(facts, self._losses))
            self._closed = tracking
        return self._closed

    @property
    def steps(self) -> int:
        """How many steps there were; what was measured beyond a number that is set is taken out."""
        return self._steps

    @steps.setter
    def steps(self, steps: int) -> None:
        before, overdue = self._steps, self._steps >= self._due
        self._steps = check_whole("steps", steps, at_least=0)
        if not overdue:  # what was put off stays due
            self._due = self._next_due()
        if self._steps < before:
            self._forget_after(self._steps)

    @property
    def tracking(self) -> Tracking:
        """The record as it stands."""
        if self._closed is not None:
            return self._closed
        failures = describe_notes((point.step, point.note) for point in self._points)
        return replace(
            self._record,
            points=tuple(self._points),
            losses=self._losses.all(),
            seconds=self._budget.elapsed,
            spent=self._budget.spent,
            notes=tuple(dict.fromkeys([*self._record.notes, *self._notes, *self._pointing.notes, *failures])),
            name=self.name,
            initialization=self.initialization,
        )

    @property
    def overhead(self) -> float:
        """The share of the time that measuring took so far."""
        if self._closed is not None:
            return self._closed.overhead
        elapsed = self._budget.elapsed
        return self._budget.spent / elapsed if elapsed > 0 else 0.0

    @property
    def path(self) -> Path | None:
        """The file that the points go to."""
        return None if self._lines is None else self._lines.path

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self) -> None:
        try:
            self._measure(must=True)
        except BaseException:
            if self._lines is not None and not self._points:
                self._lines.discard()
            raise

    def _measure(self, must: bool = False) -> TrackedPoint:
        point = self._pointing.measure(self.steps, self._losses.latest, self._budget, must=must)
        self._points = [one for one in self._points if one.step < point.step]
        self._points.append(point)
        self._due = self._next_due()
        with self._budget.counting_more():
            self._write(lambda lines: lines.add(point, self._losses))
            self._pointing.announce(self._points, stacklevel=5 if must else 4)  # the caller of track or step
        return point

    def _forget_after(self, step: int) -> None:
        """Training went back to that step: what came after it is another training's."""
        kept = [point for point in self._points if point.step <= step]
        if self._losses.forget_after(step) or len(kept) < len(self._points):
            self._points = kept
            self._write(lambda lines: lines.go_back(step, self._losses))

    def _write(self, write: Callable[[Lines], None]) -> None:
        """A disk that is full does not end a training: the lines wait until there is room."""
        if self._lines is None:
            return
        is_told = self._lines.is_behind
        try:
            write(self._lines)
        except OSError as failure:
            if not is_told:
                self._notes.append(f"{self._lines.path} could not be written at step {self.steps}: {failure}")

    def _settings(self, notes: tuple[str, ...]) -> dict[str, Any]:
        """What may be different in a run that goes on, and is not told by the points."""
        return {"every": self._record.every, "max_overhead": self._record.max_overhead, "notes": list(notes)}

    def _next_due(self) -> int:
        return (self.steps // self._record.every + 1) * self._record.every

    def _check_open(self) -> None:
        if self._closed is not None:
            raise ProblemError("this tracker is closed; call track(…, resume=True) to go on in its file.")
