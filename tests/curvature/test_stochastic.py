"""Trace, Frobenius norm and spectral density against known spectra, and their random probes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from known_matrices import CountingOperator, eigenvalues, gram, wigner, with_spectrum

from hessinit.curvature.krylov import ProbeStream
from hessinit.curvature.stochastic import frobenius_norm, hutch_plus_plus, spectral_density

ESTIMATORS = {
    "trace": (hutch_plus_plus, lambda matrix: float(matrix.double().trace())),
    "frobenius": (frobenius_norm, lambda matrix: float(torch.linalg.matrix_norm(matrix.double()))),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_mean_over_seeds_is_the_truth_and_the_error_is_two_standard_errors(name):
    matrix = with_spectrum([10.0, -6.0, *np.linspace(-1, 2, 78)])
    estimator, true = ESTIMATORS[name]
    power = 2 if name == "frobenius" else 1  # the square of the norm is unbiased
    runs = [estimator(matrix, products=30, seed=seed) for seed in range(150)]
    values = np.array([run.value for run in runs]) ** power
    truth = true(matrix) ** power
    standard_error = values.std(ddof=1) / math.sqrt(len(runs))
    assert abs(values.mean() - truth) < 3.5 * standard_error
    assert standard_error < 0.05 * truth
    assert runs[0] == estimator(matrix, products=30, seed=0)
    assert (runs[0].products, runs[0].converged) == (30, True)
    covered = np.mean([abs(run.value - true(matrix)) <= run.error for run in runs])
    assert 0.85 < covered < 0.99


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("size", [1, 2, 3, 70])
def test_enough_products_are_exact(name, size):
    estimator, true = ESTIMATORS[name]
    operator = CountingOperator(wigner(size))
    estimate = estimator(operator, products=max(6, size))
    assert abs(estimate.value - true(operator.matrix)) <= estimate.error < 1e-12
    assert estimate.products == operator.products == size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("matrix", [gram(400, 600), wigner(400)], ids=["gram", "wigner"])
def test_the_quadrature_has_the_moments_of_the_spectrum(matrix, dtype):
    truth = eigenvalues(matrix)
    density = spectral_density(matrix.to(dtype), probes=12, steps=25)
    nodes = np.array(density.nodes)
    weights = np.array(density.weights)
    norm = np.abs(truth).max()
    assert abs(weights.sum() - 1) < 1e-12
    assert weights.min() >= 0
    assert np.all(np.diff(nodes) >= 0)
    assert abs(nodes @ weights - truth.mean()) < 0.05 * norm
    assert abs(nodes**2 @ weights - (truth**2).mean()) < 0.05 * norm**2
    assert truth[0] - 1e-5 * norm <= nodes[0] < truth[0] + 0.02 * norm
    assert truth[-1] - 0.02 * norm < nodes[-1] <= truth[-1] + 1e-5 * norm


def test_the_curve_of_a_wigner_matrix_is_the_semicircle():
    density = spectral_density(wigner(500, seed=3), probes=10, steps=40)
    grid = np.array(density.grid)
    values = np.array(density.values)
    semicircle = np.sqrt(np.maximum(4 - grid**2, 0)) / (2 * math.pi)
    spacing = grid[1] - grid[0]
    assert abs(values.sum() * spacing - 1) < 1e-3
    assert np.abs(values - semicircle).sum() * spacing < 0.1
    assert 0 < density.error < 0.2


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_small_operator_is_written_out_and_exact(size):
    operator = CountingOperator(wigner(size))
    density = spectral_density(operator)
    assert operator.products == size
    assert np.allclose(density.nodes, eigenvalues(operator.matrix), atol=1e-14)
    assert density.error == 0
    assert set(density.weights) == {1 / size}


def test_a_point_mass_has_no_curve_and_the_seed_fixes_the_bits():
    density = spectral_density(3 * torch.eye(500))
    assert np.allclose(density.nodes, 3, rtol=1e-6)
    assert (density.grid, density.values) == ((), ())
    operator = CountingOperator(wigner(300).float())
    first = spectral_density(operator, probes=3, steps=8, seed=2)
    assert (operator.products, first.probes, first.steps) == (24, 3, 8)
    assert first == spectral_density(operator.matrix, probes=3, steps=8, seed=2)
    assert first != spectral_density(operator.matrix, probes=3, steps=8, seed=3)


@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_probes_depend_on_the_seed_alone_and_have_unit_variance(kind):
    before = torch.get_rng_state()
    first, again = (ProbeStream(1000, seed=3, kind=kind).draw_block(2) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert torch.equal(first[:, :1], ProbeStream(1000, seed=3, kind=kind).draw_block(1))
    assert not torch.equal(first, ProbeStream(1000, seed=4, kind=kind).draw_block(2))
    assert not torch.equal(first[:, 0], first[:, 1])
    long = ProbeStream(100_000, seed=0, kind=kind, dtype=torch.float64).draw()
    assert abs(long.mean()) < 0.02
    assert abs(long.var() - 1) < 0.02
    assert kind == "gaussian" or sorted(long.unique().tolist()) == [-1.0, 1.0]


@pytest.mark.parametrize("seed", [0, 42, -7, 2**63])
def test_probes_are_not_the_numbers_that_the_user_drew_from_the_same_seed(seed):
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(seed))
    probe = ProbeStream(1000, seed=seed).draw()
    cosine = torch.nn.functional.cosine_similarity(weights, probe, dim=0)
    assert abs(cosine) < 0.15
