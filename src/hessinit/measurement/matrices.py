"""The Hessian, the Gauss-Newton matrix and the Jacobian of a problem, as operators on flat vectors."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from hessinit.curvature import derivative_check, operators
from hessinit.curvature.evaluation import evaluate
from hessinit.curvature.operators import GaussNewtonOperator, HessianOperator, JacobianOperator
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.preserve import uninterrupted
from hessinit.problem.problem import Loss, Problem, as_problem

Operator = TypeVar("Operator", bound=operators.WeightOperator)


@uninterrupted
def hessian(
    problem: Problem | nn.Module, loss: Loss | None = None, batch: Any = None
) -> HessianOperator:
    """The exact Hessian of the loss by the problem's weights, as an operator on flat vectors.

    >>> import torch
    >>> model, data = nn.Linear(2, 1, bias=False).double(), torch.eye(2, dtype=torch.float64)
    >>> hessian(model, nn.MSELoss(), (data, torch.zeros(2, 1))).to_dense()
    tensor([[1., 0.],
            [0., 1.]], dtype=torch.float64)
    """
    return _operator(HessianOperator, as_problem(problem, loss, batch))


@uninterrupted
def gauss_newton(
    problem: Problem | nn.Module, loss: Loss | None = None, batch: Any = None
) -> GaussNewtonOperator:
    """The Gauss-Newton matrix `Jᵀ H_z J` of the problem's weights, as an operator on flat vectors."""
    return _operator(GaussNewtonOperator, as_problem(problem, loss, batch))


@uninterrupted
def jacobian(
    problem: Problem | nn.Module, loss: Loss | None = None, batch: Any = None
) -> JacobianOperator:
    """The derivative of the model's outputs by the problem's weights, (outputs, weights).

    The loss only serves to check the problem; the outputs of several batches follow one another.
    """
    return _operator(JacobianOperator, as_problem(problem, loss, batch))


def _operator(kind: type[Operator], problem: Problem) -> Operator:
    functional = FunctionalProblem(problem)
    with functional.settings():
        evaluations = evaluate(functional)
        for evaluation in evaluations:
            derivative_check.check_loss(evaluation)
            if kind is HessianOperator:
                derivative_check.check_gradients(evaluation)
            else:
                derivative_check.check_outputs(evaluation)
        # A product may come at any time, under any settings of the caller.
        return kind(evaluations, list(functional.leaves), settings=functional.settings)
