from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from known_matrices import CountingOperator, gram, wigner, with_spectrum

from hessinit.curvature.stochastic import hutch_plus_plus, hutchinson

ESTIMATORS = {
    "hutchinson": lambda matrix, products, seed=0: hutchinson(matrix, probes=products, seed=seed),
    "hutch++": lambda matrix, products, seed=0: hutch_plus_plus(matrix, products=products, seed=seed),
}


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_trace_is_within_its_error_and_the_error_is_small(name, dtype):
    matrix = gram(300, 300).to(dtype)
    estimate = ESTIMATORS[name](matrix, 60)
    truth = float(matrix.double().trace())
    assert abs(estimate.value - truth) < 4 * estimate.error
    assert estimate.error < 0.05 * truth
    assert estimate.converged
    assert estimate.products == 60


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_mean_over_seeds_is_the_trace_and_the_error_is_two_standard_errors(name):
    matrix = with_spectrum([10.0, -6.0, *np.linspace(-1, 2, 78)])
    truth = float(matrix.trace())
    runs = [ESTIMATORS[name](matrix, 30, seed) for seed in range(300)]
    values = np.array([run.value for run in runs])
    standard_error = values.std(ddof=1) / math.sqrt(len(runs))
    assert abs(values.mean() - truth) < 3.5 * standard_error
    assert standard_error < 0.05 * truth
    covered = np.mean([abs(run.value - truth) <= run.error for run in runs])
    assert 0.85 < covered < 0.99


def test_hutch_plus_plus_beats_hutchinson_on_a_decaying_spectrum():
    matrix = with_spectrum(1.0 / np.arange(1, 301) ** 2)
    truth = float(matrix.trace())

    def typical_miss(estimate):
        return np.sqrt(np.mean([(estimate(matrix, 30, seed).value - truth) ** 2 for seed in range(30)]))

    assert typical_miss(ESTIMATORS["hutch++"]) < 0.1 * typical_miss(ESTIMATORS["hutchinson"])


def test_hutch_plus_plus_is_exact_on_low_rank():
    matrix = gram(200, 5)
    estimate = hutch_plus_plus(matrix, products=18)
    assert abs(estimate.value / float(matrix.trace()) - 1) < 1e-13
    assert estimate.error < 1e-12 * estimate.value


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("size", [1, 2, 3, 70])
def test_enough_products_read_the_diagonal_off_exactly(name, size):
    operator = CountingOperator(wigner(size))
    estimate = ESTIMATORS[name](operator, max(6, size))
    assert abs(estimate.value - float(operator.matrix.trace())) <= estimate.error < 1e-12
    assert estimate.products == operator.products == size


def test_a_tolerance_stops_early_or_says_what_to_do():
    operator = CountingOperator(gram(400, 800))
    loose = hutchinson(operator, probes=300, tolerance=0.05)
    assert loose.converged
    assert loose.products == operator.products < 300
    assert loose.error <= 0.05 * loose.value
    tight = hutchinson(operator, probes=16, tolerance=1e-6)
    assert not tight.converged
    assert tight.products == 16
    assert tight.reason.startswith("stopped at probes=16 with error")
    assert tight.reason.endswith("raise probes or tolerance, or use hutch_plus_plus")


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_same_seed_gives_the_same_bits(name):
    matrix = wigner(100).float()
    assert ESTIMATORS[name](matrix, 12, 3) == ESTIMATORS[name](matrix, 12, 3)
    assert ESTIMATORS[name](matrix, 12, 3).value != ESTIMATORS[name](matrix, 12, 4).value


def test_too_few_products_are_refused():
    with pytest.raises(ValueError, match="probes=1 is too few: one probe has no spread"):
        hutchinson(torch.eye(3), probes=1)
    with pytest.raises(ValueError, match="products=5 is too few: .* Pass products=6 or more"):
        hutch_plus_plus(torch.eye(3), products=5)
    with pytest.raises(ValueError, match="tolerance=-1 is out of range"):
        hutchinson(torch.eye(3), probes=2, tolerance=-1)
