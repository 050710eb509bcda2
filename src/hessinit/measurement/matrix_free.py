"""Operators from a model, a loss and a batch, for one layer or for all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from hessinit.curvature import operators
from hessinit.curvature.derivative_check import check_gradients, check_loss, check_outputs
from hessinit.curvature.evaluation import evaluate
from hessinit.problem.problem import Loss, Problem, ProblemOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

Kind = TypeVar("Kind", bound=operators.WeightOperator)


def hessian(
    model: nn.Module, loss: Loss, batch: Any, **options: Unpack[ProblemOptions]
) -> operators.HessianOperator:
    """The exact Hessian of the loss by the chosen weights (all by default), as an operator on flat vectors.

    The options are those of `measure`: layers, forward, dtype, dropout, reduction, check, seed.

    >>> import torch
    >>> model, data = nn.Linear(2, 1, bias=False).double(), torch.eye(2, dtype=torch.float64)
    >>> hessian(model, nn.MSELoss(), (data, torch.zeros(2, 1))).to_dense()
    tensor([[1., 0.],
            [0., 1.]], dtype=torch.float64)
    """
    return _build(operators.HessianOperator, Problem(model, loss, batch, **options))


def gauss_newton(
    model: nn.Module, loss: Loss, batch: Any, **options: Unpack[ProblemOptions]
) -> operators.GaussNewtonOperator:
    """The Gauss-Newton matrix `Jᵀ H_z J` of the chosen weights; the arguments are those of `hessian`."""
    return _build(operators.GaussNewtonOperator, Problem(model, loss, batch, **options))


def jacobian(
    model: nn.Module, loss: Loss, batch: Any, **options: Unpack[ProblemOptions]
) -> operators.JacobianOperator:
    """The derivative of the model's outputs by the chosen weights, (outputs, weights).

    The loss only serves to check the problem; the outputs of several batches follow one another.
    """
    return _build(operators.JacobianOperator, Problem(model, loss, batch, **options))


def _build(kind: type[Kind], problem: Problem) -> Kind:
    with problem.settings():
        evaluations = evaluate(problem)
        for evaluation in evaluations:
            check_loss(evaluation)
            (check_gradients if kind is operators.HessianOperator else check_outputs)(evaluation)
        operator = kind(evaluations, list(problem.leaves))
    operator.settings = problem.settings  # a product may come at any time, under any settings of the caller
    return operator
