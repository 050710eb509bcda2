"""What the tests of the walk have in common."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn

BOTH = pytest.mark.parametrize("with_sample", [True, False], ids=["run", "traced"])


class Between(nn.Module):
    """Two layers with a function between them."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 6), nn.Linear(6, 3), function

    def forward(self, features: Tensor) -> Tensor:
        return self.last(self.function(self.first(features)))
