"""What the tests of the walk have in common."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

BOTH = pytest.mark.parametrize("with_sample", [True, False], ids=["run", "traced"])


class Between(nn.Module):
    """Two layers with a function between them."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 6), nn.Linear(6, 3), function

    def forward(self, features: Tensor) -> Tensor:
        return self.last(self.function(self.first(features)))


def skip_what_torch_cannot_trace(with_sample: bool) -> None:
    """For a forward that makes a tensor of its input's size: torch 2.6 traces none, a sample is needed."""
    if not with_sample:
        try:
            fx.symbolic_trace(lambda x: torch.zeros(x.shape))
        except TypeError:
            pytest.skip("this torch cannot trace torch.zeros(x.shape)")
