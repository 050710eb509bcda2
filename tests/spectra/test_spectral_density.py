from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from known_matrices import CountingOperator, eigenvalues, gram, wigner, with_spectrum

from hessinit.curvature.stochastic import spectral_density


def area(density):
    return float(np.sum(density.values) * (density.grid[1] - density.grid[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("matrix", [gram(400, 600), wigner(400)], ids=["gram", "wigner"])
def test_the_quadrature_has_the_moments_of_the_spectrum(matrix, dtype):
    truth = eigenvalues(matrix)
    density = spectral_density(matrix.to(dtype), probes=12, steps=25)
    nodes, weights = np.array(density.nodes), np.array(density.weights)
    assert abs(weights.sum() - 1) < 1e-12
    assert weights.min() >= 0
    assert np.all(np.diff(nodes) >= 0)
    norm = np.abs(truth).max()
    assert abs(density.mean.value - truth.mean()) < 4 * density.mean.error
    assert density.mean.error < 0.05 * norm
    assert abs(nodes @ weights - density.mean.value) < 1e-6 * norm
    assert abs(nodes**2 @ weights - (truth**2).mean()) < 0.05 * norm**2
    assert truth[0] - 1e-5 * norm <= nodes[0] < truth[0] + 0.02 * norm
    assert truth[-1] - 0.02 * norm < nodes[-1] <= truth[-1] + 1e-5 * norm


def test_the_curve_of_a_wigner_matrix_is_the_semicircle():
    density = spectral_density(wigner(500, seed=3), probes=10, steps=40)
    grid, values = np.array(density.grid), np.array(density.values)
    semicircle = np.sqrt(np.maximum(4 - grid**2, 0)) / (2 * math.pi)
    spacing = grid[1] - grid[0]
    assert np.abs(values - semicircle).sum() * spacing < 0.1
    assert density.error < 0.2
    assert density.converged
    inside = np.abs(grid) < 1.7
    assert np.abs(values - semicircle)[inside].max() < 4 * np.array(density.errors)[inside].max()


def test_the_mean_is_unbiased_over_seeds():
    matrix = with_spectrum([30.0, *np.linspace(-1, 2, 79)])
    truth = float(matrix.trace()) / 80
    runs = [spectral_density(matrix, probes=4, steps=10, seed=seed).mean for seed in range(100)]
    values = np.array([run.value for run in runs])
    standard_error = values.std(ddof=1) / 10
    assert abs(values.mean() - truth) < 3.5 * standard_error
    assert standard_error < 0.05 * truth


def test_the_share_of_outliers_is_right():
    matrix = with_spectrum([50.0] * 40 + list(np.linspace(-1, 1, 360)))
    density = spectral_density(matrix, probes=20)
    outliers = sum(weight for node, weight in zip(density.nodes, density.weights, strict=True) if node > 25)
    assert abs(outliers - 0.1) < 0.02


@pytest.mark.parametrize("axis", ["linear", "log"])
@pytest.mark.parametrize("size", [60, 400])
def test_the_curve_has_area_one_on_both_axes(axis, size):
    density = spectral_density(with_spectrum(10.0 ** -np.linspace(0, 6, size)), axis=axis)
    assert abs(area(density) - 1) < 1e-3


def test_the_log_axis_shows_decades_that_the_linear_one_hides():
    # Evenly spread over six decades: 1/6 per decade.
    density = spectral_density(with_spectrum(1e-20 * 10.0 ** -np.linspace(0, 6, 200)), axis="log")
    grid, values = np.array(density.grid), np.array(density.values)
    middle = (grid > -25.3) & (grid < -20.7)
    assert middle.sum() > 100
    assert np.abs(values[middle] - 1 / 6).max() < 0.01


def test_a_small_operator_is_written_out_and_exact():
    operator = CountingOperator(wigner(100))
    density = spectral_density(operator)
    assert density.products == operator.products == 100
    assert np.allclose(density.nodes, eigenvalues(operator.matrix), atol=1e-14)
    assert density.error == 0
    assert density.converged
    assert set(density.weights) == {0.01}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_tiny_operators_have_their_eigenvalues_as_nodes(size):
    matrix = wigner(size)
    assert np.allclose(spectral_density(matrix).nodes, eigenvalues(matrix), atol=1e-15)


def test_a_point_mass_has_nodes_but_no_curve():
    density = spectral_density(3 * torch.eye(500))
    assert np.allclose(density.nodes, 3, rtol=1e-6)
    assert (density.grid, density.values, density.errors) == ((), (), ())
    assert density.products == 8


def test_products_are_counted_and_probes_that_disagree_are_said_to():
    operator = CountingOperator(wigner(300))
    density = spectral_density(operator, probes=5, steps=20, width=0.008)
    assert density.products == operator.products == 100
    assert (density.probes, density.steps) == (5, 20)
    assert not density.converged
    assert "raise probes, width or tolerance" in density.reason


def test_results_are_plain_numbers_with_the_same_bits_for_the_same_seed():
    matrix = wigner(300).float()
    first, again = (spectral_density(matrix, probes=3, steps=8, seed=2) for _ in range(2))
    assert first == again
    assert first != spectral_density(matrix, probes=3, steps=8, seed=3)
    assert json.loads(json.dumps(asdict(first)))["nodes"] == list(first.nodes)
    assert replace(first, axis="log") != first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"axis": "symlog"}, "axis='symlog' is unknown; choose from 'linear', 'log'"),
        ({"probes": 1}, "probes=1 is too few: one probe has no spread"),
        ({"steps": 1}, "steps=1 is too few: one step sees only the mean eigenvalue"),
        ({"bins": 4}, "bins=4 is too few: a curve needs more points. Pass bins=16 or more"),
        ({"width": 0.001}, "width=0.001 does not fit bins=256: .* Pass a larger width or more bins"),
    ],
)
def test_bad_arguments_are_answered_with_the_rule_and_the_way_out(arguments, message):
    with pytest.raises(ValueError, match=message):
        spectral_density(torch.eye(3), **arguments)
