from __future__ import annotations

import numpy as np
import pytest
import torch
from known_matrices import CountingOperator, eigenvalues, gram, wigner, with_spectrum

from hessinit.curvature.eigenpairs import top_eigenpairs


def assert_pairs(matrix, pairs, count, tolerance):
    truth = eigenvalues(matrix)
    norm = np.abs(truth).max()
    assert pairs.converged, pairs.reason
    assert len(pairs.values) == count
    for value, true in zip(pairs.values, sorted(truth.tolist(), key=abs, reverse=True)[:count], strict=True):
        assert abs(abs(value.value) - abs(true)) <= tolerance * norm
        assert value.error <= 1.1 * tolerance * norm
        assert np.abs(truth - value.value).min() <= value.error + 1e-14 * norm  # eigvalsh rounds, too
    vectors = pairs.vectors.double()
    values = torch.tensor([value.value for value in pairs.values], dtype=torch.float64)
    residuals = torch.linalg.vector_norm(matrix.double() @ vectors - vectors * values, dim=0)
    assert residuals.max() <= 1.1 * tolerance * norm
    identity = torch.eye(count, dtype=torch.float64)
    assert (vectors.T @ vectors - identity).abs().max() < 100 * torch.finfo(matrix.dtype).eps


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-8)])
@pytest.mark.parametrize(
    "name", ["wigner", "gram", "low rank", "repeated", "symmetric", "two values", "identity"]
)
def test_the_leading_pairs_are_those_of_eigvalsh(name, dtype, tolerance):
    matrix = {
        "wigner": wigner(120),
        "gram": gram(120, 200),
        "low rank": gram(100, 3),
        "repeated": with_spectrum([4.0, 3.0, 3.0, 3.0, -5.0, -5.0, *np.linspace(-1, 1, 80)]),
        "symmetric": with_spectrum([1.0, -1.0, 0.9, -0.9, 0.8, -0.8, *np.linspace(-0.5, 0.5, 60)]),
        "two values": with_spectrum([2.0] * 9 + [1.0] * 30),
        "identity": torch.eye(30, dtype=torch.float64) * 0.3,
    }[name].to(dtype)
    pairs = top_eigenpairs(matrix, 6, tolerance=tolerance, max_iterations=600)
    assert_pairs(matrix, pairs, 6, tolerance)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_pairs_of_a_tiny_matrix(size):
    matrix = wigner(size)
    assert_pairs(matrix, top_eigenpairs(matrix, size, tolerance=1e-10), size, 1e-10)


def test_products_are_counted_and_the_seed_fixes_the_bits():
    operator = CountingOperator(with_spectrum([3.0, 3.0, 2.0, *np.linspace(0, 1, 60)]))
    pairs = top_eigenpairs(operator, 3, seed=4)
    assert operator.products == pairs.products == pairs.values[0].products
    again = top_eigenpairs(operator, 3, seed=4)
    assert torch.equal(pairs.vectors, again.vectors)
    assert pairs.values == again.values


def test_running_out_of_steps_is_a_value_with_a_way_out():
    pairs = top_eigenpairs(wigner(300), 5, tolerance=1e-9, max_iterations=20)
    assert not pairs.converged
    assert pairs.products == 20 + 5
    assert "raise max_iterations or tolerance" in pairs.reason
    truth = eigenvalues(wigner(300))
    assert all(np.abs(truth - value.value).min() <= value.error for value in pairs.values)


def test_found_but_not_yet_checked_for_copies_is_not_called_converged():
    matrix = with_spectrum([3.0, 3.0, *np.linspace(0, 1, 60)])
    enough = top_eigenpairs(matrix, 1).products
    short = top_eigenpairs(matrix, 1, max_iterations=enough // 2)
    assert top_eigenpairs(matrix, 1).converged
    assert not short.converged


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "count=0 is too few: there is nothing to find. Pass count=1 or more"),
        ({"count": 4}, "count=4 is more than the operator has: it is 3 × 3. Pass count=3 or less"),
        ({"count": 3, "max_iterations": 2}, "max_iterations=2 is too few: count=3 pairs need a product each"),
        ({"count": 1, "tolerance": 2.0}, "tolerance=2.0 is out of range"),
    ],
)
def test_bad_arguments_are_answered_with_the_rule_and_the_way_out(arguments, message):
    with pytest.raises(ValueError, match=message):
        top_eigenpairs(torch.eye(3), **arguments)
