"""The verb `track`: ‖H‖ and the stability limit, measured and logged in a training loop."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hessinit.curvature.engine import LanczosSettings
from hessinit.curvature.engine_choice import build_engine, evaluate_everywhere, functional_form
from hessinit.curvature.evaluation import in_gradients, loss_gradient
from hessinit.errors import EdgeOfStabilityWarning, ProblemError, RankError, check_number, choose
from hessinit.measurement.facts import (
    in_running_order,
    note_unchecked,
    note_uncounted,
    notes_on,
    versions_of,
)
from hessinit.present.track_record import warn_of_limit
from hessinit.problem.batches import tensors_in
from hessinit.problem.checks import (
    check_kind,
    check_switches,
    check_tolerance,
    check_whole,
    find_layers,
    unwrap,
)
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.preserve import uninterrupted
from hessinit.problem.problem import Loss, Problem, as_problem
from hessinit.problem.ranks import Ranks, calling_ranks, on_all_ranks, require_alike
from hessinit.results.advice import MOST_TIMES_STABLE, Descent, check_rate
from hessinit.results.curvature_report import MATRICES
from hessinit.results.initialization import Initialization
from hessinit.results.result import Plain, to_plain, write_text
from hessinit.results.track_record import (
    END,
    FREE_SECONDS,
    MOST_LOSSES,
    TrackedPoint,
    Tracking,
    are_lines,
    describe_notes,
    find_crossings,
)
from hessinit.training import optimizer_rules as rules
from hessinit.training.optimizers import AnyOptimizer, Training, as_tuple

T = TypeVar("T")


@dataclass(frozen=True)
class TrackSettings:
    """What a tracker measures, and how accurately.

    Args:
        curvature: "gauss-newton" or "hessian".
        tolerance: relative error of the norms.
        max_iterations: steps of Lanczos, at most.
        each_layer: whether every layer is measured, not only the network.
        at_start: whether `track` measures before the first step.
        warn: whether an `EdgeOfStabilityWarning` says when the learning rate reaches the limit.

    >>> TrackSettings(each_layer=True).tolerance
    0.01
    """

    curvature: str = "gauss-newton"
    tolerance: float = 1e-2
    max_iterations: int = 200
    each_layer: bool = False
    at_start: bool = True
    warn: bool = True

    def __post_init__(self) -> None:
        choose("curvature", self.curvature, MATRICES)
        check_tolerance(self.tolerance)
        check_whole("max_iterations", self.max_iterations, at_least=1)
        check_switches(each_layer=self.each_layer, at_start=self.at_start, warn=self.warn)


USUAL_SETTINGS = TrackSettings()


@uninterrupted
@on_all_ranks()
def track(
    problem: Problem | nn.Module,
    loss: Loss | None = None,
    batch: Any = None,
    *,
    optimizer: AnyOptimizer | None = None,
    lr: float | None = None,
    every: int = 10,
    max_overhead: float = 0.1,
    path: str | os.PathLike[str] | None = "curvature.jsonl",
    resume: bool = False,
    log_to: Any = "auto",
    settings: TrackSettings = USUAL_SETTINGS,
    distributed: str | None = None,
) -> Tracker:
    """Measure the curvature every so many steps; call `tracker.step(loss)` after each of yours.

    The curvature is always measured on the batch of the problem, for the weights that `optimizer`
    moves at that time, of two or more dimensions unless the problem names layers. Its learning
    rates, settings, groups and state are read at every measurement; a name such as "sgd", or a
    function that builds an optimizer, with `lr` works, too. Measuring takes at most five seconds,
    or the fraction `max_overhead` of the wall-clock time if that is more (1: no limit), else it is
    postponed. Training is not changed by a bit; a measurement that fails gives a point of nan with
    a note.

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
    problem = as_problem(problem, loss, batch)
    check_kind("settings", settings, TrackSettings, "each_layer=True")
    check_switches(resume=resume)
    every = check_whole("every", every, at_least=1)
    max_overhead = check_number(
        "max_overhead",
        max_overhead,
        lambda number: 0 < number <= 1,
        "a number above 0, up to 1: the maximum fraction of the time spent measuring, such as 0.1",
    )
    if path is None and resume:
        raise ProblemError(
            "resume=True needs the file to continue; pass its path=, or leave resume out."
        )
    ranks = calling_ranks()
    is_first = ranks is None or not ranks.rank
    log = None if path is None or not is_first else TrackLog(path, resume)
    sinks = find_sinks(log_to) if is_first else []
    rate, source = _read_optimizer(problem, optimizer, check_rate(lr))
    subject = _Subject(_with_copied_batches(problem, ranks), source, settings, ranks)
    gradient_seconds, facts = subject.on_first_rank(lambda: subject.check(rate))
    record = Tracking(
        **facts,
        curvature=settings.curvature,
        every=every,
        max_overhead=max_overhead,
        seed=problem.seed,
    )
    tracker = Tracker(subject, record, rate, gradient_seconds, log, sinks)
    if settings.at_start and not tracker.steps:
        tracker._measure(must_succeed=True)
    return tracker


def _read_optimizer(
    problem: Problem, optimizer: AnyOptimizer | None, rate: float | None
) -> tuple[float | None, tuple[torch.optim.Optimizer, ...] | rules.OptimizerRule]:
    """Return the learning rate that was passed or built in, and the optimizer or its rule."""
    if optimizer is None:
        return rate, rules.OptimizerRule(Descent(), name="" if rate is None else str(Descent()))
    training = Training.of(optimizer)
    if training.is_built:
        return rate, as_tuple(training.optimizer)
    rule = rules.build_optimizer_rule(training, problem.model, lr=rate, layers=problem.layers)
    return rule.lr, rule


def _with_copied_batches(problem: Problem, ranks: Ranks | None) -> Problem:
    """Return the problem on copies of the batches of all ranks: a loader may reuse its tensors."""
    batches = list(problem.batches)
    if ranks is not None:
        batches = ranks.join(batches)
    pairs = [(batch.inputs, batch.targets) for batch in batches]
    # Tensors with a graph are known to deepcopy beforehand, as it refuses them.
    pairs = copy.deepcopy(pairs, {id(tensor): tensor.clone() for tensor in tensors_in(pairs)})
    return replace(problem, batch=pairs[0] if len(pairs) == 1 else pairs)


class Tracker:
    """What `track` returns: call `step` after every optimizer step, and `close` at the end.

    Or use it in a `with`.
    Set `steps` when training continues from elsewhere; `initialization` and `name` go into the
    record.
    """

    def __init__(
        self,
        subject: _Subject,
        record: Tracking,
        rate: float | None,
        gradient_seconds: float,
        log: TrackLog | None,
        sinks: list[Sink],
    ) -> None:
        self._subject = subject
        self._rate = rate
        self._gradient_seconds = gradient_seconds
        self._log = log
        self._sinks = sinks
        if log is not None and log.earlier is not None:
            record = _continue_record(log.earlier, record, log.path)
        self._record = record = subject.on_first_rank(lambda: record)
        self._points: list[TrackedPoint] = list(record.points)
        self._losses = Losses(record.losses)
        # The measured weights and the modes of the modules at the last point.
        self._measured_in: tuple[list[str], list[bool]] | None = None
        last = self._points[-1].measuring_seconds if self._points else 0.0
        self._budget = Budget(record.max_overhead, record.seconds, record.measuring_seconds, last)
        self._was_beyond_at_first = False
        self._fault = ""  # why the last point has no limit
        self.name = record.name
        self._closed: Tracking | None = None
        self._notes: list[str] = []
        self.initialization: Initialization | None = record.initialization
        recorded = [point.step for point in self._points] + [step for step, _ in record.losses]
        self._steps = max(recorded, default=0)
        self._due = self._next_due()

    def step(
        self, loss: float | Tensor | None = None, *, lr: float | None = None
    ) -> TrackedPoint | None:
        """Call after every optimizer step; returns a point when one was measured.

        `loss` is recorded; `lr` is the learning rate, where there is no optimizer to read it from.
        """
        self._check_open()
        if lr is not None:
            if self._rate is None and isinstance(self._subject.optimizer, tuple):
                raise ProblemError(
                    f"lr={lr!r} was given, and it is read from the optimizer; leave it out."
                )
            self._rate = check_rate(lr)
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
            facts = tracking.to_dict()
            names = ("notes", "seconds", "spent", "name", "initialization")
            self._write({"line": END, **{name: facts[name] for name in facts if name in names}})
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
                self._log.write_anew()

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
        self._points = [earlier for earlier in self._points if earlier.step < point.step]
        self._due = self._next_due()
        self._write(to_plain(point))
        self._points.append(point)
        for sink in list(self._sinks):
            try:
                sink(scalars(point), point.step)
            except Exception as failure:  # a full disk or a lost connection: training goes on
                self._sinks.remove(sink)
                self._notes.append(f"Logging stopped at step {point.step}: {failure!r}")
        self._budget.count(time.perf_counter() - started)
        ranks = self._subject.ranks
        is_first = ranks is None or not ranks.rank
        if self._crosses_limit() and self._subject.settings.warn and is_first:
            message = warn_of_limit(point, self._record.optimizer)
            # The caller of step, or of track; both this and track are decorated.
            warnings.warn(message, EdgeOfStabilityWarning, stacklevel=6 if must_succeed else 4)
        return point

    def _make_point(self, started: float, must_succeed: bool) -> TrackedPoint:
        lr = None
        try:
            rule = self._subject.read_optimizer(self._rate)
            lr = rule.lr
            fields, weights, fault = self._subject.measure(rule)
            note = self._note_changes(fault, weights)
        except Exception as failure:  # whatever it is, training goes on
            if must_succeed:
                raise
            with contextlib.suppress(RankError):  # told to rank 0, whose point is all ranks'
                require_alike(failure)
            unknown = ("loss", "norm", "error", "stable_learning_rate")
            fields = {**dict.fromkeys(unknown, math.nan), "converged": False}
            note = str(failure) or type(failure).__name__
        seconds = time.perf_counter() - started
        return TrackedPoint(
            step=self.steps,
            seconds=self._budget.elapsed,
            measuring_seconds=seconds,
            gradients=in_gradients(seconds, self._gradient_seconds),
            training_loss=self._losses.latest,
            lr=lr,
            note=note,
            lr_times_norm=None if lr is None else lr * fields["norm"],
            **fields,
            lr_over_limit=_over_limit(lr, fields["stable_learning_rate"]),
        )

    def _note_changes(self, fault: str, weights: list[str]) -> str:
        """Say what is new about the limit, the weights and the modes since the last point."""
        notes = []
        if fault != self._fault:
            notes.append(fault or "There is a stability limit again.")
        self._fault = fault
        model = unwrap(self._subject.problem.model)
        measured_in = weights, [module.training for module in model.modules()]
        if self._measured_in not in (None, measured_in):
            notes.append(
                "Since the last point, the measured weights or modes of modules (train or eval) "
                "changed."
            )
        self._measured_in = measured_in
        return " ".join(notes)

    def _crosses_limit(self) -> bool:
        """Whether to warn: an initial rate somewhat above the limit may wait for the next point."""
        point = self._points[-1]
        over = point.lr_over_limit or 0.0
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
        permitted = max(FREE_SECONDS, self.max_overhead * self.elapsed)
        return self.max_overhead == 1 or self.spent + self.last <= permitted

    def count(self, seconds: float) -> None:
        self.spent += seconds
        self.last = seconds


@dataclass(frozen=True)
class _Subject:
    """What every point measures: the model as it is now, on the same examples and draws."""

    problem: Problem
    optimizer: tuple[torch.optim.Optimizer, ...] | rules.OptimizerRule
    settings: TrackSettings
    ranks: Ranks | None

    @property
    def lanczos(self) -> LanczosSettings:
        settings = self.settings
        return LanczosSettings(settings.tolerance, settings.max_iterations, self.problem.seed)

    def on_first_rank(self, work: Callable[[], T]) -> T:
        """Do the work on rank 0; return its result on all ranks that track together."""
        if self.ranks is None:
            return work()
        with self.ranks.together():
            return self.ranks.first(work)

    def read_optimizer(self, rate: float | None) -> rules.OptimizerRule:
        """Return the rule of the optimizer as it is now: schedules and added groups change it."""
        if isinstance(self.optimizer, rules.OptimizerRule):
            return replace(self.optimizer, lr=rate)
        model = unwrap(self.problem.model)
        trained = [
            layer
            for layer in find_layers(model, self.problem.layers)
            if model.get_parameter(layer.parameter).requires_grad
        ]
        return rules.read_optimizer(self.optimizer, model, trained, lr=rate, in_training=True)

    def _functional(self, rule: rules.OptimizerRule, check: bool) -> FunctionalProblem:
        layers = sorted(rule.rates) or self.problem.layers
        return functional_form(replace(self.problem, layers=layers, check=check))

    def check(self, rate: float | None) -> tuple[float, dict[str, Any]]:
        """Refuse what cannot be measured; return the seconds of a gradient, and facts.

        Derivatives are checked unless the problem says check=False.
        """
        rule = self.read_optimizer(rate)
        problem = self._functional(rule, self.problem.check)
        with problem.settings():
            evaluations, of_all = evaluate_everywhere(problem)
            if problem.check:
                build_engine(evaluations, self.settings.curvature, self.lanczos)
            notes = [*notes_on(problem, evaluations), *note_unchecked(problem.check), *rule.notes]
            if rule.name:
                notes += note_uncounted(problem, rule.moved)
            facts = {
                "optimizer": rule.name,
                "examples": of_all.get("examples", problem.examples),
                "notes": tuple(notes),
                "versions": versions_of(problem),
            }
            return loss_gradient(evaluations).seconds, facts

    def measure(self, rule: rules.OptimizerRule) -> tuple[dict[str, Any], list[str], str]:
        """Return the measured fields of a point, its weights, and why there is no limit."""
        problem = self._functional(rule, check=False)
        with problem.settings():
            evaluations, of_all = evaluate_everywhere(problem)
            engine = build_engine(evaluations, self.settings.curvature, self.lanczos)
            names = list(problem.leaves)
            layers = {}
            if self.settings.each_layer:
                extremes_of = engine.extremes_of_each(names)
                for layer in in_running_order(problem, evaluations):
                    layers[layer.name] = extremes_of[layer.parameter].norm.value
            extremes = engine.extremes(names)
            limit = rules.find_stability_limit(
                rule,
                engine,
                evaluations,
                self.lanczos,
                semidefinite=self.settings.curvature == "gauss-newton",
                extremes=extremes,
                top_only=True,
            )
            fault = ""
            if math.isnan(limit.norm.value):
                fault = f"No stability limit of {rule.name}: {limit.norm.reason}."
            fields = {
                "loss": of_all.get(
                    "loss",
                    sum(evaluation.loss_value * evaluation.weight for evaluation in evaluations),
                ),
                "norm": extremes.norm.value,
                "error": extremes.norm.error,
                "converged": extremes.norm.converged,
                "stable_learning_rate": limit.stable,
                "layers": layers,
                "products": (extremes.top.products + extremes.bottom.products + limit.products),
            }
            return fields, names, fault


def _over_limit(lr: float | None, stable: float) -> float | None:
    """Return the learning rate over the largest stable one; None if one of them is unknown."""
    if lr is None or math.isnan(stable):
        return None
    return lr / stable if stable else math.inf


def _continue_record(earlier: Tracking, record: Tracking, path: Path) -> Tracking:
    if earlier.curvature != record.curvature:
        raise ProblemError(
            f"cannot resume: {path} tracks curvature={earlier.curvature!r}, not "
            f"{record.curvature!r}; pass the same curvature, or another path."
        )
    # The notes of points are described again.
    of_points = describe_notes((point.step, point.note) for point in earlier.points)
    notes = [note for note in earlier.notes if note not in of_points]
    changes = []
    for name in ("optimizer", "examples", "seed"):
        before = getattr(earlier, name)
        now = getattr(record, name)
        if before != now:
            changes.append(f"{name} was {before!r} and is {now!r}")
    if changes:
        notes.append(f"Resumed with other settings: {'; '.join(changes)}.")
    return replace(
        earlier, every=record.every, max_overhead=record.max_overhead, notes=tuple(notes)
    )


Sink = Callable[[dict[str, float], int], object]


class Losses:
    """At most a thousand training losses, evenly spread over the steps.

    A loss on a GPU is read only when it is needed: reading it at every step would make training
    wait.
    """

    def __init__(self, earlier: tuple[tuple[int, float], ...] = ()) -> None:
        self._kept: list[tuple[int, float | Tensor]] = list(earlier)
        common = math.gcd(*(step for step, _ in earlier))
        # As many as this were thinned already, by powers of two.
        self.stride = common & -common if len(earlier) >= MOST_LOSSES // 2 else 1
        self._latest: float | Tensor | None = None

    def add(self, step: int, loss: float | Tensor) -> None:
        self._latest = _read_loss(loss)
        if step % self.stride == 0:
            self._kept.append((step, self._latest))
        if len(self._kept) > MOST_LOSSES:
            self.stride *= 2
            self._kept = [pair for pair in self._kept if pair[0] % self.stride == 0]

    def drop_after(self, step: int) -> None:
        self._kept = [pair for pair in self._kept if pair[0] <= step]
        self._latest = None

    @property
    def latest(self) -> float | None:
        """The last loss given, whether it was kept or not."""
        return None if self._latest is None else float(self._latest)

    def all(self) -> tuple[tuple[int, float], ...]:
        self._kept = [(step, float(loss)) for step, loss in self._kept]
        return tuple((step, float(loss)) for step, loss in self._kept)


def _read_loss(loss: Any) -> float | Tensor:
    if isinstance(loss, Tensor):
        # A copy: the loss may be divided in place afterwards, or live in a buffer that is used
        # again.
        loss = loss.detach().clone()
        if loss.device.type != "cpu" and loss.numel() == 1:
            return loss
    try:
        return float(loss)
    except (TypeError, ValueError, RuntimeError):
        raise ProblemError(
            f"the loss given to step() is {loss!r:.60}; it must be a single real number, such as "
            "loss.mean(), or left out."
        ) from None


class TrackLog:
    """A file of JSON lines: a header, a line for each point, and a line at the end.

    Each line is with the operating system before training goes on, so that a killed run loses
    nothing. A file that is new, resumed, removed, or cut by a full disk is written as a whole with
    the next line. An earlier tracker's file of that name is renamed to `NAME.bak`, or continued
    with `resume`.
    """

    def __init__(self, path: Any, resume: bool) -> None:
        if not isinstance(path, str | os.PathLike):
            raise ProblemError(
                f"path is a {type(path).__name__}; it must be the name of a file, or None."
            )
        self.path = Path(path)
        self._place = self.path.absolute()  # training may change the working directory
        if self._place.is_dir() or not self._place.parent.is_dir():
            raise ProblemError(
                f"path={str(path)!r} must be a file in a folder that exists; create it, or pass "
                "None."
            )
        self.earlier: Tracking | None = None
        self._is_whole = False  # whether the file holds all that was tracked so far
        self._written = -1  # the step of the last loss in the file
        exists = self._place.exists()
        self._replaces = exists and not resume
        if exists and resume:
            try:
                self.earlier = Tracking.from_json(self._place.read_bytes(), source=str(path))
            except ValueError as problem:
                raise ProblemError(f"cannot resume: {problem}") from problem
        elif exists and not are_lines(self._place.read_bytes()):
            raise ProblemError(
                f"path={str(path)!r} exists and is not a tracker's file, so it is not overwritten; "
                "give another path, or None for no file."
            )

    def add(
        self,
        line: Mapping[str, Plain],
        losses: Losses,
        record: Tracking,
        before: Sequence[TrackedPoint],
    ) -> None:
        """Append a line with the losses since the last; `before` are the points of earlier ones."""
        appends = self._is_whole and self._place.exists()
        self._is_whole = False
        recorded = losses.all()
        new = [pair for pair in recorded if not appends or pair[0] > self._written]
        lines = [{**line, "losses": to_plain(new), "stride": losses.stride}]
        if not appends:
            header = {**record.to_dict(), "lines": True}
            del header["points"], header["losses"]
            earlier = [{**to_plain(point), "losses": [], "stride": 1} for point in before]
            lines = [header, *earlier, *lines]
        text = "".join(json.dumps(fields, allow_nan=False) + "\n" for fields in lines)
        if appends:
            with self._place.open("ab") as file:
                file.write(text.encode())
        else:
            if self._replaces:
                self._place.replace(self._place.with_name(self._place.name + ".bak"))
                self._replaces = False
            write_text(self._place, text)
        self._is_whole = True
        self._written = recorded[-1][0] if recorded else -1

    def write_anew(self) -> None:
        """Write the whole file with the next line: what it holds is not what was tracked."""
        self._is_whole = False


def scalars(point: TrackedPoint) -> dict[str, float]:
    """Return the numbers of a point by name, but for unknown ones."""
    named = {
        "norm": point.norm,
        "lr_times_norm": point.lr_times_norm,
        "lr_over_limit": point.lr_over_limit,
        "loss": point.loss,
        **{f"layers/{name}": norm for name, norm in point.layers.items()},
    }
    return {f"hessinit/{name}": value for name, value in named.items() if value is not None}


def find_sinks(log_to: Any) -> list[Sink]:
    """Return the functions that scalars are passed to; "auto" is the W&B run that is active."""
    if log_to is None:
        return []
    if isinstance(log_to, list | tuple):
        return [sink for logger in log_to for sink in find_sinks(logger)]
    if isinstance(log_to, str) and log_to == "auto":
        return [_WandbSink()]
    if callable(getattr(log_to, "add_scalar", None)):
        return [partial(_add_scalars, log_to)]
    if callable(getattr(log_to, "log", None)):
        return [_WandbSink(log_to)]
    if callable(log_to):
        return [log_to]
    shown = repr(log_to) if isinstance(log_to, str) else f"a {type(log_to).__name__}"
    raise ProblemError(
        f"log_to holds {shown}; it takes 'auto', a SummaryWriter (add_scalar), a W&B run (log), a "
        "function of a dict and a step, or several of them."
    )


def _add_scalars(writer: Any, values: dict[str, float], step: int) -> None:
    for name, value in values.items():
        writer.add_scalar(name, value, step)


class _WandbSink:
    """Logs into the current row of a W&B run (by default of the one that is active at the time).

    With its own step axis, as W&B drops earlier steps; only a second point in the same row begins a
    new one.
    """

    def __init__(self, run: Any = None) -> None:
        self._chosen_run = run
        self._row = -1
        self._last_run: Any = None

    def __call__(self, values: dict[str, float], step: int) -> None:
        run = self._chosen_run or getattr(sys.modules.get("wandb"), "run", None)
        if run is None:
            return
        is_new = run is not self._last_run
        if is_new:
            run.define_metric("hessinit/step")
            run.define_metric("hessinit/*", step_metric="hessinit/step")
        self._row = run.step + (not is_new and run.step == self._row)
        self._last_run = run
        run.log({**values, "hessinit/step": step}, step=self._row)
