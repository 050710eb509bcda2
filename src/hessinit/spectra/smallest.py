"""The smallest eigenvalue of a positive semidefinite matrix that is written out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hessinit.results.estimates import Estimate
from hessinit.spectra.lanczos import lanczos


class _Inverse:
    """The inverse by its products, from a Cholesky factor."""

    def __init__(self, factor: Tensor) -> None:
        self.factor, self.dtype, self.device = factor, factor.dtype, factor.device
        self.shape = (factor.shape[0], factor.shape[1])

    def __matmul__(self, vectors: Tensor) -> Tensor:
        columns = vectors.unsqueeze(1) if vectors.ndim == 1 else vectors
        return torch.cholesky_solve(columns, self.factor).view_as(vectors)


def smallest_eigenvalue(matrix: Tensor, *, tolerance: float = 1e-3, seed: int = 0) -> Estimate:
    """By Lanczos on the inverse, where the smallest eigenvalue is the largest: ten steps instead of hundreds.

    In fp64 whatever the matrix's dtype. A matrix that is singular up to rounding has 0, to that rounding.

    >>> round(smallest_eigenvalue(torch.diag(torch.tensor([4.0, 1.0, 2.0]))).value, 6)
    1.0
    """
    size = matrix.shape[0]
    rounding = float(torch.finfo(matrix.dtype).eps) * size * float(matrix.diagonal().abs().max())
    if not math.isfinite(rounding):
        return Estimate(0.0, math.inf, False, "the matrix is not finite; use torch.float64", 0)
    factor, failure = torch.linalg.cholesky_ex(matrix.double())
    if int(failure):
        return Estimate(0.0, rounding, True, "positive semidefinite and singular up to rounding", 0)
    found = lanczos(_Inverse(factor), ends="top", tolerance=tolerance, seed=seed).top
    value = 1 / found.value
    error = value * found.relative_error + rounding
    return Estimate(value, error, found.converged, found.reason, found.products)
