from __future__ import annotations

import numpy as np
import pytest
import torch
from known_matrices import eigenvalues, gaussian_matrix, gram, wigner, with_spectrum

from hessinit.curvature.krylov import LanczosProcess


def run(process, steps):
    while not process.exhausted and process.steps < steps:
        process.step()
    return process


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_basis_stays_orthonormal_where_plain_lanczos_would_lose_it(dtype):
    # One eigenvalue converges within a few steps; without reorthogonalization its ghosts appear soon after.
    matrix = with_spectrum([100.0, *np.linspace(0, 1, 199)]).to(dtype)
    process = run(LanczosProcess(matrix, gaussian_matrix(200, 1)[:, 0].to(dtype)), 80)
    basis = process.ritz_vectors(np.eye(80)).double()
    departure = (basis.T @ basis - torch.eye(80, dtype=torch.float64)).abs().max()
    assert departure < 20 * torch.finfo(dtype).eps
    values, _ = process.ritz()
    assert (values * process.scale > 2).sum() == 1


def test_as_many_steps_as_dimensions_give_the_whole_spectrum():
    matrix = wigner(60)
    process = run(LanczosProcess(matrix, gaussian_matrix(60, 1)[:, 0]), 60)
    values, _ = process.ritz()
    assert process.exhausted
    assert np.abs(values * process.scale - eigenvalues(matrix)).max() < 1e-13


def test_the_residual_from_the_small_matrix_is_the_residual_of_the_large_one():
    matrix = gram(80, 100)
    process = run(LanczosProcess(matrix, gaussian_matrix(80, 1)[:, 0]), 12)
    values, small = process.ritz()
    vectors = process.ritz_vectors(small)
    measured = torch.linalg.vector_norm(
        matrix @ vectors - vectors * torch.from_numpy(values * process.scale), dim=0
    )
    assert np.allclose(process.residuals(small) * process.scale, measured.numpy(), atol=1e-13)


def test_a_locked_eigenvector_is_not_found_again():
    matrix = torch.diag(torch.arange(1.0, 31.0, dtype=torch.float64))
    locked = torch.zeros(30, 1, dtype=torch.float64)
    locked[29] = 1
    process = run(LanczosProcess(matrix, gaussian_matrix(30, 1)[:, 0], locked), 30)
    assert process.steps == 29
    values, small = process.ritz()
    assert abs(values[-1] * process.scale - 29) < 1e-12
    assert process.ritz_vectors(small)[29].abs().max() < 1e-14


def test_an_invariant_space_ends_the_iteration():
    process = run(LanczosProcess(with_spectrum([1.0] * 10 + [4.0] * 15), gaussian_matrix(25, 1)[:, 0]), 25)
    assert process.exhausted
    assert process.steps == 2


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_a_start_without_a_direction_is_refused(bad):
    with pytest.raises(ValueError, match="the initial vector is zero or not finite; pass any other vector"):
        LanczosProcess(torch.eye(3), torch.full((3,), bad))
