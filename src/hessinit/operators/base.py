"""What every operator offers: `@`, `to_dense`, `to_scipy`, over flat vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class LinearOperator(ABC):
    """A matrix known by its products. Vectors are flat: the layers' weights one after the other."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    products: int = 0

    @abstractmethod
    def _product(self, vector: Tensor) -> Tensor:
        """The product with one flat vector."""

    def _adjoint_product(self, vector: Tensor) -> Tensor:
        """The product of the transpose with one flat vector; the operator itself where it is symmetric."""
        return self._product(vector)

    def __matmul__(self, vectors: Tensor) -> Tensor:
        if vectors.shape[0] != self.shape[1] or vectors.ndim not in (1, 2):
            raise ValueError(
                f"cannot multiply an operator of shape {self.shape} with {tuple(vectors.shape)}; "
                f"pass ({self.shape[1]},) or ({self.shape[1]}, m)."
            )
        vectors = vectors.to(dtype=self.dtype, device=self.device)
        if vectors.ndim == 1:
            self.products += 1
            return self._product(vectors)
        self.products += vectors.shape[1]
        return torch.stack([self._product(column) for column in vectors.unbind(1)], dim=1)

    def to_dense(self) -> Tensor:
        """The matrix itself; costs one product a column, so only for small ones."""
        return self @ torch.eye(self.shape[1], dtype=self.dtype, device=self.device)

    def to_scipy(self) -> Any:
        """A `scipy.sparse.linalg.LinearOperator` with the same products, for scipy's solvers."""
        import numpy as np
        from scipy.sparse.linalg import LinearOperator as ScipyOperator

        def times(vector: Any) -> Any:
            return self._product(self._from_numpy(vector)).cpu().numpy()

        def transposed_times(vector: Any) -> Any:
            return self._adjoint_product(self._from_numpy(vector)).cpu().numpy()

        kind = np.float64 if self.dtype == torch.float64 else np.float32
        return ScipyOperator(self.shape, matvec=times, rmatvec=transposed_times, dtype=kind)

    def _from_numpy(self, vector: Any) -> Tensor:
        return torch.as_tensor(vector.reshape(-1).copy()).to(dtype=self.dtype, device=self.device)


def split(vector: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """A flat vector as tensors of these shapes."""
    sizes = [int(torch.Size(shape).numel()) for shape in shapes]
    return [part.view(shape) for part, shape in zip(vector.split(sizes), shapes, strict=True)]


def join(tensors: Sequence[Tensor]) -> Tensor:
    """The reverse of `split`."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
