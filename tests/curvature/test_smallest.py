"""The smallest eigenvalue of a matrix that is written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hessinit.curvature.lanczos import smallest_eigenvalue


def with_spectrum(values: list[float], dtype: torch.dtype) -> Tensor:
    basis, _ = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64))
    return ((basis * torch.tensor(values, dtype=torch.float64)) @ basis.T).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "values",
    [
        [3.0],
        [0.5, 2.0],
        [1.0, 1.0, 1.0],
        [1e-3, 1.0, 5.0, 9.0],
        [1e-12, 1e-6, 1.0],
        [0.0, 1.0, 2.0],
        [0.0, 0.0, 4.0],
    ],
)
def test_it_is_right_to_its_error(values: list[float], dtype: torch.dtype) -> None:
    found = smallest_eigenvalue(with_spectrum(values, dtype))
    assert found.converged
    assert abs(found.value - values[0]) <= found.error + 1e-3 * values[0]
    assert found.error <= 1e-3 * values[0] + 100 * torch.finfo(dtype).eps * values[-1]


def test_a_matrix_of_zeros_has_zero() -> None:
    assert smallest_eigenvalue(torch.zeros(3, 3)).value == 0.0


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_matrix_that_is_not_finite_has_no_smallest_eigenvalue(value: float) -> None:
    matrix = torch.eye(3)
    matrix[1, 1] = value
    found = smallest_eigenvalue(matrix)
    assert not found.converged
    assert found.error == math.inf
    assert "not finite" in found.reason
