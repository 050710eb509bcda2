"""Analyses of your own: output, loss gradient and parameters of every batch, with their graphs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, TypeVar

from torch import Tensor

from hessinit.curvature.derivative_check import check_gradients, check_loss
from hessinit.curvature.engine_choice import evaluate
from hessinit.curvature.evaluation import Evaluation, cost_since
from hessinit.errors import ProblemError
from hessinit.measurement.facts import facts_of, in_running_order, note_unchecked, notes_on
from hessinit.problem.checks import Layer as Layer
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.preserve import uninterrupted
from hessinit.problem.problem import Problem

T = TypeVar("T")


class EvaluatedBatch:
    """The output of one batch, and the loss gradient by it, as functions of the parameters.

    `parameters` are copies of the measured parameters by name; `weight` is the factor of this
    batch's loss in the loss of all batches.
    """

    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        self.parameters: Mapping[str, Tensor] = evaluation.leaves
        self.output = evaluation.output
        self.weight = evaluation.weight

    @property
    def loss_gradient(self) -> tuple[Tensor, Tensor]:
        """The output cut off from the model, and the gradient of the loss by it, differentiable."""
        return self._evaluation.at_output.gradient

    @property
    def activation_bytes(self) -> int:
        """The memory of what the measured layers return, for choosing how much to batch."""
        uses = [use for uses in self._evaluation.uses.values() for use in uses]
        returned = [use.node._input_metadata[0] for use in uses]
        return sum(int(math.prod(tensor.shape)) * int(tensor.dtype.itemsize) for tensor in returned)


class EvaluatedProblem:
    """A problem while it is analyzed; it is evaluated when `batches` are first asked for.

    `layers` are the measured parameters: each has a `name`, the name of its `parameter`, `aliases`
    (a tied weight's other names), `shape` and `size`.
    """

    def __init__(self, problem: Problem) -> None:
        self._started = time.perf_counter()
        self._functional = FunctionalProblem(problem)
        self.problem = problem
        self.layers = self._functional.layers
        self.dtype = self._functional.dtype
        self.device = self._functional.device
        self.settings = self._functional.settings

    @cached_property
    def _evaluations(self) -> list[Evaluation]:
        evaluations = evaluate(self._functional)
        for evaluation in evaluations:
            check_loss(evaluation)
            check_gradients(evaluation)
        return evaluations

    @cached_property
    def batches(self) -> tuple[EvaluatedBatch, ...]:
        """Every batch, evaluated; its derivatives are checked against finite differences."""
        return tuple(map(EvaluatedBatch, self._evaluations))

    @property
    def layers_in_running_order(self) -> list[Layer]:
        """The layers as the first batch's forward used them; unused ones last."""
        return in_running_order(self._functional, self._evaluations)

    def facts(self) -> dict[str, Any]:
        """Return what a result says beside its numbers: loss, examples, cost, notes, versions.

        This frees the graphs; call it last.
        """
        problem = self._functional
        evaluations = self._evaluations
        notes = (*notes_on(problem, evaluations), *note_unchecked(problem.check))
        self.__dict__.pop("batches", None)
        return {
            **facts_of(problem, evaluations),
            **cost_since(self._started, evaluations),
            "notes": notes,
        }


@uninterrupted
def analyze(problem: Problem, analysis: Callable[[EvaluatedProblem], T]) -> T:
    """Return `analysis(evaluated)`; model, random state and settings are afterwards as before.

    The problem is checked and evaluated as by `measure`: dropout is frozen, low precision is
    widened, errors name the way out.

    >>> from torch import nn, ones, zeros
    >>> problem = Problem(nn.Linear(3, 1), nn.MSELoss(), (ones(3, 3), zeros(3, 1)))
    >>> analyze(problem, lambda evaluated: evaluated.batches[0].output.shape)
    torch.Size([3, 1])
    """
    if not isinstance(problem, Problem):
        raise ProblemError(
            f"problem is a {type(problem).__name__}; pass hessinit.Problem(model, loss, batch)."
        )
    evaluated = EvaluatedProblem(problem)
    with evaluated.settings():
        return analysis(evaluated)
