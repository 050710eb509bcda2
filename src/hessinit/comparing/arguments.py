"""Guards at the door of `compare` and `sweep`: the value, the rule and the way out, before any work."""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import Executor
from typing import Any

import torch
from torch import nn

from hessinit.errors import ProblemError
from hessinit.problem.validate import check_arguments, check_whole

FEWEST_STEPS = 10


def check_problem(build: Any, loss: Any, forward: Any) -> None:
    """A function that makes models, and a loss."""
    if isinstance(build, nn.Module):
        raise ProblemError(
            f"build is a {type(build).__name__}, and every run needs a new model; pass a function that makes "
            "one, such as lambda: Net()."
        )
    if not callable(build):
        raise ProblemError(
            f"build is a {type(build).__name__}; it must be a function without arguments that makes a model."
        )
    check_arguments(nn.Identity(), loss, forward, None, "freeze")  # the model is checked once it is built


def read_positive_numbers(name: str, values: Any, example: str) -> tuple[float, ...]:
    """One or more different numbers above 0.

    >>> read_positive_numbers("learning_rates", [0.1, 1], "[0.01, 0.1]")
    (0.1, 1.0)
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ProblemError(f"{name}={values!r} must be a list of numbers, such as {example}.")
    numbers = tuple(read_positive(name, value) for value in values)
    if not numbers:
        raise ProblemError(f"{name} is empty; give at least one number, such as {example}.")
    for number in numbers:
        if numbers.count(number) > 1:
            raise ProblemError(f"{name} holds {number:g} twice; give every number once.")
    return numbers


def read_positive(name: str, value: Any) -> float:
    """A finite number above 0."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf or isinstance(value, (bool, str)):
        raise ProblemError(f"{value!r} in {name} must be a number above 0, such as 0.1.")
    return number


def read_seeds(seeds: Any) -> tuple[int, ...]:
    """How many seeds, or which.

    >>> read_seeds(3), read_seeds([7, 8])
    ((0, 1, 2), (7, 8))
    """
    if isinstance(seeds, str) or not isinstance(seeds, Iterable):
        return tuple(range(check_whole("seeds", seeds, at_least=1)))
    numbers = tuple(check_whole("a seed in seeds", seed, at_least=0) for seed in seeds)
    if not numbers:
        raise ProblemError("seeds is empty; pass how many, such as 3, or a list of them.")
    for number in numbers:
        if numbers.count(number) > 1:
            raise ProblemError(f"seeds holds {number} twice; every seed counts once.")
    return numbers


def read_warmup(warmup: Any, steps: int) -> int:
    """Steps of warmup; a fifth of all by default."""
    if warmup is None:
        return max(1, steps // 5)
    number = check_whole("warmup", warmup, at_least=1)
    if number > steps:
        raise ProblemError(f"warmup={number} is longer than the run; it must be at most steps={steps}.")
    return number


def check_execution(workers: Any, executor: Any) -> None:
    """Where the runs are made."""
    if workers is not None:
        check_whole("workers", workers, at_least=1)
    if executor is None:
        return
    if workers is not None:
        raise ProblemError(
            f"workers={workers} and executor= are both given; the executor knows its own workers, so leave "
            "workers out."
        )
    if not isinstance(executor, Executor) and not callable(getattr(executor, "submit", None)):
        raise ProblemError(
            f"executor is a {type(executor).__name__}; it must be a concurrent.futures.Executor, such as "
            "ProcessPoolExecutor() or a Dask client's get_executor()."
        )


def read_device(device: Any) -> str | None:
    """A device that can be used here."""
    if device is None:
        return None
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as failure:
        reason = str(failure).strip().splitlines()[0].rstrip(".")
        raise ProblemError(
            f"device={device!r} cannot be used here: {reason}. Leave it out to train where build() puts the "
            "model."
        ) from failure
    if found.type == "meta":
        raise ProblemError(
            f"device={device!r} holds no numbers, so nothing can be trained there; pass a real device, such "
            "as 'cpu', or leave it out to train where build() puts the model."
        )
    return str(found)


def read_layers(layers: Any) -> tuple[str, ...] | None:
    """Names or globs; whether they fit is for the model to say."""
    if layers is None:
        return None
    patterns = (layers,) if isinstance(layers, str) else tuple(layers) if isinstance(layers, Iterable) else ()
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ProblemError(
            f"layers={layers!r} must be names or globs, such as ['fc1', 'conv*'], or None for every weight."
        )
    return patterns
