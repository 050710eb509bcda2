"""Linear operators over flat vectors (`@`, `T`, `to_dense`, `to_scipy`): Hessian, Gauss-Newton, Jacobian."""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hessinit.curvature.evaluation import Evaluation
from hessinit.problem.preserve import uninterrupted


class LinearOperator(ABC):
    """A matrix known by its products. Vectors are flat: the layers' weights one after the other."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    # What the products run in; the caller of many enters it once instead.
    settings: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    @abstractmethod
    def _product(self, vector: Tensor) -> Tensor:
        """The product with one flat vector."""

    def _adjoint_product(self, vector: Tensor) -> Tensor:
        return self._product(vector)

    @uninterrupted
    def __matmul__(self, vectors: Tensor) -> Tensor:
        if not isinstance(vectors, Tensor):
            raise TypeError(
                f"cannot multiply an operator with a {type(vectors).__name__}; pass a torch.Tensor."
            )
        if vectors.ndim not in (1, 2) or vectors.shape[0] != self.shape[1]:
            why = f"cannot multiply an operator of shape {self.shape} with {tuple(vectors.shape)}"
            raise ValueError(f"{why}; pass ({self.shape[1]},) or ({self.shape[1]}, m).")
        vectors = vectors.to(dtype=self.dtype, device=self.device)
        with self.settings():
            if vectors.ndim == 1:
                return self._product(vectors)
            if vectors.shape[1] == 0:
                return vectors.new_zeros(self.shape[0], 0)
            return torch.stack([self._product(column) for column in vectors.unbind(1)], dim=1)

    @property
    def T(self) -> LinearOperator:  # noqa: N802 (numpy's and torch's name for it)
        """The transpose; the operator itself where it is symmetric."""
        return (
            self
            if type(self)._adjoint_product is LinearOperator._adjoint_product
            else Transposed(self)
        )

    def to_dense(self) -> Tensor:
        """The matrix itself; costs one product a column, so only for small ones."""
        return self @ torch.eye(self.shape[1], dtype=self.dtype, device=self.device)

    def to_scipy(self) -> Any:
        """A `scipy.sparse.linalg.LinearOperator` with the same products, for scipy's solvers."""
        import numpy as np
        from scipy.sparse.linalg import LinearOperator as ScipyOperator

        def times(operator: LinearOperator) -> Callable[[Any], Any]:
            return lambda vector: (
                (operator @ torch.as_tensor(vector.reshape(-1).copy())).cpu().numpy()
            )

        kind = np.float64 if self.dtype == torch.float64 else np.float32
        return ScipyOperator(self.shape, matvec=times(self), rmatvec=times(self.T), dtype=kind)


class Transposed(LinearOperator):
    def __init__(self, original: LinearOperator) -> None:
        self.original = original
        self.shape = (original.shape[1], original.shape[0])
        self.dtype = original.dtype
        self.device = original.device
        self.settings = original.settings

    def _product(self, vector: Tensor) -> Tensor:
        return self.original._adjoint_product(vector)

    def _adjoint_product(self, vector: Tensor) -> Tensor:
        return self.original._product(vector)


def split(vector: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    sizes = [int(torch.Size(shape).numel()) for shape in shapes]
    # Only at an even place can numbers be taken for pairs, as of complex ones.
    parts = [one.clone() if one.storage_offset() % 2 else one for one in vector.split(sizes)]
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def join(tensors: Sequence[Tensor]) -> Tensor:
    flat = [tensor.reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def add_up(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of tensors of one shape; a single one is not copied."""
    # A copy of large ones takes longer than a call for each.
    stacks = len(tensors) > 1 and tensors[0].numel() <= 2**14
    return torch.stack(list(tensors)).sum(0) if stacks else functools.reduce(torch.add, tensors)


class WeightOperator(LinearOperator):
    """Something that acts on the weights of `names`, summed over the evaluated batches."""

    def __init__(
        self,
        evaluations: Sequence[Evaluation],
        names: Sequence[str],
        settings: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        leaves = evaluations[0].leaves
        self.settings = settings
        self.evaluations = list(evaluations)
        self.names = list(names)
        self.shapes = [tuple(leaves[name].shape) for name in names]
        self.shape = (sum(leaves[name].numel() for name in names),) * 2
        self.dtype = leaves[names[0]].dtype
        self.device = evaluations[0].problem.device

    @uninterrupted  # a dense matrix takes many products
    def _sum_over_batches(self, product: Callable[[Evaluation], Sequence[Tensor]]) -> Tensor:
        found = (join(product(one)).detach() * one.weight for one in self.evaluations)
        return functools.reduce(torch.add, found)


class HessianOperator(WeightOperator):
    """The exact Hessian of the loss, reverse over reverse; a product costs about two gradients."""

    def _product(self, vector: Tensor) -> Tensor:
        tangents = split(vector, self.shapes)
        return self._sum_over_batches(lambda one: one.hessian(self.names, tangents))


class GaussNewtonOperator(WeightOperator):
    """`Jᵀ H_z J`, the paper's Theorem 1; a product costs about two gradients."""

    def _product(self, vector: Tensor) -> Tensor:
        tangents = split(vector, self.shapes)

        def product(one: Evaluation) -> tuple[Tensor, ...]:
            moved = one.push(self.names, tangents)
            return one.pull(self.names, one.output_hessian(moved, overwrite=True))

        return self._sum_over_batches(product)


class Recorder:
    """Records products on a GPU as CUDA graphs, which demand a stream of their own."""

    def __init__(self, evaluations: Sequence[Evaluation]) -> None:
        self._stream = torch.cuda.Stream()
        self._last = None
        for one in evaluations:
            one.forget()  # a backward pass runs on the stream of its forward: evaluate again on this one

    _last: torch.cuda.CUDAGraph | None  # keeps the memory that all share

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            yield
        before.wait_stream(self._stream)

    def record(self, function: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor] | None:
        """A graph that computes the function again into the tensor; None where it cannot be recorded."""
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(pool=self._last.pool() if self._last else None)
            try:
                found = function()
            finally:
                graph.capture_end()
        except RuntimeError:  # an operation that waits for the GPU
            return None
        self._last = graph
        return graph, found


class RecordedOperator(LinearOperator):
    """An operator whose third and later products replay the kernels of the second one."""

    def __init__(self, operator: WeightOperator, recorder: Recorder) -> None:
        self._operator = operator
        self._recorder = recorder
        self._products = 0
        self.shape = operator.shape
        self.dtype = operator.dtype
        self.device = operator.device
        self._recording: tuple[torch.cuda.CUDAGraph, Tensor] | None = None

    def _product(self, vector: Tensor) -> Tensor:
        self._products += 1
        if self._products == 2:
            self._given = vector.clone()
            self._recording = self._recorder.record(lambda: self._operator._product(self._given))
            self._read = [dict(vars(one)) for one in self._operator.evaluations]  # by the recording
        if self._recording is None:  # the first one also loads kernels, which no recording may do
            return self._operator._product(vector)
        graph, found = self._recording
        self._given.copy_(vector)
        graph.replay()
        return found.clone()


class JacobianOperator(WeightOperator):
    """`J`: the derivative of all outputs of all batches by the weights, (outputs, weights)."""

    def __init__(
        self,
        evaluations: Sequence[Evaluation],
        names: Sequence[str],
        settings: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        super().__init__(evaluations, names, settings)
        self._rows = [evaluation.output.numel() for evaluation in self.evaluations]
        self.shape = (sum(self._rows), self.shape[1])

    @uninterrupted
    def _product(self, vector: Tensor) -> Tensor:
        tangents = split(vector, self.shapes)
        return join([evaluation.push(self.names, tangents) for evaluation in self.evaluations])

    @uninterrupted
    def _adjoint_product(self, vector: Tensor) -> Tensor:
        pairs = zip(self.evaluations, vector.split(self._rows), strict=True)
        pulled = [join(e.pull(self.names, rows.view_as(e.output))) for e, rows in pairs]
        return torch.stack(pulled).sum(0)
