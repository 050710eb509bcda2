"""What both callbacks share: initialize before the first step, track the curvature, resume.

In a distributed job the first rank works while the others wait; its failure and its weights go to
all ranks.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed
from torch import nn
from torch.optim import Optimizer

import hessinit
from hessinit.errors import ProblemError
from hessinit.problem.checks import check_kind, check_present, find_layers, unwrap
from hessinit.problem.ranks import Ranks, is_one_of_several, share_weights
from hessinit.training.optimizer_rules import read_optimizer

T = TypeVar("T")
# A function that draws the weights of the problem's model and returns the result of `initialize_`.
Initialize = Callable[[hessinit.Problem], hessinit.Initialization]

KEY = "hessinit"  # of the callback's state in a checkpoint
FILE = "curvature.jsonl"


def import_base(packages: tuple[str, ...], name: str, library: str) -> Any:
    """Return the callback class of the first of these packages that is installed."""
    for package in packages:
        with contextlib.suppress(ModuleNotFoundError):
            return getattr(importlib.import_module(package), name)
    raise ImportError(
        f"this callback needs {library}; install it with `pip install "
        f"'hessinit[{library.lower()}]'`."
    )


@dataclass(eq=False)
class TrackedRun:
    """One training run with its tracker; the options are those of both callbacks.

    Every rank makes the same calls; the first one does the work.
    """

    initialize: bool | Initialize
    every: int
    max_overhead: float
    path: str | os.PathLike[str] | None
    settings: hessinit.TrackSettings
    initialization: hessinit.Initialization | None = field(default=None, init=False)
    _tracker: hessinit.Tracker | None = field(default=None, init=False)
    _tracking: hessinit.Tracking | None = field(default=None, init=False)
    _state: Mapping[str, Any] = field(default_factory=dict, init=False)
    _file: Path | None = field(default=None, init=False)
    _first_step: int = field(default=0, init=False)
    _is_compared: bool = field(default=False, init=False)
    _open_files: ClassVar[set[Path | None]] = set()

    def __post_init__(self) -> None:
        check_kind("settings", self.settings, hessinit.TrackSettings, "each_layer=True")
        if not isinstance(self.initialize, bool) and not callable(self.initialize):
            raise ProblemError(
                f"initialize={self.initialize!r} must be True, False, or a function of the problem "
                "that calls hessinit.initialize_, such as lambda problem: "
                "hessinit.initialize_(problem, lr=0.1)."
            )

    def begin(
        self,
        model: nn.Module,
        make_problem: Callable[[], hessinit.Problem],
        optimizer: Optimizer | None,
        *,
        folder: str | os.PathLike[str],
        log_to: Any,
        steps: int,
    ) -> None:
        """Initialize a new run, and measure the first point of one that has taken `steps` before.

        A resumed run is not initialized, and continues the file named in its checkpoint.
        `make_problem` is called on the first rank.
        """
        self.close()
        self._tracking = None
        self._file = None
        self._first_step = steps
        self._is_compared = False
        self.initialization = None
        model = unwrap(model)
        check_present(model)
        problem: Any = on_first_rank(make_problem, doing="reading the batch")
        if self.initialize and not steps:
            self.initialization = on_first_rank(
                lambda: self._draw(problem, optimizer), doing="initializing"
            )
            share_weights(model)
        self._tracker = on_first_rank(
            lambda: self._track(problem, optimizer, Path(folder), log_to, steps),
            doing="the first measurement",
        )

    def step(self, steps: int, loss: Any = None) -> None:
        """Record that the optimizer has taken `steps` in all."""
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

    def compare(self, trained: float, step: int, factor: float) -> None:
        """Note once if the mean training loss up to `step` and the measured one differ by `factor`.

        A smaller training loss counts only where the last point is beyond two thirds of these
        steps: losses fall.
        """
        points = () if self.tracking is None else self.tracking.points
        measured = [point.loss for point in points if point.step >= self._first_step]
        if self._is_compared or not measured or not all(map(math.isfinite, (trained, *measured))):
            return
        nearest = min(max(trained, min(measured)), max(measured))
        low = min(trained, nearest)
        differs = abs(trained - nearest) > (factor - 1) * abs(low) + 1e-6
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
        """The name of this record in a checkpoint; another file or curvature is another record."""
        return f"{self.path} {self.settings.curvature}"

    @property
    def state(self) -> dict[str, Any] | None:
        """What a checkpoint stores: the file and its first norm; None on other ranks."""
        tracking = self.tracking
        if tracking is None or not tracking.points:
            return None
        return {"file": str(self._file), "first_norm": tracking.points[0].norm}

    def load_state(self, state: Any) -> None:
        """Take what the checkpoint holds that training resumes from, if anything."""
        self._state = state if isinstance(state, Mapping) else {}

    def _draw(
        self, problem: hessinit.Problem, optimizer: Optimizer | None
    ) -> hessinit.Initialization:
        if callable(self.initialize):
            return self.initialize(problem)
        stepping, lr = read_step(optimizer, unwrap(problem.model))
        return hessinit.initialize_(problem, lr=lr, optimizer=stepping, distributed="each")

    def _track(
        self,
        problem: hessinit.Problem,
        optimizer: Optimizer | None,
        folder: Path,
        log_to: Any,
        steps: int,
    ) -> hessinit.Tracker:
        earlier = self._find_file(folder) if steps else None
        path = earlier or (folder / FILE if self.path is None else Path(self.path))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.absolute()  # training may change the working directory
        if self._file in self._open_files:
            raise ProblemError(f"another callback writes to {path}; pass path=, a file for each.")
        tracker = hessinit.track(
            problem,
            optimizer=optimizer,
            every=self.every,
            max_overhead=self.max_overhead,
            path=path,
            resume=earlier is not None,
            log_to=log_to,
            settings=replace(self.settings, at_start=False),
            distributed="each",
        )
        self._open_files.add(self._file)
        try:
            tracker.steps = steps
            tracker.initialization = self.initialization or tracker.initialization
            if steps and earlier is None:
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
        """Return the file that the checkpoint names, where it was or in the folder of this run."""
        named = Path(str(self._state.get("file", "")))
        for path in (named, folder / named.name):
            with contextlib.suppress(OSError, ValueError):  # gone, or not a tracker's
                points = hessinit.Tracking.load(path).points
                if points and points[0].norm == self._state.get("first_norm"):
                    return path
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


def read_step(optimizer: Optimizer | None, model: nn.Module) -> tuple[Optimizer, float]:
    """Return what `initialize_` asks of the training: its optimizer, and the learning rate.

    >>> model = nn.Linear(4, 3)
    >>> read_step(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8), model)[1]
    0.1
    """
    try:
        if optimizer is None:
            raise ProblemError("there is not one optimizer to read the learning rate from.")
        read = read_optimizer(optimizer, model, find_layers(model))
        # OneCycleLR begins below the rate that it works towards, which it keeps as "max_lr".
        peaks = [float(group["max_lr"]) for group in optimizer.param_groups if "max_lr" in group]
        lr = max(peaks, default=read.lr)
        if not lr:
            raise ProblemError("the optimizer's learning rate is 0.")
    except ProblemError as refusal:
        raise ProblemError(
            f"{refusal} Or pass the step yourself: initialize=lambda problem: "
            "hessinit.initialize_(problem, lr=0.1)."
        ) from refusal
    return optimizer, lr


def is_first_rank() -> bool:
    """Return whether this process does the work: the only one, or the first of the job."""
    return not is_one_of_several() or torch.distributed.get_rank() == 0


def on_first_rank(work: Callable[[], T], *, doing: str) -> T | None:
    """Do the `work` on the first rank while the others wait; raise its exception on every rank."""
    if not is_one_of_several():
        return work()
    ranks = Ranks(doing)
    outcome = list[T]()
    with ranks.together():
        ranks.first(lambda: outcome.append(work()), last=True)
    return outcome[0] if outcome else None
