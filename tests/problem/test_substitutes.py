"""Functions that torch cannot differentiate twice, and what stands in for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hessinit


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_a_sparse_embedding_is_measured_like_a_dense_one(curvature: str) -> None:
    torch.manual_seed(0)
    sparse = nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Tanh(), nn.Flatten(), nn.Linear(6, 4))
    dense = nn.Sequential(nn.Embedding(7, 3), nn.Tanh(), nn.Flatten(), nn.Linear(6, 4))
    dense.load_state_dict(sparse.state_dict())
    batch = torch.randint(7, (5, 2)), torch.randint(4, (5,))
    found, truth = (
        hessinit.measure(model, nn.CrossEntropyLoss(), batch, curvature=curvature)
        for model in (sparse, dense)
    )
    assert [layer.norm for layer in found] == [layer.norm for layer in truth]
    assert found.network.norm == truth.network.norm > 0


@pytest.mark.parametrize("inplace", [False, True])
def test_a_hardsigmoid_has_the_second_derivative_that_torch_lacks(inplace: bool) -> None:
    torch.manual_seed(0)
    batch, loss = (torch.randn(9, 5).double(), torch.randint(3, (9,))), nn.CrossEntropyLoss()
    first, last = nn.Linear(5, 6).double(), nn.Linear(6, 3).double()
    options = {"curvature": "both", "jacobians": True, "tolerance": 1e-8}
    report = hessinit.measure(nn.Sequential(first, nn.Hardsigmoid(inplace), last), loss, batch, **options)
    by_hand = nn.Sequential(first, Sixth(), last)
    truth = hessinit.measure(by_hand, loss, batch, **options)
    for row, other in zip(report, truth, strict=True):
        assert row.norm == pytest.approx(other.norm, rel=1e-6)
    assert report["0"].jacobians.activation == pytest.approx(1 / 6)


class Sixth(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu6(x + 3) / 6


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_a_second_derivative_that_torch_lacks_is_named_in_the_loss(curvature: str) -> None:
    def spread(output: torch.Tensor, target: None) -> torch.Tensor:
        return torch.cdist(output, output.roll(1, 0)).square().mean()

    with pytest.raises(hessinit.ProblemError, match="of cdist, which the loss uses.*Write the loss"):
        hessinit.measure(nn.Linear(4, 3), spread, (torch.randn(6, 4), None), curvature=curvature)


class Radial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centres, self.head = nn.Parameter(torch.randn(5, 4)), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.exp(-torch.cdist(x, self.centres)))


def test_a_second_derivative_that_torch_lacks_is_named_in_the_model_and_the_way_out_leads_out() -> None:
    data = torch.randn(6, 4), torch.arange(6) % 3
    with pytest.raises(hessinit.ProblemError, match="of cdist.*Leave these weights out .layers=."):
        hessinit.measure(Radial(), nn.CrossEntropyLoss(), data)
    assert hessinit.measure(Radial(), nn.CrossEntropyLoss(), data, layers="head").network.norm > 0
