"""What a call costs: its seconds, and how many gradients could have been computed meanwhile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hessinit.curvature.evaluation import Evaluation
from hessinit.problem.functional import FunctionalProblem

# A gradient shorter than this is timed twice, and the shorter one counts: a cold start or another
# process may have doubled it.
_SHORT_SECONDS = 0.005


class TimedGradient(NamedTuple):
    """A gradient, and the seconds that it took."""

    seconds: float
    output: Tensor  # of the first batch
    by_leaf: dict[str, Tensor]


def timed_gradient(problem: FunctionalProblem, weights: Sequence[float] = ()) -> TimedGradient:
    """Compute forward and backward of all batches by the measured weights, on warm caches.

    The model runs as in every evaluation of the problem, on copies of the weights; nothing of it
    changes. `weights` are those of the batches in the loss; without them the gradient itself is not
    kept.
    """
    times = list[float]()
    tensors = {**problem.leaves, **problem.constants}
    names = list(problem.leaves)
    while not times or (len(times) < 2 and times[-1] < _SHORT_SECONDS):
        total = dict[str, Tensor]()
        outputs = list[Tensor]()
        started = clock(problem)
        for number, batch in enumerate(problem.batches):
            output, gradients = problem.output_and_gradients(batch, tensors, names)
            outputs = outputs or [output]
            if not weights:
                continue
            for name, gradient in zip(names, gradients, strict=True):
                if weights[number] != 1:
                    gradient = gradient * weights[number]
                total[name] = total[name] + gradient if name in total else gradient
        times.append(clock(problem) - started)
    return TimedGradient(min(times), outputs[0], total)


def in_gradients(seconds: float | None, gradient: float | None) -> float | None:
    """Return the cost in gradients; None if one of both is unknown."""
    return seconds / gradient if seconds is not None and gradient else None


def cost_of(
    problem: FunctionalProblem,
    evaluations: Sequence[Evaluation],
    started: float,
    gradient: float | None = None,
) -> dict[str, Any]:
    """Return the `seconds` since `started`, and in `gradients`; time one if none was."""
    seconds = clock(problem) - started
    for evaluation in evaluations:
        evaluation.forget()
    if gradient is None:
        gradient = timed_gradient(problem).seconds
    return {"seconds": seconds, "gradients": in_gradients(seconds, gradient)}


def clock(problem: FunctionalProblem) -> float:
    """Return the time, after what a GPU still computes."""
    if problem.device.type == "cuda":
        torch.cuda.synchronize(problem.device)
    return time.perf_counter()
