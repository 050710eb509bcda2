"""The dense truth is itself held against closed forms, finite differences and a second derivation."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from dense import dense_curvature, in_double, layer_parameters
from zoo import PROBLEMS, ZOO, Problem
from zoo.snapshot import differences, snapshot
from zoo.truth import true_layers, true_matrices, true_network

CURVATURES = ("gauss-newton", "hessian")
WAYS = [("gauss-newton", "func"), ("hessian", "func"), ("hessian", "loops")]
each_way = pytest.mark.parametrize(("curvature", "hessian_by"), WAYS)
each_problem = pytest.mark.parametrize("problem", ZOO)
each_curvature = pytest.mark.parametrize("curvature", CURVATURES)
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")


@each_way
def test_linear_regression_is_the_gram_matrix_of_the_features(curvature: str, hessian_by: str) -> None:
    torch.manual_seed(0)
    features, targets = torch.randn(7, 4).double(), torch.randn(7, 3).double()
    truth = torch.kron(torch.eye(3).double(), 2 / (7 * 3) * features.t() @ features)
    model = nn.Linear(4, 3)
    found = dense_curvature(model, nn.MSELoss(), (features, targets), curvature, hessian_by=hessian_by)
    torch.testing.assert_close(found.network, truth, rtol=0, atol=1e-14)


@each_way
def test_softmax_regression_is_the_mean_of_covariance_times_features(curvature: str, hessian_by: str) -> None:
    torch.manual_seed(1)
    model, features, targets = nn.Linear(4, 3), torch.randn(7, 4).double(), torch.randint(3, (7,))
    truth = torch.zeros(12, 12).double()
    with torch.no_grad():
        for row, probabilities in zip(features, in_double(model)(features).softmax(dim=1), strict=True):
            covariance = probabilities.diag() - probabilities.outer(probabilities)
            truth += torch.kron(covariance, row.outer(row)) / 7
    found = dense_curvature(
        model, nn.CrossEntropyLoss(), (features, targets), curvature, hessian_by=hessian_by
    )
    torch.testing.assert_close(found.network, truth, rtol=0, atol=1e-14)


@each_way
def test_logistic_regression_weighs_features_by_p_times_one_minus_p(curvature: str, hessian_by: str) -> None:
    torch.manual_seed(2)
    model, features, targets = nn.Linear(4, 1), torch.randn(7, 4).double(), torch.randint(2, (7, 1)).double()
    p = in_double(model)(features).sigmoid().detach()
    truth = features.t() @ (p * (1 - p) * features) / 7
    found = dense_curvature(
        model, nn.BCEWithLogitsLoss(), (features, targets), curvature, hessian_by=hessian_by
    )
    torch.testing.assert_close(found.network, truth, rtol=0, atol=1e-14)


@each_curvature
def test_uneven_batches_add_up_to_the_whole(curvature: str) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    features, targets, loss = torch.randn(7, 4), torch.randint(3, (7,)), nn.CrossEntropyLoss()
    parts = [(features[:5], targets[:5]), (features[5:], targets[5:])]
    whole = dense_curvature(model, loss, (features, targets), curvature)
    found = dense_curvature(model, loss, parts, curvature)
    torch.testing.assert_close(found.network, whole.network, rtol=0, atol=1e-14)


def test_relu_blocks_agree_between_hessian_and_gauss_newton_but_the_network_does_not() -> None:
    problem = next(problem for problem in PROBLEMS if problem.name == "conv2d_relu")
    exact, approximate = (true_matrices(problem, curvature) for curvature in ("hessian", "gauss-newton"))
    for layer, matrix in exact.layers.items():
        torch.testing.assert_close(matrix, approximate.layers[layer], rtol=0, atol=1e-14)
    assert (exact.network - approximate.network).abs().max() > 1e-2


def test_the_zoo_holds_at_least_forty_five_problems_with_different_names() -> None:
    assert len({problem.name for problem in PROBLEMS}) == len(PROBLEMS) >= 45


@each_problem
def test_a_problem_is_the_same_each_time_and_uses_nobody_elses_random_numbers(problem: Problem) -> None:
    state = torch.get_rng_state()
    first, second = problem.build(), problem.build()
    assert torch.equal(torch.get_rng_state(), state)
    changed = differences(snapshot(*first), snapshot(*second))
    assert [key for key in changed if not key.startswith("parameter ")] == []


@each_problem
@each_curvature
def test_every_truth_is_finite_and_zero_only_where_it_should_be(problem: Problem, curvature: str) -> None:
    matrices = true_matrices(problem, curvature)
    assert len(matrices.network) <= 300
    assert torch.isfinite(matrices.network).all()
    assert true_network(problem, curvature).norm > 0
    flat = [name for name, truth in true_layers(problem, curvature).items() if truth.norm == 0]
    assert flat == list(problem.flat_layers)


@pytest.mark.sweep
@pytest.mark.parametrize("problem", [one for one in PROBLEMS if one.hessian_by == "func"], ids=str)
def test_forward_over_reverse_and_reverse_over_reverse_give_one_hessian(problem: Problem) -> None:
    truth = true_matrices(problem, "hessian").network
    other = true_matrices(dataclasses.replace(problem, hessian_by="loops"), "hessian").network
    torch.testing.assert_close(other, truth, rtol=0, atol=1e-11 * true_network(problem, "hessian").norm)


# Torch's second derivative can be wrong both ways at once (weight norm's is); its first ones are right.
@each_problem
def test_the_hessian_is_the_slope_of_the_gradient(problem: Problem) -> None:
    truth, step = true_matrices(problem, "hessian").network, 1e-5
    # A direction in the Hessian's range: along an embedding's padding row torch's gradient is 0 by decree.
    direction = truth @ torch.linspace(-1, 1, len(truth)).double()
    direction /= direction.norm()
    slope = (_gradient(problem, direction * step) - _gradient(problem, -direction * step)) / (2 * step)
    tolerance = 1e-6 * true_network(problem, "hessian").norm
    torch.testing.assert_close(slope, truth @ direction, rtol=0, atol=tolerance)


def _gradient(problem: Problem, displacement: torch.Tensor) -> torch.Tensor:
    model, loss, batch = problem.build()
    names = layer_parameters(model, problem.options.get("layers")).values()
    batches = [in_double(part) for part in ([batch] if isinstance(batch, tuple) else batch)]
    total = torch.zeros_like(displacement)
    for inputs, targets in batches:
        moved = in_double(model)
        weights = [dict(moved.named_parameters())[name].requires_grad_() for name in names]
        with torch.no_grad():
            for weight, part in zip(weights, displacement.split([w.numel() for w in weights]), strict=True):
                weight += part.view_as(weight)
        output = problem.forward(moved, inputs) if problem.forward else moved(inputs)
        gradients = torch.autograd.grad(in_double(loss)(output, targets), weights, materialize_grads=True)
        share = len(targets) / sum(len(other) for _, other in batches)
        total += share * torch.cat([gradient.flatten() for gradient in gradients])
    return total


STANDING_IN = [problem for problem in PROBLEMS if problem.stand_in is not None]


@pytest.mark.parametrize("problem", STANDING_IN, ids=str)
def test_a_stand_in_computes_the_same_function_of_the_same_parameters(problem: Problem) -> None:
    model, _, (inputs, _) = problem.build()
    stand_in = problem.stand_in(problem.build()[0])
    forward = problem.forward or (lambda model, inputs: model(inputs))
    torch.testing.assert_close(forward(stand_in, inputs), forward(model, inputs))
    assert [name for name, _ in stand_in.named_parameters()] == [name for name, _ in model.named_parameters()]


@each_problem
def test_the_truth_leaves_the_model_as_found(problem: Problem) -> None:
    model, loss, batch = problem.build()
    if problem.stand_in is not None:
        model = problem.stand_in(model)
    before = snapshot(model, loss, batch)
    layers = problem.options.get("layers")
    dense_curvature(model, loss, batch, "gauss-newton", layers=layers, forward=problem.forward)
    assert differences(before, snapshot(model, loss, batch)) == []
