"""The verbs `compare` and `sweep`: short trainings of schemes × learning rates × seeds."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import math
import os
import time
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hessinit.errors import (
    ConvergenceWarning,
    ProblemError,
    accepts,
    check_names,
    check_positive,
    list_of,
)
from hessinit.measurement.facts import SOFTWARE
from hessinit.measurement.loss_range import UNKNOWN, LossRange, find_loss_range
from hessinit.measurement.measure import measure
from hessinit.problem import validate
from hessinit.problem.batches import Batch
from hessinit.problem.explained import explained, explained_loss
from hessinit.problem.preserve import uninterrupted
from hessinit.problem.problem import Forward, Loss, Problem
from hessinit.problem.ranks import on_all_ranks
from hessinit.results.comparison import DIGITS, MOST_POINTS, NETWORK, Comparison, Run, window
from hessinit.results.initialization import DIVERGED
from hessinit.results.result import Plain, from_plain, to_plain
from hessinit.training import loop
from hessinit.training.data import (
    Data,
    copy_to,
    derive,
    device_of,
    read_data,
    reproducible,
    seed_everything,
)
from hessinit.training.initializers import (
    Initializer,
    NormalWeights,
    WriteWeights,
    describe,
    read_schemes,
)
from hessinit.training.run_folder import RunFolder, describe_interruption
from hessinit.training.trial import judge
from hessinit.training.workers import (
    Job,
    announce,
    check_workers,
    count_cores,
    progress_bar,
    run_jobs,
)

DEFAULT_SCHEMES = ("default", "he", "glorot", "orthogonal", "lsuv", "hessinit")
LEARNING_RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
STDS = (1.0, 0.5, 0.1, 0.075, 0.05, 0.005)  # of the paper's Table 4
FEWEST_STEPS = 10
CONSTANT_BATCHES = 16  # on which the loss of a constant prediction is found
MEASURING = 30  # training steps in the time of which the initial curvature is measured, about
SHORTER = "Fewer steps, seeds, schemes or learning rates, or no curvature, make it shorter"
TOLERANCE = 1e-2  # of the initial norms: a percent is enough to compare initializations

Build = Callable[[], nn.Module]
Key = tuple[str, float, int]  # scheme, learning rate, seed


@uninterrupted
@on_all_ranks(splits=["each"])
def compare(
    build: Build,
    loss: Loss,
    data: Any,
    *,
    schemes: str | Iterable[str | Initializer] | Mapping[str, str | WriteWeights] = DEFAULT_SCHEMES,
    learning_rates: Iterable[float] = LEARNING_RATES,
    seeds: int | Iterable[int] = 3,
    steps: int = 200,
    batch_size: int = 64,
    optimizer: str | loop.MakeOptimizer = "sgd",
    warmup: int | None = None,
    forward: Forward | None = None,
    measure_curvature: bool = True,
    folder: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    device: str | torch.device | None = None,
    progress: bool = True,
    distributed: str | None = None,
) -> Comparison:
    """Train briefly from several initializations, at several learning rates, with several seeds.

    `build()` makes a new model, which is trained in train mode. `data` is `(inputs, targets)` with
    all examples along the first dimension, or an iterable of ready batches (whose size `batch_size`
    does not change). All schemes of a seed see the same batches in the same order; numbers depend
    on the seeds only.

    A scheme is one of `apply_scheme_`, "default" (the weights that build() gives), "hessinit"
    (`initialize_` for that learning rate), or one of them with "+warmup": the rate rises linearly
    over `warmup` steps (by default a fifth). A mapping names functions of your own, `scheme(model,
    loss, batch, lr, seed)`, which write the weights in place. `optimizer` is "sgd", "momentum" or
    "nesterov" (0.9), "adam", "adamw" or a function `(parameters, lr)`. A scheme that fails on this
    model stops nothing: its runs say why.

    With `folder`, every finished run is kept there, and the same call continues an interrupted
    experiment, also with more schemes, rates and seeds. Your functions are recorded by name: after
    changing their code, use a new folder. Runs are made in `workers` processes (by default one for
    each core), for which your functions must be defined at the top of a file, or on an `executor`
    of concurrent.futures. A rank of a distributed job makes all runs itself, and only with
    distributed="each": call it on rank 0 alone.

    Costs `steps` training steps for each run, and 20 to 50 more where the initial curvature is
    measured.

    >>> from hessinit.digits import load_digits
    >>> from torch import nn
    >>> comparison = compare(
    ...     lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
    ...     nn.CrossEntropyLoss(), load_digits(), schemes=["default", "he"], learning_rates=[0.1],
    ...     seeds=1, steps=30, workers=1)
    >>> comparison.best
    ('he', 0.1)
    """
    steps = validate.check_whole("steps", steps, at_least=FEWEST_STEPS)
    read = read_schemes(schemes, _read_warmup(warmup, steps))
    if warmup is not None and not any(each.warmup for each in read):
        raise ProblemError(
            f"warmup={warmup} is for schemes with a warmup; name one, such as 'he+warmup'."
        )
    rates = _read_list("learning_rates", learning_rates, "[0.01, 0.1]", check_positive)
    if isinstance(build, nn.Module) or not accepts(build):
        rule = "a function that makes a new model for every run, such as lambda: Net()"
        raise ProblemError(f"build is a {type(build).__name__}; it must be {rule}.")
    # The model is checked once it is built.
    validate.check_arguments(nn.Identity(), loss, forward)
    loop.check_optimizer(optimizer)
    validate.check_switches(measure_curvature=measure_curvature, progress=progress)
    check_workers(workers, executor)
    if not isinstance(seeds, Iterable):
        seeds = range(validate.check_whole("seeds", seeds, at_least=1))
    numbers = _read_list("seeds", seeds, "[0, 1, 2]", partial(validate.check_whole, at_least=0))
    try:
        place = None if device is None else str(torch.empty(0, device=device).device)
    except (RuntimeError, AssertionError, TypeError, ValueError) as failure:
        why = f"device={device!r} cannot be used here: {failure}"
        raise ProblemError(
            f"{why}. Leave it out to train where build() puts the model."
        ) from failure
    kept = RunFolder(folder)
    started = time.perf_counter()
    examples = read_data(data, validate.check_whole("batch_size", batch_size, at_least=1), steps)
    trainer = Trainer(build, loss, examples, forward, read, steps, optimizer, place)
    model, first_loss, step_seconds, loss_range = trainer.check_first_model()
    trainer = replace(trainer, loss_range=loss_range)
    stds = tuple(each.scheme.std for each in read if isinstance(each.scheme, NormalWeights))
    kind = "sweep" if stds else "compare"
    versions = {**SOFTWARE, "device": str(device_of(model))}
    if folder is not None:  # hashing the data is for nothing without one
        record = {"kind": kind, "measure_curvature": measure_curvature, "torch": versions["torch"]}
        described = {each.name: each.description for each in read}
        kept.open({**record, **trainer.record(model, first_loss)}, described)
    if workers is None and executor is None and device_of(model).type != "cpu":
        workers = 1  # one accelerator has one memory
    grid = [(each.name, rate, seed) for each in read for rate in rates for seed in numbers]
    dependent = tuple(each.name for each in read if each.depends_on_rate)
    # Weights that do not depend on the learning rate are measured at the lowest one.
    measured = {
        key for key in grid if measure_curvature and (key[0] in dependent or key[1] == min(rates))
    }
    if progress and executor is None and not kept.results:
        made = len(grid) * steps + len(measured) * MEASURING
        announce(made * step_seconds / min(workers or count_cores(), len(grid)), SHORTER)
    runs, notes = _make_runs(trainer, kept, grid, measured, progress, workers, executor)
    # They are shown there, too, if an earlier call measured them at a lower one.
    known = {(run.scheme, run.seed): run.norms for run in runs.values() if run.norms is not None}
    for name, rate, seed in grid:
        if name not in dependent:
            norms = known.get((name, seed)) if rate == min(rates) else None
            runs[name, rate, seed] = replace(runs[name, rate, seed], norms=norms)
    settings = {
        "model": type(model).__name__,
        "parameters": sum(one.numel() for one in model.parameters()),
        "loss": describe(loss),
        "forward": None if forward is None else describe(forward),
        "measure_curvature": measure_curvature,
    }
    return Comparison(
        kind=kind,
        schemes=tuple(each.name for each in read),
        learning_rates=rates,
        seeds=numbers,
        runs=tuple(runs[key] for key in grid),
        steps=steps,
        batch_size=examples.batch_size,
        optimizer=describe(optimizer),
        examples=examples.examples,
        stds=stds,
        rate_dependent=dependent,
        warmup=max(each.warmup for each in read) or None,
        seconds=time.perf_counter() - started,
        notes=notes,
        constant_loss=None if math.isnan(loss_range.constant) else loss_range.constant,
        settings=settings,
        versions=versions,
    )


@uninterrupted
def sweep(
    build: Build,
    loss: Loss,
    data: Any,
    *,
    stds: Iterable[float] = STDS,
    learning_rate: float = 0.01,
    layers: str | Iterable[str] | None = None,
    steps: int = 200,
    warmup: int | None = None,
    **options: Any,
) -> Comparison:
    """Draw the weights from N(0, std²) for each of `stds`, measure the curvature, train briefly.

    The experiment of the paper's Tables 4 and 5. Biases are 0; every std scales the same random
    numbers. `layers` takes names or globs: other weights stay as build() gives them. With `warmup`,
    the rate rises linearly over that many steps. The other options are those of `compare`, schemes
    and learning_rates aside.

    >>> from hessinit.digits import load_digits
    >>> from torch import nn
    >>> comparison = sweep(
    ...     lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
    ...     nn.CrossEntropyLoss(), load_digits(), stds=[0.01, 0.1], seeds=1, steps=20, workers=1)
    >>> ratio = comparison.norm("std 0.1", layer="1") / comparison.norm("std 0.01", layer="1")
    >>> 80 < ratio < 120  # the curvature of one of two layers grows with the square of the other's weights
    True
    """
    check_names(
        options,
        [
            one
            for one in inspect.signature(compare).parameters
            if one not in ("schemes", "learning_rates")
        ],
    )
    steps = validate.check_whole("steps", steps, at_least=FEWEST_STEPS)
    sizes = _read_list("stds", stds, "[0.5, 0.05]", check_positive)
    chosen = (
        layers if isinstance(layers, str) else tuple(validate.list_patterns(layers) or ()) or None
    )
    warming = 0 if warmup is None else _read_warmup(warmup, steps)
    read = tuple(Initializer(f"std {std!r}", NormalWeights(std, chosen), warming) for std in sizes)
    rates = [check_positive("learning_rate", learning_rate)]
    return compare(build, loss, data, schemes=read, learning_rates=rates, steps=steps, **options)


@dataclass(frozen=True)
class Trainer:
    """What all runs share; called with a job, it trains a new model and returns the run."""

    build: Build
    loss: Loss
    data: Data
    forward: Forward | None
    schemes: tuple[Initializer, ...]
    steps: int
    optimizer: str | loop.MakeOptimizer
    device: str | None
    loss_range: LossRange = UNKNOWN

    def __call__(self, job: Job) -> Run:
        (name, rate, seed), measures = job.parameters
        run = partial(Run, scheme=name, learning_rate=rate, seed=seed)
        started = time.perf_counter()
        with reproducible(), warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # the first model's warnings were shown when it was checked
            model = self.build_model(seed)
            device = device_of(model)
            loss = self.own_loss(device)
            chosen = self.data.initial_batch(seed)
            scheme = next(each for each in self.schemes if each.name == name)
            try:
                batch = copy_to(chosen, device)
                remark = scheme.initialize_(
                    model, loss, batch, rate, seed, self.forward, self.optimizer
                )
            except Exception as failure:  # a scheme may refuse this model
                return run(
                    losses=(),
                    first_loss=math.nan,
                    final_loss=math.nan,
                    steps_done=0,
                    diverged=False,
                    norms=None,
                    seconds=time.perf_counter() - started,
                    note=str(failure) or type(failure).__name__,
                )
            model.train()
            norms = None
            trouble = ""
            if measures:
                check = (
                    scheme.scheme != "hessinit"
                )  # `initialize_` has checked the derivatives already
                norms, trouble = self._measure(model, loss, copy_to(chosen, device), seed, check)
            seed_everything(seed, "training")  # after the measurement, so that it changes nothing
            optimizer = loop.make_optimizer(self.optimizer, model, rate)
            losses, failed = loop.train(
                model,
                loss,
                (copy_to(batch, device) for batch in self.data.minibatches(seed)),
                optimizer,
                steps=self.steps,
                warmup=loop.Warmup(optimizer, scheme.warmup),
                forward=self.forward,
                build=lambda: self.build_model(seed),
            )
        outcome = judge(losses, self.loss_range)
        last = window(self.steps)
        curve = loop.chunk_means(losses, math.ceil(self.steps / MOST_POINTS))
        return run(
            losses=tuple(float(f"{loss:.{DIGITS}g}") for loss in curve),
            first_loss=losses[0],
            final_loss=loop.final_loss(losses, last),
            steps_done=len(losses) - (not math.isfinite(losses[-1])),
            diverged=outcome == DIVERGED,
            outcome=outcome,
            norms=norms,
            seconds=time.perf_counter() - started,
            note=" ".join(filter(None, (remark, trouble, failed))),
        )

    def build_model(self, seed: int) -> nn.Module:
        """A new model on the chosen device; the same weights for the same seed."""
        seed_everything(seed, "build")
        model: Any = self.build()
        validate.check_model(model, self.forward)
        moved: nn.Module = model.to(self.device) if self.device is not None else model
        return moved.train()

    def own_loss(self, device: torch.device) -> Loss:
        return (
            copy.deepcopy(self.loss).to(device) if isinstance(self.loss, nn.Module) else self.loss
        )

    def check_first_model(self) -> tuple[nn.Module, float, float, LossRange]:
        """A new model, its loss, the seconds of a gradient, and the range of the loss.

        Refuses wrong models, losses and data before any run.
        """
        with reproducible():
            other = self.build_model(0)
            model = self.build_model(0)
            validate.check_order(model, self.loss)
            for part in self.data.parts:
                validate.check_finite_inputs(part.inputs, "")
            shared = {id(parameter) for parameter in other.parameters() if parameter.requires_grad}
            if model is other or any(id(parameter) in shared for parameter in model.parameters()):
                raise ProblemError(
                    "build() returned the same model twice, or models that share their weights, and every "
                    "run needs its own; create the model inside build, or return copy.deepcopy(model)."
                )
            for each in self.schemes:
                if isinstance(each.scheme, NormalWeights):
                    each.scheme(other, None, None, 0.0, 0)  # refuses layers that match nothing
            batch = copy_to(self.data.initial_batch(0), device_of(model))
            seed_everything(0, "training")
            output, value = self._first_loss(model, *batch)
            validate.check_loss_value(value)
            if not value.requires_grad:
                why = "the loss does not depend on any trainable parameter, so there is nothing to train"
                raise ProblemError(f"{why}; is the model frozen, or does its forward detach?")
            loop.make_optimizer(self.optimizer, model, 0.1)
            value.backward()  # the first includes what torch does once
            started = time.perf_counter()
            self._first_loss(model, *batch)[1].backward()
            return model, value.item(), time.perf_counter() - started, self._find_loss_range(output)

    def _find_loss_range(self, output: Any) -> LossRange:
        """Over some mini-batches."""
        if not isinstance(output, Tensor):
            return UNKNOWN
        loss = self.own_loss(output.device)
        size = self.data.initial_batch(0).size
        some = itertools.islice(self.data.minibatches(0), CONSTANT_BATCHES)
        # The output is that of the initial batch; the last one of ready ones may differ.
        pairs = [copy_to(batch, output.device) for batch in some if batch.size == size]
        batches = [Batch(inputs, targets, size) for inputs, targets in pairs]
        return find_loss_range(lambda free, batch: loss(free, batch.targets), output, batches)

    def _first_loss(self, model: nn.Module, inputs: Any, targets: Any) -> tuple[Any, Tensor]:
        """The output and the loss of a batch; what fails on a shape or dtype is explained."""
        with explained(model, inputs, self.forward, converted=False):
            output = model(inputs) if self.forward is None else self.forward(model, inputs)
        with explained_loss(output, targets):
            return output, self.own_loss(device_of(model))(output, targets)

    def record(self, model: nn.Module, first_loss: float) -> dict[str, Plain]:
        """The settings that must not change between the runs of one folder."""
        shapes = (
            f"{name}: {str(parameter.dtype).removeprefix('torch.')} {tuple(parameter.shape)}"
            + ("" if parameter.requires_grad else " frozen")
            for name, parameter in model.named_parameters()
        )
        return {
            "model": describe(model),
            "parameters": "; ".join(shapes),
            "loss": describe(self.loss),
            "forward": describe(self.forward),
            "hash of the data": self.data.digest(),
            "examples": self.data.examples,
            "batch_size": self.data.batch_size,
            "steps": self.steps,
            "optimizer": describe(self.optimizer),
            "device": device_of(model).type,
            "default dtype": str(torch.get_default_dtype()),
            # Options that repr(loss) does not show change it. Few digits: other machines round
            # otherwise.
            "loss of a new model": f"{first_loss:.4g}",
        }

    def _measure(
        self, model: nn.Module, loss: Loss, batch: tuple[Any, Any], seed: int, check: bool
    ) -> tuple[dict[str, float] | None, str]:
        """The initial norms, and what went wrong, which does not stop the run."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", ConvergenceWarning)
            try:
                seed = derive(seed, "measure")
                problem = Problem(model, loss, batch, forward=self.forward, check=check, seed=seed)
                report = measure(problem, tolerance=TOLERANCE, distributed="each")
            except Exception as failure:
                return None, f"The initial curvature was not measured: {failure}"
        # A layer that is called "network" appears under its parameter's name.
        names = {NETWORK: f"{NETWORK}.weight"}
        norms = {names.get(layer.name, layer.name): layer.norm for layer in report.layers}
        norms[NETWORK] = report.network.norm
        return norms, " ".join(f"Initial curvature: {warning.message}" for warning in caught)


def _make_runs(
    trainer: Trainer,
    kept: RunFolder,
    grid: Sequence[Key],
    measured: Container[Key],
    progress: bool,
    workers: int | None,
    executor: Executor | None,
) -> tuple[dict[Key, Run], tuple[str, ...]]:
    """The runs of the folder and those that were missing, each kept as soon as it is finished; and notes."""
    runs: dict[Key, Run] = {}
    for name, value in kept.results.items():
        try:
            run: Run = from_plain(Run, value)
        except ValueError as problem:
            raise ProblemError(
                f"{kept.path_of(name)} is not a whole run: {problem}. Delete it."
            ) from problem
        runs[run.scheme, run.learning_rate, run.seed] = run
    # Seed by seed, so that there is something to compare early.
    seeds = list(dict.fromkeys(seed for _, _, seed in grid))
    missing = sorted((key for key in grid if key not in runs), key=lambda key: seeds.index(key[2]))
    jobs = [
        Job(f"{key[0]}, lr {key[1]!r}, seed {key[2]}", (key, key in measured)) for key in missing
    ]
    results, notes = run_jobs(trainer, jobs, workers, executor)
    with (
        progress_bar("Training", len(grid), len(grid) - len(jobs), progress) as advance,
        contextlib.closing(results),
    ):
        try:
            for job, run in results:
                kept.add(job.key, to_plain(run))
                runs[job.parameters[0]] = run
                advance(f"{run.scheme}, rate {run.learning_rate:g}: loss {run.final_loss:.3g}", 1)
        except KeyboardInterrupt:
            done = sum(key in runs for key in grid)
            raise KeyboardInterrupt(describe_interruption(kept.folder, done, len(grid))) from None
    return runs, notes


def _read_list(
    name: str, values: Any, example: str, read: Callable[[str, Any], Any]
) -> tuple[Any, ...]:
    numbers = [read(name, value) for value in list_of(values)]
    if not numbers or len(set(numbers)) < len(numbers):
        shown = numbers or values
        raise ProblemError(
            f"{name}={shown!r} must be a list of numbers, each once, such as {example}."
        )
    return tuple(numbers)


def _read_warmup(warmup: Any, steps: int) -> int:
    number = (
        max(1, steps // 5) if warmup is None else validate.check_whole("warmup", warmup, at_least=1)
    )
    if number > steps:
        raise ProblemError(
            f"warmup={number} is longer than the run; it must be at most steps={steps}."
        )
    return number
