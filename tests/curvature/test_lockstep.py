"""Several Lanczos runs in lockstep give what each gives alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hessinit.curvature.lanczos import lanczos, lockstep_tops


def semidefinite(size: int, rank: int | None = None) -> Tensor:
    root = torch.randn(size, rank or size, dtype=torch.float64)
    return root @ root.T


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 40, 70])
def test_each_value_is_the_true_one_whatever_runs_beside_it(size: int) -> None:
    matrices = [
        semidefinite(size),
        torch.zeros(size, size, dtype=torch.float64),
        torch.eye(size, dtype=torch.float64),
        semidefinite(size, 1),
        semidefinite(size) * 1e-30,
        semidefinite(size) * 1e30,
    ]
    for matrix, top in zip(matrices, lockstep_tops(matrices), strict=True):
        truth = float(torch.linalg.eigvalsh(matrix)[-1])
        alone = lanczos(matrix, which="top").top
        assert top.converged
        assert alone.converged
        assert abs(top.value - truth) <= top.error
        assert top.error <= 1.1e-3 * truth
        assert top.value == pytest.approx(alone.value, rel=1e-3)


def test_powers_of_two_change_no_bit_but_the_scale() -> None:
    matrix = semidefinite(20)
    plain, small = lockstep_tops([matrix, matrix * 2.0**-80])
    assert small.value == plain.value * 2.0**-80
    assert small.products == plain.products


class Breaking:
    """Products of a matrix, until one of them holds a value that is no number."""

    def __init__(self, matrix: Tensor, at: int, value: float) -> None:
        self.matrix, self.at, self.value = matrix, at, value
        self.shape, self.dtype, self.device = matrix.shape, matrix.dtype, matrix.device
        self.products = 0

    def __matmul__(self, vector: Tensor) -> Tensor:
        self.products += 1
        product = self.matrix @ vector
        if self.products >= self.at:
            product[0] = self.value
        return product


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("at", [1, 2, 4, 6])
def test_a_product_that_is_not_finite_gives_inf_and_leaves_the_others_alone(at: int, value: float) -> None:
    matrices = [semidefinite(40), semidefinite(40)]
    first, broken, second = lockstep_tops([matrices[0], Breaking(semidefinite(40), at, value), matrices[1]])
    assert broken.value == math.inf
    assert not broken.converged
    assert f"product {at} was not finite" in broken.reason
    for matrix, top in zip(matrices, (first, second), strict=True):
        truth = float(torch.linalg.eigvalsh(matrix)[-1])
        assert abs(top.value - truth) <= top.error


def test_too_few_steps_are_admitted() -> None:
    (top,) = lockstep_tops([semidefinite(50)], max_iterations=3)
    assert not top.converged
    assert top.products == 3
    assert "max_iterations=3" in top.reason
