"""Symmetric matrices whose spectra are known, or can be had from numpy in fp64."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def with_spectrum(values: list[float] | np.ndarray, *, seed: int = 0) -> Tensor:
    """A dense fp64 matrix with exactly these eigenvalues, in a random basis."""
    size = len(values)
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    matrix = (basis * torch.as_tensor(np.asarray(values), dtype=torch.float64)) @ basis.T
    return (matrix + matrix.T) / 2


def gaussian_matrix(rows: int, columns: int, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def wigner(size: int, *, seed: int = 0) -> Tensor:
    noise = gaussian_matrix(size, size, seed=seed)
    return (noise + noise.T) / (2 * size) ** 0.5


def gram(rows: int, columns: int, *, seed: int = 0) -> Tensor:
    factor = gaussian_matrix(rows, columns, seed=seed)
    return factor @ factor.T / columns


def eigenvalues(matrix: Tensor) -> np.ndarray:
    return np.linalg.eigvalsh(matrix.double().numpy())


class CountingOperator:
    """A matrix that counts its products and can spoil one of them."""

    def __init__(self, matrix: Tensor, *, spoil: int | None = None, by: float = float("nan")) -> None:
        self.matrix = matrix
        self.spoil = spoil
        self.by = by
        self.products = 0
        self.shape = tuple(matrix.shape)
        self.dtype = matrix.dtype
        self.device = matrix.device

    def __matmul__(self, other: Tensor) -> Tensor:
        self.products += 1 if other.ndim == 1 else other.shape[1]
        result = self.matrix @ other
        if self.spoil is not None and self.products >= self.spoil:
            result[0] = self.by
        return result
