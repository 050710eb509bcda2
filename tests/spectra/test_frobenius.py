from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from known_matrices import CountingOperator, gram, wigner, with_spectrum

from hessinit.curvature.stochastic import frobenius_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("matrix", [gram(300, 600), wigner(300)], ids=["gram", "wigner"])
def test_the_norm_is_within_its_error_and_the_error_is_small(matrix, dtype):
    estimate = frobenius_norm(matrix.to(dtype), products=64)
    truth = float(torch.linalg.matrix_norm(matrix))
    assert abs(estimate.value - truth) < 4 * estimate.error
    assert estimate.error < 0.05 * truth
    assert estimate.products == 64


def test_the_square_is_unbiased_over_seeds_and_the_error_is_two_standard_errors():
    matrix = with_spectrum([4.0, -3.0, *np.linspace(-1, 1, 78)])
    truth = float(matrix.square().sum())
    runs = [frobenius_norm(matrix, products=30, seed=seed) for seed in range(300)]
    squares = np.array([run.value**2 for run in runs])
    standard_error = squares.std(ddof=1) / math.sqrt(len(runs))
    assert abs(squares.mean() - truth) < 3.5 * standard_error
    assert standard_error < 0.05 * truth
    covered = np.mean([abs(run.value - math.sqrt(truth)) <= run.error for run in runs])
    assert 0.85 < covered < 0.99


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_enough_products_take_every_column_exactly(size):
    operator = CountingOperator(wigner(size))
    estimate = frobenius_norm(operator, products=100)
    truth = float(torch.linalg.matrix_norm(operator.matrix))
    assert abs(estimate.value - truth) <= estimate.error < 1e-13 * (1 + truth) * 10
    assert estimate.products == operator.products == size


def test_rank_one_is_the_length_squared():
    vector = torch.arange(1.0, 201.0, dtype=torch.float64)
    estimate = frobenius_norm(torch.outer(vector, vector), products=200)
    assert abs(estimate.value / float(vector @ vector) - 1) < 1e-14


def test_the_same_seed_gives_the_same_bits():
    matrix = wigner(100).float()
    assert frobenius_norm(matrix, products=10, seed=3) == frobenius_norm(matrix, products=10, seed=3)
    assert frobenius_norm(matrix, products=10, seed=3) != frobenius_norm(matrix, products=10, seed=4)


def test_too_few_products_are_refused():
    with pytest.raises(ValueError, match="products=1 is too few: one product has no spread"):
        frobenius_norm(torch.eye(3), products=1)
