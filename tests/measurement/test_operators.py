"""The three operators against dense matrices from their definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch
from scipy.sparse.linalg import eigsh
from torch import nn

import hessinit
from dense import dense_curvature
from tiny import LOSS, batch, inputs, labels, network

MAKERS = {"hessian": hessinit.hessian, "gauss-newton": hessinit.gauss_newton}
DOUBLE: dict[str, Any] = {"dtype": torch.float64}


def true_jacobian(layers: list[str] | None = None) -> torch.Tensor:
    model, (x, _) = network().double(), batch()
    names = [f"{layer}.weight" for layer in (layers or ["0", "2"])]
    fixed = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def call(*weights: torch.Tensor) -> torch.Tensor:
        moved = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(model, {**fixed, **moved}, (x.double(),)).flatten()

    parts = torch.autograd.functional.jacobian(call, tuple(fixed[name] for name in names))
    return torch.cat([part.flatten(1) for part in parts], dim=1)


@pytest.mark.parametrize("curvature", MAKERS)
def test_all_layers_together_are_the_dense_matrix(curvature: str) -> None:
    operator = MAKERS[curvature](network(), LOSS, batch(), **DOUBLE)
    truth = dense_curvature(network(), LOSS, batch(), curvature).network
    assert operator.shape == (35, 35)
    assert (operator.dtype, operator.device.type) == (torch.float64, "cpu")
    torch.testing.assert_close(operator.to_dense(), truth, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("curvature", MAKERS)
@pytest.mark.parametrize("layer", ["0", "2"])
def test_one_layer_is_a_block_on_the_diagonal(curvature: str, layer: str) -> None:
    operator = MAKERS[curvature](network(), LOSS, batch(), layers=layer, **DOUBLE)
    truth = dense_curvature(network(), LOSS, batch(), curvature).layers[layer]
    torch.testing.assert_close(operator.to_dense(), truth, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("curvature", MAKERS)
def test_several_batches_are_averaged_over_examples(curvature: str) -> None:
    x, y = batch(7)
    operator = MAKERS[curvature](network(), LOSS, [(x[:5], y[:5]), (x[5:], y[5:])], **DOUBLE)
    truth = dense_curvature(network(), LOSS, (x, y), curvature).network
    torch.testing.assert_close(operator.to_dense(), truth, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", [*MAKERS.values(), hessinit.jacobian])
def test_a_block_is_multiplied_column_by_column(make: Any) -> None:
    operator = make(network(), LOSS, batch(), **DOUBLE)
    block = torch.randn(35, 4, dtype=torch.float64)
    product = operator @ block
    assert operator.products == 4
    torch.testing.assert_close(product[:, 2], operator @ block[:, 2], rtol=1e-12, atol=0)
    torch.testing.assert_close(product, operator.to_dense() @ block, rtol=1e-9, atol=1e-12)
    assert operator.products == 4 + 1 + 35
    assert (operator @ block[:, :0]).shape == (operator.shape[0], 0)


@pytest.mark.parametrize("make", [*MAKERS.values(), hessinit.jacobian])
def test_vectors_of_another_precision_are_converted_and_left_alone(make: Any) -> None:
    operator, vector = make(network(), LOSS, batch()), torch.randn(35, dtype=torch.float64)
    before = vector.clone()
    product = operator @ vector
    assert product.dtype == torch.float32
    assert not product.requires_grad
    assert torch.equal(vector, before)


@pytest.mark.parametrize("make", [*MAKERS.values(), hessinit.jacobian])
def test_wrong_shapes_are_answered_with_the_right_ones(make: Any) -> None:
    operator = make(network(), LOSS, batch())
    for wrong in (torch.ones(34), torch.ones(34, 2), torch.ones(35, 2, 2), torch.ones(())):
        with pytest.raises(ValueError, match=r"cannot multiply .* 35\) with .*; pass \(35,\) or \(35, m\)"):
            operator @ wrong
    with pytest.raises(TypeError, match="cannot multiply an operator with a ndarray; pass a torch.Tensor"):
        operator @ numpy.ones(35)


@pytest.mark.parametrize("curvature", MAKERS)
def test_scipy_finds_the_same_ends(curvature: str) -> None:
    operator = MAKERS[curvature](network(), LOSS, batch(), **DOUBLE)
    truth = torch.linalg.eigvalsh(dense_curvature(network(), LOSS, batch(), curvature).network)
    found = eigsh(operator.to_scipy(), k=2, which="BE", return_eigenvectors=False)
    assert sorted(found) == pytest.approx([truth[0].item(), truth[-1].item()], rel=1e-8, abs=1e-10)
    assert operator.products > 0


def test_the_jacobian_is_the_derivative_of_the_outputs() -> None:
    operator = hessinit.jacobian(network(), LOSS, batch(), **DOUBLE)
    assert operator.shape == (18, 35)
    torch.testing.assert_close(operator.to_dense(), true_jacobian(), rtol=1e-9, atol=1e-12)
    one = hessinit.jacobian(network(), LOSS, batch(), layers="2", **DOUBLE)
    torch.testing.assert_close(one.to_dense(), true_jacobian(["2"]), rtol=1e-9, atol=1e-12)


def test_the_jacobians_transpose_is_its_adjoint() -> None:
    operator = hessinit.jacobian(network(), LOSS, batch(), **DOUBLE)
    left = torch.randn(18, dtype=torch.float64)
    right = torch.randn(35, dtype=torch.float64)
    assert operator.T.shape == (35, 18)
    torch.testing.assert_close(left @ (operator @ right), right @ (operator.T @ left), rtol=1e-12, atol=0)
    torch.testing.assert_close(operator.T.to_dense(), true_jacobian().T, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(operator.T.T @ right, operator @ right, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"shape \(35, 18\) with \(35,\); pass \(18,\)"):
        operator.T @ right


@pytest.mark.parametrize("curvature", MAKERS)
def test_symmetric_operators_are_their_own_transpose(curvature: str) -> None:
    operator = MAKERS[curvature](network(), LOSS, batch())
    assert operator.T is operator


@pytest.mark.parametrize("curvature", MAKERS)
def test_linear_regression_has_the_closed_form(curvature: str) -> None:
    x = inputs(6, 4).double()
    model = nn.Linear(4, 2, bias=False).double()
    operator = MAKERS[curvature](model, nn.MSELoss(), (x, torch.zeros(6, 2)))
    # The mean over 6 × 2 squares: 2/12 · I ⊗ XᵀX.
    truth = torch.kron(torch.eye(2, dtype=torch.float64), x.T @ x) / 6
    torch.testing.assert_close(operator.to_dense(), truth, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("make", [*MAKERS.values(), hessinit.jacobian])
def test_problems_are_checked_as_in_measure(make: Any) -> None:
    with pytest.raises(hessinit.ProblemError, match="layers='fc' fits no parameter"):
        make(network(), LOSS, batch(), layers="fc")
    with pytest.raises(hessinit.ProblemError, match=r"layer 1 \(Dropout\) is active"):
        make(nn.Sequential(network(), nn.Dropout()), LOSS, batch())
    frozen = make(nn.Sequential(network(), nn.Dropout()), LOSS, batch(), dropout="freeze", seed=3)
    assert math.isfinite(float((frozen @ torch.ones(35)).sum()))


def test_the_model_is_left_alone_by_products() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    hessinit.hessian(model, LOSS, (inputs(), labels())).to_dense()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
