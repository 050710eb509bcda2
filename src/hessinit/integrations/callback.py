"""What both callbacks share: initialize before the first step, track the curvature, resume from checkpoints.

In a distributed job the first rank works while the others wait; its failure and its weights go to all ranks.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.distributed
from torch import nn

from hessinit.errors import ProblemError, did_you_mean
from hessinit.problem.problem import Forward, Loss
from hessinit.problem.validate import check_whole, unwrap

if TYPE_CHECKING:
    from hessinit import Initialization, Tracker, Tracking

T = TypeVar("T")

KEY = "hessinit"  # of the callback's state in a checkpoint
FILE = "curvature.jsonl"
# Losses of the same examples and weights, up to the rounding of 16 bits; of other examples or dropout masks.
SAME, ALIKE = 1.05, 1.5
# Options of `track` that are read from the trainer.
_FROM_TRAINER = {"optimizer", "lr", "resume"}
# Recognized by name: importing these would take seconds, and not every torch has them.
_SHARDING = {"FullyShardedDataParallel", "FSDPModule"}


def import_base(packages: tuple[str, ...], name: str, library: str) -> Any:
    """The callback class of the first of these packages that is installed."""
    for package in packages:
        try:
            return getattr(importlib.import_module(package), name)
        except ModuleNotFoundError as missing:
            if missing.name not in (package, package.partition(".")[0]):
                raise
    raise ImportError(
        f"this callback needs {library}; install it with `pip install 'hessinit[{library.lower()}]'`."
    )


@dataclass(frozen=True)
class TrainedProblem:
    """The model in training, what it is measured on, and its optimizer."""

    model: nn.Module
    loss: Loss
    batch: Any
    forward: Forward | None
    optimizer: torch.optim.Optimizer | None


class TrackedRun:
    """One training run with its tracker. Every rank makes the same calls; the first one does the work."""

    _open_files: ClassVar[set[Path | None]] = set()

    def __init__(
        self,
        *,
        every: int = 100,
        max_overhead: float = 0.1,
        initialize: bool | Mapping[str, Any] = False,
        path: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        from hessinit.training.track import check_max_overhead

        self._every = check_whole("every", every, at_least=1)
        self._max_overhead = check_max_overhead(max_overhead)
        self._initialize = _read_initialize(initialize)
        self._path = path
        self._options = _check_options(options)
        self._tracker: Tracker | None = None
        self._tracking: Tracking | None = None
        self._state: Mapping[str, Any] = {}
        self._file: Path | None = None
        self.initialization: Initialization | None = None

    def begin(
        self, model: nn.Module, make_problem: Callable[[], TrainedProblem], *,
        folder: str | os.PathLike[str], log_to: Any, steps: int,
    ) -> None:  # fmt: skip
        """Call before the first step of a run that has taken `steps` before; only a new run is initialized.

        A resumed run continues the file named in its checkpoint. `make_problem` is called on the first rank.
        """
        self.close()
        self._tracking = self.initialization = self._file = None
        model = unwrap(model)
        check_unsharded(model)
        problem: Any = on_first_rank(make_problem, model, doing="reading the batch")
        if self._initialize is not None and not steps:
            self.initialization = on_first_rank(lambda: self._draw(problem), model, doing="initializing")
            share_weights(model)
        self._tracker = on_first_rank(
            lambda: self._track(problem, Path(folder), log_to, steps), model, doing="the first measurement"
        )

    def step(self, steps: int, loss: Any = None) -> None:
        """Call after the optimizer has taken `steps` in all."""
        if self._tracker is None or steps <= self._tracker.steps:
            return
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

    @property
    def tracking(self) -> Tracking | None:
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

    def _draw(self, problem: TrainedProblem) -> Initialization:
        import hessinit

        options = initialization_options(problem.optimizer, unwrap(problem.model), self._initialize or {})
        options = {"forward": problem.forward, **options}
        return hessinit.initialize_(problem.model, problem.loss, problem.batch, **options)

    def _track(self, problem: TrainedProblem, folder: Path, log_to: Any, steps: int) -> Tracker:
        import hessinit

        file = self._find_file(folder) if steps else None
        path = file or (folder / FILE if self._path is None else Path(self._path))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.absolute()  # training may change the working directory
        if self._file in self._open_files:
            raise ProblemError(f"another callback writes to {path}; pass path=, a file for each.")
        options = {"at_start": True, **self._options}
        measure_now = options.pop("at_start")
        tracker = hessinit.track(
            problem.model, problem.loss, problem.batch, every=self._every, max_overhead=self._max_overhead,
            optimizer=problem.optimizer, forward=problem.forward, path=path, log_to=log_to,
            resume=file is not None, at_start=False, **options,
        )  # fmt: skip
        self._open_files.add(self._file)
        try:
            tracker.steps = steps
            tracker.initialization = self.initialization or tracker.initialization
            if steps and file is None:
                tracker.add_note(f"Training resumed at step {steps}; the earlier record was not found.")
            if measure_now:
                point = tracker.measure()
                if self.initialization is not None and (point.lr_over_limit or 0) >= 1:
                    # Weights made for a learning rate begin above its limit: κ is 4, the limit of SGD 2.
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
        from hessinit import Tracking

        named = Path(str(self._state.get("file", "")))
        for place in (named, folder / named.name):
            try:
                points = Tracking.load(place).points
            except (OSError, ValueError):  # gone, or not a tracker's
                continue
            if points and points[0].norm == self._state.get("first_norm"):
                return place
        return None


class RunResults:
    """The results of a callback's run; None on all ranks but the first."""

    _run: TrackedRun

    @property
    def tracking(self) -> Tracking | None:
        """The record of the run, so far."""
        return self._run.tracking

    @property
    def initialization(self) -> Initialization | None:
        """The result of `initialize_`, if it was called."""
        return self._run.initialization


def differs(trained: float, measured: float, times: float) -> bool:
    """Whether one loss is more than so many `times` the other; values that are not finite tell nothing.

    >>> differs(2.30, 2.31, SAME), differs(230.0, 2.3, ALIKE)
    (False, True)
    """
    if not (math.isfinite(trained) and math.isfinite(measured)):
        return False
    low, high = sorted((trained, measured))
    return high - low > (times - 1) * abs(low) + 1e-6


def initialization_options(
    optimizer: torch.optim.Optimizer | None, model: nn.Module, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The options of `initialize_`: what the user gave and, for the rest, what the optimizer says.

    >>> model = nn.Linear(4, 3)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)
    >>> initialization_options(optimizer, model, {"seed": 3})
    {'optimizer': 'momentum', 'momentum': 0.8, 'lr': 0.1, 'seed': 3}
    """
    way_out = "pass the step yourself: initialize={'lr': 0.1, 'optimizer': 'sgd'}"
    has_target = "lr" in given or "target" in given
    read: dict[str, Any] = {}
    try:
        if optimizer is None:
            raise ProblemError("there is not one optimizer to read the learning rate from.")
        read = _optimizer_options(optimizer, model, given.get("layers"))
    except ProblemError as refusal:
        if not has_target:
            raise ProblemError(f"{refusal} Or {way_out}.") from refusal
    if "target" in given:
        read.pop("lr", None)
    return {**read, **given}


def _optimizer_options(optimizer: torch.optim.Optimizer, model: nn.Module, layers: Any) -> dict[str, Any]:
    from hessinit.problem.layers import find_layers
    from hessinit.training.optimizer_rules import read_optimizer

    found = read_optimizer(optimizer, model, find_layers(model, layers))
    # OneCycleLR begins below the rate that it works towards, which it keeps as "max_lr".
    rates = [float(group["max_lr"]) for group in optimizer.param_groups if "max_lr" in group]
    lr, rule = max(rates, default=found.lr), found.rule
    if not lr:
        raise ProblemError("the optimizer's learning rate is 0.")
    assert rule is not None
    if hasattr(rule, "decoupled"):
        return {"optimizer": "adamw" if rule.decoupled else "adam", "lr": lr}
    if not rule.momentum:
        return {"optimizer": "sgd", "lr": lr}
    return {"optimizer": "nesterov" if rule.nesterov else "momentum", "momentum": rule.momentum, "lr": lr}


def _read_initialize(initialize: Any) -> dict[str, Any] | None:
    import hessinit

    if isinstance(initialize, bool):
        return {} if initialize else None
    if not isinstance(initialize, Mapping):
        raise ProblemError(
            f"initialize={initialize!r} must be True, False, or a dict of options for hessinit.initialize_, "
            "such as {'lr': 0.1}."
        )
    _check_names("initialize", initialize, _keywords(hessinit.initialize_))
    return dict(initialize)


def _check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    import hessinit
    from hessinit.training.optimizer_rules import CurvatureOptions

    for name in _FROM_TRAINER & set(options):
        way = "; for the initialization, pass initialize={'lr': …}" if name == "lr" else ""
        raise ProblemError(f"{name}={options[name]!r} is read from the trainer; leave it out{way}.")
    known = [*_keywords(hessinit.track), *CurvatureOptions.__annotations__]
    _check_names("the callback", options, [name for name in known if name not in _FROM_TRAINER])
    layers = options.get("layers")
    return dict(options) if layers is None or isinstance(layers, str) else {**options, "layers": list(layers)}


def _check_names(where: str, given: Mapping[str, Any], known: list[str]) -> None:
    for name in given:
        if name not in known:
            raise ProblemError(
                f"{where} does not know {name!r}; it takes {', '.join(known)}.{did_you_mean(name, known)}"
            )


def _keywords(function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]


def is_first_rank() -> bool:
    """Whether this process does the work: the only one, or the first of the job."""
    return not _is_distributed() or torch.distributed.get_rank() == 0


def on_first_rank(work: Callable[[], T], model: nn.Module, *, doing: str) -> T | None:
    """Do the `work` on the first rank while the others wait; its exception is raised on every rank.

    Every rank must call this. The others get None. How long they wait is bounded by the timeout of the
    process group.
    """
    if not _is_distributed():
        return work()
    outcome: T | None = None
    failure: BaseException | None = None
    if is_first_rank():
        try:
            outcome = work()
        except BaseException as caught:
            failure = caught
    message = ["" if failure is None else f"{type(failure).__name__}: {failure}"]
    torch.distributed.broadcast_object_list(message, src=0, device=_device(model))
    if failure is not None:
        raise failure
    if message[0]:
        raise RuntimeError(f"{doing} failed on rank 0, so that every rank stops: {message[0]}")
    return outcome


def share_weights(model: nn.Module) -> None:
    """Give every rank the first one's parameters and buffers, bit for bit and in place.

    Costs one broadcast for each tensor. In a single process it does nothing.
    """
    if not _is_distributed():
        return
    device = _device(model)  # NCCL sends nothing from the CPU, where a buffer may well be
    for tensor in (*model.parameters(), *model.buffers()):
        own = tensor.detach()
        # As bytes: backends do not know every dtype, and no bit of a nan may change.
        sent = own.contiguous().reshape(-1).view(torch.uint8).to(device)
        torch.distributed.broadcast(sent, src=0)
        if sent.data_ptr() != own.data_ptr():
            own.copy_(sent.view(own.dtype).view_as(own))


def check_unsharded(model: nn.Module) -> None:
    """Refuse sharded weights: no rank has them all."""
    kinds = [kind.__name__ for part in model.modules() for kind in type(part).__mro__]
    sharded = [kind for kind in kinds if kind in _SHARDING]
    sharded += [type(one).__name__ for one in model.parameters() if type(one).__name__ == "DTensor"]
    sharded += ["DeepSpeed's parameter" for one in model.parameters() if hasattr(one, "ds_id")]
    if sharded:
        raise ProblemError(
            f"the weights are sharded over the ranks ({sharded[0]}), so that no rank can measure them. Call "
            "hessinit.initialize_ before the model is wrapped, and track a run without shards."
        )


def _is_distributed() -> bool:
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


def _device(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device
