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
