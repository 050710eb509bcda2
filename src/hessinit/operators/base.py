"""What every operator offers: `@`, `T`, `to_dense`, `to_scipy`, over flat vectors."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class LinearOperator(ABC):
    """A matrix known by its products. Vectors are flat: the layers' weights one after the other."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    products: int = 0
    # What the products run in; the caller of many enters it once instead.
    settings: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    @abstractmethod
    def _product(self, vector: Tensor) -> Tensor:
        """The product with one flat vector."""

    def _adjoint_product(self, vector: Tensor) -> Tensor:
        """The product of the transpose with one flat vector; the operator itself where it is symmetric."""
        return self._product(vector)

    def __matmul__(self, vectors: Tensor) -> Tensor:
        if not isinstance(vectors, Tensor):
            raise TypeError(
                f"cannot multiply an operator with a {type(vectors).__name__}; pass a torch.Tensor."
            )
        if vectors.ndim not in (1, 2) or vectors.shape[0] != self.shape[1]:
            raise ValueError(
                f"cannot multiply an operator of shape {self.shape} with {tuple(vectors.shape)}; "
                f"pass ({self.shape[1]},) or ({self.shape[1]}, m)."
            )
        if vectors.dtype != self.dtype or vectors.device != self.device:
            vectors = vectors.to(dtype=self.dtype, device=self.device)
        self.products += 1 if vectors.ndim == 1 else vectors.shape[1]
        with self.settings():
            if vectors.ndim == 1:
                return self._product(vectors)
            if vectors.shape[1] == 0:
                return vectors.new_zeros(self.shape[0], 0)
            return torch.stack([self._product(column) for column in vectors.unbind(1)], dim=1)

    @property
    def T(self) -> LinearOperator:  # noqa: N802 (numpy's and torch's name for it)
        """The transpose; the operator itself where it is symmetric."""
        return self if type(self)._adjoint_product is LinearOperator._adjoint_product else Transposed(self)

    def to_dense(self) -> Tensor:
        """The matrix itself; costs one product a column, so only for small ones."""
        return self @ torch.eye(self.shape[1], dtype=self.dtype, device=self.device)

    def to_scipy(self) -> Any:
        """A `scipy.sparse.linalg.LinearOperator` with the same products, for scipy's solvers."""
        import numpy as np
        from scipy.sparse.linalg import LinearOperator as ScipyOperator

        def times(operator: LinearOperator) -> Callable[[Any], Any]:
            return lambda vector: (operator @ torch.as_tensor(vector.reshape(-1).copy())).cpu().numpy()

        kind = np.float64 if self.dtype == torch.float64 else np.float32
        return ScipyOperator(self.shape, matvec=times(self), rmatvec=times(self.T), dtype=kind)


class Transposed(LinearOperator):
    """The transpose of an operator; its products count as the operator's."""

    def __init__(self, original: LinearOperator) -> None:
        self.original = original
        self.shape = (original.shape[1], original.shape[0])
        self.dtype, self.device, self.settings = original.dtype, original.device, original.settings

    def _product(self, vector: Tensor) -> Tensor:
        self.original.products += 1
        return self.original._adjoint_product(vector)

    def _adjoint_product(self, vector: Tensor) -> Tensor:
        self.original.products += 1
        return self.original._product(vector)


def split(vector: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """A flat vector as tensors of these shapes."""
    sizes = [int(torch.Size(shape).numel()) for shape in shapes]
    return [part.view(shape) for part, shape in zip(vector.split(sizes), shapes, strict=True)]


def join(tensors: Sequence[Tensor]) -> Tensor:
    """The reverse of `split`."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
