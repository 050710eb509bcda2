"""The training loop of the project, its optimizers, and summaries of the losses it returns.

losses, failure = train(model, loss, batches, make_optimizer("sgd", model, 0.1), steps=200)
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from hessinit.errors import ProblemError, choose
from hessinit.problem.problem import Forward, Loss
from hessinit.problem.validate import check_loss_value

MakeOptimizer = Callable[[list[nn.Parameter], float], Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters, lr: SGD(parameters, lr=lr),
    "momentum": lambda parameters, lr: SGD(parameters, lr=lr, momentum=0.9),
    "adam": lambda parameters, lr: Adam(parameters, lr=lr),
}

# A run has diverged if its final loss exceeds the first by more than this fraction,
WORSE = 0.05
# and by more than this many standard deviations of the noise between mini-batches.
DEVIATIONS = 3.0


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
    """Train in place; returns the loss of every mini-batch before its step, and a failure in words.

    `batches` are pairs (inputs, targets) on the model's device; at most `steps` of them are used. A loss that
    is not finite is the last, and no step is made with it. An exception from the forward or the loss counts
    as a loss of nan, and is returned in words, if the weights are its cause: some are not finite, or a new
    model from `build` accepts the same batch. Any other exception is raised. `on_step(number, loss)` is
    called after every step, counted from 1.

    >>> _ = torch.manual_seed(0)
    >>> model, x = nn.Linear(2, 1), torch.eye(2)
    >>> losses, failure = train(model, nn.MSELoss(), [(x, x[:, :1])] * 50, make_optimizer("sgd", model, 0.5))
    >>> len(losses), losses[-1] < 0.01 * losses[0], failure
    (50, True, '')
    """
    losses: list[float] = []
    for step, batch in enumerate(itertools.islice(batches, steps)):
        if warmup is not None:
            warmup.set(step)
        optimizer.zero_grad(set_to_none=True)
        failure = ""
        try:
            value = evaluate_loss(model, loss, batch, forward)
        except Exception as raised:
            # Some functions refuse nan and inf instead of passing them on.
            is_memory = isinstance(raised, torch.OutOfMemoryError)
            if is_memory or not _caused_by_weights(model, build, loss, batch, forward):
                raise
            failure = f"Step {step + 1} failed on the weights that training led to: {raised}"
            losses.append(math.nan)
        else:
            check_loss_value(value)
            losses.append(value.item())
            if math.isfinite(losses[-1]):
                value.backward()
                optimizer.step()
        if on_step is not None:
            on_step(step + 1, losses[-1])
        if not math.isfinite(losses[-1]):
            return losses, failure
    return losses, ""


def evaluate_loss(model: nn.Module, loss: Loss, batch: tuple[Any, Any], forward: Forward | None) -> Tensor:
    """The loss of a mini-batch, as training calls it."""
    inputs, targets = batch
    output = model(inputs) if forward is None else forward(model, inputs)
    value: Tensor = loss(output, targets)
    return value


def _caused_by_weights(
    model: nn.Module, build: Callable[[], nn.Module] | None, loss: Loss, batch: tuple[Any, Any],
    forward: Forward | None,
) -> bool:  # fmt: skip
    if all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters()):
        try:
            evaluate_loss(model if build is None else build(), loss, batch, forward)
        except Exception:
            return False
    return True


def check_optimizer(optimizer: Any) -> None:
    """Refuse what is neither a name nor a function that makes an optimizer."""
    if isinstance(optimizer, Optimizer):
        raise ProblemError(
            f"optimizer is a {type(optimizer).__name__} of one model, and every run trains a new one; pass a "
            f"function: lambda parameters, lr: torch.optim.{type(optimizer).__name__}(parameters, lr=lr)."
        )
    if not callable(optimizer):
        choose("optimizer", optimizer, list(OPTIMIZERS))


def read_positive(name: str, value: Any) -> float:
    """A finite number above 0, such as a learning rate."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf or isinstance(value, (bool, str)):
        raise ProblemError(f"{value!r} in {name} must be a number above 0, such as 0.1.")
    return number


def make_optimizer(optimizer: str | MakeOptimizer, model: nn.Module, learning_rate: float) -> Optimizer:
    """An optimizer of the model's trainable parameters."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ProblemError(
            f"the model ({type(model).__name__}) has no trainable parameter, so there is nothing to train; "
            "unfreeze some (requires_grad_()), and give the model before the loss."
        )
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    made: Any = make(parameters, learning_rate)
    if not isinstance(made, Optimizer):
        raise ProblemError(
            f"optimizer returned a {type(made).__name__}; it must be called as optimizer(parameters, lr) and "
            "return a torch.optim.Optimizer."
        )
    return made


class Warmup:
    """Raises the learning rate linearly over `steps` steps to the optimizer's own; 0 steps change nothing.

    >>> optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
    >>> warmup = Warmup(optimizer, steps=4)
    >>> warmup.set(1)
    >>> optimizer.param_groups[0]["lr"]
    0.2
    """

    def __init__(self, optimizer: Optimizer, steps: int) -> None:
        self._groups = [(group, group["lr"]) for group in optimizer.param_groups]
        self._steps = steps

    def set(self, step: int) -> None:
        """Set the learning rate of a step, counted from 0."""
        if step < self._steps:
            for group, rate in self._groups:
                group["lr"] = rate * (step + 1) / self._steps


def final_loss(losses: Sequence[float], last: int) -> float:
    """The mean of the last losses; the last one where it is not finite.

    >>> final_loss([3.0, 2.0, 1.0], last=2), final_loss([3.0, float("inf")], last=2)
    (1.5, inf)
    """
    return statistics.fmean(losses[-last:]) if math.isfinite(losses[-1]) else losses[-1]


def chunk_means(losses: Sequence[float], length: int) -> list[float]:
    """The mean of every `length` losses in turn; the last chunk may be shorter.

    >>> chunk_means([4.0, 2.0, 1.0, 3.0, 1.0], length=2)
    [3.0, 2.0, 1.0]
    """
    return [statistics.fmean(losses[first : first + length]) for first in range(0, len(losses), length)]


def has_diverged(losses: Sequence[float], last: int) -> bool:
    """Whether the mean of the `last` losses exceeds the first by 5 %, and by more than chance allows.

    The first mini-batch may be an easy one, so a run that does not move can end 5 % above its first loss. The
    noise is estimated from differences of neighbouring losses, in logarithms where all are positive.

    >>> has_diverged([2.0, 2.6, 2.3, 2.7, 2.4, 2.5, 2.2, 2.6, 2.3, 2.6, 2.4, 2.5], last=10)
    False
    >>> has_diverged([2.0, 2.1, 2.1, 2.6, 2.6, 2.7, 2.9, 3.0, 3.0, 3.2, 3.3, 3.5], last=10)
    True
    """
    if not math.isfinite(losses[-1]):
        return True
    final = statistics.fmean(losses[-last:])
    if not final > losses[0] + WORSE * abs(losses[0]):
        return False
    is_positive, noise = min(losses) > 0, 0.0
    heights = [math.log(loss) for loss in losses] if is_positive else losses
    for part in (heights[: last + 1], heights[-last:]):
        # The standard deviation of one loss, from the median difference of neighbours: jumps do not count.
        apart = [abs(after - before) for before, after in itertools.pairwise(part)]
        noise = max(noise, statistics.median(apart or [0.0]) / (0.6745 * math.sqrt(2)))
    # Against the first loss alone, for a training that jumps at once; and against the first few, whose mean
    # is known better, for one that climbs slowly.
    for many in (1, max(1, min(last, len(losses) - last))):
        reference = statistics.fmean(losses[:many])
        rise, most = final - reference, WORSE * abs(reference)
        if is_positive:
            rise, most = math.log(final / reference), math.log1p(WORSE)
        if rise > most + DEVIATIONS * noise * math.sqrt(1 / many + 1 / last):
            return True
    return False
