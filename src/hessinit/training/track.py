"""The verb `track`: ‖H‖ and the stability limit, measured every so many steps of a training loop."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from hessinit.curvature.engines import LanczosSettings, build_engine
from hessinit.curvature.evaluation import evaluate
from hessinit.curvature.progress import in_gradients, timed_gradient
from hessinit.errors import EdgeOfStabilityWarning, ProblemError, check_number
from hessinit.measurement.facts import (
    in_running_order,
    note_unchecked,
    note_uncounted,
    notes_on,
    versions_of,
)
from hessinit.present.track_record import warn_of_limit
from hessinit.problem.batches import read_batches, tensors_in
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.preserve import uninterrupted
from hessinit.problem.problem import Loss, Problem
from hessinit.problem.ranks import Ranks, calling_ranks, on_all_ranks
from hessinit.problem.validate import check_switches, check_whole, find_layers, unwrap
from hessinit.results.advice import MOST_TIMES_STABLE, Descent, check_rate
from hessinit.results.initialization import Initialization
from hessinit.results.result import to_plain
from hessinit.results.track_record import (
    END,
    FREE_SECONDS,
    TrackedPoint,
    Tracking,
    describe_notes,
    find_crossings,
)
from hessinit.training import optimizer_rules as rules
from hessinit.training.track_log import Losses, Sink, TrackLog, find_sinks, scalars

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")


@uninterrupted
@on_all_ranks()
def track(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    every: int = 10,
    optimizer: rules.AnyOptimizer | None = None,
    lr: float | None = None,
    path: str | os.PathLike[str] | None = "curvature.jsonl",
    resume: bool = False,
    max_overhead: float = 0.1,
    each_layer: bool = False,
    log_to: Any = "auto",
    at_start: bool = True,
    warn: bool = True,
    distributed: str | None = None,
    **options: Unpack[rules.CurvatureOptions],
) -> Tracker:
    """Measure the curvature now and then every so many steps; call `tracker.step(loss)` after each of yours.

    The curvature is always measured on `batch`, for the weights that `optimizer` moves at that
    time, of two or more dimensions unless `layers` names others. Its learning rates, settings,
    groups and state are read at every measurement; a name such as "sgd", or a function that builds
    an optimizer, with `lr` works, too. Measuring takes at most five seconds, or the fraction
    `max_overhead` of the wall-clock time if that is more (1: no limit), else it is postponed.
    Training is not changed by a bit; a measurement that fails gives a point of nan with a note. The
    other options are those of `advise`, with tolerance=1e-2.

    Every point is written to `path` as a line of JSON; `resume` continues an earlier file, which is
    otherwise renamed to `PATH.bak`. Its scalars go to `log_to`: a SummaryWriter, a W&B run, a
    function of a dict and a step, or several. An `EdgeOfStabilityWarning` says when the learning
    rate reaches the stability limit.

    With `distributed`, as in `initialize_`, every rank makes the same calls and gets the same
    points, which rank 0 measures, writes and logs.

    >>> model, inputs = nn.Linear(2, 1, bias=False).double(), torch.eye(2, dtype=torch.float64)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.5)
    >>> batch = inputs, torch.zeros(2, 1)
    >>> with track(model, nn.MSELoss(), batch, optimizer=optimizer, path=None) as tracker:
    ...     point = tracker.measure()
    >>> round(point.norm, 6), round(point.lr_over_limit, 6)  # closed form: H = I, stable up to 2
    (1.0, 0.75)
    """
    check_switches(resume=resume, each_layer=each_layer, at_start=at_start, warn=warn)
    every = check_whole("every", every, at_least=1)
    rule = (
        "a number above 0, up to 1: the maximum fraction of the time spent measuring, such as 0.1"
    )
    max_overhead = check_number("max_overhead", max_overhead, lambda number: 0 < number <= 1, rule)
    curvature, settings, problem = rules.read_curvature_options(
        model, loss, {"tolerance": 1e-2, "dropout": "freeze", **options}
    )
    if path is None and resume:
        raise ProblemError(
            "resume=True needs the file to continue; pass its path=, or leave resume out."
        )
    ranks = calling_ranks()
    is_first = ranks is None or not ranks.rank
    log = None if path is None or not is_first else TrackLog(path, resume)
    sinks = find_sinks(log_to) if is_first else []
    rate = check_rate(lr)
    steps: Any = optimizer
    if optimizer is None:
        steps = rules.OptimizerRule(Descent(), name="" if rate is None else str(Descent()))
    else:
        rules.require_known_optimizer(optimizer)
        if not isinstance(optimizer, torch.optim.Optimizer):
            steps = rules.build_optimizer_rule(optimizer, model, lr=rate, layers=problem["layers"])
            rate = steps.lr
    # Copied: an iterator gives its batches once, and a loader may reuse its tensors. Those with a
    # graph are known to deepcopy beforehand, as it refuses them.
    batches = [one for _, one in read_batches(batch)]
    batches = batches if ranks is None else ranks.join(batches)
    pairs = [(one.inputs, one.targets) for one in batches]
    pairs = copy.deepcopy(pairs, {id(tensor): tensor.clone() for tensor in tensors_in(pairs)})
    examples: Any = pairs[0] if len(pairs) == 1 else pairs
    subject = _Subject(
        model, loss, examples, steps, rate, curvature, each_layer, settings, problem, ranks
    )
    facts = subject.on_first_rank(subject.check)
    facts |= {
        "curvature": curvature,
        "every": every,
        "max_overhead": max_overhead,
        "seed": settings.seed,
    }
    tracker = Tracker(subject, Tracking(**facts), log, sinks, warn and is_first)
    if at_start and not tracker.steps:
        tracker._measure(must_succeed=True)
    return tracker


class Tracker:
    """What `track` returns: `step` after every optimizer step, `close` at the end, or use it in a `with`.

    Set `steps` when training continues from elsewhere; `initialization` and `name` go into the
    record.
    """

    def __init__(
        self,
        subject: _Subject,
        record: Tracking,
        log: TrackLog | None,
        sinks: list[Sink],
        warn: bool,
    ) -> None:
        self._subject = subject
        self._log = log
        self._sinks = sinks
        self._warn = warn
        if log is not None and log.earlier is not None:
            record = _continue_record(log.earlier, record, log.path)
        self._record = record = subject.on_first_rank(lambda: record)
        self._points: list[TrackedPoint] = list(record.points)
        self._losses = Losses(record.losses)
        self._seen: Any = (
            None  # the measured weights and the modes of the modules at the last point
        )
        last = self._points[-1].measuring_seconds if self._points else 0.0
        self._budget = Budget(record.max_overhead, record.seconds, record.measuring_seconds, last)
        self._was_beyond_at_first = False
        self.name = record.name
        self._closed: Tracking | None = None
        self._notes: list[str] = []
        self.initialization: Initialization | None = record.initialization
        seen = [
            *(point.step for point in self._points[-1:]),
            *(step for step, _ in record.losses[-1:]),
        ]
        self._steps = max(seen, default=0)
        self._due = self._next_due()

    def step(
        self, loss: float | Tensor | None = None, *, lr: float | None = None
    ) -> TrackedPoint | None:
        """Call after every optimizer step; returns a point when one was measured.

        `loss` is recorded; `lr` is the learning rate, where there is no optimizer to read it from.
        """
        self._check_open()
        if lr is not None:
            if (
                isinstance(self._subject.optimizer, torch.optim.Optimizer)
                and self._subject.lr is None
            ):
                raise ProblemError(
                    f"lr={lr!r} was given, and it is read from the optimizer; leave it out."
                )
            self._subject.lr = check_rate(lr)
        self._steps += 1
        if loss is not None:
            self._losses.add(self.steps, loss)
        if self.steps < self._due or not self._subject.on_first_rank(self._budget.affords):
            return None
        return self._measure()

    def measure(self) -> TrackedPoint:
        """Measure now, whatever the budget; the time counts."""
        self._check_open()
        return self._measure()

    def add_note(self, note: str) -> None:
        """Add a remark to the record."""
        self._notes.append(note)

    def close(self) -> Tracking:
        """Write the last line, and return the whole record; a second call changes nothing."""
        if self._closed is None:
            tracking = self.tracking
            names = ("notes", "seconds", "spent", "name", "initialization")
            facts = {name: value for name, value in tracking.to_dict().items() if name in names}
            self._write({"line": END, **facts})
            self._closed = tracking
        return self._closed

    @property
    def steps(self) -> int:
        """The number of steps; a smaller number removes the points and losses of later steps."""
        return self._steps

    @steps.setter
    def steps(self, steps: int) -> None:
        before = self._steps
        self._steps = check_whole("steps", steps, at_least=0)
        if self._steps < before:
            self._points = [point for point in self._points if point.step <= self._steps]
            self._losses.drop_after(self._steps)
            self._due = self._next_due()
            if self._log is not None:
                self._log.is_whole = False

    @property
    def tracking(self) -> Tracking:
        """The record so far."""
        if self._closed is not None:
            return self._closed
        failures = describe_notes((point.step, point.note) for point in self._points)
        return replace(
            self._record,
            points=tuple(self._points),
            losses=self._losses.all(),
            name=self.name,
            seconds=self._budget.elapsed,
            spent=self._budget.spent,
            initialization=self.initialization,
            notes=tuple(dict.fromkeys([*self._record.notes, *self._notes, *failures])),
        )

    @property
    def overhead(self) -> float:
        """The fraction of the time that measuring took so far."""
        return self.tracking.overhead

    @property
    def path(self) -> Path | None:
        """The file that the points are written to."""
        return None if self._log is None else self._log.path

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    @uninterrupted
    def _measure(self, must_succeed: bool = False) -> TrackedPoint:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what training still has to compute is not our time
        started = time.perf_counter()
        point = self._subject.on_first_rank(lambda: self._make_point(started, must_succeed))
        self._points = [one for one in self._points if one.step < point.step]
        self._due = self._next_due()
        self._write(to_plain(point))
        self._points.append(point)
        for sink in list(self._sinks):
            try:
                sink(scalars(point), point.step)
            except (
                Exception
            ) as failure:  # a full disk or a lost connection is no reason to stop training
                self._sinks.remove(sink)
                self._notes.append(f"Logging stopped at step {point.step}: {failure!r}")
        self._budget.count(time.perf_counter() - started)
        if self._crosses_limit() and self._warn:
            message = warn_of_limit(point, self._record.optimizer)
            # The caller of step, or of track; both this and track are decorated.
            warnings.warn(message, EdgeOfStabilityWarning, stacklevel=6 if must_succeed else 4)
        return point

    def _make_point(self, started: float, must_succeed: bool) -> TrackedPoint:
        subject = self._subject
        lr = None
        note = ""
        try:
            steps = subject.read_optimizer()
            lr = steps.lr
            fields, weights = subject.measure(steps)
            news = [
                one for one in steps.notes if steps.rule is None and one not in self._record.notes
            ]
            seen = weights, [module.training for module in unwrap(subject.model).modules()]
            changed = "Since the last point, the measured weights or modes of modules (train or eval) changed."
            news += [changed] * (self._seen not in (None, seen))
            self._seen = seen
            note = " ".join(news)
        except Exception as failure:  # whatever it is, training goes on
            if must_succeed:
                raise
            unknown = ("loss", "norm", "error", "stable_learning_rate")
            fields = {**dict.fromkeys(unknown, math.nan), "converged": False}
            note = str(failure) or type(failure).__name__
        stable = fields["stable_learning_rate"]
        seconds = time.perf_counter() - started
        return TrackedPoint(
            step=self.steps,
            seconds=self._budget.elapsed,
            measuring_seconds=seconds,
            gradients=in_gradients(seconds, subject.gradient_seconds),
            training_loss=self._losses.latest,
            lr=lr,
            note=note,
            lr_times_norm=None if lr is None else lr * fields["norm"],
            **fields,
            lr_over_limit=None
            if lr is None or math.isnan(stable)
            else lr / stable
            if stable
            else math.inf,
        )

    def _crosses_limit(self) -> bool:
        """Whether to warn.

        An initial rate somewhat above the limit is tolerated until the next point.
        """
        point = self._points[-1]
        over = self._points[-1].lr_over_limit or 0.0
        crossed = point.step in find_crossings(self._points)[-1:]
        waited = self._was_beyond_at_first
        self._was_beyond_at_first = False
        if crossed and point.step == 0 and over <= MOST_TIMES_STABLE:
            self._was_beyond_at_first = True
            return False
        return crossed or (waited and over >= 1)

    def _write(self, line: dict[str, Any]) -> None:
        """A full disk does not end a training: the next line brings what it did not take."""
        if self._log is not None:
            try:
                self._log.add(line, self._losses, self._record, self._points)
            except OSError as failure:
                self._notes.append(f"{self._log.path} could not be written: {failure}")

    def _next_due(self) -> int:
        return (self.steps // self._record.every + 1) * self._record.every

    def _check_open(self) -> None:
        if self._closed is not None:
            raise ProblemError(
                "this tracker is closed; call track(…, resume=True) to continue its file."
            )


class Budget:
    """Permits a measurement that, if it takes as long as the last one, stays within the overhead.

    The first `FREE_SECONDS` are always permitted: a run of seconds would have no points otherwise.
    """

    def __init__(
        self, max_overhead: float, elapsed: float = 0.0, spent: float = 0.0, last: float = 0.0
    ):
        self.max_overhead = max_overhead
        self.spent = spent
        self.last = last
        self._began = time.perf_counter() - elapsed

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._began

    def affords(self) -> bool:
        most = max(FREE_SECONDS, self.max_overhead * self.elapsed)
        return self.max_overhead == 1 or self.spent + self.last <= most

    def count(self, seconds: float) -> None:
        self.spent = self.spent + seconds
        self.last = seconds


@dataclass
class _Subject:
    """What every point measures: the model as it is now, on the same examples and random numbers."""

    model: nn.Module
    loss: Loss
    data: Any
    optimizer: torch.optim.Optimizer | rules.OptimizerRule
    lr: float | None
    curvature: str
    each_layer: bool
    settings: LanczosSettings
    options: dict[str, Any]  # of a FunctionalProblem
    ranks: Ranks | None
    gradient_seconds: float = 0.0

    def on_first_rank(self, work: Callable[[], T]) -> T:
        """What rank 0 finds, on all ranks that track together."""
        with self.ranks.together() if self.ranks else contextlib.nullcontext():
            return self.ranks.first(work) if self.ranks else work()

    def read_optimizer(self) -> rules.OptimizerRule:
        """The optimizer as it is now: schedules, freezing and added groups change it."""
        if isinstance(self.optimizer, rules.OptimizerRule):
            return replace(self.optimizer, lr=self.lr)
        inner = unwrap(self.model)
        layers = find_layers(inner, self.options["layers"])
        trained = [one for one in layers if inner.get_parameter(one.parameter).requires_grad]
        return rules.read_optimizer(self.optimizer, inner, trained, lr=self.lr, in_training=True)

    def _problem(self, steps: rules.OptimizerRule, **other: Any) -> FunctionalProblem:
        layers = sorted(steps.rates) or self.options["layers"]
        return FunctionalProblem(
            Problem(self.model, self.loss, self.data, **{**self.options, "layers": layers, **other})
        )

    def check(self) -> dict[str, Any]:
        """Refuse what cannot be measured or, unless check=False, has wrong derivatives; returns constants."""
        steps = self.read_optimizer()
        problem = self._problem(steps)
        with problem.settings():
            evaluations = evaluate(problem)
            if problem.check:
                build_engine(evaluations, self.curvature, self.settings)
            notes = (*notes_on(problem, evaluations), *note_unchecked(problem.check))
            uncounted = note_uncounted(problem, steps.moved) if steps.name else ()
            for one in evaluations:
                one.forget()
            self.gradient_seconds = timed_gradient(problem).seconds
            return {
                "optimizer": steps.name,
                "examples": problem.examples,
                "notes": (*notes, *steps.notes, *uncounted),
                "versions": versions_of(problem),
            }

    def measure(self, steps: rules.OptimizerRule) -> tuple[dict[str, Any], list[str]]:
        """The fields of a point that are measured, and the names of the measured weights."""
        problem = self._problem(steps, check=False)
        with problem.settings():
            evaluations = evaluate(problem)
            engine = build_engine(evaluations, self.curvature, self.settings)
            names = list(problem.leaves)
            layers = {}
            if self.each_layer:
                each = engine.extremes_of_each(names)
                in_order = in_running_order(problem, evaluations)
                layers = {layer.name: each[layer.parameter].norm.value for layer in in_order}
            extremes = engine.extremes(names)
            norm = extremes.norm
            products = extremes.top.products + extremes.bottom.products
            stable = math.nan
            if steps.rule is not None:
                limit = rules.find_stability_limit(
                    steps,
                    engine,
                    evaluations,
                    self.settings,
                    semidefinite=self.curvature == "gauss-newton",
                    extremes=extremes,
                    top_only=True,
                )
                stable = limit.stable
                products = products + limit.products
            fields = {
                "loss": sum(one.loss_value * one.weight for one in evaluations),
                "norm": norm.value,
                "error": norm.error,
                "converged": norm.converged,
                "stable_learning_rate": stable,
                "layers": layers,
                "products": products,
            }
            return fields, names


def _continue_record(earlier: Tracking, record: Tracking, path: Path) -> Tracking:
    if earlier.curvature != record.curvature:
        raise ProblemError(
            f"cannot resume: {path} tracks curvature={earlier.curvature!r}, not {record.curvature!r}; pass "
            "the same curvature, or another path."
        )
    names = ("optimizer", "examples", "seed")
    pairs = {name: (getattr(earlier, name), getattr(record, name)) for name in names}
    changes = [
        f"{name} was {was!r} and is {now!r}" for name, (was, now) in pairs.items() if was != now
    ]
    notes = [f"Resumed with other settings: {'; '.join(changes)}."] if changes else []
    told = describe_notes((point.step, point.note) for point in earlier.points)  # and will be again
    kept = [note for note in earlier.notes if note not in told]
    return replace(
        earlier, every=record.every, max_overhead=record.max_overhead, notes=(*kept, *notes)
    )
