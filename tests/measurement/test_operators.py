"""The three operators against dense matrices from their definitions."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from scipy.sparse.linalg import eigsh
from torch import nn

import hessinit
from calls import call
from dense import dense_curvature
from tiny import LOSS, batch, network

DOUBLE: dict[str, Any] = {"dtype": torch.float64}
MAKERS = {"hessian": hessinit.hessian, "gauss-newton": hessinit.gauss_newton}
each_curvature = pytest.mark.parametrize("curvature", MAKERS)
each_maker = pytest.mark.parametrize("make", [*MAKERS.values(), hessinit.jacobian])


def true_jacobian(*layers: str) -> torch.Tensor:
    model = network().double()
    x, _ = batch()
    names = [f"{layer}.weight" for layer in layers]
    fixed = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def call(*weights: torch.Tensor) -> torch.Tensor:
        moved = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(model, {**fixed, **moved}, (x.double(),)).flatten()

    parts = torch.autograd.functional.jacobian(call, tuple(fixed[name] for name in names))
    return torch.cat([part.flatten(1) for part in parts], dim=1)


@each_curvature
@pytest.mark.parametrize("layer", [None, "0", "2"])
@pytest.mark.parametrize("several", [False, True])
def test_operators_are_the_dense_matrix_and_average_batches_over_examples(
    curvature: str, layer: str | None, several: bool
) -> None:
    x, y = batch(7)
    data = [(x[:5], y[:5]), (x[5:], y[5:])] if several else (x, y)
    operator = call(MAKERS[curvature], network(), LOSS, data, layers=layer, **DOUBLE)
    dense = dense_curvature(network(), LOSS, (x, y), curvature)
    truth = dense.network if layer is None else dense.layers[layer]
    assert (operator.shape, operator.dtype, operator.device.type) == (truth.shape, torch.float64, "cpu")
    assert operator.T is operator
    torch.testing.assert_close(operator.to_dense(), truth, rtol=1e-9, atol=1e-12)


@each_maker
def test_blocks_are_multiplied_column_by_column_and_vectors_converted(make: Any) -> None:
    operator = call(make, network(), LOSS, batch(), **DOUBLE)
    block = torch.randn(35, 4, dtype=torch.float64)
    product = operator @ block
    torch.testing.assert_close(product[:, 2], operator @ block[:, 2], rtol=1e-12, atol=0)
    torch.testing.assert_close(product, operator.to_dense() @ block, rtol=1e-9, atol=1e-12)
    assert (operator @ block[:, :0]).shape == (operator.shape[0], 0)
    before = block.clone()
    single = make(network(), LOSS, batch()) @ block[:, 0]
    assert (single.dtype, single.requires_grad) == (torch.float32, False)
    assert torch.equal(block, before)


@each_maker
def test_wrong_shapes_and_problems_are_answered_with_the_right_ones(make: Any) -> None:
    operator = make(network(), LOSS, batch())
    for wrong in (torch.ones(34), torch.ones(34, 2), torch.ones(35, 2, 2), torch.ones(())):
        with pytest.raises(ValueError, match=r"cannot multiply .* 35\) with .*; pass \(35,\) or \(35, m\)"):
            operator @ wrong
    with pytest.raises(TypeError, match="cannot multiply an operator with a ndarray; pass a torch.Tensor"):
        operator @ numpy.ones(35)
    dropping = nn.Sequential(network(), nn.Dropout())
    with pytest.raises(hessinit.ProblemError, match=r"dropout is active \(train mode\) in 1 \(Dropout\)"):
        call(make, dropping, LOSS, batch(), dropout="refuse")
    frozen = call(make, dropping, LOSS, batch(), dropout="freeze", seed=3)
    assert bool((frozen @ torch.ones(35)).isfinite().all())


@each_curvature
def test_scipy_finds_the_same_ends(curvature: str) -> None:
    operator = call(MAKERS[curvature], network(), LOSS, batch(), **DOUBLE)
    truth = torch.linalg.eigvalsh(dense_curvature(network(), LOSS, batch(), curvature).network)
    ends = eigsh(operator.to_scipy(), k=2, which="BE", return_eigenvectors=False)
    assert sorted(ends) == pytest.approx([truth[0].item(), truth[-1].item()], rel=1e-8, abs=1e-10)


def test_the_jacobian_is_the_derivative_of_the_outputs_and_its_transpose_the_adjoint() -> None:
    operator = call(hessinit.jacobian, network(), LOSS, batch(), **DOUBLE)
    last = call(hessinit.jacobian, network(), LOSS, batch(), layers="2", **DOUBLE)
    torch.testing.assert_close(operator.to_dense(), true_jacobian("0", "2"), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(last.to_dense(), true_jacobian("2"), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(operator.T.to_dense(), true_jacobian("0", "2").T, rtol=1e-9, atol=1e-12)
    right = torch.randn(35, dtype=torch.float64)
    assert torch.equal(operator.T.T @ right, operator @ right)
    with pytest.raises(ValueError, match=r"shape \(35, 18\) with \(35,\); pass \(18,\)"):
        operator.T @ right
