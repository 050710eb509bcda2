"""The verbs `compare` and `sweep`: short trainings of schemes × learning rates × seeds."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hessinit.errors import ProblemError, accepts, argument, check_callable, check_positive, list_of
from hessinit.measurement.facts import SOFTWARE
from hessinit.problem import checks
from hessinit.problem.preserve import uninterrupted
from hessinit.problem.problem import Loss, Problem
from hessinit.problem.ranks import check_each
from hessinit.progress import OnProgress, announce, check_progress
from hessinit.results.comparison import Comparison, Run
from hessinit.results.result import Plain, from_plain
from hessinit.training.jobs import Job, JobFolder, check_folder, check_workers, count_cores
from hessinit.training.loop import device_of, read_data
from hessinit.training.optimizers import AnyOptimizer, Training
from hessinit.training.trainer import (
    OURS,
    Build,
    FirstModel,
    Initializer,
    NormalWeights,
    Trainer,
    WriteWeights,
    describe,
    read_schemes,
)


@dataclass(frozen=True)
class Usual:
    """What `compare` and `sweep` do unless they are told otherwise."""

    schemes: tuple[str, ...] = ("default", "he", "glorot", "orthogonal", "lsuv", "hessinit")
    learning_rates: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3)
    stds: tuple[float, ...] = (1.0, 0.5, 0.1, 0.075, 0.05, 0.005)  # of the paper's Table 4
    fewest_steps: int = 10  # of which the final loss is the mean
    steps_of_a_measurement: int = 30  # that take as long as measuring the curvature, about


USUAL = Usual()
SHORTER = "Fewer steps, seeds, schemes or learning rates, or no curvature, make it shorter"

Key = tuple[str, float, int]  # scheme, learning rate, seed


@dataclass(frozen=True)
class RunSettings:
    """How the runs of `compare` and `sweep` are made.

    Args:
        warmup: steps over which the rate rises linearly: by default a fifth, where a scheme asks
            for a warmup.
        measure_curvature: whether ‖H‖ is measured before the training: 20 to 50 steps.
        workers: processes, by default one for each core; your functions must then be defined at
            the top of a file. On an accelerator one, as it has one memory.
        executor: of concurrent.futures, or a Dask client's, in place of `workers`.
        device: where the models are trained; by default where `build` puts them.
        progress: a bar, or a function of a `ProgressState`, called after every run.
        distributed: "each" where every rank of a distributed job makes all runs itself. Otherwise
            call it on rank 0 alone.

    >>> RunSettings(workers=4, device="cpu").measure_curvature
    True
    """

    warmup: int | None = None
    measure_curvature: bool = True
    workers: int | None = None
    executor: Executor | None = None
    device: str | torch.device | None = None
    progress: bool | OnProgress = True
    distributed: str | None = None

    def __post_init__(self) -> None:
        if self.warmup is not None:
            checks.check_whole("warmup", self.warmup, at_least=1)
        checks.check_switches(measure_curvature=self.measure_curvature)
        check_workers(self.workers, self.executor)
        check_progress(self.progress)
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError, TypeError, ValueError) as failure:
            raise ProblemError(
                argument("device", self.device),
                f" cannot be used here: {failure}. Leave it out to train "
                "where build() puts the model.",
            ) from failure

    def warmup_steps(self, steps: int) -> int:
        """Return the steps of a warmup in a run of so many steps."""
        warmup = max(1, steps // 5) if self.warmup is None else self.warmup
        if warmup > steps:
            raise ProblemError(
                argument("warmup", warmup),
                " is longer than the run; it must be at most ",
                argument("steps", steps),
                ".",
            )
        return warmup


AS_USUAL = RunSettings()


@dataclass(frozen=True)
class Grid:
    """All runs of a comparison."""

    schemes: tuple[Initializer, ...]
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    measures_curvature: bool

    @property
    def keys(self) -> list[Key]:
        return [
            (scheme.name, rate, seed)
            for scheme in self.schemes
            for rate in self.rates
            for seed in self.seeds
        ]

    @property
    def rate_dependent(self) -> tuple[str, ...]:
        """The schemes whose weights may depend on the learning rate, which functions receive."""
        return tuple(
            scheme.name
            for scheme in self.schemes
            if scheme.scheme == OURS or not isinstance(scheme.scheme, (str, NormalWeights))
        )

    def is_measured(self, key: Key) -> bool:
        """Whether the run shows norms: at the lowest rate alone, if all share the weights."""
        scheme, rate, _ = key
        is_shown = scheme in self.rate_dependent or rate == min(self.rates)
        return self.measures_curvature and is_shown


@uninterrupted
def compare(
    build: Build,
    loss: Loss | Problem,
    data: Any = None,
    *,
    schemes: str | Iterable[str | Initializer] | Mapping[str, str | WriteWeights] = USUAL.schemes,
    learning_rates: Iterable[float] = USUAL.learning_rates,
    seeds: int | Iterable[int] = 3,
    steps: int = 200,
    batch_size: int = 64,
    optimizer: AnyOptimizer = "sgd",
    folder: str | os.PathLike[str] | None = None,
    settings: RunSettings = AS_USUAL,
) -> Comparison:
    """Train briefly from several initializations, at several learning rates, with several seeds.

    `build()` makes a new model, which is trained in train mode. `data` is `(inputs, targets)` with
    all examples along the first dimension, or an iterable of ready batches (whose size `batch_size`
    does not change). A `Problem` in place of the loss brings its options, such as `forward`, too,
    and, if none are given, the data. All schemes of a seed see the same batches in the same order;
    numbers depend on the seeds only.

    A scheme is one of `apply_scheme_`, "default" (the weights that build() gives), "hessinit"
    (`initialize_` for that learning rate), or one of them with "+warmup": the rate rises linearly
    over a fifth of the steps. A mapping names functions of your own, `scheme(model, loss, batch,
    lr, seed)`, which write the weights in place. `optimizer` is any as in `advise`, but not one
    that was built. A scheme that fails on this model stops nothing: its runs say why.

    With `folder`, every finished run is kept there, and the same call continues an interrupted
    experiment, also with more schemes, rates and seeds. Your functions are recorded by name: after
    changing their code, use a new folder. `settings` say how runs are made: processes, warmup,
    whether the curvature is measured.

    Costs `steps` training steps for each run, and 20 to 50 more where the initial curvature is
    measured.

    >>> from hessinit.digits import load_digits
    >>> from torch import nn
    >>> comparison = compare(
    ...     lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
    ...     nn.CrossEntropyLoss(), load_digits(), schemes=["default", "he"], learning_rates=[0.1],
    ...     seeds=1, steps=30, settings=RunSettings(workers=1))
    >>> comparison.best
    ('he', 0.1)
    """
    checks.check_kind("settings", settings, RunSettings, "workers=4")
    check_each("compare", settings.distributed)
    steps = checks.check_whole("steps", steps, at_least=USUAL.fewest_steps)
    grid = _read_grid(schemes, learning_rates, seeds, settings, steps)
    if isinstance(build, nn.Module) or not accepts(build):
        raise ProblemError(
            f"build is a {type(build).__name__}; it must be a function that makes a new model for "
            "every run, such as lambda: Net()."
        )
    loss, data, options = _read_problem(loss, data)
    check_folder(folder)
    training = Training.of(optimizer)
    training.check_rebuilds()
    started = time.perf_counter()
    batch_size = checks.check_whole("batch_size", batch_size, at_least=1)
    examples = read_data(data, batch_size, steps)
    device = None if settings.device is None else str(torch.empty(0, device=settings.device).device)
    trainer = Trainer(build, loss, examples, options, grid.schemes, steps, training, device)
    first = trainer.check_first_model()
    job_folder = _open_folder(folder, settings, trainer, first)
    if settings.progress is True and settings.executor is None and not job_folder.results:
        _announce(grid, steps, first, settings)
    runs = _make_runs(replace(trainer, loss_range=first.loss_range), job_folder, grid)
    stds = tuple(
        scheme.scheme.std for scheme in grid.schemes if isinstance(scheme.scheme, NormalWeights)
    )
    forward = options["forward"]
    constant_loss = first.loss_range.constant
    return Comparison(
        kind=_kind(grid.schemes),
        schemes=tuple(scheme.name for scheme in grid.schemes),
        learning_rates=grid.rates,
        seeds=grid.seeds,
        runs=runs,
        steps=steps,
        batch_size=examples.batch_size,
        optimizer=describe(training),
        examples=examples.examples,
        stds=stds,
        rate_dependent=grid.rate_dependent,
        warmup=max(scheme.warmup for scheme in grid.schemes) or None,
        seconds=time.perf_counter() - started,
        notes=job_folder.notes,
        constant_loss=None if math.isnan(constant_loss) else constant_loss,
        settings={
            "model": type(first.model).__name__,
            "parameters": sum(parameter.numel() for parameter in first.model.parameters()),
            "loss": describe(loss),
            "forward": None if forward is None else describe(forward),
            "measure_curvature": settings.measure_curvature,
        },
        versions={**SOFTWARE, "device": str(device_of(first.model))},
    )


@uninterrupted
def sweep(
    build: Build,
    loss: Loss | Problem,
    data: Any = None,
    *,
    stds: Iterable[float] = USUAL.stds,
    learning_rate: float = 0.01,
    layers: str | Iterable[str] | None = None,
    seeds: int | Iterable[int] = 3,
    steps: int = 200,
    batch_size: int = 64,
    optimizer: AnyOptimizer = "sgd",
    folder: str | os.PathLike[str] | None = None,
    settings: RunSettings = AS_USUAL,
) -> Comparison:
    """Draw the weights from N(0, std²) for each of `stds`, measure the curvature, train briefly.

    The experiment of the paper's Tables 4 and 5. Biases are 0; every std scales the same random
    numbers. `layers` takes names or globs: other weights stay as build() gives them. With a warmup
    in the `settings`, the rate rises linearly over that many steps. The other arguments are those
    of `compare`.

    >>> from hessinit.digits import load_digits
    >>> from torch import nn
    >>> comparison = sweep(
    ...     lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
    ...     nn.CrossEntropyLoss(), load_digits(), stds=[0.01, 0.1], seeds=1, steps=20,
    ...     settings=RunSettings(workers=1))
    >>> ratio = comparison.norm("std 0.1", layer="1") / comparison.norm("std 0.01", layer="1")
    >>> 80 < ratio < 120  # a layer's curvature grows with the square of the other's weights
    True
    """
    steps = checks.check_whole("steps", steps, at_least=USUAL.fewest_steps)
    checks.check_kind("settings", settings, RunSettings, "workers=4")
    patterns: Any = layers
    if not isinstance(layers, str):
        patterns = tuple(checks.list_patterns(layers) or ()) or None
    warmup = 0 if settings.warmup is None else settings.warmup_steps(steps)
    initializers = [
        Initializer(f"std {std!r}", NormalWeights(std, patterns), warmup)
        for std in _read_list("stds", stds, "[0.5, 0.05]", check_positive)
    ]
    return compare(
        build,
        loss,
        data,
        schemes=initializers,
        learning_rates=[check_positive("learning_rate", learning_rate)],
        seeds=seeds,
        steps=steps,
        batch_size=batch_size,
        optimizer=optimizer,
        folder=folder,
        settings=settings,
    )


def _read_problem(loss: Any, data: Any) -> tuple[Loss, Any, dict[str, Any]]:
    """Return loss, data, and the options of a problem for every model."""
    of_a_run = ("model", "loss", "batch", "seed")
    options = [field for field in fields(Problem) if field.name not in of_a_run]
    if isinstance(loss, Problem):
        if data is None:
            data = loss.batch
        return loss.loss, data, {field.name: getattr(loss, field.name) for field in options}
    check_callable("loss", loss, "loss(output, target)")
    return loss, data, {field.name: field.default for field in options}


def _read_list(
    name: str, values: Any, example: str, read: Callable[[str, Any], Any]
) -> tuple[Any, ...]:
    numbers = [read(name, value) for value in list_of(values)]
    if not numbers or len(set(numbers)) < len(numbers):
        raise ProblemError(
            argument(name, numbers or values),
            f" must be a list of numbers, each once, such as {example}.",
        )
    return tuple(numbers)


def _read_grid(schemes: Any, rates: Any, seeds: Any, settings: RunSettings, steps: int) -> Grid:
    initializers = read_schemes(schemes, settings.warmup_steps(steps))
    if settings.warmup is not None and not any(scheme.warmup for scheme in initializers):
        raise ProblemError(
            argument("warmup", settings.warmup),
            " is for schemes with a warmup; name one, such as 'he+warmup'.",
        )
    if not isinstance(seeds, Iterable):
        seeds = range(checks.check_whole("seeds", seeds, at_least=1))
    return Grid(
        initializers,
        _read_list("learning_rates", rates, "[0.01, 0.1]", check_positive),
        _read_list("seeds", seeds, "[0, 1, 2]", partial(checks.check_whole, at_least=0)),
        settings.measure_curvature,
    )


def _kind(schemes: Iterable[Initializer]) -> str:
    is_sweep = any(isinstance(scheme.scheme, NormalWeights) for scheme in schemes)
    return "sweep" if is_sweep else "compare"


def _open_folder(
    folder: Any, settings: RunSettings, trainer: Trainer, first: FirstModel
) -> JobFolder:
    """Return the folder with the runs that it holds; refuse one of another experiment."""
    workers = settings.workers
    if workers is None and settings.executor is None and device_of(first.model).type != "cpu":
        workers = 1  # an accelerator has one memory
    job_folder = JobFolder(
        folder, workers=workers, executor=settings.executor, progress=settings.progress
    )
    if folder is not None:  # hashing the data is for nothing without one
        record = {
            "kind": _kind(trainer.schemes),
            "measure_curvature": settings.measure_curvature,
            "torch": SOFTWARE["torch"],
            **trainer.record(first),
        }
        job_folder.open(record, {scheme.name: scheme.description for scheme in trainer.schemes})
        for name, value in job_folder.results.items():
            _read_run(job_folder, name, value)
    return job_folder


def _announce(grid: Grid, steps: int, first: FirstModel, settings: RunSettings) -> None:
    """Say how long the runs take, if that is long."""
    keys = grid.keys
    measured = sum(grid.is_measured(key) for key in keys)
    trained = len(keys) * steps + measured * USUAL.steps_of_a_measurement
    processes = min(settings.workers or count_cores(), len(keys))
    announce(trained * first.gradient_seconds / processes, SHORTER)


def _make_runs(trainer: Trainer, job_folder: JobFolder, grid: Grid) -> tuple[Run, ...]:
    """Return the runs of the grid; make those that the folder lacks."""
    # Seed by seed, so that there is something to compare early.
    names = {key: f"{key[0]}, lr {key[1]!r}, seed {key[2]}" for key in grid.keys}
    jobs = [
        Job(names[key], (key, grid.is_measured(key)))
        for key in sorted(grid.keys, key=lambda key: grid.seeds.index(key[2]))
    ]
    job_folder.run(trainer, jobs, label="Training")
    every_run = [_read_run(job_folder, name, value) for name, value in job_folder.results.items()]
    # They are shown at the lowest rate, also if an earlier call measured them at a lower one.
    norms = {(run.scheme, run.seed): run.norms for run in every_run if run.norms is not None}
    runs = {(run.scheme, run.learning_rate, run.seed): run for run in every_run}
    for name, rate, seed in grid.keys:
        if name not in grid.rate_dependent:
            shown = norms.get((name, seed)) if rate == min(grid.rates) else None
            runs[name, rate, seed] = replace(runs[name, rate, seed], norms=shown)
    return tuple(runs[key] for key in grid.keys)


def _read_run(job_folder: JobFolder, name: str, value: Plain) -> Run:
    try:
        return from_plain(Run, value)
    except ValueError as problem:
        raise ProblemError(
            f"{job_folder.path_of(name)} is not a whole run: {problem}. Delete it."
        ) from problem
