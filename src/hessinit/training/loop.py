"""The training loop of the project, its optimizers, and summaries of the losses it returns."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from hessinit.errors import ProblemError, accepts, check_positive, choose
from hessinit.problem import checks
from hessinit.problem.preserve import uninterrupted, untouched_random_state
from hessinit.problem.problem import Forward, Loss, Problem
from hessinit.problem.substitutes import in_mode
from hessinit.results.track_record import Tracking
from hessinit.training.data import copy_to, device_of, read_data, seed_everything

# A function of the parameters and the learning rate, or of the parameters alone.
MakeOptimizer = Callable[..., Optimizer]

Parameters = list[nn.Parameter]

OPTIMIZERS: dict[str, Callable[[Parameters, float, float], Optimizer]] = {
    "sgd": lambda parameters, lr, _: SGD(parameters, lr=lr),
    "momentum": lambda parameters, lr, momentum: SGD(parameters, lr=lr, momentum=momentum),
    "nesterov": lambda parameters, lr, momentum: SGD(
        parameters, lr=lr, momentum=momentum, nesterov=True
    ),
    "adam": lambda parameters, lr, _: Adam(parameters, lr=lr),
    "adamw": lambda parameters, lr, _: AdamW(parameters, lr=lr),
}

EXAMPLE = "lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr)"


def train(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[tuple[Any, Any]],
    optimizer: Optimizer,
    *,
    steps: int | None = None,
    warmup: Warmup | None = None,
    forward: Forward | None = None,
    build: Callable[[], nn.Module] | None = None,
    on_step: Callable[[int, float], object] | None = None,
) -> tuple[list[float], str]:
    """Train in place; returns the loss of every mini-batch before its step, and why it failed.

    At most `steps` of the `batches` are used. A loss that is not finite is the last, and no step is
    made with it. An exception counts as a loss of nan if the weights are its cause: some are not
    finite, or a new model from `build` accepts the same batch. `on_step(number, loss)` is called
    after every step, counted from 1.
    """
    losses: list[float] = []
    for step, batch in enumerate(itertools.islice(batches, steps)):
        if warmup is not None:
            warmup.set(step)
        model.zero_grad(set_to_none=True)  # that of the optimizer asks torch's compiler each time
        failure = ""
        try:
            value = evaluate_loss(model, loss, batch, forward)
        except Exception as raised:
            # Some functions refuse nan and inf instead of passing them on.
            is_out_of_memory = isinstance(raised, torch.OutOfMemoryError)
            if is_out_of_memory or not _caused_by_weights(model, build, loss, batch, forward):
                raise
            failure = f"Step {step + 1} failed on the weights that training led to: {raised}"
            losses.append(math.nan)
        else:
            checks.check_loss_value(value)
            losses.append(value.item())
            if math.isfinite(losses[-1]):
                value.backward()
                optimizer.step()
        if on_step is not None:
            on_step(step + 1, losses[-1])
        if not math.isfinite(losses[-1]):
            return losses, failure
    return losses, ""


@uninterrupted
def evaluate_loss(
    model: nn.Module, loss: Loss, batch: tuple[Any, Any], forward: Forward | None
) -> Tensor:
    inputs, targets = batch
    output = model(inputs) if forward is None else forward(model, inputs)
    return loss(output, targets)


def _caused_by_weights(
    model: nn.Module,
    build: Callable[[], nn.Module] | None,
    loss: Loss,
    batch: tuple[Any, Any],
    forward: Forward | None,
) -> bool:
    if all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters()):
        if build is None:
            return False
        try:
            evaluate_loss(build(), loss, batch, forward)
        except Exception:
            return False
    return True


def train_and_track(
    problem: Problem,
    data: Any,
    *,
    lr: float,
    steps: int = 200,
    batch_size: int = 64,
    optimizer: str | MakeOptimizer = "sgd",
    warmup: int = 0,
    examples: int = 256,
    name: str = "",
    on_step: Callable[[int, float], object] | None = None,
    **tracking: Any,
) -> Tracking:
    """Train the problem's model in place on mini-batches of `data`, and track its curvature.

    It is measured on `examples` of the data. `data`, `batch_size`, `optimizer` and `warmup` are as
    in `compare`; `tracking` are arguments of `track`. Start and end are measured whatever the
    `max_overhead`. `on_step(step, loss)` is called after every step. The same seed gives the same
    weights, and the caller's random generators are not touched.
    """
    from hessinit.training.track import TrackSettings, track

    steps = checks.check_whole("steps", steps, at_least=1)
    batch_size = checks.check_whole("batch_size", batch_size, at_least=1)
    examples = checks.check_whole("examples", examples, at_least=1)
    rate = check_positive("lr", lr)
    warmup = checks.check_whole("warmup", warmup, at_least=0)
    check_optimizer(optimizer)
    read = read_data(data, batch_size, steps)
    batches = read.tracked_batches(examples, problem.seed)
    pairs = [(batch.inputs, batch.targets) for batch in batches]
    problem = replace(problem, batch=pairs[0] if len(pairs) == 1 else pairs)
    model = problem.model
    with (
        in_mode(model, training=True),
        untouched_random_state(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        seed_everything(problem.seed, "training")
        stepper = make_optimizer(optimizer, model, rate)
        ramp = Warmup(stepper, warmup)
        ramp.set(0)
        quiet = {"path": None, "log_to": None, "settings": TrackSettings(warn=False)}
        with track(problem, optimizer=stepper, **{**quiet, **tracking}) as tracker:
            tracker.name = name

            def after_step(step: int, loss: float) -> None:
                tracker.step(loss)
                if on_step is not None:
                    on_step(step, loss)
                if not math.isfinite(loss):
                    tracker.add_note(
                        f"The loss became {loss} at step {tracker.steps}; training ended there."
                    )

            train(
                model,
                problem.loss,
                (copy_to(batch, device_of(model)) for batch in read.minibatches(problem.seed)),
                stepper,
                steps=steps,
                warmup=ramp,
                forward=problem.forward,
                on_step=after_step,
            )
            if tracker.tracking.points[-1].step < tracker.steps:
                tracker.measure()
        return tracker.close()


def check_optimizer(optimizer: Any) -> None:
    """Raise ProblemError if this is no known name and no function that builds an optimizer."""
    if isinstance(optimizer, Optimizer):
        raise ProblemError(
            f"optimizer is a {type(optimizer).__name__} of one model, and every run trains a new "
            f"one; pass a function such as {EXAMPLE}."
        )
    if isinstance(optimizer, str):
        choose("optimizer", optimizer, list(OPTIMIZERS), {"gd": "sgd", "heavy ball": "momentum"})
    elif isinstance(optimizer, nn.Module) or not (
        accepts(optimizer, [], wrapped=False) or accepts(optimizer, [], 0.1, wrapped=False)
    ):
        rule = f"a name, such as 'adam', or a function that builds one, such as {EXAMPLE}"
        raise ProblemError(f"optimizer is a {type(optimizer).__name__}; it must be {rule}.")


def make_optimizer(
    optimizer: str | MakeOptimizer,
    model: nn.Module,
    learning_rate: float | None,
    momentum: float = 0.9,
) -> Optimizer:
    """Build an optimizer of the model's trainable parameters.

    Where a function takes the parameters alone, the rates of its groups are scaled, the largest to
    `learning_rate`. With None its rates stay; a function that requires a rate is then passed 1.

    >>> import functools
    >>> build = functools.partial(SGD, lr=0.1, momentum=0.5)
    >>> optimizer = make_optimizer(build, nn.Linear(2, 1), 0.3)
    >>> optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]
    (0.3, 0.5)
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ProblemError(
            "the model has no trainable parameter; unfreeze some with requires_grad_()."
        )
    rate = 1.0 if learning_rate is None else learning_rate
    if isinstance(optimizer, str):
        return OPTIMIZERS[optimizer](parameters, rate, momentum)
    takes_rate = accepts(optimizer, [], 0.1)
    if learning_rate is None and accepts(optimizer, []):
        takes_rate = False
    try:
        built: Any = optimizer(parameters, rate) if takes_rate else optimizer(parameters)
    except ValueError as failure:  # torch refuses an empty list
        raise ProblemError(_explain_build(f"optimizer cannot be built: {failure}")) from failure
    _check_trains(built, model)
    if not takes_rate and learning_rate is not None:
        _scale_rates(built, learning_rate)
    return built


def _check_trains(built: Any, model: nn.Module) -> None:
    """Raise ProblemError unless a user's function built an optimizer of this model's parameters."""
    kind = type(built).__name__
    if not isinstance(built, Optimizer):
        raise ProblemError(
            f"optimizer returned a {kind}; it must be called as optimizer(parameters, lr) or "
            "optimizer(parameters) and return a torch.optim.Optimizer."
        )
    of_model = {id(parameter) for parameter in model.parameters()}
    updated = [id(parameter) for group in built.param_groups for parameter in group["params"]]
    strangers = sum(parameter not in of_model for parameter in updated)
    if updated and not strangers:
        return
    fault = "it has none"
    if strangers:
        fault = f"{strangers} of its {len(updated)} parameters are not the model's"
    raise ProblemError(
        _explain_build(f"optimizer returned a {kind} that does not train the model: {fault}")
    )


def _explain_build(fault: str) -> str:
    return f"{fault.rstrip('.')}. Build it over the parameters that it is given, as {EXAMPLE}."


def _scale_rates(optimizer: Optimizer, learning_rate: float) -> None:
    """Bring the largest rate to this one; the other groups keep their proportion to it."""
    if not all("lr" in group for group in optimizer.param_groups):
        return
    largest = max(float(group["lr"]) for group in optimizer.param_groups)
    if largest > 0:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * (group["lr"] / largest)


class Warmup:
    """Raises the learning rate linearly over `steps` steps to the optimizer's; 0 changes nothing.

    >>> optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
    >>> warmup = Warmup(optimizer, steps=4)
    >>> warmup.set(1)
    >>> optimizer.param_groups[0]["lr"]
    0.2
    """

    def __init__(self, optimizer: Optimizer, steps: int) -> None:
        groups = optimizer.param_groups if steps else []
        self._groups = [(group, group["lr"]) for group in groups]
        self._steps = steps

    def set(self, step: int) -> None:
        """Set the learning rate of a step, counted from 0."""
        if step < self._steps:
            for group, rate in self._groups:
                group["lr"] = rate * (step + 1) / self._steps


def final_loss(losses: Sequence[float], last: int) -> float:
    """The mean of the last losses; the last one where it is not finite."""
    return statistics.fmean(losses[-last:]) if math.isfinite(losses[-1]) else losses[-1]


def chunk_means(losses: Sequence[float], length: int) -> list[float]:
    """The mean of every `length` losses in turn; the last chunk may be shorter.

    >>> chunk_means([4.0, 2.0, 1.0, 3.0, 1.0], length=2)
    [3.0, 2.0, 1.0]
    """
    return [
        statistics.fmean(losses[first : first + length]) for first in range(0, len(losses), length)
    ]
