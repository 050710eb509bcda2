from __future__ import annotations

import numpy as np
import pytest
import torch
from known_matrices import CountingOperator, eigenvalues, gaussian_matrix, gram, wigner, with_spectrum
from scipy.sparse.linalg import eigsh

from hessinit.spectra.lanczos import lanczos

KNOWN = {
    "diagonal": torch.diag(torch.linspace(-1.0, 2.0, 300, dtype=torch.float64)),
    "negative": -gram(200, 400),
    "gram": gram(200, 400),
    "low rank": gram(300, 4),
    "wigner": wigner(300),
    "repeated ends": with_spectrum([3.0] * 5 + [-2.0] * 7 + list(np.linspace(-1, 1, 100))),
    "decades": with_spectrum(10.0 ** -np.linspace(0, 12, 200)),
    "nearly symmetric": with_spectrum([1.0, -0.9999, *np.linspace(-0.6, 0.6, 200)]),
    "symmetric": with_spectrum([1.0, -1.0, *np.linspace(-0.99, 0.99, 150)]),
    "rank one": torch.ones(100, 100, dtype=torch.float64),
    "identity": 3 * torch.eye(40, dtype=torch.float64),
    "size 1": torch.tensor([[-2.5]], dtype=torch.float64),
    "size 2": torch.tensor([[1.0, 2.0], [2.0, -3.0]], dtype=torch.float64),
    "size 3": torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]], dtype=torch.float64),
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float64, 1e-8)])
def test_both_ends_are_right_to_the_tolerance_and_the_error_covers_them(name, dtype, tolerance):
    matrix = KNOWN[name].to(dtype)
    truth = eigenvalues(matrix)
    norm = np.abs(truth).max()
    extremes = lanczos(matrix, tolerance=tolerance, max_steps=300)
    for estimate, true in ((extremes.top, truth[-1]), (extremes.bottom, truth[0]), (extremes.norm, norm)):
        assert estimate.converged, estimate.reason
        # eigvalsh itself is exact to a few units in the last place of fp64.
        assert abs(estimate.value - true) <= min(estimate.error, tolerance * norm) + 1e-14 * norm
        assert estimate.error <= 1.01 * tolerance * norm
        assert estimate.products == extremes.steps == len(extremes.ritz)


def test_the_answer_is_that_of_scipy():
    matrix = wigner(400, seed=5)
    low, high = eigsh(matrix.numpy(), k=2, which="BE", return_eigenvectors=False)
    extremes = lanczos(matrix, tolerance=1e-10, max_steps=400)
    assert abs(extremes.top.value - high) < 1e-10
    assert abs(extremes.bottom.value - low) < 1e-10


def test_a_nearly_symmetric_spectrum_is_right_in_fifteen_steps_where_power_iteration_is_not():
    matrix = with_spectrum([1.0, -0.9999, *np.linspace(-0.6, 0.6, 400)])
    vector = gaussian_matrix(402, 1)[:, 0]
    for _ in range(15):
        vector = matrix @ vector / torch.linalg.vector_norm(matrix @ vector)
    assert abs(float(vector @ (matrix @ vector))) < 0.98
    extremes = lanczos(matrix, max_steps=15)
    assert abs(extremes.top.value - 1) < 1e-3
    assert abs(extremes.bottom.value + 0.9999) < 1e-3


def test_clustered_ends_are_within_error_and_tolerance_nearly_always():
    # Counted by taking the other rules of RitzEnd out: stopping by the Kato–Temple bound alone leaves 71 of
    # these outside the tolerance, and reporting it as the error would be wrong for 74.
    random = np.random.default_rng(2)
    outside_error = outside_tolerance = 0
    for trial in range(150):
        size = int(random.integers(20, 300))
        cluster = 1 - random.random(max(2, size // 4)) * 10.0 ** random.uniform(-4, -1)
        values = np.concatenate([cluster, random.random(size) * 0.5, [-0.8]])
        top = lanczos(torch.diag(torch.from_numpy(values)), ends="top", seed=trial).top
        assert top.converged
        outside_error += abs(top.value - values.max()) > top.error
        outside_tolerance += abs(top.value - values.max()) > 1e-3
    assert outside_error <= 9
    assert outside_tolerance <= 7


def test_only_the_top_is_cheaper_and_leaves_the_bottom_open():
    matrix = gram(300, 300)
    both, top = lanczos(matrix), lanczos(matrix, ends="top")
    assert top.steps < both.steps
    assert top.bottom is None
    assert top.norm == top.top
    assert abs(top.top.value - eigenvalues(matrix)[-1]) <= top.top.error


def test_the_norm_is_honest_when_the_bottom_that_nobody_asked_for_is_larger():
    extremes = lanczos(with_spectrum([1.0, -5.0, *np.linspace(-0.1, 0.1, 50)]), ends="top")
    assert abs(extremes.top.value - 1) < 5e-3
    assert abs(extremes.norm.value - 5) <= extremes.norm.error


def test_vectors_are_unit_eigenvectors():
    matrix = wigner(150)
    extremes = lanczos(matrix, tolerance=1e-10, vectors=True)
    for vector, estimate in ((extremes.top_vector, extremes.top), (extremes.bottom_vector, extremes.bottom)):
        assert abs(torch.linalg.vector_norm(vector) - 1) < 1e-14
        assert (
            torch.linalg.vector_norm(matrix @ vector - estimate.value * vector) < 1e-5 * extremes.norm.value
        )
    without = lanczos(matrix)
    assert without.top_vector is None
    assert without.bottom_vector is None


def test_the_same_seed_gives_the_same_bits():
    matrix = wigner(200).float()
    first, again = lanczos(matrix, seed=7, vectors=True), lanczos(matrix, seed=7, vectors=True)
    assert first.ritz == again.ritz
    assert torch.equal(first.top_vector, again.top_vector)
    assert first.ritz != lanczos(matrix, seed=8).ritz


def test_running_out_of_steps_is_a_value_with_a_way_out():
    extremes = lanczos(wigner(300), tolerance=1e-10, max_steps=8)
    assert not extremes.top.converged
    assert extremes.steps == extremes.top.products == 8
    assert extremes.top.reason.startswith("stopped at max_steps=8 with residual")
    assert extremes.top.reason.endswith("of the norm; raise max_steps or tolerance")
    assert abs(extremes.top.value - eigenvalues(wigner(300))[-1]) <= extremes.top.error


def test_a_tolerance_below_rounding_is_not_called_converged():
    extremes = lanczos(wigner(50).float(), tolerance=1e-9)
    assert not extremes.top.converged
    assert "below the rounding level 1e-06 of torch.float32" in extremes.top.reason


def test_products_and_progress_are_counted():
    operator, seen = CountingOperator(wigner(100)), []
    extremes = lanczos(operator, on_step=seen.append)
    assert seen == list(range(1, extremes.steps + 1))
    assert operator.products == extremes.steps


def test_a_good_guess_saves_steps_and_a_misleading_one_does_not_mislead():
    matrix = with_spectrum([2.0, 1.9, 1.8, *np.linspace(0, 1.5, 300)])
    values, vectors = torch.linalg.eigh(matrix)
    cold = lanczos(matrix, ends="top")
    warm = lanczos(matrix, ends="top", start=1e-12 * vectors[:, -1])
    assert warm.steps < cold.steps
    misled = lanczos(matrix, ends="top", start=vectors[:, -2], tolerance=1e-6)
    assert abs(misled.top.value - values[-1]) <= misled.top.error


def test_an_operator_that_tracks_gradients_is_only_read():
    matrix = wigner(20).requires_grad_()
    extremes = lanczos(matrix, vectors=True)
    assert not extremes.top_vector.requires_grad
    assert matrix.grad is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ends": "bottom"}, "ends='bottom' is unknown; choose from 'both', 'top'"),
        ({"tolerance": 0.0}, "tolerance=0.0 is out of range; it is a relative error between 0 and 1"),
        ({"tolerance": float("nan")}, "tolerance=nan is out of range"),
        ({"max_steps": 0}, "max_steps=0 is too few: every step is one product. Pass max_steps=1 or more"),
        ({"start": torch.ones(4)}, r"start has shape \(4,\); this operator takes vectors of shape \(3,\)"),
        ({"start": torch.zeros(3)}, "start is zero or not finite; pass any other vector, or None"),
    ],
)
def test_bad_arguments_are_answered_with_the_rule_and_the_way_out(arguments, message):
    with pytest.raises(ValueError, match=message):
        lanczos(torch.eye(3), **arguments)


@pytest.mark.parametrize("shape", [(3, 2), (0, 0), (2, 2, 2)])
def test_an_operator_that_is_not_square_is_refused(shape):
    with pytest.raises(ValueError, match=r"shape .*; spectra need a square, non-empty one"):
        lanczos(torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.complex64])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(TypeError, match=f"dtype {dtype}; spectra need torch.float32 or torch.float64"):
        lanczos(torch.eye(2).to(dtype))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_operator_gives_the_answer_of_the_cpu():
    matrix = wigner(300)
    here, there = lanczos(matrix, tolerance=1e-8), lanczos(matrix.cuda(), tolerance=1e-8, vectors=True)
    assert abs(here.top.value - there.top.value) < 1e-12
    assert there.top_vector.is_cuda
