"""Linear operators over flat vectors (`@`, `T`, `to_dense`, `to_scipy`): Hessian, Gauss-Newton, Jacobian."""

from __future__ import annotations

import contextlib
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from hessinit.curvature.evaluation import Evaluation


class Operator(Protocol):
    """A symmetric n × n matrix known by its products; a plain symmetric torch matrix is one."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def __matmul__(self, other: Tensor, /) -> Tensor: ...


def operator_size(operator: Operator) -> int:
    shape = tuple(operator.shape)
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] == 0:
        raise ValueError(
            f"the operator has shape {shape}; spectra need a square, non-empty one, such as A.T @ A."
        )
    if operator.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"the operator has dtype {operator.dtype}; convert it to torch.float32 or torch.float64."
        )
    return shape[0]


def require_at_least(name: str, value: int, least: int, reason: str) -> None:
    if value < least:
        raise ValueError(f"{name}={value} is too few: {reason}. Pass {name}={least} or more.")


def require_tolerance(tolerance: float) -> None:
    if not 0 < tolerance < 1:
        raise ValueError(
            f"tolerance={tolerance} is out of range; it is a relative error between 0 and 1, such as 1e-3."
        )


def power_of_two_scale(vector: Tensor) -> float:
    """The power of two just below the largest |entry|; 0 for a zero vector, inf when an entry is not finite.

    Dividing by a power of two is exact. Costs one host synchronisation.

    >>> power_of_two_scale(torch.tensor([3.0, -5.0])), power_of_two_scale(torch.zeros(2))
    (4.0, 0.0)
    """
    largest = float(vector.detach().abs().max())
    if not math.isfinite(largest):
        return math.inf
    if largest == 0:
        return 0.0
    # The scale and its inverse must both be normal numbers of the dtype, also for subnormal entries.
    limit = 126 if vector.dtype == torch.float32 else 1000
    return math.ldexp(1.0, max(-limit, min(limit, math.frexp(largest)[1] - 1)))


ProbeKind = Literal["gaussian", "rademacher"]

_MOST_DRAWN = 2**16


class ProbeStream:
    """An endless sequence of probes that depends only on seed, size, dtype and kind.

    Probes are drawn on the CPU, so every device sees the same ones. The global random state is left alone.

    >>> ProbeStream(4, seed=0, kind="rademacher").draw().abs().tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int,
        kind: ProbeKind = "gaussian",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.size, self.kind, self.dtype, self.device = size, kind, dtype, device
        # After torch.manual_seed(0) the user's own weights are the numbers that seed 0 gives: probes from the
        # same seed would not be random with respect to the operator (50 % off in tests).
        mixed = np.random.SeedSequence(seed % 2**64, spawn_key=(0x4E55,)).generate_state(1)[0]
        self._generator = torch.Generator().manual_seed(int(mixed))

    def draw(self) -> Tensor:
        if self.kind == "gaussian":
            probe = torch.randn(self.size, generator=self._generator, dtype=self.dtype)
        else:
            # Eight signs from every random byte: ten times as fast as a number for each sign.
            count = -(-self.size // 8)
            bits = torch.randint(0, 256, (count,), generator=self._generator, dtype=torch.uint8)
            signs = torch.from_numpy(np.unpackbits(bits.numpy(), count=self.size))
            probe = signs.to(self.dtype).mul_(2).sub_(1)
        return probe.to(self.device)

    def draw_block(self, count: int) -> Tensor:
        """The next `count` probes as the columns of a (size, count) matrix."""
        return torch.stack([self.draw() for _ in range(count)], dim=1)


def probe_stream(operator: Operator, seed: int, kind: ProbeKind = "gaussian") -> ProbeStream:
    size = operator_size(operator)
    return ProbeStream(size, seed=seed, kind=kind, dtype=operator.dtype, device=operator.device)


def random_like(tensor: Tensor, seed: int, dtype: torch.dtype | None = None) -> Tensor:
    """A random tensor of the shape and device, with the identity as its covariance."""
    dtype, shape, size = dtype or tensor.dtype, tensor.shape, tensor.numel()
    splits = [(math.prod(shape[:at]), math.prod(shape[at:])) for at in range(1, len(shape))]
    if size <= _MOST_DRAWN or not splits:
        return ProbeStream(size, seed=seed, dtype=dtype, device=tensor.device).draw().view(shape)
    # An outer product: to draw a number for every weight of a large model takes longer than some gradients.
    few, others = min(splits, key=sum)
    numbers = ProbeStream(few + others, seed=seed, dtype=dtype, device=tensor.device).draw()
    return torch.outer(numbers[:few], numbers[few:]).view(shape)


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
    def __init__(self, original: LinearOperator) -> None:
        self.original = original
        self.shape = (original.shape[1], original.shape[0])
        self.dtype, self.device, self.settings = original.dtype, original.device, original.settings

    def _product(self, vector: Tensor) -> Tensor:
        return self.original._adjoint_product(vector)

    def _adjoint_product(self, vector: Tensor) -> Tensor:
        return self.original._product(vector)


def split(vector: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    sizes = [int(torch.Size(shape).numel()) for shape in shapes]
    return [part.view(shape) for part, shape in zip(vector.split(sizes), shapes, strict=True)]


def join(tensors: Sequence[Tensor]) -> Tensor:
    flat = [tensor.reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def add_up(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of tensors of one shape; a single one is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.stack(list(tensors)).sum(0)


class WeightOperator(LinearOperator):
    """Something that acts on the weights of `names`, summed over the evaluated batches."""

    def __init__(self, evaluations: Sequence[Evaluation], names: Sequence[str]) -> None:
        leaves = evaluations[0].leaves
        self.evaluations, self.names = list(evaluations), list(names)
        self.shapes = [tuple(leaves[name].shape) for name in names]
        self.shape = (sum(leaves[name].numel() for name in names),) * 2
        self.dtype, self.device = leaves[names[0]].dtype, evaluations[0].problem.device

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
            return one.pull(self.names, one.output_hessian(one.push(self.names, tangents)))

        return self._sum_over_batches(product)


class JacobianOperator(WeightOperator):
    """`J`: the derivative of all outputs of all batches by the weights, (outputs, weights)."""

    def __init__(self, evaluations: Sequence[Evaluation], names: Sequence[str]) -> None:
        super().__init__(evaluations, names)
        self._rows = [evaluation.output.numel() for evaluation in self.evaluations]
        self.shape = (sum(self._rows), self.shape[1])

    def _product(self, vector: Tensor) -> Tensor:
        tangents = split(vector, self.shapes)
        return join([evaluation.push(self.names, tangents) for evaluation in self.evaluations])

    def _adjoint_product(self, vector: Tensor) -> Tensor:
        pairs = zip(self.evaluations, vector.split(self._rows), strict=True)
        pulled = [join(e.pull(self.names, rows.view_as(e.output))) for e, rows in pairs]
        return torch.stack(pulled).sum(0)
