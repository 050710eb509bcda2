"""A small operator written out as a matrix, for the cases where exact is no dearer than an estimate."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hessinit.spectra.protocol import Operator, operator_size

_COLUMNS_AT_ONCE = 64


def dense_columns(operator: Operator) -> Iterator[Tensor]:
    """The columns of the operator in order, in blocks (n, up to 64); n products in all.

    >>> torch.cat(list(dense_columns(torch.tensor([[1.0, 2.0], [2.0, 3.0]]))), dim=1).tolist()
    [[1.0, 2.0], [2.0, 3.0]]
    """
    size = operator_size(operator)
    for first in range(0, size, _COLUMNS_AT_ONCE):
        count = min(_COLUMNS_AT_ONCE, size - first)
        block = torch.zeros((size, count), dtype=operator.dtype, device=operator.device)
        block[first : first + count].fill_diagonal_(1)
        yield (operator @ block).detach()
