"""One run of `compare`: a new model, its initialization, its curvature, and a short training."""

from __future__ import annotations

import copy
import itertools
import math
import re
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hessinit.errors import ConvergenceWarning, ProblemError, argument, choose, list_of
from hessinit.init.apply_scheme import SCHEMES, SYNONYMS, Scheme, draw_scheme_
from hessinit.init.options import Fit
from hessinit.init.weights import find_targets
from hessinit.measurement.loss_range import UNKNOWN, LossRange, find_loss_range
from hessinit.measurement.measure import measure
from hessinit.problem import checks
from hessinit.problem.batches import Batch
from hessinit.problem.functional import explained, explained_loss
from hessinit.problem.problem import Loss, Problem
from hessinit.results.comparison import DIGITS, MOST_POINTS, NETWORK, Run, window
from hessinit.results.initialization import DIVERGED
from hessinit.results.result import Plain
from hessinit.training import loop
from hessinit.training.jobs import Job
from hessinit.training.loop import (
    Data,
    copy_to,
    derive,
    device_of,
    generator,
    reproducible,
    seed_everything,
)
from hessinit.training.optimizers import Training
from hessinit.training.trial import judge

OURS = "hessinit"
DEFAULT = "default"
WARMUP = "+warmup"
KNOWN = [DEFAULT, OURS, *(scheme for scheme in SCHEMES if scheme != DEFAULT)]

WriteWeights = Callable[..., Any]  # function(model, loss, batch, lr, seed), writes in place


@dataclass(frozen=True)
class NormalWeights:
    """The initialization of a sweep: weights of `layers` from N(0, std²), their biases 0."""

    std: float
    layers: str | tuple[str, ...] | None = None

    def __call__(self, model: nn.Module, loss: Any, batch: Any, lr: float, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)  # the same numbers for every std, only scaled
        targets = find_targets(model, self.layers)
        if not targets:
            layers = argument("layers", self.layers)
            raise ProblemError(layers, " names no weight of two or more dimensions.")
        for target in targets:
            value = torch.randn(target.value.shape, generator=source)
            if not target.reason_unchanged:
                target.write_(self.std * value)
                for bias in target.biases().values():
                    nn.init.zeros_(bias)


@dataclass(frozen=True)
class Initializer:
    """A name, the scheme or function behind it, and the steps of its learning-rate warmup."""

    name: str
    scheme: str | WriteWeights
    warmup: int = 0

    @property
    def description(self) -> str:
        """What the record of the experiment says; the same in every process."""
        if not self.warmup:
            return describe(self.scheme)
        return f"{describe(self.scheme)} with {self.warmup} steps of warmup"

    def initialize_(self, problem: Problem, lr: float, seed: int, optimizer: Any) -> str:
        """Write the weights in place; return why a target was not met, or an empty string."""
        seed_everything(seed, "start")
        if self.scheme == OURS:
            from hessinit.training.initialize import initialize_  # the other schemes do not need it

            result = initialize_(
                problem, lr=lr, optimizer=optimizer, fit=Fit(overwrite=True), distributed="each"
            )
            return "" if result.converged else str(result.reason)
        if callable(self.scheme):
            self.scheme(problem.model, problem.loss, problem.batch, lr, problem.seed)
        elif self.scheme != DEFAULT:
            draw_scheme_(
                problem.model,
                Scheme(self.scheme),
                problem.batch[0],
                problem.forward,
                generator=generator(seed, "start"),
            )
        return ""


def read_schemes(schemes: Any, warmup: int) -> tuple[Initializer, ...]:
    """Return the initializers of names, or of a mapping from names to names or functions.

    A name that ends in "+warmup" has `warmup` steps of warmup.

    >>> schemes = read_schemes(["he", "lsuv+warmup"], warmup=40)
    >>> [(initializer.scheme, initializer.warmup) for initializer in schemes]
    [('he', 0), ('lsuv', 40)]
    """
    if isinstance(schemes, Mapping):
        named = list(schemes.items())
    else:
        names = [schemes] if isinstance(schemes, str) else list_of(schemes)
        named = list(zip(names, names, strict=True))
    if not named:
        raise ProblemError(
            argument("schemes", schemes),
            " must be a list of names, such as ['he'], or a mapping from names "
            "to names or functions.",
        )
    if len({name for name, _ in named}) < len(named):
        raise ProblemError(argument("schemes", schemes), " must hold every scheme once.")
    return tuple(_read_scheme(name, scheme, warmup) for name, scheme in named)


def _read_scheme(name: Any, scheme: Any, warmup: int) -> Initializer:
    if isinstance(scheme, Initializer):
        return scheme
    steps = warmup if str(name).endswith(WARMUP) or str(scheme).endswith(WARMUP) else 0
    if isinstance(scheme, str):
        base = scheme.removesuffix(WARMUP)
        choose("schemes", base, KNOWN, SYNONYMS)
        return Initializer(name, base, steps)
    is_function = callable(scheme) and not isinstance(scheme, (type, nn.Module))
    if is_function and isinstance(name, str):
        return Initializer(name, scheme, steps)
    raise ProblemError(
        f"schemes holds {scheme!r}; a scheme is a name, such as 'he', or in a mapping a function "
        "scheme(model, loss, batch, lr, seed) that writes the weights in place: {'mine': function}."
    )


def describe(source: Any) -> str:
    """Return a function or module in words that are the same in every process: no addresses.

    >>> describe(torch.nn.functional.mse_loss), describe(NormalWeights(0.1))
    ('torch.nn.functional.mse_loss', 'NormalWeights(std=0.1, layers=None)')
    """
    if isinstance(source, Training):
        changed = [
            f"{field.name}={getattr(source, field.name)}"
            for field in fields(source)[1:]
            if getattr(source, field.name) != field.default
        ]
        return ", ".join([describe(source.optimizer), *changed])
    if hasattr(source, "__qualname__"):
        return f"{source.__module__}.{source.__qualname__}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(source))


CONSTANT_BATCHES = 16  # on which the loss of a constant prediction is found
TOLERANCE = 1e-2  # of the initial norms: a percent is enough to compare initializations

Build = Callable[[], nn.Module]


class FirstModel(NamedTuple):
    """What the first model tells before any run."""

    model: nn.Module
    loss: float
    gradient_seconds: float
    loss_range: LossRange


@dataclass(frozen=True)
class Trainer:
    """What all runs share; called with a job, it trains a new model and returns the run.

    `options` are those of a `Problem`, its model, loss, batch and seed aside.
    """

    build: Build
    loss: Loss
    data: Data
    options: Mapping[str, Any]
    schemes: tuple[Initializer, ...]
    steps: int
    training: Training
    device: str | None
    loss_range: LossRange = UNKNOWN

    def __call__(self, job: Job) -> Run:
        (name, rate, seed), is_measured = job.parameters
        scheme = next(scheme for scheme in self.schemes if scheme.name == name)
        run = partial(Run, scheme=name, learning_rate=rate, seed=seed)
        started = time.perf_counter()
        with reproducible(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the first model were shown
            model = self.build_model(seed)
            problem = self._problem(model, self.data.initial_batch(seed), derive(seed, "start"))
            try:
                remark = scheme.initialize_(problem, rate, seed, self.training)
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
            norms, trouble = self._measure(model, scheme, seed) if is_measured else (None, "")
            losses, failed = self._train(model, scheme, rate, seed)
        outcome = judge(losses, self.loss_range)
        curve = loop.chunk_means(losses, math.ceil(self.steps / MOST_POINTS))
        return run(
            losses=tuple(float(f"{loss:.{DIGITS}g}") for loss in curve),
            first_loss=losses[0],
            final_loss=loop.final_loss(losses, window(self.steps)),
            steps_done=len(losses) - (not math.isfinite(losses[-1])),
            diverged=outcome == DIVERGED,
            outcome=outcome,
            norms=norms,
            seconds=time.perf_counter() - started,
            note=" ".join(filter(None, (remark, trouble, failed))),
        )

    def _problem(self, model: nn.Module, batch: Batch, seed: int) -> Problem:
        device = device_of(model)
        # The model may write into its inputs.
        return Problem(
            model, self._loss_on(device), copy_to(batch, device), **self.options, seed=seed
        )

    def _measure(
        self, model: nn.Module, scheme: Initializer, seed: int
    ) -> tuple[dict[str, float] | None, str]:
        """Return the initial norms, and what went wrong, which does not stop the run."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", ConvergenceWarning)
            try:
                problem = self._problem(
                    model, self.data.initial_batch(seed), derive(seed, "measure")
                )
                if scheme.scheme == "hessinit":  # `initialize_` has checked the derivatives
                    problem = replace(problem, check=False)
                report = measure(problem, tolerance=TOLERANCE, distributed="each")
            except Exception as failure:
                return None, f"The initial curvature was not measured: {failure}"
        # A layer that is called "network" appears under its parameter's name.
        names = {NETWORK: f"{NETWORK}.weight"}
        norms = {names.get(layer.name, layer.name): layer.norm for layer in report.layers}
        norms[NETWORK] = report.network.norm
        return norms, " ".join(f"Initial curvature: {warning.message}" for warning in caught)

    def _train(
        self, model: nn.Module, scheme: Initializer, rate: float, seed: int
    ) -> tuple[list[float], str]:
        """Train the model; return its losses, and a failure in words."""
        device = device_of(model)
        seed_everything(seed, "training")  # so that measuring changes nothing
        optimizer = self.training.build(model, rate)
        steps = self.steps * optimizer.accumulate
        batches = itertools.islice(self.data.minibatches(seed), steps)
        return loop.train(
            model,
            self._loss_on(device),
            (copy_to(batch, device) for batch in batches),
            optimizer,
            warmup=scheme.warmup,
            forward=self.options["forward"],
            build=lambda: self.build_model(seed),
        )

    def build_model(self, seed: int) -> nn.Module:
        """Return a new model on the chosen device; the same weights for the same seed."""
        seed_everything(seed, "build")
        model: Any = self.build()
        checks.check_model(model, self.options["forward"])
        if self.device is not None:
            model = model.to(self.device)
        return model.train()

    def _loss_on(self, device: torch.device) -> Loss:
        if isinstance(self.loss, nn.Module):
            return copy.deepcopy(self.loss).to(device)
        return self.loss

    def check_first_model(self) -> FirstModel:
        """Return what a new model tells; refuse wrong models, losses and data before any run."""
        with reproducible():
            spare = self.build_model(0)
            model = self.build_model(0)
            self._check_models(model, spare)
            batch = copy_to(self.data.initial_batch(0), device_of(model))
            seed_everything(0, "training")
            output, loss = self._first_loss(model, *batch)
            checks.check_loss_value(loss)
            if not loss.requires_grad:
                raise ProblemError(
                    "the loss does not depend on any trainable parameter, so there is nothing to "
                    "train; is the model frozen, or does its forward detach?"
                )
            self.training.build(model, 0.1)
            loss.backward()  # the first includes what torch does once
            started = time.perf_counter()
            self._first_loss(model, *batch)[1].backward()
            seconds = time.perf_counter() - started
            return FirstModel(model, loss.item(), seconds, self._find_loss_range(output))

    def _check_models(self, model: nn.Module, spare: nn.Module) -> None:
        """Refuse a `build` whose models share their weights, and data or layers that do not fit."""
        checks.check_order(model, self.loss)
        for part in self.data.parts:
            checks.check_finite_inputs(part.inputs, "")
        shared = {id(parameter) for parameter in spare.parameters() if parameter.requires_grad}
        if model is spare or any(id(parameter) in shared for parameter in model.parameters()):
            raise ProblemError(
                "build() returned the same model twice, or models that share their weights, and "
                "every run needs its own; create the model inside build, or return "
                "copy.deepcopy(model)."
            )
        for initializer in self.schemes:
            if isinstance(initializer.scheme, NormalWeights):
                initializer.scheme(spare, None, None, 0.0, 0)  # refuses layers that match nothing

    def _find_loss_range(self, output: Any) -> LossRange:
        """Return the range of the loss over some mini-batches."""
        if not isinstance(output, Tensor):
            return UNKNOWN
        loss = self._loss_on(output.device)
        size = self.data.initial_batch(0).size
        batches = []
        for batch in itertools.islice(self.data.minibatches(0), CONSTANT_BATCHES):
            # The output is that of the initial batch; the last one of ready ones may differ.
            if batch.size == size:
                inputs, targets = copy_to(batch, output.device)
                batches.append(Batch(inputs, targets, size))
        return find_loss_range(lambda free, batch: loss(free, batch.targets), output, batches)

    def _first_loss(self, model: nn.Module, inputs: Any, targets: Any) -> tuple[Any, Tensor]:
        """Return the output and the loss of a batch; explain what fails on a shape or dtype."""
        forward = self.options["forward"]
        with explained(model, inputs, forward, converted=False):
            output = model(inputs) if forward is None else forward(model, inputs)
        with explained_loss(output, targets):
            return output, self._loss_on(device_of(model))(output, targets)

    def record(self, first: FirstModel) -> dict[str, Plain]:
        """Return the settings that must not change between the runs of one folder."""
        parameters = []
        for name, parameter in first.model.named_parameters():
            dtype = str(parameter.dtype).removeprefix("torch.")
            frozen = "" if parameter.requires_grad else " frozen"
            parameters.append(f"{name}: {dtype} {tuple(parameter.shape)}{frozen}")
        changed = {
            field.name: str(self.options[field.name])
            for field in fields(Problem)
            if self.options.get(field.name, field.default) != field.default
        }
        changed["forward"] = describe(self.options["forward"])
        return {
            "model": describe(first.model),
            "parameters": "; ".join(parameters),
            "loss": describe(self.loss),
            "forward": "",  # the order of the settings is that of earlier records
            "hash of the data": self.data.digest(),
            "examples": self.data.examples,
            "batch_size": self.data.batch_size,
            "steps": self.steps,
            "optimizer": describe(self.training),
            "device": device_of(first.model).type,
            "default dtype": str(torch.get_default_dtype()),
            # Options that repr(loss) does not show change it. Few digits: other machines round
            # otherwise.
            "loss of a new model": f"{first.loss:.4g}",
            **changed,
        }
