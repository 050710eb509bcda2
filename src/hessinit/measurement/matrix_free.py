"""Operators from a model, a loss and a batch, for one layer or for all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from hessinit.curvature.derivative_check import check_gradients, check_loss, check_outputs
from hessinit.curvature.evaluation import evaluate
from hessinit.curvature.operators import (
    GaussNewtonOperator,
    HessianOperator,
    JacobianOperator,
    WeightOperator,
)
from hessinit.problem.problem import Forward, Loss, Problem, explained_memory

Kind = TypeVar("Kind", bound=WeightOperator)


def hessian(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    layers: str | Iterable[str] | None = None,
    forward: Forward | None = None,
    dtype: torch.dtype | None = None,
    dropout: str = "refuse",
    reduction: str = "auto",
    check: bool = True,
    seed: int = 0,
) -> HessianOperator:
    """The exact Hessian of the loss by the chosen weights (all by default), as an operator on flat vectors.

    >>> model, data = nn.Linear(2, 1, bias=False).double(), torch.eye(2, dtype=torch.float64)
    >>> hessian(model, nn.MSELoss(), (data, torch.zeros(2, 1))).to_dense()
    tensor([[1., 0.],
            [0., 1.]], dtype=torch.float64)
    """
    problem = Problem(
        model, loss, batch, layers=layers, forward=forward, dtype=dtype, dropout=dropout, reduction=reduction,
        check=check, seed=seed,
    )  # fmt: skip
    return _build(HessianOperator, problem)


def gauss_newton(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    layers: str | Iterable[str] | None = None,
    forward: Forward | None = None,
    dtype: torch.dtype | None = None,
    dropout: str = "refuse",
    reduction: str = "auto",
    check: bool = True,
    seed: int = 0,
) -> GaussNewtonOperator:
    """The Gauss-Newton matrix `Jᵀ H_z J` of the chosen weights; the arguments are those of `hessian`."""
    problem = Problem(
        model, loss, batch, layers=layers, forward=forward, dtype=dtype, dropout=dropout, reduction=reduction,
        check=check, seed=seed,
    )  # fmt: skip
    return _build(GaussNewtonOperator, problem)


def jacobian(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    layers: str | Iterable[str] | None = None,
    forward: Forward | None = None,
    dtype: torch.dtype | None = None,
    dropout: str = "refuse",
    reduction: str = "auto",
    check: bool = True,
    seed: int = 0,
) -> JacobianOperator:
    """The derivative of the model's outputs by the chosen weights, (outputs, weights).

    The loss only serves to check the problem; the outputs of several batches follow one another.
    """
    problem = Problem(
        model, loss, batch, layers=layers, forward=forward, dtype=dtype, dropout=dropout, reduction=reduction,
        check=check, seed=seed,
    )  # fmt: skip
    return _build(JacobianOperator, problem)


def _build(kind: type[Kind], problem: Problem) -> Kind:
    with problem.settings(), explained_memory(problem):
        evaluations = evaluate(problem)
        for evaluation in evaluations:
            check_loss(evaluation)
            (check_gradients if kind is HessianOperator else check_outputs)(evaluation)
        operator = kind(evaluations, list(problem.leaves))
    operator.settings = problem.settings  # a product may come at any time, under any settings of the caller
    return operator
