"""Odd shapes, unfinished searches and numbers beyond range: said, not shown as bounds."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hessinit

pytestmark = pytest.mark.filterwarnings("ignore::hessinit.ConvergenceWarning")


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).tanh().sum()


def test_an_output_without_dimensions_has_products() -> None:
    def loss(output: Tensor, target: None) -> Tensor:
        return (output - 1) ** 2

    row = hessinit.measure(Energy(), loss, (torch.randn(9, 4), None), jacobians=True)["a"]
    assert row.jacobians.rigorous_bound >= row.norm


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return self.a(x[0]) * x[1]


def test_an_input_without_dimensions_is_no_obstacle() -> None:
    batch = (torch.randn(6, 4), torch.tensor(2.0)), torch.randint(3, (6,))
    row = hessinit.measure(Tempered(), nn.CrossEntropyLoss(), batch, jacobians=True)["a"]
    assert row.jacobians.rigorous_bound >= row.norm


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(checkpoint(self.a, x, use_reentrant=True)))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints_are_refused_in_words() -> None:
    batch = torch.randn(6, 4), torch.randint(3, (6,))
    # No gradient reaches the layer inside, since its inputs have none: torch warns, and the check refuses it.
    with pytest.raises(hessinit.ProblemError, match="is not that of the function that is trained"):
        hessinit.measure(Checkpointed(), nn.CrossEntropyLoss(), batch)
    with pytest.raises(hessinit.ProblemError, match="reentrant checkpoints"):
        hessinit.measure(Checkpointed(), nn.CrossEntropyLoss(), batch, jacobians=True, check=False)


class Sloped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.prelu(x, self.a(x).view(-1))


def test_a_layer_that_gives_the_slope_of_an_activation_does_not_have_it() -> None:
    batch = -torch.rand(1, 5), torch.randint(5, (1,))
    report = hessinit.measure(Sloped(), nn.CrossEntropyLoss(), batch, jacobians=True, diagnostics=True)
    assert report["a"].jacobians.activation == 1.0
    assert report["a"].jacobians.rigorous_bound >= report["a"].norm * 0.999
    assert report["a"].diagnostics.activation == ""


def test_an_unfinished_search_gives_no_bound() -> None:
    weights = torch.ones(300).double()
    weights[7] = 1.5
    model, x = nn.Linear(4, 300, bias=False).double(), torch.randn(1, 4).double()
    report = hessinit.measure(
        model, lambda output, _: (weights * output**2).sum(), (x, None), jacobians=True, max_iterations=1
    )
    found = report[0].jacobians
    assert found.rigorous_bound is None
    assert "did not converge; raise max_iterations" in found.reason


def test_a_norm_beyond_range_is_not_compared_with_its_bounds() -> None:
    layers = [nn.Linear(5, 5, bias=False) for _ in range(20)]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for layer in layers:
            layer.weight.mul_(1e3)
    report = hessinit.measure(model, nn.MSELoss(), (torch.zeros(3, 5), torch.zeros(3, 5)), jacobians=True)
    assert math.isclose(report[0].norm, 0.0)
    assert "times ‖H‖" not in report.verdict
    assert "above the paper's bound" not in report.verdict
