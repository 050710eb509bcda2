"""Many largest singular values at once, against dense ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hessinit.curvature.singular_values import BatchedMap, SingularValues, largest_singular_values

SHAPES = [(5, 7, 3), (4, 3, 7), (3, 1, 9), (2, 40, 40), (1, 30, 50)]


def found(matrices: Tensor, **settings: Any) -> SingularValues:
    return largest_singular_values(BatchedMap.of(matrices), **{"dtype": matrices.dtype, **settings})


def true_norms(matrices: Tensor) -> Any:
    return torch.linalg.matrix_norm(matrices.double(), 2).numpy()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norms_are_right_within_their_errors(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    matrices = torch.randn(*shape, dtype=dtype)
    answer, truth = found(matrices), true_norms(matrices)
    assert answer.converged
    assert (np.abs(answer.values - truth) <= answer.errors).all()
    assert (answer.errors <= 2e-3 * truth).all()
    assert (answer.upper >= truth).all()


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_examples_of_very_different_size_do_not_disturb_each_other(scale: float) -> None:
    matrices = torch.randn(4, 20, 30)
    scaled = matrices.clone()
    scaled[1] *= scale
    one, other = found(matrices), found(scaled)
    assert other.converged
    assert other.values[[0, 2, 3]] == pytest.approx(one.values[[0, 2, 3]], rel=1e-5)
    assert other.values[1] == pytest.approx(one.values[1] * scale, rel=1e-3)


def test_zero_and_rank_one_matrices_are_exact_and_others_go_on() -> None:
    matrices = torch.randn(3, 12, 15, dtype=torch.float64)
    matrices[0] = 0
    matrices[1] = torch.outer(torch.arange(12.0), torch.arange(15.0))
    answer, truth = found(matrices, tolerance=1e-8), true_norms(matrices)
    assert answer.values[0] == answer.errors[0] == 0
    assert answer.values == pytest.approx(truth, rel=1e-8)


def test_a_crowded_top_is_within_its_error() -> None:
    orthogonal = torch.linalg.qr(torch.randn(60, 60, dtype=torch.float64))[0]
    matrices = (orthogonal * torch.linspace(0.99, 1.0, 60, dtype=torch.float64)).unsqueeze(0)
    answer = found(matrices)
    assert abs(answer.values[0] - 1) <= answer.errors[0] <= 2e-3


def test_stopping_early_is_said_and_the_residual_is_the_error() -> None:
    matrices = torch.randn(3, 80, 90)
    answer = found(matrices, max_iterations=4, tolerance=1e-6)
    assert not answer.converged
    assert answer.reason == "stopped at max_iterations=4 in 3 examples; raise it or tolerance"
    assert answer.products == 8
    assert (answer.errors > 1e-3).all()


def test_what_is_not_finite_is_too_large_and_never_zero() -> None:
    matrices = torch.randn(3, 5, 6)
    matrices[1, 0, 0] = math.nan
    answer = found(matrices)
    assert answer.values[1] == math.inf
    assert not answer.converged
    assert "not finite" in answer.reason
    assert np.isfinite(answer.values[[0, 2]]).all()


def test_a_tolerance_below_rounding_is_not_claimed() -> None:
    answer = found(torch.randn(2, 3, 4), tolerance=1e-9)
    assert not answer.converged
    assert "below the rounding level" in answer.reason
