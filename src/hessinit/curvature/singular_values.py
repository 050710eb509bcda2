"""The largest singular value of many linear maps at once, one for each example of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hessinit.curvature import krylov, lanczos
from hessinit.curvature.krylov import Array
from hessinit.curvature.probes import ProbeStream


@dataclass(frozen=True)
class BatchedMap:
    """One matrix per example, known by its products.

    `push` takes (examples, inputs) to (examples, outputs), and `pull` takes them back.
    """

    examples: int
    inputs: int
    outputs: int
    push: Callable[[Tensor], Tensor]
    pull: Callable[[Tensor], Tensor]

    @property
    def transposed(self) -> BatchedMap:
        return BatchedMap(self.examples, self.outputs, self.inputs, self.pull, self.push)

    @classmethod
    def of(cls, matrices: Tensor) -> BatchedMap:
        """Explicit matrices: (examples, outputs, inputs)."""
        examples, outputs, inputs = matrices.shape
        return cls(
            examples,
            inputs,
            outputs,
            lambda vectors: torch.bmm(matrices, vectors.unsqueeze(2)).squeeze(2),
            lambda vectors: torch.bmm(vectors.unsqueeze(1), matrices).squeeze(1),
        )


@dataclass(frozen=True)
class SingularValues:
    """The largest singular value of every example, and its error.

    `converged` says whether every error is within the tolerance.
    """

    values: Array
    errors: Array
    converged: bool
    reason: str
    products: int

    @property
    def upper(self) -> Array:
        return self.values + self.errors


def largest_singular_values(
    maps: BatchedMap,
    *,
    tolerance: float = 1e-3,
    max_iterations: int = 200,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> SingularValues:
    """The spectral norm of every example's matrix, to `tolerance`, relative.

    By Lanczos on AᵀA for all examples in lockstep, in the smaller of the two spaces; a step costs
    one product with every matrix and one with every transpose, and keeps one vector per example.
    The same for 1e-30·A and 1e30·A, example by example.

    >>> matrices = torch.diag_embed(torch.tensor([[3.0, 1.0, 0.0], [0.5, 2.0, 1.0]]))
    >>> largest_singular_values(BatchedMap.of(matrices)).values.round(5).tolist()
    [3.0, 2.0]
    """
    if maps.outputs < maps.inputs:
        maps = maps.transposed
    stream = ProbeStream(maps.examples * maps.inputs, seed=seed, dtype=dtype)
    squared = _SquaredMap(maps)
    goal = lanczos.Goal(
        which="top",
        # The relative error of a square is twice as large. More than 2 % of it would save few
        # products, and miss more eigenvalues.
        tolerance=min(2 * tolerance, 0.02),
        max_iterations=max_iterations,
        is_semidefinite=True,
        # An eigenvalue may be missed in any example of 1 % of the batches.
        rarity=krylov.STOPPING.rarest / maps.examples,
    )
    initial = stream.draw().to(device).view(maps.examples, maps.inputs)
    search = lanczos.LanczosSearch(squared.products, initial, goal)
    squares = [result.top for result in lanczos.run_together([search])]
    values = np.sqrt([square.value for square in squares])
    uppers = np.sqrt([square.value + square.error for square in squares])
    is_finite = np.isfinite(values)
    errors = np.where(is_finite, uppers - np.where(is_finite, values, 0.0), np.inf)
    roots = np.sqrt(squared.scales)
    unsettled = sum(not square.converged for square in squares)
    rounding = 4 * torch.finfo(dtype).eps
    reason = f"settled in every example, within tolerance={tolerance:g}"
    if not is_finite.all():
        reason = krylov.NOT_FINITE
    elif tolerance < rounding:
        reason = f"tolerance={tolerance:g} is below the rounding level {rounding:.0e} of {dtype}"
    elif unsettled:
        stopped = f"stopped at max_iterations={max_iterations} in {unsettled} examples"
        reason = f"{stopped}; raise it or tolerance"
    products = 2 * max(square.products for square in squares)
    return SingularValues(values * roots, errors * roots, not unsettled, reason, products)


class _SquaredMap:
    """Products with every AᵀA / s, where s is a power of two near the size of the first A v."""

    def __init__(self, maps: BatchedMap) -> None:
        self._maps = maps
        self.scales: Array = np.zeros(0)

    def products(self, vectors: Tensor, examples: Sequence[int]) -> Tensor:
        rows = list(examples)
        inputs = vectors.new_zeros(self._maps.examples, self._maps.inputs)
        inputs[rows] = vectors
        images = self._maps.push(inputs).detach()
        if not self.scales.size:
            largest = images.abs().amax(dim=1).double().cpu().numpy()
            powers = krylov.powers_of_two(largest, images.dtype)
            self.scales = np.where(np.isfinite(powers) & (powers > 0), powers, 1.0)
        scales = torch.from_numpy(self.scales).to(images)
        return self._maps.pull(images / scales[:, None]).detach()[rows]
