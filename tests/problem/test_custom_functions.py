"""Custom autograd functions: measured when their backward can be differentiated, refused when it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import hessinit


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


class OnceCube(Cube):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


class Network(nn.Module):
    def __init__(self, cube: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cube = cube
        self.first, self.last = nn.Linear(5, 4).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cube(self.first(x)))


LOSS = nn.CrossEntropyLoss()
NEEDS_TWO: dict[str, Any] = {
    "the exact Hessian": lambda model, batch: hessinit.measure(model, LOSS, batch, curvature="hessian"),
    "Lanczos": lambda model, batch: hessinit.measure(model, LOSS, batch, estimator="lanczos"),
    "Jacobian products": lambda model, batch: hessinit.measure(model, LOSS, batch, jacobians=True),
    "quadratic forms": lambda model, batch: hessinit.quadratic_form(model, LOSS, batch),
    "a Hessian product": lambda model, batch: hessinit.hessian(model, LOSS, batch) @ torch.ones(32).double(),
    "a Gauss-Newton product": lambda model, batch: hessinit.gauss_newton(model, LOSS, batch).to_dense(),
}


def some_batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(6, 5).double(), torch.randint(3, (6,))


@pytest.mark.parametrize("what", NEEDS_TWO)
def test_a_backward_that_cannot_be_differentiated_is_refused_by_name(what: str) -> None:
    with pytest.raises(
        hessinit.ProblemError,
        match="the backward of OnceCube is not the derivative of its forward, or cannot be differentiated",
    ):
        NEEDS_TWO[what](Network(OnceCube.apply), some_batch())


@pytest.mark.parametrize("what", NEEDS_TWO)
def test_a_backward_that_can_is_not(what: str) -> None:
    assert NEEDS_TWO[what](Network(Cube.apply), some_batch()) is not None


def test_the_gram_engine_needs_one_derivative_only() -> None:
    truth = hessinit.measure(Network(lambda x: x**3), LOSS, some_batch())
    report = hessinit.measure(Network(OnceCube.apply), LOSS, some_batch())
    assert report["first"].norm == pytest.approx(truth["first"].norm, rel=1e-6)


def test_an_exact_hessian_through_a_custom_function_is_right() -> None:
    options = {"curvature": "hessian", "tolerance": 1e-8}
    truth = hessinit.measure(Network(lambda x: x**3), LOSS, some_batch(), **options)
    report = hessinit.measure(Network(Cube.apply), LOSS, some_batch(), **options)
    assert report["first"].norm == pytest.approx(truth["first"].norm, rel=1e-6)
