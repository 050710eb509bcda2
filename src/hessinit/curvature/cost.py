"""What a measurement costs, in gradients: its seconds over those of one forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hessinit.curvature.evaluation import Evaluation
from hessinit.problem.functional import FunctionalProblem

# A gradient shorter than this is timed twice, and the shorter one counts: a cold start or another
# process may have doubled it.
_SHORT_SECONDS = 0.005


@dataclass(frozen=True)
class LossGradient:
    """The gradient of the loss of all batches, and the seconds of its forwards and backwards."""

    by_leaf: Mapping[str, Tensor]
    output: Tensor  # of the first batch
    seconds: float


def loss_gradient(evaluations: Sequence[Evaluation]) -> LossGradient:
    """The gradient of the loss by the measured weights, from the graphs, which are freed.

    Costs a backward pass; the seconds of the forward are those of each evaluation's first one.
    """
    by_leaf = dict[str, Tensor]()
    outputs = list[Tensor]()
    seconds = 0.0
    for evaluation in evaluations:
        with evaluation.graphs():
            loss = evaluation.loss
            outputs = outputs or [evaluation.output.detach()]
        started = evaluation.problem.clock()
        leaves = list(evaluation.leaves.values())
        gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
        seconds += evaluation.forward_seconds + evaluation.problem.clock() - started
        for name, gradient in zip(evaluation.leaves, gradients, strict=True):
            part = gradient if evaluation.weight == 1 else gradient * evaluation.weight
            by_leaf[name] = by_leaf[name] + part if name in by_leaf else part
    return LossGradient(by_leaf, outputs[0], seconds)


def gradient_seconds(problem: FunctionalProblem) -> float:
    """The seconds of a forward and backward of all batches, of the plain model, on warm caches."""
    weights = {**problem.leaves, **problem.constants}
    seconds = list[float]()
    while not seconds or (len(seconds) < 2 and seconds[-1] < _SHORT_SECONDS):
        started = problem.clock()
        for batch in problem.batches:
            problem.output_and_gradients(batch, weights, list(problem.leaves))
        seconds.append(problem.clock() - started)
    return min(seconds)


def in_gradients(seconds: float | None, gradient: float | None) -> float | None:
    """The cost in gradients, from the seconds of one; None where one of both is not known."""
    return seconds / gradient if seconds is not None and gradient else None


def cost_since(started: float, evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """The fields `seconds` and `gradients` of a result; the graphs are freed."""
    seconds = evaluations[0].problem.clock() - started
    gradient = loss_gradient(evaluations).seconds
    return {"seconds": seconds, "gradients": in_gradients(seconds, gradient)}
