"""The factors of Gauss-Newton: calls read off the graph, and the root of the loss's curvature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hessinit
from hessinit.curvature.engine_choice import evaluate
from hessinit.curvature.evaluation import Evaluation
from hessinit.curvature.layer_uses import find_uses, read_call
from hessinit.curvature.loss_hessian import LossFactor, check_curved, factor_loss_hessian
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.problem import Problem
from tiny import labels

TOKENS = torch.tensor([[0, 2, 1], [3, 0, 0]])
IMAGES = torch.randn(2, 4, 6, 5, generator=torch.Generator().manual_seed(3)).double()
ROWS = IMAGES[:, 0, 0]
ONES = torch.ones(3).double()
USES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "linear with bias": ((3, 5), lambda w: F.linear(ROWS, w, ONES)),
    "linear of three dimensions": ((3, 5), lambda w: F.linear(IMAGES[:, 0], w)),
    "addmm, stored as (in, out)": ((5, 3), lambda w: torch.addmm(ONES, ROWS, w, beta=2)),
    "matmul, stored as (in, out)": ((5, 3), lambda w: ROWS @ w),
    "a transpose of a transpose": ((5, 3), lambda w: ROWS @ w.t().t()),
    "convolution": ((3, 4, 2, 3), lambda w: F.conv2d(IMAGES, w, None, (2, 1), (0, 2), (1, 2))),
    "grouped convolution": ((6, 2, 2, 2), lambda w: F.conv2d(IMAGES, w, groups=2)),
    "transposed": ((4, 3, 2, 2), lambda w: F.conv_transpose2d(IMAGES, w, stride=2, output_padding=1)),
    "embedding": ((4, 3), lambda w: F.embedding(TOKENS, w)),
    "embedding with padding": ((4, 3), lambda w: F.embedding(TOKENS, w, padding_idx=0)),
    "embedding with padding from the end": ((4, 3), lambda w: F.embedding(TOKENS, w, padding_idx=-1)),
}


@pytest.mark.parametrize("name", USES)
def test_pull_is_autograds_gradient_and_push_its_adjoint(name: str) -> None:
    shape, use = USES[name]
    leaf = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    output = use(leaf)
    (found,) = find_uses(output, {"w": leaf})["w"]
    call = read_call(found, leaf)
    cotangent, change = torch.randn_like(output), torch.randn_like(leaf)
    (gradient,) = torch.autograd.grad(output, leaf, cotangent)
    torch.testing.assert_close(call.pull(cotangent.view(call.output_shape)), gradient)
    pushed = call.push(change)
    assert tuple(pushed.shape) == call.output_shape
    assert pushed.shape[0] == call.rows == call.inputs.shape[0]
    torch.testing.assert_close((pushed * cotangent.view_as(pushed)).sum(), (change * gradient).sum())
    twice = call.on(torch.cat([call.inputs, call.inputs]))
    torch.testing.assert_close(twice.push(change), torch.cat([pushed, pushed]))
    assert twice.output_shape == (2 * call.rows, *call.output_shape[1:])


UNKNOWN: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "the weight on the left": ((3, 2), lambda w: w @ ROWS),
    "addmm with a factor": ((5, 3), lambda w: torch.addmm(ONES, ROWS, w, alpha=2)),
    "embedding of one word": ((4, 3), lambda w: F.embedding(torch.tensor(2), w)),
    "gradients scaled by frequency": ((4, 3), lambda w: F.embedding(TOKENS, w, scale_grad_by_freq=True)),
    "the weight squared": ((5, 3), lambda w: ROWS @ w.pow(2)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_any_other_use_is_not_known(name: str) -> None:
    shape, use = UNKNOWN[name]
    leaf = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    uses = find_uses(use(leaf), {"w": leaf})["w"]
    assert [read_call(one, leaf) for one in uses] == [None] * len(uses) != []


LABELS = torch.tensor([0, 1, 2, 0, -100, 1])
SOFT = torch.tensor([[0.2, 0.3, 0.5]]).repeat(6, 1).double()
WEIGHTS = torch.tensor([1e-3, 1.0, 5.0]).double()


def evaluation(loss: Callable[..., Tensor], targets: Tensor) -> Evaluation:
    """The output is the weight itself."""
    torch.manual_seed(1)
    model = nn.Linear(6, 3, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.randn(3, 6))
    (found,) = evaluate(FunctionalProblem(Problem(model, loss, (torch.eye(6).double(), targets))))
    return found


CONVEX: dict[str, tuple[Callable[..., Tensor], Tensor, int]] = {
    "cross-entropy with ignored rows": (nn.CrossEntropyLoss(), LABELS, 2),
    "cross-entropy summed": (nn.CrossEntropyLoss(reduction="sum"), LABELS, 2),
    "cross-entropy with class weights": (nn.CrossEntropyLoss(weight=WEIGHTS), LABELS, 2),
    "cross-entropy with soft targets": (nn.CrossEntropyLoss(), SOFT, 2),
    "mean squares": (nn.MSELoss(), SOFT, 3),
    "squares of one output only": (lambda z, t: z[:, 1].pow(2).sum(), SOFT, 1),
    "logistic": (nn.BCEWithLogitsLoss(), SOFT, 3),
    "Poisson, rates far apart": (lambda z, t: (z + torch.tensor([-20.0, 0.0, 20.0])).exp().sum(), SOFT, 3),
}


@pytest.mark.parametrize("name", CONVEX)
def test_the_root_gives_the_hessian_of_the_loss_back(name: str) -> None:
    loss, targets, columns = CONVEX[name]
    found = evaluation(loss, targets)
    root = factor_loss_hessian(found)
    assert isinstance(root, LossFactor)
    assert root.columns.shape[0] == columns
    output = found.output.detach()
    truth = torch.autograd.functional.hessian(lambda z: loss(z, targets), output).reshape(18, 18)
    rebuilt = torch.block_diag(*(root.scale * torch.einsum("cni,cnj->nij", root.columns, root.columns)))
    torch.testing.assert_close(rebuilt, truth, rtol=0, atol=1e-13 * float(truth.abs().max()))
    # Each output to its own size: a curvature of 1e-17 beside one of 1 is somebody's whole curvature.
    torch.testing.assert_close(rebuilt.diagonal(), truth.diagonal(), rtol=1e-5, atol=0)


NO_ROOT: dict[str, tuple[Callable[..., Tensor], str]] = {
    "concave": (lambda z, t: -z.pow(2).sum(), "not convex"),
    "concave in one output": (lambda z, t: (z[:, 0] ** 2 - z[:, 1] ** 2).sum(), "not convex"),
    "concave for one example": (lambda z, t: (z[:5] ** 2).sum() - (z[5] ** 2).sum(), "not convex"),
    "saddle": (lambda z, t: (z[:, 0] * z[:, 1]).sum(), "not convex"),
    "mean over the batch squared": (lambda z, t: z.mean(0).pow(2).sum(), "couples"),
    "only between neighbours": (lambda z, t: (z[1:] * z[:-1]).sum(), "couples"),
    "a weak tie": (lambda z, t: z.pow(2).sum() + 1e-4 * z.sum().pow(2), "couples"),
    "infinite": (lambda z, t: (z - z.detach()).abs().pow(1.5).sum(), "curvature at the output is not finite"),
}


@pytest.mark.parametrize("name", NO_ROOT)
def test_without_a_root_there_is_a_reason(name: str) -> None:
    loss, reason = NO_ROOT[name]
    found = factor_loss_hessian(evaluation(loss, SOFT))
    assert isinstance(found, str)
    assert reason in found


def test_a_weak_tie_between_examples_is_noticed_among_many_outputs() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        mean = output.softmax(1).mean(0)
        return F.cross_entropy(output, target) + 0.01 * (mean * mean.log()).sum()

    problem = Problem(nn.Linear(2, 300), loss, (torch.randn(6, 2), torch.arange(6)))
    (found,) = evaluate(FunctionalProblem(problem))
    assert factor_loss_hessian(found) == "the loss couples the examples"


@pytest.mark.parametrize("find", [factor_loss_hessian, check_curved])
def test_a_loss_that_is_linear_in_the_output_is_refused_and_a_saturated_one_called_that(find: Any) -> None:
    with pytest.raises(hessinit.ProblemError, match="linear in the model's output"):
        find(evaluation(lambda z, t: z.sum(), SOFT))
    for size in (1e-3, 1.0, 1e6):
        model = nn.Linear(2, 3, bias=False)
        with torch.no_grad():
            model.weight.copy_(size * torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]]))
        sure = lambda z, t, factor=1e6 / size: F.cross_entropy(factor * z, t)  # noqa: E731
        (found,) = evaluate(FunctionalProblem(Problem(model, sure, (torch.randn(6, 2), labels()))))
        with pytest.raises(hessinit.ProblemError, match="is saturated: it bends at smaller outputs"):
            find(found)
