from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from known_matrices import CountingOperator, eigenvalues, wigner, with_spectrum

from hessinit.curvature.eigenpairs import top_eigenpairs
from hessinit.curvature.lanczos import lanczos
from hessinit.curvature.stochastic import frobenius_norm, hutch_plus_plus, spectral_density

SCALES = [(torch.float64, factor) for factor in (1e-30, 1e-12, 1e12, 1e30)]
SCALES += [(torch.float32, factor) for factor in (1e-25, 1e-12, 1e12, 1e25)]


def estimates_of(matrix):
    extremes = lanczos(matrix)
    yield from (extremes.top, extremes.bottom, extremes.norm)
    yield from top_eigenpairs(matrix, 3).values
    yield hutch_plus_plus(matrix, products=20)
    yield frobenius_norm(matrix, products=20)
    yield frobenius_norm(matrix, products=200)


@pytest.mark.parametrize(("dtype", "factor"), SCALES)
def test_every_estimate_scales_with_the_operator(dtype, factor):
    matrix = with_spectrum([5.0, 4.0, -4.9, *np.linspace(-1, 2, 117)]).to(dtype)
    for plain, scaled in zip(estimates_of(matrix), estimates_of(matrix * factor), strict=True):
        # The factor is no power of two, so the entries are rounded anew; nothing else may differ.
        bound = 50 * torch.finfo(dtype).eps * (abs(plain.value) + 5)
        assert abs(scaled.value / factor - plain.value) <= bound
        assert abs(scaled.error / factor - plain.error) <= bound + 1e-3 * plain.error
        assert scaled.converged == plain.converged
        assert scaled.products == plain.products


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_power_of_two_changes_no_bit(dtype):
    matrix = wigner(120).to(dtype)
    plain, scaled = lanczos(matrix), lanczos(matrix * 2.0**-70)
    assert [value * 2.0**-70 for value in plain.ritz] == list(scaled.ritz)


def test_subnormal_and_huge_fp32_entries_do_not_end_in_zero_or_inf():
    matrix = torch.diag(torch.linspace(-1.0, 2.0, 60))
    for factor in (1e-41, 1e38):
        extremes = lanczos(matrix * factor)
        assert abs(extremes.top.value / (2 * factor) - 1) < 5e-3


@pytest.mark.parametrize("size", [1, 2, 50])
def test_the_zero_operator_is_exactly_zero(size):
    zero = torch.zeros(size, size)
    extremes = lanczos(zero)
    for estimate in (extremes.top, extremes.bottom, extremes.norm):
        assert (estimate.value, estimate.error, estimate.converged, estimate.products) == (0.0, 0.0, True, 1)
        assert estimate.reason == "the operator is zero on a random vector"
    pairs = top_eigenpairs(zero, size)
    assert all(value.value == 0 and value.error == 0 and value.converged for value in pairs.values)
    for estimate in (hutch_plus_plus(zero, products=6), frobenius_norm(zero, products=2)):
        assert (estimate.value, estimate.error, estimate.converged) == (0.0, 0.0, True)
    density = spectral_density(zero, probes=2, steps=2)
    assert set(density.nodes) == {0.0}
    assert density.grid == ()


@pytest.mark.parametrize("by", [float("nan"), float("inf")])
@pytest.mark.parametrize("spoil", [1, 3])
def test_a_product_that_is_not_finite_is_never_reported_as_a_number(by, spoil):
    def spoiled():
        return CountingOperator(wigner(300), spoil=spoil, by=by)

    extremes = lanczos(spoiled())
    assert (extremes.top.value, extremes.bottom.value, extremes.norm.value) == (math.inf, -math.inf, math.inf)
    pairs = top_eigenpairs(spoiled(), 2)
    density = spectral_density(spoiled(), probes=2, steps=5)
    for estimate in (
        extremes.top,
        extremes.bottom,
        extremes.norm,
        *pairs.values,
        hutch_plus_plus(spoiled(), products=9),
        frobenius_norm(spoiled(), products=8),
    ):
        assert math.isinf(estimate.value)
        assert not estimate.converged
        assert "not finite" in estimate.reason
    assert (density.nodes, density.error) == ((), math.inf)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    size=st.integers(1, 40),
    rank=st.integers(1, 40),
    seed=st.integers(0, 10**6),
    exponent=st.integers(-25, 25),
    shift=st.sampled_from([0.0, -0.5, 1.0]),
)
def test_lanczos_agrees_with_eigvalsh_on_any_symmetric_matrix(size, rank, seed, exponent, shift):
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(size, rank, generator=generator, dtype=torch.float64)
    signs = torch.randint(0, 2, (rank,), generator=generator).double() * 2 - 1
    matrix = (left * signs) @ left.T / rank + shift * torch.eye(size, dtype=torch.float64)
    matrix = (matrix + matrix.T) / 2 * 10.0**exponent
    truth = eigenvalues(matrix)
    norm = np.abs(truth).max()
    extremes = lanczos(matrix, tolerance=1e-9, seed=seed)
    rounding = 1e-13 * norm
    for estimate, true in ((extremes.top, truth[-1]), (extremes.bottom, truth[0]), (extremes.norm, norm)):
        assert estimate.converged
        assert abs(estimate.value - true) <= 1e-9 * norm + rounding
        assert abs(estimate.value - true) <= estimate.error + rounding
