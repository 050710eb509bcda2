"""The root of the loss's curvature: S Sᵀ is the loss's own Hessian, or there is a reason why not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from pieces import assert_right
from torch import Tensor, nn

import hessinit
from hessinit.curvature.evaluation import Evaluation, evaluate
from hessinit.curvature.loss_factor import LossFactor, check_curved, factor_loss_hessian
from hessinit.problem.problem import Problem

LABELS = torch.tensor([0, 1, 2, 0, -100, 1])
SOFT = torch.tensor([[0.2, 0.3, 0.5]]).repeat(6, 1).double()
WEIGHTS = torch.tensor([1e-3, 1.0, 5.0]).double()


def evaluation(loss: Callable[..., Tensor], targets: Tensor, scale: float = 1.0) -> Evaluation:
    """The output is the weight itself, so it can be set at will."""
    torch.manual_seed(1)
    model = nn.Linear(6, 3, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(scale * torch.randn(3, 6))
    (found,) = evaluate(Problem(model, loss, (torch.eye(6).double(), targets)))
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
    blocks = root.scale * torch.einsum("cni,cnj->nij", root.columns, root.columns)
    rebuilt = torch.block_diag(*blocks)
    torch.testing.assert_close(rebuilt, truth, rtol=0, atol=1e-13 * float(truth.abs().max()))
    # Each output to its own size: a curvature of 1e-17 beside one of 1 is somebody's whole curvature.
    torch.testing.assert_close(rebuilt.diagonal(), truth.diagonal(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0])
def test_a_saturated_softmax_keeps_what_curvature_it_has(scale: float) -> None:
    model = nn.Linear(4, 3).double()
    with torch.no_grad():
        model.weight.mul_(scale)
    batch = (torch.randn(6, 4).double(), torch.tensor([0, 1, 2, 0, 1, 2]))
    assert_right(model, nn.CrossEntropyLoss(), batch)


NO_ROOT: dict[str, tuple[Callable[..., Tensor], str]] = {
    "concave": (lambda z, t: -z.pow(2).sum(), "not convex"),
    "convex in one output, concave in another": (
        lambda z, t: (z[:, 0] ** 2 - z[:, 1] ** 2).sum(),
        "not convex",
    ),
    "concave for one example only": (lambda z, t: (z[:5] ** 2).sum() - (z[5] ** 2).sum(), "not convex"),
    "saddle": (lambda z, t: (z[:, 0] * z[:, 1]).sum(), "not convex"),
    "mean over the batch squared": (lambda z, t: z.mean(0).pow(2).sum(), "couples"),
    "only between neighbours": (lambda z, t: (z[1:] * z[:-1]).sum(), "couples"),
    "a weak tie": (lambda z, t: z.pow(2).sum() + 1e-4 * z.sum().pow(2), "couples"),
}


@pytest.mark.parametrize("name", NO_ROOT)
def test_without_a_root_there_is_a_reason(name: str) -> None:
    loss, reason = NO_ROOT[name]
    found = factor_loss_hessian(evaluation(loss, SOFT))
    assert isinstance(found, str)
    assert reason in found


def test_a_curvature_that_is_not_finite_is_called_that() -> None:
    found = evaluation(lambda z, t: (z - z.detach()).abs().pow(1.5).sum(), SOFT)
    assert factor_loss_hessian(found) == "the loss's curvature at the output is not finite"


def test_a_weak_tie_between_examples_is_noticed_among_many_outputs() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        mean = output.softmax(1).mean(0)
        return F.cross_entropy(output, target) + 0.01 * (mean * mean.log()).sum()

    problem = Problem(nn.Linear(2, 300), loss, (torch.randn(6, 2), torch.arange(6)))
    (found,) = evaluate(problem)
    assert factor_loss_hessian(found) == "the loss couples the examples"


@pytest.mark.parametrize("find", [factor_loss_hessian, check_curved])
def test_a_loss_that_is_linear_in_the_output_is_refused(find: Callable[[Evaluation], object]) -> None:
    with pytest.raises(hessinit.ProblemError, match="linear in the model's output"):
        find(evaluation(lambda z, t: z.sum(), SOFT))


@pytest.mark.parametrize("find", [factor_loss_hessian, check_curved])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6])
def test_a_saturated_loss_is_not_called_linear(find: Callable[[Evaluation], object], size: float) -> None:
    def sure(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(1e6 / size * output, target)

    model = nn.Linear(2, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(size * torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]]))
    (found,) = evaluate(Problem(model, sure, (torch.randn(6, 2), torch.arange(6) % 3)))
    with pytest.raises(hessinit.ProblemError, match="is saturated: it bends at smaller outputs"):
        find(found)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.main, self.side = nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(4, 5)

    def forward(self, features: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(features))
        return torch.cat([self.main(hidden), self.side(hidden)], dim=1)


@pytest.mark.parametrize("share", [1e-4, 1e-6, 1e-8])
def test_a_head_with_a_tiny_share_of_the_loss_is_not_flat(share: float) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output[:, :5], target) + share * F.cross_entropy(output[:, 5:], target)

    model, batch = TwoHeads(), (torch.randn(6, 3), torch.arange(6) % 5)
    report = hessinit.measure(model, loss, batch)
    alone = hessinit.measure(model, lambda output, target: F.cross_entropy(output[:, 5:], target), batch)
    assert report["side"].engine == "gram"
    assert report["side"].norm == pytest.approx(share * alone["side"].norm, rel=2e-3)
