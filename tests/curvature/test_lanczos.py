"""Lanczos, alone and in lockstep: extremes, eigenpairs, singular values, against numpy in fp64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from known_matrices import CountingOperator, eigenvalues, gaussian_matrix, gram, wigner, with_spectrum
from torch import Tensor

from hessinit.curvature import krylov
from hessinit.curvature.lanczos import (
    BatchedMap,
    Goal,
    LanczosSearch,
    SingularValues,
    Start,
    lanczos,
    largest_eigenvalues,
    largest_singular_values,
    run_together,
    smallest_eigenvalue,
    top_eigenpairs,
)
from hessinit.curvature.stochastic import frobenius_norm, hutch_plus_plus, spectral_density

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def run(matrix: Tensor, steps: int, locked: Tensor | None = None) -> krylov.LanczosProcess:
    initial = gaussian_matrix(len(matrix), 1).T.to(matrix.dtype)
    process = krylov.LanczosProcess(krylov.products_with([matrix]), initial, locked)
    while not process.exhausted[0] and process.steps < steps:
        process.step()
    return process


def spectrum_of(process: krylov.LanczosProcess) -> krylov.RitzSpectrum:
    (spectrum,) = process.ritz()
    return spectrum


@each_dtype
def test_the_basis_stays_orthonormal_where_plain_lanczos_would_lose_it(dtype: torch.dtype) -> None:
    # One eigenvalue converges within a few steps; without reorthogonalization its ghosts follow.
    process = run(with_spectrum([100.0, *np.linspace(0, 1, 199)]).to(dtype), 80)
    basis = process.ritz_vectors(np.eye(80)).double()
    departure = (basis.T @ basis - torch.eye(80, dtype=torch.float64)).abs().max()
    assert departure < 20 * torch.finfo(dtype).eps
    spectrum = spectrum_of(process)
    assert (spectrum.values * spectrum.scale > 2).sum() == 1


def test_the_process_ends_with_an_invariant_space_and_respects_what_is_locked() -> None:
    process = run(wigner(60), 60)
    spectrum = spectrum_of(process)
    assert spectrum.is_exhausted
    assert np.abs(spectrum.values * spectrum.scale - eigenvalues(wigner(60))).max() < 1e-13
    process = run(with_spectrum([1.0] * 10 + [4.0] * 15), 25)
    assert (process.exhausted.tolist(), process.steps) == ([True], 2)
    matrix = torch.diag(torch.arange(1.0, 31.0, dtype=torch.float64))
    process = run(matrix, 30, locked=torch.eye(30, dtype=torch.float64)[:, 29:])
    spectrum = spectrum_of(process)
    assert process.steps == 29
    assert abs(spectrum.values[-1] * spectrum.scale - 29) < 1e-12
    assert process.ritz_vectors(spectrum.vectors)[29].abs().max() < 1e-14


@each_dtype
@pytest.mark.parametrize("kept", [[0, 1, 2, 3], [1, 3], [2]])
def test_runs_in_lockstep_are_those_of_each_matrix_alone(kept: list[int], dtype: torch.dtype) -> None:
    matrices = [gram(60, 60, seed=seed).to(dtype) for seed in range(4)]
    initial = gaussian_matrix(60, 1).T.to(dtype).expand(4, -1)
    together = krylov.LanczosProcess(krylov.products_with(matrices), initial)
    for step in range(12):
        together.step()
        if step == 5:
            together.keep(kept)
    assert together.runs == kept
    for row, spectrum in zip(kept, together.ritz(), strict=True):
        alone = spectrum_of(run(matrices[row], 12))
        assert spectrum.scale == alone.scale
        assert np.abs(spectrum.values - alone.values).max() < 1e3 * torch.finfo(dtype).eps
        assert np.abs(spectrum.residuals - alone.residuals).max() < 1e3 * torch.finfo(dtype).eps


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
    "size 3": torch.diag(torch.ones(2, dtype=torch.float64), 1)
    + torch.diag(torch.ones(2, dtype=torch.float64), -1),
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float64, 1e-8)])
def test_both_ends_are_right_to_the_tolerance_and_the_error_covers_them(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    matrix = KNOWN[name].to(dtype)
    truth = eigenvalues(matrix)
    norm = np.abs(truth).max()
    extremes = lanczos(matrix, tolerance=tolerance, max_iterations=300)
    estimates = (extremes.top, extremes.bottom, extremes.norm)
    for estimate, true in zip(estimates, (truth[-1], truth[0], norm), strict=True):
        assert estimate.converged, estimate.reason
        # eigvalsh itself is exact to a few units in the last place of fp64.
        assert abs(estimate.value - true) <= min(estimate.error, tolerance * norm) + 1e-14 * norm
        # The error of an end that does not make the norm covers what may lie unseen.
        assert estimate.error <= (1.01 if abs(true) > 0.8 * norm else 20.01) * tolerance * norm
        assert estimate.products == extremes.steps == len(extremes.ritz)


def test_clustered_ends_are_within_error_and_tolerance_nearly_always() -> None:
    # Stopping by the Kato–Temple bound alone leaves 71 of 150 outside the tolerance, and reporting
    # it as the error would be wrong for 74.
    random = np.random.default_rng(2)
    outside_error = outside_tolerance = 0
    for trial in range(100):
        size = int(random.integers(20, 300))
        cluster = 1 - random.random(max(2, size // 4)) * 10.0 ** random.uniform(-4, -1)
        values = np.concatenate([cluster, random.random(size) * 0.5, [-0.8]])
        top = lanczos(torch.diag(torch.from_numpy(values)), which="top", seed=trial).top
        assert top.converged
        outside_error += abs(top.value - values.max()) > top.error
        outside_tolerance += abs(top.value - values.max()) > 1e-3
    assert (outside_error <= 7, outside_tolerance <= 6) == (True, True)


@pytest.mark.parametrize(("gap", "most"), [(0.01, 3), pytest.param(0.05, 2, marks=pytest.mark.sweep)])
def test_two_close_eigenvalues_are_rarely_taken_for_one(gap: float, most: int) -> None:
    # Without the bound on what a start may not have seen, 15 and 3 of 600 are missed.
    bulk = 0.6 * torch.rand(38, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    matrix = torch.diag(torch.cat([torch.tensor([1.0, 1 - gap], dtype=torch.float64), bulk]))
    tops = [lanczos(matrix, which="top", seed=seed).top for seed in range(400)]
    assert all(top.converged for top in tops)
    assert sum(abs(top.value - 1) > top.error for top in tops) <= most


def test_the_error_of_the_end_that_does_not_make_the_norm_holds() -> None:
    # The residual alone takes the second eigenvalue for the top in 35 of 200 cases.
    outside = 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        values = np.concatenate([[-1.0, 0.3, 0.297], 0.1 * random.normal(size=60).clip(-2, 2)])
        top = lanczos(torch.diag(torch.from_numpy(values)), seed=seed).top
        assert top.converged
        assert top.error <= 0.0201
        outside += abs(top.value - 0.3) > top.error
    assert outside <= 2


def test_only_the_top_is_cheaper_and_the_norm_is_honest_when_the_bottom_is_larger() -> None:
    matrix = gram(300, 300)
    extremes = lanczos(matrix, which="top")
    assert extremes.steps < lanczos(matrix).steps
    assert (extremes.bottom, extremes.norm) == (None, extremes.top)
    assert abs(extremes.top.value - eigenvalues(matrix)[-1]) <= extremes.top.error
    extremes = lanczos(with_spectrum([1.0, -5.0, *np.linspace(-0.1, 0.1, 50)]), which="top")
    assert abs(extremes.top.value - 1) < 5e-3
    assert abs(extremes.norm.value - 5) <= extremes.norm.error


def test_what_did_not_converge_is_a_value_with_a_way_out() -> None:
    top = lanczos(wigner(300), tolerance=1e-10, max_iterations=8).top
    assert (top.converged, top.products) == (False, 8)
    assert top.reason.startswith("stopped at max_iterations=8 with residual")
    assert top.reason.endswith("of the norm; raise max_iterations or tolerance")
    assert abs(top.value - eigenvalues(wigner(300))[-1]) <= top.error
    rounded = lanczos(wigner(50).float(), tolerance=1e-9).top
    assert not rounded.converged
    assert "below the rounding level 1e-06 of torch.float32" in rounded.reason
    pairs = top_eigenpairs(wigner(300), 5, tolerance=1e-9, max_iterations=20)
    assert (pairs.converged, pairs.products) == (False, 20 + 5)
    assert "raise max_iterations or tolerance" in pairs.reason
    truth = eigenvalues(wigner(300))
    assert all(np.abs(truth - value.value).min() <= value.error for value in pairs.values)
    (top,) = largest_eigenvalues([gram(50, 50)], max_iterations=3)
    assert (top.converged, top.products) == (False, 3)


PAIRED = {
    **{name: KNOWN[name] for name in ("gram", "low rank", "identity", "size 1", "size 3")},
    "wigner": wigner(120),
    "repeated": with_spectrum([4.0, 3.0, 3.0, 3.0, -5.0, -5.0, *np.linspace(-1, 1, 80)]),
    "symmetric": with_spectrum([1.0, -1.0, 0.9, -0.9, 0.8, -0.8, *np.linspace(-0.5, 0.5, 60)]),
    "two values": with_spectrum([2.0] * 9 + [1.0] * 30),
}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-8)])
@pytest.mark.parametrize("name", PAIRED)
def test_the_leading_pairs_are_those_of_eigvalsh(name: str, dtype: torch.dtype, tolerance: float) -> None:
    matrix = PAIRED[name].to(dtype)
    count = min(6, len(matrix))
    truth = eigenvalues(matrix)
    norm = np.abs(truth).max()
    pairs = top_eigenpairs(matrix, count, tolerance=tolerance, max_iterations=600)
    assert pairs.converged, pairs.reason
    leading = sorted(truth.tolist(), key=abs, reverse=True)[:count]
    for value, true in zip(pairs.values, leading, strict=True):
        assert abs(abs(value.value) - abs(true)) <= tolerance * norm
        assert value.error <= 1.1 * tolerance * norm
        # eigvalsh rounds, too.
        assert np.abs(truth - value.value).min() <= value.error + 1e-14 * norm
    vectors = pairs.vectors.double()
    values = torch.tensor([value.value for value in pairs.values], dtype=torch.float64)
    residuals = (matrix.double() @ vectors - vectors * values).norm(dim=0)
    assert residuals.max() <= 1.1 * tolerance * norm
    identity = torch.eye(count, dtype=torch.float64)
    assert (vectors.T @ vectors - identity).abs().max() < 100 * torch.finfo(dtype).eps


def test_pairs_are_counted_fixed_by_the_seed_and_converged_only_when_checked_for_copies() -> None:
    operator = CountingOperator(with_spectrum([3.0, 3.0, 2.0, *np.linspace(0, 1, 60)]))
    pairs, again = (top_eigenpairs(operator, 3, seed=4) for _ in range(2))
    assert operator.products == 2 * pairs.products == 2 * pairs.values[0].products
    assert torch.equal(pairs.vectors, again.vectors)
    assert pairs.values == again.values
    pair = top_eigenpairs(operator.matrix, 1)
    assert pair.converged
    assert not top_eigenpairs(operator.matrix, 1, max_iterations=pair.products // 2).converged


@pytest.mark.parametrize("size", [1, 2, 3, 40, 70])
def test_each_value_in_lockstep_is_the_true_one_whatever_runs_beside_it(size: int) -> None:
    identity = torch.eye(size, dtype=torch.float64)
    ordinary = [gram(size, size), 0 * identity, identity, gram(size, 1)]
    matrices = [*ordinary, gram(size, size) * 1e-30, gram(size, 3) * 1e30]
    for matrix, top in zip(matrices, largest_eigenvalues(matrices), strict=True):
        truth = float(torch.linalg.eigvalsh(matrix)[-1])
        alone = lanczos(matrix, which="top").top
        assert top.converged
        assert abs(top.value - truth) <= top.error + 1e-14 * truth
        assert top.error <= 1.1e-3 * truth
        assert top.value == pytest.approx(alone.value, rel=1e-3)


SPECTRA = [[3.0], [0.5, 2.0], [1.0, 1.0, 1.0], [1e-3, 1.0, 5.0, 9.0], [1e-12, 1e-6, 1.0], [0.0, 0.0, 4.0]]


@each_dtype
@pytest.mark.parametrize("values", SPECTRA)
def test_the_smallest_eigenvalue_is_right_to_its_error(values: list[float], dtype: torch.dtype) -> None:
    smallest = smallest_eigenvalue(with_spectrum(values).to(dtype))
    assert smallest.converged
    assert abs(smallest.value - values[0]) <= smallest.error + 1e-3 * values[0]
    assert smallest.error <= 1e-3 * values[0] + 100 * torch.finfo(dtype).eps * values[-1]


def test_a_matrix_that_is_not_finite_has_no_smallest_eigenvalue() -> None:
    for value in (math.inf, math.nan):
        smallest = smallest_eigenvalue(torch.diag(torch.tensor([1.0, value, 1.0])))
        assert (smallest.converged, smallest.error) == (False, math.inf)


SCALES = [(torch.float64, factor) for factor in (1e-30, 1e-12, 1e30)]
SCALES += [(torch.float32, factor) for factor in (1e-25, 1e12, 1e25)]


def estimates_of(matrix: Any) -> list[Any]:
    extremes = lanczos(matrix)
    pairs = top_eigenpairs(matrix, min(3, matrix.shape[0]))
    norms = [frobenius_norm(matrix, products=products) for products in (20, 200)]
    trace = hutch_plus_plus(matrix, products=20)
    return [extremes.top, extremes.bottom, extremes.norm, *pairs.values, trace, *norms]


@pytest.mark.parametrize(("dtype", "factor"), SCALES)
def test_every_estimate_scales_with_the_operator(dtype: torch.dtype, factor: float) -> None:
    matrix = with_spectrum([5.0, 4.0, -4.9, *np.linspace(-1, 2, 117)]).to(dtype)
    for plain, scaled in zip(estimates_of(matrix), estimates_of(matrix * factor), strict=True):
        # The factor is no power of two, so the entries are rounded anew; nothing else may differ.
        bound = 50 * torch.finfo(dtype).eps * (abs(plain.value) + 5)
        assert abs(scaled.value / factor - plain.value) <= bound
        assert abs(scaled.error / factor - plain.error) <= bound + 1e-3 * plain.error
        assert (scaled.converged, scaled.products) == (plain.converged, plain.products)


@each_dtype
def test_a_power_of_two_changes_no_bit_and_subnormal_entries_do_not_end_in_zero(dtype: torch.dtype) -> None:
    matrix = gram(120, 120).to(dtype)
    scaled = lanczos(matrix * 2.0**-70)
    assert [value * 2.0**-70 for value in lanczos(matrix).ritz] == list(scaled.ritz)
    plain, small = largest_eigenvalues([matrix, matrix * 2.0**-80])
    assert (small.value, small.products) == (plain.value * 2.0**-80, plain.products)
    for factor in (1e-41, 1e38):
        top = lanczos(torch.diag(torch.linspace(-1.0, 2.0, 60)) * factor).top
        assert abs(top.value / (2 * factor) - 1) < 5e-3


@pytest.mark.parametrize("size", [1, 2, 50])
def test_the_zero_operator_is_exactly_zero(size: int) -> None:
    zero = torch.zeros(size, size)
    top = lanczos(zero).top
    assert (top.products, top.reason) == (1, "the operator is zero on a random vector")
    for estimate in estimates_of(zero):
        assert (estimate.value, estimate.error, estimate.converged) == (0.0, 0.0, True)
    density = spectral_density(zero, probes=2, steps=2)
    assert (set(density.nodes), density.grid) == ({0.0}, ())


@pytest.mark.parametrize("by", [float("nan"), float("inf")])
@pytest.mark.parametrize("spoil", [1, 3])
def test_a_product_that_is_not_finite_is_never_reported_as_a_number(by: float, spoil: int) -> None:
    def spoiled() -> CountingOperator:
        return CountingOperator(wigner(300), spoil=spoil, by=by)

    extremes = lanczos(spoiled())
    ends = (extremes.top, extremes.bottom, extremes.norm)
    assert [end.value for end in ends] == [math.inf, -math.inf, math.inf]
    pairs = top_eigenpairs(spoiled(), 2)
    samples = hutch_plus_plus(spoiled(), products=9), frobenius_norm(spoiled(), products=8)
    for estimate in (*ends, *pairs.values, *samples):
        assert math.isinf(estimate.value)
        assert not estimate.converged
        assert "not finite" in estimate.reason
    density = spectral_density(spoiled(), probes=2, steps=5)
    assert (density.nodes, density.error) == ((), math.inf)
    first, broken, last = largest_eigenvalues([gram(300, 40), spoiled(), gram(300, 50)])
    assert (broken.value, broken.converged) == (math.inf, False)
    assert f"product {spoil} was not finite" in broken.reason
    for top, columns in ((first, 40), (last, 50)):
        assert abs(top.value - eigenvalues(gram(300, columns))[-1]) <= top.error


def singular_values(matrices: Tensor, **options: Any) -> SingularValues:
    given = {"tolerance": 1e-3, "max_iterations": 200, "seed": 0, "dtype": matrices.dtype, **options}
    return largest_singular_values(BatchedMap.of(matrices), **given)


def true_singular_values(matrices: Tensor) -> np.ndarray:
    return torch.linalg.matrix_norm(matrices.double(), 2).numpy()


@pytest.mark.parametrize("shape", [(5, 7, 3), (4, 3, 7), (3, 1, 9), (2, 40, 40), (1, 30, 50)])
@each_dtype
def test_singular_values_are_right_within_their_errors(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    matrices = torch.randn(*shape, dtype=dtype)
    answer = singular_values(matrices)
    truth = true_singular_values(matrices)
    assert answer.converged
    assert (np.abs(answer.values - truth) <= answer.errors).all()
    assert (answer.errors <= 2e-3 * truth).all()
    assert (answer.upper >= truth).all()


def random_relus(generator: torch.Generator) -> Tensor:
    """The Jacobians of four random ReLU layers of width 70 at 20 examples."""
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    jacobians = torch.eye(70, dtype=torch.float64).expand(20, -1, -1)
    for _ in range(4):
        is_active = torch.rand(20, 70, 1, **options) > 0.5
        weight = torch.randn(70, 70, **options) * (2 / 70) ** 0.5
        jacobians = is_active * (weight @ jacobians)
    return jacobians


def square_gaussians(generator: torch.Generator) -> Tensor:
    return torch.randn(20, 60, 60, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("tolerance", [0.05, 1e-2, 1e-3])
@pytest.mark.parametrize("draw", [random_relus, square_gaussians])
def test_no_example_of_a_batch_has_a_singular_value_beyond_its_error(draw: Any, tolerance: float) -> None:
    # The error of a value that has merely settled misses some of these: their gaps are small.
    generator = torch.Generator().manual_seed(0)
    missed = 0
    for seed in range(10):
        matrices = draw(generator)
        truth = true_singular_values(matrices)
        answer = singular_values(matrices, tolerance=tolerance, seed=seed)
        assert answer.converged
        assert (answer.errors <= 1.01 * tolerance * truth).all()
        missed += int((np.abs(answer.values - truth) > answer.errors).sum())
    assert missed == 0


def test_matrices_of_other_sizes_ranks_and_spectra_do_not_disturb_each_other() -> None:
    matrices = torch.randn(6, 60, 60, dtype=torch.float64)
    matrices[1] *= 1e-30
    matrices[2] *= 1e30
    matrices[3] = 0
    matrices[4] = torch.outer(torch.arange(60.0), torch.arange(60.0))
    matrices[5] = torch.linalg.qr(matrices[5])[0] * torch.linspace(0.99, 1, 60)  # crowded
    answer = singular_values(matrices)
    truth = true_singular_values(matrices)
    assert answer.converged
    assert (np.abs(answer.values - truth) <= answer.errors + 1e-12 * truth).all()
    assert (answer.errors <= 2e-3 * truth).all()
    assert answer.values[3] == answer.errors[3] == 0


def test_singular_values_that_did_not_converge_say_why() -> None:
    answer = singular_values(torch.randn(3, 80, 90), max_iterations=4, tolerance=1e-6)
    assert (answer.converged, answer.products) == (False, 8)
    assert answer.reason == "stopped at max_iterations=4 in 3 examples; raise it or tolerance"
    assert (answer.errors > 1e-3).all()
    matrices = torch.randn(3, 5, 6)
    matrices[1, 0, 0] = math.nan
    answer = singular_values(matrices)
    assert (answer.values[1], answer.converged) == (math.inf, False)
    assert "not finite" in answer.reason
    assert np.isfinite(answer.values[[0, 2]]).all()
    answer = singular_values(torch.randn(2, 3, 4), tolerance=1e-9)
    assert not answer.converged
    assert "below the rounding level" in answer.reason


@pytest.mark.parametrize(
    ("find", "arguments", "message"),
    [
        (lanczos, {"which": "bottom"}, "which='bottom' is unknown; choose from 'both', 'top'"),
        (lanczos, {"tolerance": 0.0}, "tolerance=0.0 must be a relative error between 0 and 1, such"),
        (lanczos, {"tolerance": math.nan}, "tolerance=nan must be a relative error"),
        (lanczos, {"max_iterations": 0}, "max_iterations=0 must be a whole number, 1 or more"),
        (top_eigenpairs, {"count": 0}, "count=0 must be a whole number, 1 or more"),
        (top_eigenpairs, {"count": 4}, "count=4 is more than the operator has: it is 3 × 3. Pass"),
        (top_eigenpairs, {"count": 3, "max_iterations": 2}, "max_iterations=2 must be a whole number"),
        (top_eigenpairs, {"count": 1, "tolerance": 2.0}, "tolerance=2.0 must be a relative error"),
        (spectral_density, {"probes": 1}, "probes=1 must be a whole number, 2 or more"),
        (spectral_density, {"steps": 1}, "steps=1 must be a whole number, 2 or more"),
        (hutch_plus_plus, {"products": 5}, "products=5 must be a whole number, 6 or more"),
        (frobenius_norm, {"products": 1}, "products=1 must be a whole number, 2 or more"),
    ],
)
def test_bad_arguments_are_answered_with_the_rule(find: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find(torch.eye(3), **arguments)


def test_the_norm_alone_is_cheaper_and_the_other_end_keeps_an_honest_error() -> None:
    for matrix in (gram(300, 300), -gram(300, 300), wigner(300)):
        truth = eigenvalues(matrix)
        true_norm = np.abs(truth).max()
        extremes = lanczos(matrix, which="norm")
        assert extremes.steps <= lanczos(matrix).steps
        assert extremes.norm.converged
        assert abs(extremes.norm.value - true_norm) <= extremes.norm.error <= 1e-3 * true_norm
        assert extremes.bottom is not None
        for end, true in ((extremes.top, truth[-1]), (extremes.bottom, truth[0])):
            assert abs(end.value - true) <= end.error


@pytest.mark.parametrize("tolerance", [0.1, 0.01])
def test_a_rougher_tolerance_takes_fewer_products_and_its_error_holds(tolerance: float) -> None:
    outside = 0
    for trial in range(100):
        values = 10.0 ** -np.random.default_rng(trial).uniform(0, 3, 400)
        matrix = torch.diag(torch.from_numpy(values))
        rough = lanczos(matrix, which="top", tolerance=tolerance, seed=trial).top
        fine = lanczos(matrix, which="top", tolerance=1e-4, seed=trial).top
        assert rough.products < fine.products
        assert rough.error <= 1.01 * tolerance * rough.value
        outside += abs(rough.value - values.max()) > rough.error
    assert outside <= 3


def test_a_start_with_the_matrix_as_covariance_finds_the_same_with_fewer_products() -> None:
    values = torch.arange(1.0, 3001.0, dtype=torch.float64) ** -0.6
    goal = Goal(which="top", tolerance=0.1, max_iterations=200)
    saved = 0
    for seed in range(20):
        vector = values.sqrt() * gaussian_matrix(3000, 1, seed=seed)[:, 0]
        starts = Start(vector, float(vector.square().sum())), None
        searches = [LanczosSearch.of(torch.diag(values), goal, seed, start) for start in starts]
        started, plain = (result.top for result in run_together(searches))
        assert abs(started.value - 1) <= started.error <= 0.101
        saved += plain.products - started.products
    assert saved >= 10


def test_a_long_operator_keeps_its_last_vectors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = gram(400, 60)
    all_kept = lanczos(matrix, which="top").top
    memory = replace(krylov.MEMORY, size_of_large=100, numbers_per_block=1600)
    monkeypatch.setattr(krylov, "MEMORY", memory)
    goal = Goal(which="top", tolerance=1e-3, max_iterations=200)
    search = LanczosSearch.of(matrix, goal, seed=0)
    (result,) = run_together([search])
    assert sum(block.shape[1] for block in search._process._blocks) == 12 < result.steps
    assert abs(result.top.value - all_kept.value) <= 1e-6 * all_kept.value
