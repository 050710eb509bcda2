"""What both callbacks share: initialize before the first step, track the curvature, resume from checkpoints.

In a distributed job the first rank works while the others wait; its failure and its weights go to
all ranks.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed
from torch import nn

import hessinit
from hessinit.errors import ProblemError, check_names, options_of
from hessinit.problem.problem import Forward, Loss
from hessinit.problem.ranks import Ranks, is_one_of_several, share_weights
from hessinit.problem.validate import check_present, find_layers, unwrap

T = TypeVar("T")

KEY = "hessinit"  # of the callback's state in a checkpoint
FILE = "curvature.jsonl"
# Options of `track` that are read from the trainer.
_FROM_TRAINER = {"optimizer", "lr", "resume", "at_start", "distributed"}


def import_base(packages: tuple[str, ...], name: str, library: str) -> Any:
    """The callback class of the first of these packages that is installed."""
    for package in packages:
        with contextlib.suppress(ModuleNotFoundError):
            return getattr(importlib.import_module(package), name)
    way = f"install it with `pip install 'hessinit[{library.lower()}]'`"
    raise ImportError(f"this callback needs {library}; {way}.")


class TrackedRun:
    """One training run with its tracker.

    Every rank makes the same calls; the first one does the work.
    """

    _open_files: ClassVar[set[Path | None]] = set()

    def __init__(
        self,
        initialize: bool | Mapping[str, Any] = False,
        path: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        for name in _FROM_TRAINER & set(options):
            way = "For the initialization, pass initialize={'lr': …}"
            raise ProblemError(
                f"{name}={options[name]!r} is read from the trainer; leave it out. {way}."
            )
        if not isinstance(initialize, (bool, Mapping)):
            raise ProblemError(
                f"initialize={initialize!r} must be True, False, or a dict of options for "
                "hessinit.initialize_, such as {'lr': 0.1}."
            )
        self._initialize = (
            dict(initialize) if isinstance(initialize, Mapping) else {} if initialize else None
        )
        self._path = path
        self._options = options
        self._tracker: hessinit.Tracker | None = None
        self._tracking: hessinit.Tracking | None = None
        self._state: Mapping[str, Any] = {}
        self._file: Path | None = None
        self._first_step = 0
        self._is_compared = False
        self.initialization: hessinit.Initialization | None = None

    def begin(
        self,
        model: nn.Module,
        make_problem: Callable[[], dict[str, Any]],
        *,
        folder: str | os.PathLike[str],
        log_to: Any,
        steps: int,
    ) -> None:
        """Call before the first step of a run that has taken `steps` before; only a new run is initialized.

        A resumed run continues the file named in its checkpoint. `make_problem` is called on the
        first rank; it returns the arguments of `track`: model, loss, batch, forward, optimizer.
        """
        self.close()
        self._tracking = self.initialization = self._file = None
        self._first_step = steps
        self._is_compared = False
        model = unwrap(model)
        check_present(model)
        problem: Any = on_first_rank(make_problem, doing="reading the batch")
        if self._initialize is not None and not steps:
            self.initialization = on_first_rank(lambda: self._draw(**problem), doing="initializing")
            share_weights(model)
        self._tracker = on_first_rank(
            lambda: self._track(problem, Path(folder), log_to, steps), doing="the first measurement"
        )

    def step(self, steps: int, loss: Any = None) -> None:
        """Call after the optimizer has taken `steps` in all."""
        if self._tracker is not None and steps > self._tracker.steps:
            self._tracker.steps = steps - 1  # several optimizers may have stepped since
            self._tracker.step(loss)

    def close(self) -> None:
        """Complete the record; a second call does nothing."""
        if self._tracker is not None:
            self._tracking = self._tracker.close()
            self._tracker = None
            self._open_files.discard(self._file)

    def add_note(self, note: str) -> None:
        """Add a remark to the record, on the first rank."""
        if self._tracker is not None:
            self._tracker.add_note(note)

    def compare(self, trained: float, step: int, times: float) -> None:
        """Note once if the mean `trained` loss of the steps up to `step` is so many `times` the measured one.

        A smaller one counts only where the last point is beyond two thirds of these steps: losses
        fall.
        """
        points = () if self.tracking is None else self.tracking.points
        measured = [point.loss for point in points if point.step >= self._first_step]
        if self._is_compared or not measured or not all(map(math.isfinite, (trained, *measured))):
            return
        nearest = min(max(trained, min(measured)), max(measured))
        low, high = sorted((trained, nearest))
        differs = high - low > (times - 1) * abs(low) + 1e-6
        is_near = 3 * (points[-1].step + 1 - self._first_step) >= 2 * (step - self._first_step)
        self._is_compared = not differs or is_near or trained > nearest
        if differs and self._is_compared:
            self.add_note(
                f"The training loss up to step {step} is {trained:.3g} where the measured loss is "
                f"{nearest:.3g}: what is measured may not be what is trained (a loss of your own, "
                "accumulated gradients)."
            )

    @property
    def tracking(self) -> hessinit.Tracking | None:
        """The record so far; None on the other ranks, and before the first step."""
        return self._tracking if self._tracker is None else self._tracker.tracking

    @property
    def key(self) -> str:
        """Identifies this callback in a checkpoint: another file, curvature or layers is another record."""
        asked = None if self._path is None else os.fspath(self._path)
        return f"{asked} {self._options.get('curvature', 'gauss-newton')} {self._options.get('layers')}"

    @property
    def state(self) -> dict[str, Any] | None:
        """For a checkpoint: the file, and its first norm, by which it is recognized; None on other ranks."""
        tracking = self.tracking
        if tracking is None or not tracking.points:
            return None
        return {"file": str(self._file), "first_norm": tracking.points[0].norm}

    def load_state(self, state: Any) -> None:
        """What the checkpoint holds that training resumes from, if anything."""
        self._state = state if isinstance(state, Mapping) else {}

    def _draw(
        self, model: nn.Module, loss: Loss, batch: Any, forward: Forward | None, optimizer: Any
    ) -> hessinit.Initialization:
        options = initialization_options(optimizer, unwrap(model), self._initialize or {})
        describing = {"forward": forward, **options_of(hessinit.Problem, options)}
        fit = options_of(hessinit.Fit, options)
        known = {*describing, *fit, "distributed"}
        return hessinit.initialize_(
            hessinit.Problem(model, loss, batch, **describing),
            fit=hessinit.Fit(**fit),
            distributed="each",
            **{name: value for name, value in options.items() if name not in known},
        )

    def _track(
        self, problem: dict[str, Any], folder: Path, log_to: Any, steps: int
    ) -> hessinit.Tracker:
        file = self._find_file(folder) if steps else None
        path = file or (folder / FILE if self._path is None else Path(self._path))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.absolute()  # training may change the working directory
        if self._file in self._open_files:
            raise ProblemError(f"another callback writes to {path}; pass path=, a file for each.")
        options = {"resume": file is not None, "distributed": "each", **self._options}
        groups = [hessinit.Problem, hessinit.TrackSettings]
        grouped = [field.name for group in groups for field in fields(group)]
        check_names(options, [*inspect.signature(hessinit.track).parameters, *grouped])
        problem = dict(problem)
        optimizer = problem.pop("optimizer")
        for field in fields(hessinit.Problem):
            if field.name in options:
                problem[field.name] = options.pop(field.name)
        settings: dict[str, Any] = {"at_start": False}
        for field in fields(hessinit.TrackSettings):
            if field.name in options:
                settings[field.name] = options.pop(field.name)
        tracker = hessinit.track(
            hessinit.Problem(**problem),
            optimizer=optimizer,
            path=path,
            log_to=log_to,
            settings=hessinit.TrackSettings(**settings),
            **options,
        )
        self._open_files.add(self._file)
        try:
            tracker.steps = steps
            tracker.initialization = self.initialization or tracker.initialization
            if steps and file is None:
                tracker.add_note(
                    f"Training resumed at step {steps}; the earlier record was not found."
                )
            point = tracker.measure()
            if self.initialization is not None and (point.lr_over_limit or 0) >= 1:
                # Weights made for a learning rate begin above its limit: κ is 4, the limit of SGD
                # 2.
                tracker.add_note(
                    "The initial learning rate is above the stability limit on purpose (lr·‖H‖ = "
                    f"{point.lr_times_norm:.3g}): the weights were initialized so."
                )
        except BaseException:  # a warning that is an error, an interrupt
            tracker.close()
            self._open_files.discard(self._file)
            raise
        return tracker

    def _find_file(self, folder: Path) -> Path | None:
        """The file that the checkpoint names, where it was or in the folder of this run."""
        named = Path(str(self._state.get("file", "")))
        for place in (named, folder / named.name):
            with contextlib.suppress(OSError, ValueError):  # gone, or not a tracker's
                points = hessinit.Tracking.load(place).points
                if points and points[0].norm == self._state.get("first_norm"):
                    return place
        return None


class RunResults:
    """The results of a callback's run; None on all ranks but the first."""

    _run: TrackedRun

    @property
    def tracking(self) -> hessinit.Tracking | None:
        """The record of the run, so far."""
        return self._run.tracking

    @property
    def initialization(self) -> hessinit.Initialization | None:
        """The result of `initialize_`, if it was called."""
        return self._run.initialization


def initialization_options(
    optimizer: torch.optim.Optimizer | None, model: nn.Module, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The options of `initialize_`: what the user gave and, for the rest, what the optimizer says.

    >>> model = nn.Linear(4, 3)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)
    >>> initialization_options(optimizer, model, {"seed": 3})
    {'optimizer': 'momentum', 'lr': 0.1, 'momentum': 0.8, 'seed': 3}
    """
    from hessinit.training.optimizer_rules import name_rule, read_optimizer

    try:
        if optimizer is None:
            raise ProblemError("there is not one optimizer to read the learning rate from.")
        found = read_optimizer(optimizer, model, find_layers(model, given.get("layers")))
        # OneCycleLR begins below the rate that it works towards, which it keeps as "max_lr".
        rates = [float(group["max_lr"]) for group in optimizer.param_groups if "max_lr" in group]
        lr = max(rates, default=found.lr)
        rule = found.rule
        if not lr or rule is None:
            raise ProblemError("the optimizer's learning rate is 0.")
    except ProblemError as refusal:
        if "lr" in given or "target" in given:
            return dict(given)
        way_out = "pass the step yourself: initialize={'lr': 0.1, 'optimizer': 'sgd'}"
        raise ProblemError(f"{refusal} Or {way_out}.") from refusal
    read: dict[str, Any] = {} if "target" in given else {"lr": lr}
    if momentum := getattr(rule, "momentum", 0.0):
        read["momentum"] = momentum
    return {"optimizer": name_rule(rule), **read, **given}


def is_first_rank() -> bool:
    """Whether this process does the work: the only one, or the first of the job."""
    return not is_one_of_several() or torch.distributed.get_rank() == 0


def on_first_rank(work: Callable[[], T], *, doing: str) -> T | None:
    """Do the `work` on the first rank while the others wait; its exception is raised on every rank."""
    if not is_one_of_several():
        return work()
    ranks = Ranks(doing)
    outcome = list[T]()
    with ranks.together():
        ranks.first(lambda: outcome.append(work()), last=True)
    return outcome[0] if outcome else None
