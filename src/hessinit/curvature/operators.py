"""Linear operators on flat vectors: the Hessian, the Gauss-Newton matrix and the Jacobian."""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hessinit.curvature.evaluation import BatchGraph, graphs_of
from hessinit.problem.preserve import uninterrupted

# What the products run in: a context manager is entered for each.
Settings = Callable[[], contextlib.AbstractContextManager[None]]


class LinearOperator(ABC):
    """A matrix known by its products. Vectors are flat: the layers' weights one after the other.

    Multiply with `@`; `T` is the transpose, and `to_dense` and `to_scipy` convert the operator.
    """

    settings: Settings = contextlib.nullcontext

    def __init__(self, shape: tuple[int, int], like: LinearOperator | Tensor) -> None:
        """An operator of this shape, with the dtype and the device of another one or a tensor."""
        self.shape = shape
        self.dtype: torch.dtype = like.dtype
        self.device: torch.device = like.device

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
            shapes = f"an operator of shape {self.shape} with {tuple(vectors.shape)}"
            advice = f"pass ({self.shape[1]},) or ({self.shape[1]}, m)"
            raise ValueError(f"cannot multiply {shapes}; {advice}.")
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
        is_symmetric = type(self)._adjoint_product is LinearOperator._adjoint_product
        return self if is_symmetric else Transposed(self)

    def to_dense(self) -> Tensor:
        """The matrix itself, from one product for each column: for small operators only."""
        return self @ torch.eye(self.shape[1], dtype=self.dtype, device=self.device)

    def to_scipy(self) -> Any:
        """A `scipy.sparse.linalg.LinearOperator` with the same products, for scipy's solvers."""
        import numpy as np
        from scipy.sparse.linalg import LinearOperator as ScipyOperator

        def product_with(operator: LinearOperator, vector: Any) -> Any:
            return (operator @ torch.as_tensor(vector.reshape(-1).copy())).cpu().numpy()

        return ScipyOperator(
            self.shape,
            matvec=functools.partial(product_with, self),
            rmatvec=functools.partial(product_with, self.T),
            dtype=np.float64 if self.dtype == torch.float64 else np.float32,
        )


class Transposed(LinearOperator):
    def __init__(self, original: LinearOperator) -> None:
        super().__init__((original.shape[1], original.shape[0]), original)
        self.original = original
        self.settings = original.settings

    def _product(self, vector: Tensor) -> Tensor:
        return self.original._adjoint_product(vector)

    def _adjoint_product(self, vector: Tensor) -> Tensor:
        return self.original._product(vector)


def split(vector: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """The parts of a flat vector, one of each shape; the inverse of `join`."""
    sizes = [int(torch.Size(shape).numel()) for shape in shapes]
    tensors = []
    for part, shape in zip(vector.split(sizes), shapes, strict=True):
        # Pairs of numbers can be viewed as complex ones at an even offset only.
        aligned = part.clone() if part.storage_offset() % 2 else part
        tensors.append(aligned.view(shape))
    return tensors


def join(tensors: Sequence[Tensor]) -> Tensor:
    """The entries of all tensors, in one flat vector."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def add_up(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of tensors of one shape; a single one is not copied."""
    # To copy large tensors takes longer than one call for each.
    if len(tensors) > 1 and tensors[0].numel() <= 2**14:
        return torch.stack(list(tensors)).sum(0)
    return functools.reduce(torch.add, tensors)


class WeightOperator(LinearOperator):
    """An operator on the weights of `names`, summed over the evaluated batches."""

    def __init__(
        self,
        evaluations: Sequence[BatchGraph],
        names: Sequence[str],
        settings: Settings = contextlib.nullcontext,
    ) -> None:
        leaves = evaluations[0].leaves
        size = sum(leaves[name].numel() for name in names)
        super().__init__((size, size), leaves[names[0]])
        self.device = evaluations[0].problem.device
        self.settings = settings
        self.evaluations = list(evaluations)
        self.names = list(names)
        self.shapes = [tuple(leaves[name].shape) for name in names]

    @uninterrupted  # a dense matrix takes many products
    def _sum_over_batches(self, product: Callable[[BatchGraph], Sequence[Tensor]]) -> Tensor:
        weighted = (
            join(product(evaluation)).detach() * evaluation.weight
            for evaluation in self.evaluations
        )
        return functools.reduce(torch.add, weighted)


class HessianOperator(WeightOperator):
    """The exact Hessian of the loss, reverse over reverse; a product costs about two gradients."""

    def _product(self, vector: Tensor) -> Tensor:
        tangents = split(vector, self.shapes)
        return self._sum_over_batches(lambda evaluation: evaluation.hessian(self.names, tangents))


class GaussNewtonOperator(WeightOperator):
    """`Jᵀ H_z J`, the paper's Theorem 1; a product costs about two gradients."""

    def _product(self, vector: Tensor) -> Tensor:
        tangents = split(vector, self.shapes)

        def product(evaluation: BatchGraph) -> tuple[Tensor, ...]:
            moved = evaluation.push(self.names, tangents)
            curved = evaluation.output_hessian(moved, overwrite=True)
            return evaluation.pull(self.names, curved)

        return self._sum_over_batches(product)


class KernelRecorder:
    """Records the kernels of products as CUDA graphs, which demand a stream of their own."""

    def __init__(self, evaluations: Sequence[BatchGraph]) -> None:
        self._evaluations = evaluations
        self._stream = torch.cuda.Stream()
        self._last: torch.cuda.CUDAGraph | None = None  # keeps the memory that all share

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        # A backward pass runs on the stream of its forward: this block builds its graphs on its own
        # stream.
        with torch.cuda.stream(self._stream), graphs_of(self._evaluations, anew=True):
            yield
        before.wait_stream(self._stream)

    def record(self, function: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor] | None:
        """A graph that computes the function again, and the tensor that it writes to.

        None if the function cannot be recorded.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(pool=self._last.pool() if self._last else None)
            try:
                result = function()
            finally:
                graph.capture_end()
        except RuntimeError:  # an operation waits for the GPU
            return None
        self._last = graph
        return graph, result


class RecordedOperator(LinearOperator):
    """An operator whose third and later products replay the kernels of the second one."""

    def __init__(self, operator: WeightOperator, recorder: KernelRecorder) -> None:
        super().__init__(operator.shape, operator)
        self._operator = operator
        self._recorder = recorder
        self._products = 0
        self._recording: tuple[torch.cuda.CUDAGraph, Tensor] | None = None

    def _product(self, vector: Tensor) -> Tensor:
        self._products += 1
        # The first product also loads kernels, which no recording may do.
        if self._products == 2:
            self._input = vector.clone()
            self._recording = self._recorder.record(lambda: self._operator._product(self._input))
            # The recording reads these tensors.
            evaluations = self._operator.evaluations
            self._read = [dict(vars(evaluation)) for evaluation in evaluations]
        if self._recording is None:
            return self._operator._product(vector)
        graph, output = self._recording
        self._input.copy_(vector)
        graph.replay()
        return output.clone()


class JacobianOperator(WeightOperator):
    """`J`: the derivative of all outputs of all batches by the weights, (outputs, weights)."""

    def __init__(
        self,
        evaluations: Sequence[BatchGraph],
        names: Sequence[str],
        settings: Settings = contextlib.nullcontext,
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
        pulled = []
        for evaluation, rows in zip(self.evaluations, vector.split(self._rows), strict=True):
            cotangent = rows.view_as(evaluation.output)
            pulled.append(join(evaluation.pull(self.names, cotangent)))
        return torch.stack(pulled).sum(0)
