"""The extreme eigenvalues of a symmetric operator, with a bound on their error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hessinit.curvature import krylov, probes
from hessinit.results.estimates import Estimate

Which = Literal["both", "top"]

# An extreme counts for the norm from this share of it on.
_MAKES_THE_NORM = 0.9


@dataclass(frozen=True)
class LanczosResult:
    """The extreme eigenvalues; `norm` is the largest |eigenvalue|. Their products are shared, not added.

    `bottom` is None when only the top was asked for; `ritz` holds all Ritz values in ascending order.
    """

    top: Estimate
    bottom: Estimate | None
    norm: Estimate
    steps: int
    ritz: tuple[float, ...]


def lanczos(
    operator: probes.Operator,
    *,
    which: Which = "both",
    tolerance: float = 1e-3,
    max_iterations: int = 200,
    seed: int = 0,
    semidefinite: bool = False,
) -> LanczosResult:
    """The largest and the smallest eigenvalue, each to `tolerance` times the spectral norm.

    Stopped by a bound on the error that is relative to the norm, hence the same for 1e-30·A and 1e30·A. Costs
    one product per step (typically 10 to 60) and keeps one vector per step. With which="top" only the largest
    eigenvalue has to converge (enough for a positive semidefinite operator).

    >>> extremes = lanczos(torch.diag(torch.linspace(-2.0, 3.0, 50, dtype=torch.float64)))
    >>> abs(extremes.top.value - 3) <= extremes.top.error <= 3e-3
    True
    """
    size = probes.operator_size(operator)
    if which not in ("both", "top"):
        raise ValueError(
            f"which={which!r} is unknown; choose from 'both', 'top'. For the bottom alone pass -operator."
        )
    probes.require_tolerance(tolerance)
    probes.require_at_least("max_iterations", max_iterations, 1, "every step is one product")
    process = krylov.LanczosProcess(operator, probes.random_vector(operator, seed))
    limit = min(max_iterations, size)
    checks: list[tuple[int, float, float]] = []
    while process.steps < limit:
        process.step()
        if not process.finite:
            return _not_finite(process.steps + 1, which)
        if process.steps == 1:
            checks.append((1, process.alphas[0], process.alphas[0]))
        last = process.exhausted or process.steps == limit
        if not last and (size <= krylov.SMALL or not krylov.worth_checking(process.steps)):
            continue
        values, small_vectors = process.ritz()
        residuals = process.residuals(small_vectors)
        norm = krylov.spectral_norm(values)
        earlier = [check for check in checks if check[0] <= process.steps - krylov.SETTLING_STEPS]
        _, last_bottom, last_top = earlier[-1] if earlier else (0, -math.inf, math.inf)
        found = []
        for index, previous in ((-1, last_top), (0, last_bottom)):
            value, residual = float(values[index]), float(residuals[index])
            change, unseen = 0.0 if process.exhausted else abs(value - previous), 0.0
            if abs(value) > _MAKES_THE_NORM * norm:  # only an extreme that may be the norm must be certain
                unseen = krylov.unseen_distance(residual, abs(float(small_vectors[0, index])), size)
            found.append(krylov.read_extreme(values, residuals, index, change, unseen))
        top, bottom = found
        checks.append((process.steps, bottom.value, top.value))
        # A semidefinite operator has no negative eigenvalue: a small Ritz value bounds the smallest one.
        if semidefinite and 0 <= bottom.value <= tolerance * norm:
            bottom = krylov.RitzExtreme(bottom.value, bottom.value, bottom.value, 0.0, bounded=True)
        needed = (top, bottom) if which == "both" else (top,)
        if last or all(extreme.is_converged(tolerance, norm) for extreme in needed):
            break
    high, low = (krylov.conclude(one, process, norm, tolerance, max_iterations) for one in (top, bottom))
    ritz = tuple(float(value) * process.scale for value in values)
    larger = _larger(high, low, tolerance)
    return LanczosResult(high, low if which == "both" else None, larger, process.steps, ritz)


def _larger(top: Estimate, bottom: Estimate, tolerance: float) -> Estimate:
    """The norm: the larger of |top| and |bottom|, and no more than the larger of their upper bounds."""
    other, larger = sorted((bottom, top), key=lambda one: abs(one.value))
    value = abs(larger.value)
    error = max(larger.error, abs(other.value) + other.error - value)
    settled = larger.converged and error <= larger.error + tolerance * value
    reason = larger.reason
    if larger.converged and not settled:
        reason = "the other end of the spectrum may be larger in size; ask for which='both'"
    return Estimate(value, error, settled, reason, larger.products)


def _not_finite(products: int, which: Which) -> LanczosResult:
    top, bottom = krylov.not_finite(products), krylov.not_finite(products, -1.0)
    return LanczosResult(top, bottom if which == "both" else None, top, products, ())


class _Inverse:
    """The inverse by its products, from a Cholesky factor."""

    def __init__(self, factor: Tensor) -> None:
        self.factor, self.dtype, self.device = factor, factor.dtype, factor.device
        self.shape = (factor.shape[0], factor.shape[1])

    def __matmul__(self, vectors: Tensor) -> Tensor:
        columns = vectors.unsqueeze(1) if vectors.ndim == 1 else vectors
        return torch.cholesky_solve(columns, self.factor).view_as(vectors)


def smallest_eigenvalue(matrix: Tensor, *, tolerance: float = 1e-3, seed: int = 0) -> Estimate:
    """The smallest eigenvalue of a positive matrix, by Lanczos on its inverse: ten steps instead of hundreds.

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
    found = lanczos(_Inverse(factor), which="top", tolerance=tolerance, seed=seed).top
    value = 1 / found.value
    error = value * found.relative_error + rounding
    return Estimate(value, error, found.converged, found.reason, found.products)


_ROWS = 32


@dataclass
class _LockstepRun:
    index: int
    operator: probes.Operator
    scale: float
    dtype: torch.dtype
    steps: int = 0
    exhausted: bool = False


def lockstep_tops(
    operators: Sequence[probes.Operator], *, tolerance: float = 1e-3, max_iterations: int = 200, seed: int = 0
) -> list[Estimate]:
    """The result of `lanczos(which="top")` for each operator; all runs advance in lockstep.

    A step costs the bookkeeping of one run instead of many: for small operators that is most of the time.

    >>> two = [torch.diag(torch.tensor([1.0, 2.0, 3.0])), torch.diag(torch.tensor([5.0, 0.0, 0.0]))]
    >>> [round(top.value, 5) for top in lockstep_tops(two)]
    [3.0, 5.0]
    """
    lockstep = _Lockstep(operators, seed)
    limit = min(max_iterations, lockstep.size)
    found: dict[int, Estimate] = {}
    for step in range(1, limit + 1):
        lockstep.advance()
        over = [run.exhausted or not 0 < run.scale < math.inf or step == limit for run in lockstep.runs]
        if (step <= krylov.SETTLING_STEPS or lockstep.size <= krylov.SMALL) and not any(over):
            continue
        values, vectors, residuals = lockstep.ritz()
        finished = []
        for row, run in enumerate(lockstep.runs):
            # Most runs are far from done most of the time: one comparison tells.
            early = lockstep.size <= krylov.SMALL or residuals[row, -1] > 0.1 * values[row, -1]
            if early and not over[row]:
                continue
            change = 0.0 if run.exhausted else abs(values[row, -1] - lockstep.earlier(row))
            fraction = abs(float(vectors[row, 0, -1]))
            unseen = krylov.unseen_distance(float(residuals[row, -1]), fraction, lockstep.size)
            top = krylov.read_extreme(values[row], residuals[row], -1, float(change), unseen)
            if over[row] or top.is_converged(tolerance, top.value):
                finished.append(row)
                found[run.index] = krylov.conclude(top, run, top.value, tolerance, max_iterations)
        lockstep.drop(finished)
        if not lockstep.runs:
            break
    return [found[index] for index in range(len(operators))]


class _Lockstep:
    """The Lanczos bases of the operators still running, one row each, extended together.

    The bookkeeping is numpy's: the vectors are short, and its calls cost a fraction of torch's.
    """

    def __init__(self, operators: Sequence[probes.Operator], seed: int) -> None:
        first = operators[0]
        self.size = int(first.shape[0])
        self._like = probes.random_vector(first, seed)
        initial = self._like.cpu().numpy()
        rows = min(_ROWS, self.size + 1)
        self._basis = np.empty((len(operators), rows, self.size), dtype=initial.dtype)
        self._basis[:, 0] = initial / np.linalg.norm(initial)
        self.runs = [
            _LockstepRun(index, operator, 0.0, first.dtype) for index, operator in enumerate(operators)
        ]
        self._products: krylov.Array | None = self._multiply(0)
        # Powers of two keep every run the same for 1e-30·A and 1e30·A.
        for run, product in zip(self.runs, self._products, strict=True):
            run.scale = probes.power_of_two_scale(torch.from_numpy(product))
        self._small = np.zeros((len(operators), rows, rows))
        self._betas = np.zeros(len(operators))
        self._largest = np.zeros(len(operators))
        self._rounding = 10 * float(torch.finfo(first.dtype).eps)
        self._tops: list[krylov.Array] = []

    def _multiply(self, step: int) -> krylov.Array:
        vectors = [torch.from_numpy(row).to(self._like.device) for row in self._basis[:, step]]
        products = [run.operator @ vector for run, vector in zip(self.runs, vectors, strict=True)]
        return np.stack([product.detach().cpu().numpy() for product in products])

    def advance(self) -> None:
        """One product each, orthogonalized against its own basis."""
        step = self.runs[0].steps
        products, self._products = self._products, None
        if products is None:
            products = self._multiply(step)
        inverse = [1 / run.scale if 0 < run.scale < math.inf else 1.0 for run in self.runs]
        known = self._basis[:, : step + 1]
        alphas = np.zeros(len(self.runs))
        with np.errstate(invalid="ignore", over="ignore"):  # `_record` looks for what is not finite
            remainder = products * np.array(inverse, dtype=products.dtype)[:, None]
            # Twice is enough (Parlett, after Kahan): one pass leaves ghosts of converged eigenvalues.
            for _ in range(2):
                along = np.matmul(known, remainder[:, :, None])
                remainder = remainder - np.matmul(along.transpose(0, 2, 1), known)[:, 0]
                alphas += along[:, step, 0]
            betas = np.linalg.norm(remainder, axis=1).astype(np.float64)
        if step + 1 == self._basis.shape[1]:
            self._basis = np.concatenate((self._basis, np.empty_like(self._basis)), axis=1)
            self._small = np.pad(self._small, ((0, 0), (0, step + 1), (0, step + 1)))
        with np.errstate(invalid="ignore", divide="ignore"):
            self._basis[:, step + 1] = remainder / betas[:, None].astype(remainder.dtype)
        self._record(step, alphas, betas)

    def _record(self, step: int, alphas: krylov.Array, betas: krylov.Array) -> None:
        finite = np.isfinite(alphas) & np.isfinite(betas)
        alphas, betas = np.where(finite, alphas, 0.0), np.where(finite, betas, 0.0)
        self._small[:, step, step] = alphas
        if step:
            self._small[:, step, step - 1] = self._betas
        self._largest = np.maximum(self._largest, np.maximum(np.abs(alphas), betas))
        exhausted = (betas <= self._rounding * self._largest) | (step + 1 == self.size)
        self._betas = np.where(exhausted, 0.0, betas)
        for run, ended, good in zip(self.runs, exhausted.tolist(), finite.tolist(), strict=True):
            run.steps, run.exhausted = step + 1, ended
            if not good:
                run.scale = math.inf

    def ritz(self) -> tuple[krylov.Array, krylov.Array, krylov.Array]:
        """Values, small eigenvectors and residuals of all runs, ascending."""
        steps = self.runs[0].steps
        values, vectors = krylov.small_eigenpairs(self._small[:, :steps, :steps])
        self._tops.append(values[:, -1])
        return values, vectors, self._betas[:, None] * np.abs(vectors[:, -1])

    def earlier(self, row: int) -> float:
        """The top Ritz value as many checks ago as it has to stay the same; -inf before that."""
        checks = krylov.SETTLING_STEPS
        return float(self._tops[-1 - checks][row]) if len(self._tops) > checks else -math.inf

    def drop(self, finished: Sequence[int]) -> None:
        if not finished:
            return
        kept = [row for row in range(len(self.runs)) if row not in finished]
        self.runs = [self.runs[row] for row in kept]
        self._basis, self._small = self._basis[kept], self._small[kept]
        self._betas, self._largest = self._betas[kept], self._largest[kept]
        self._tops = [tops[kept] for tops in self._tops]
