"""The largest singular value of many linear maps at once, one for each example of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hessinit.curvature.krylov import CAUTION, NOT_FINITE, Array, worth_checking
from hessinit.curvature.probes import ProbeStream

# The basis grows by this many vectors at a time.
_ROWS = 16


@dataclass(frozen=True)
class BatchedMap:
    """One matrix per example, known by its products: `push` takes (examples, inputs), `pull` (…, outputs)."""

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
    """The largest singular value of every example, its error, and whether that is within the tolerance."""

    values: Array
    errors: Array
    converged: bool
    reason: str
    products: int

    @property
    def upper(self) -> Array:
        return self.values + self.errors


# A value has settled when it has not moved over this many steps.
_SETTLING_STEPS = 3


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

    Golub-Kahan bidiagonalization of all examples in lockstep; a step costs one product with every
    matrix and one with every transpose. The same for 1e-30·A and 1e30·A, example by example. Goes
    through the smaller of the two spaces and keeps one of its vectors per step, fully
    reorthogonalized.
    """
    if maps.outputs < maps.inputs:
        maps = maps.transposed
    stream = ProbeStream(maps.examples * maps.inputs, seed=seed, dtype=dtype)
    process = _Bidiagonalization(maps, stream.draw().to(device).view(maps.examples, maps.inputs))
    limit = min(max_iterations, maps.inputs)
    tops: list[tuple[int, Array]] = []
    while True:
        process.step()
        last = process.steps == limit or bool((process.exhausted | ~process.finite).all())
        if not last and not worth_checking(process.steps):
            continue
        values, bounds, residuals = process.read()
        earlier = [top for steps, top in tops if steps <= process.steps - _SETTLING_STEPS]
        tops.append((process.steps, values))
        change = np.abs(values - earlier[-1]) if earlier else np.full_like(values, math.inf)
        change = np.where(process.exhausted, 0.0, change)
        small = residuals <= CAUTION * math.sqrt(tolerance) * values
        settled = (bounds <= tolerance * values) & (change <= tolerance * values) & small
        if last or bool(settled.all()):
            break
    # As in RitzExtreme.error: the residual until converged, and a little more than the bound in a
    # cluster.
    rounding = 8 * float(torch.finfo(dtype).eps)
    finite = process.finite
    errors = np.maximum(np.maximum(bounds, change), np.minimum(3 * residuals, tolerance * values))
    errors = np.where(settled, errors, residuals) + rounding * values
    loose = int((~settled).sum())
    reason = f"settled in every example, within tolerance={tolerance:g}"
    if not finite.all():
        reason = NOT_FINITE
    elif tolerance < rounding:
        reason = f"tolerance={tolerance:g} is below the rounding level {rounding:.0e} of {dtype}"
    elif loose:
        reason = (
            f"stopped at max_iterations={max_iterations} in {loose} examples; raise it or tolerance"
        )
    values, errors = (np.where(finite, one * process.scales, math.inf) for one in (values, errors))
    converged = bool(finite.all()) and tolerance >= rounding and not loose
    return SingularValues(values, errors, converged, reason, 2 * process.steps)


class _Bidiagonalization:
    """`A V = U B` with B upper bidiagonal, for every example, in units of its own power of two."""

    def __init__(self, maps: BatchedMap, initial: Tensor) -> None:
        self._maps = maps
        self._right = initial.new_empty(maps.examples, min(_ROWS, maps.inputs), maps.inputs)
        self._right[:, 0] = initial / torch.linalg.vector_norm(initial, dim=1, keepdim=True)
        self._left: Tensor | None = None
        self._scales: Tensor | None = None
        self._small = np.zeros((maps.examples, _ROWS, _ROWS))
        self._betas = np.zeros(maps.examples)
        self._largest = np.zeros(maps.examples)
        self._rounding = 10 * float(torch.finfo(initial.dtype).eps)
        self.steps = 0
        self.exhausted = np.zeros(maps.examples, dtype=bool)
        self.finite = np.ones(maps.examples, dtype=bool)

    @property
    def scales(self) -> Array:
        assert self._scales is not None
        return self._scales[:, 0].double().cpu().numpy()

    def step(self) -> None:
        step = self.steps
        previous = self._betas
        current = self._right[:, step]
        left = self._maps.push(current).detach()
        if self._scales is None:
            self._scales = _powers_of_two(left)
        left = left / self._scales
        if self._left is not None:
            left = left - self._left * torch.as_tensor(previous).to(left)[:, None]
        lengths = torch.linalg.vector_norm(left, dim=1)
        self._left = _divided(left, lengths)
        candidate = self._maps.pull(self._left).detach() / self._scales
        candidate = candidate - current * lengths[:, None]
        known = self._right[:, : step + 1]
        # Twice is enough (Parlett, after Kahan); one side orthogonal keeps the other (Simon & Zha
        # 2000).
        for _ in range(2):
            along = torch.bmm(known, candidate.unsqueeze(2))
            candidate = candidate - torch.bmm(along.mT, known).squeeze(1)
        alphas = lengths.double().cpu().numpy()
        betas = torch.linalg.vector_norm(candidate, dim=1).double().cpu().numpy()
        self.finite &= np.isfinite(alphas) & np.isfinite(betas)
        alphas = np.where(self.finite, alphas, 0.0)
        betas = np.where(self.finite, betas, 0.0)
        if step == self._small.shape[1]:
            self._small = np.pad(self._small, ((0, 0), (0, _ROWS), (0, _ROWS)))
        self._small[:, step, step] = alphas
        if step:
            self._small[:, step - 1, step] = previous
        self._largest = np.maximum(self._largest, np.maximum(alphas, betas))
        self.steps += 1
        self.exhausted |= (betas <= self._rounding * self._largest) | (
            self.steps == self._maps.inputs
        )
        self._betas = np.where(self.exhausted, 0.0, betas)
        if self.steps < self._maps.inputs:
            if self.steps == self._right.shape[1]:
                more = min(_ROWS, self._maps.inputs - self.steps)
                room = self._right.new_empty(len(candidate), more, candidate.shape[1])
                self._right = torch.cat((self._right, room), 1)
            # An exhausted example goes on as zeros, which change nothing.
            self._right[:, self.steps] = _divided(
                candidate, torch.as_tensor(self._betas).to(candidate)
            )

    def read(self) -> tuple[Array, Array, Array]:
        """The largest singular values, their Kato-Temple bounds and residuals."""
        left, values, _ = np.linalg.svd(self._small[:, : self.steps, : self.steps])
        # ‖Aᵀ U p − s V q‖ = β |last of p|, and A V q = s U p.
        residuals = self._betas[:, None] * np.abs(left[:, -1, :])
        top = values[:, 0]
        residual = residuals[:, 0]
        bound = residual.copy()
        if self.steps > 1:
            gap = top - values[:, 1] - residuals[:, 1]
            with np.errstate(divide="ignore", invalid="ignore"):
                bound = np.where(gap > residual, residual * (residual / gap), residual)
        return top, bound, residual


def _powers_of_two(vectors: Tensor) -> Tensor:
    """One near the size of every row; 1 where there is none."""
    largest = vectors.abs().amax(dim=1, keepdim=True)
    powers = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1)
    return torch.where(
        (largest > 0) & torch.isfinite(powers) & (powers > 0), powers, torch.ones_like(powers)
    )


def _divided(vectors: Tensor, lengths: Tensor) -> Tensor:
    safe = torch.where(lengths > 0, lengths, torch.ones_like(lengths))
    return torch.where(lengths[:, None] > 0, vectors / safe[:, None], torch.zeros_like(vectors))
