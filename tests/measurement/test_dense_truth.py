"""The dense truth is itself held against closed forms, finite differences and a second derivation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dense import dense_curvature, in_double, layer_parameters
from zoo import PROBLEMS, ZOO, Problem
from zoo.snapshot import differences, snapshot
from zoo.truth import true_layers, true_matrices, true_network

WAYS = [("gauss-newton", "func"), ("hessian", "func"), ("hessian", "loops")]
each_problem = pytest.mark.parametrize("problem", ZOO)
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")


def closed_form(loss: nn.Module, model: nn.Module, features: torch.Tensor) -> torch.Tensor:
    """The mean over 7 examples of (the loss's Hessian at the output) ⊗ x xᵀ."""
    with torch.no_grad():
        output = in_double(model)(features)
    if isinstance(loss, nn.MSELoss):
        inner = 2 / 3 * torch.eye(3).double().expand(7, 3, 3)
    elif isinstance(loss, nn.CrossEntropyLoss):
        p = output.softmax(1)
        inner = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    else:
        inner = torch.diag_embed(output.sigmoid() * (1 - output.sigmoid())) / 3
    return sum(torch.kron(block, row.outer(row)) / 7 for block, row in zip(inner, features, strict=True))


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss()], ids=str)
@pytest.mark.parametrize(("curvature", "hessian_by"), WAYS)
def test_linear_models_have_their_closed_forms(loss: nn.Module, curvature: str, hessian_by: str) -> None:
    torch.manual_seed(0)
    model, features, targets = nn.Linear(4, 3), torch.randn(7, 4).double(), torch.rand(7, 3).double()
    targets = targets.argmax(1) if isinstance(loss, nn.CrossEntropyLoss) else targets
    truth = closed_form(loss, model, features)
    for batch in [(features, targets), [(features[:5], targets[:5]), (features[5:], targets[5:])]]:
        found = dense_curvature(model, loss, batch, curvature, hessian_by=hessian_by)
        torch.testing.assert_close(found.network, truth, rtol=0, atol=1e-14)


def test_relu_blocks_agree_between_hessian_and_gauss_newton_but_the_network_does_not() -> None:
    problem = next(problem for problem in PROBLEMS if problem.name == "conv2d_relu")
    exact, approximate = (true_matrices(problem, curvature) for curvature in ("hessian", "gauss-newton"))
    for layer, matrix in exact.layers.items():
        torch.testing.assert_close(matrix, approximate.layers[layer], rtol=0, atol=1e-14)
    assert (exact.network - approximate.network).abs().max() > 1e-2


def test_the_zoo_holds_138_problems_with_different_names() -> None:
    assert len({problem.name for problem in PROBLEMS}) == len(PROBLEMS) == 138


@each_problem
def test_a_problem_is_the_same_each_time_its_truth_finite_and_it_is_left_as_found(problem: Problem) -> None:
    state = torch.get_rng_state()
    first, (model, loss, batch) = problem.build(), problem.build()
    assert torch.equal(torch.get_rng_state(), state)
    changed = differences(snapshot(*first), snapshot(model, loss, batch))
    assert [key for key in changed if not key.startswith("parameter ")] == []
    for curvature in ("gauss-newton", "hessian"):
        assert torch.isfinite(true_matrices(problem, curvature).network).all()
        assert true_network(problem, curvature).norm > 0
        flat = [name for name, truth in true_layers(problem, curvature).items() if truth.norm == 0]
        assert flat == list(problem.flat_layers)
    model = model if problem.stand_in is None else problem.stand_in(model)
    before = snapshot(model, loss, batch)
    layers = problem.options.get("layers")
    dense_curvature(model, loss, batch, "gauss-newton", layers=layers, forward=problem.forward)
    assert differences(before, snapshot(model, loss, batch)) == []


# Torch's second derivative can be wrong both ways at once (weight norm's is); its first ones are right.
@each_problem
def test_the_hessian_is_the_slope_of_the_gradient(problem: Problem) -> None:
    truth, step = true_matrices(problem, "hessian").network, 1e-5
    # A direction in the Hessian's range: along an embedding's padding row torch's gradient is 0 by decree.
    direction = truth @ torch.linspace(-1, 1, len(truth)).double()
    direction /= direction.norm()
    slope = (gradient(problem, direction * step) - gradient(problem, -direction * step)) / (2 * step)
    tolerance = 1e-6 * true_network(problem, "hessian").norm
    torch.testing.assert_close(slope, truth @ direction, rtol=0, atol=tolerance)


def gradient(problem: Problem, displacement: torch.Tensor) -> torch.Tensor:
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
        total += share * torch.cat([one.flatten() for one in gradients])
    return total


@pytest.mark.parametrize("problem", [one for one in PROBLEMS if one.stand_in is not None], ids=str)
def test_a_stand_in_computes_the_same_function_of_the_same_parameters(problem: Problem) -> None:
    model, _, (inputs, _) = problem.build()
    stand_in = problem.stand_in(problem.build()[0])
    forward = problem.forward or (lambda model, inputs: model(inputs))
    torch.testing.assert_close(forward(stand_in, inputs), forward(model, inputs))
    assert [name for name, _ in stand_in.named_parameters()] == [name for name, _ in model.named_parameters()]
