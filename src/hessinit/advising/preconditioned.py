"""Curvature in the coordinates of an adaptive optimizer, by its products."""

from __future__ import annotations

from torch import Tensor

from hessinit.curvature.engines import Effort
from hessinit.curvature.lanczos import lanczos
from hessinit.curvature.operators import LinearOperator
from hessinit.results.estimates import Estimate


class Preconditioned(LinearOperator):
    """`P^-½ H P^-½`; weights with `P = inf` are left out. A product costs one with H.

    >>> import torch
    >>> matrix, divisor = torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.tensor([4.0, 1.0])
    >>> Preconditioned(matrix, divisor).to_dense()
    tensor([[0.5000, 0.5000],
            [0.5000, 2.0000]])
    """

    def __init__(self, curvature: LinearOperator | Tensor, divisor: Tensor) -> None:
        self._curvature = curvature
        self._root = divisor.rsqrt()
        self.shape = (int(divisor.numel()), int(divisor.numel()))
        self.dtype, self.device = divisor.dtype, divisor.device

    def _product(self, vector: Tensor) -> Tensor:
        return self._root * (self._curvature @ (self._root * vector))


def preconditioned_norm(operator: Preconditioned, effort: Effort, *, semidefinite: bool) -> Estimate:
    """The largest |eigenvalue|; a curvature that is semidefinite in all but rounding needs only its top."""
    found = lanczos(operator, ends="top" if semidefinite else "both", **effort.options).norm
    if semidefinite and not found.converged:
        return lanczos(operator, ends="both", **effort.options).norm
    return found
