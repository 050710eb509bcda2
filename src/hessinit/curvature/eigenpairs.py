"""The leading eigenvalues of a symmetric operator with their eigenvectors, multiple ones included."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hessinit.curvature import krylov, probes
from hessinit.results.estimates import Estimate


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenvalues in the order asked for; `vectors[:, i]` is the unit eigenvector of `values[i]`.

    The error of a value is its measured residual ‖A v − λ v‖: an eigenvalue lies that near. `products` is the
    cost of all pairs together; each value repeats it. There are fewer than asked for only when
    `max_iterations` ran out.
    """

    values: tuple[Estimate, ...]
    vectors: Tensor
    converged: bool
    reason: str
    products: int


def top_eigenpairs(
    operator: probes.Operator,
    count: int,
    *,
    tolerance: float = 1e-3,
    max_iterations: int = 400,
    seed: int = 0,
) -> Eigenpairs:
    """The `count` eigenvalues of largest size, to within tolerance·norm.

    One Lanczos iteration sees a single copy of a multiple eigenvalue. So what has converged is locked, and
    further iterations run orthogonal to it, until one finds nothing that belongs among the first `count`. A
    last product with every vector measures the residuals. Costs at most `max_iterations` products plus one
    per vector, and one vector of memory per step of the longest iteration.

    >>> matrix = torch.diag(torch.tensor([5.0, 5.0, 5.0, -7.0, 1.0, 0.0, 2.0, 3.0], dtype=torch.float64))
    >>> [round(value.value, 6) for value in top_eigenpairs(matrix, 4).values]
    [-7.0, 5.0, 5.0, 5.0]
    """
    size = probes.operator_size(operator)
    probes.require_at_least("count", count, 1, "there is nothing to find")
    if count > size:
        raise ValueError(
            f"count={count} is more than the operator has: it is {size} × {size}. Pass count={size} or less."
        )
    probes.require_tolerance(tolerance)
    probes.require_at_least(
        "max_iterations", max_iterations, count, f"count={count} pairs need a product each"
    )
    search = _Search(operator, count, tolerance)
    stream = probes.ProbeStream(size, seed=seed, dtype=operator.dtype, device=operator.device)
    while not search.complete and search.products < max_iterations and search.finite:
        search.sweep(stream.draw(), max_iterations)
    if not search.finite:
        return _not_finite(search.products, count, operator)
    return _rayleigh_ritz(search)


class _Search:
    """Sweeps of Lanczos, each orthogonal to what the earlier ones have locked."""

    def __init__(self, operator: probes.Operator, count: int, tolerance: float) -> None:
        self.operator, self.count, self.tolerance = operator, count, tolerance
        self.locked = torch.empty((operator.shape[0], 0), dtype=operator.dtype, device=operator.device)
        self.values: list[float] = []
        self.norm = 0.0
        self.products = 0
        self.complete = False
        self.finite = True

    def sweep(self, initial: Tensor, max_iterations: int) -> None:
        process = krylov.LanczosProcess(self.operator, initial, self.locked)
        while True:
            process.step()
            self.products += 1
            if not process.finite:
                self.finite = False
                return
            out_of_steps = self.products >= max_iterations
            if not (process.exhausted or out_of_steps or krylov.worth_checking(process.steps)):
                continue
            values, small = process.ritz()
            residuals = process.residuals(small)
            self.norm = max(self.norm, krylov.spectral_norm(values) * process.scale)
            leading = self._leading(values * process.scale)
            allowed = 0.5 * self.tolerance * self.norm
            decided = process.exhausted or (
                len(self.values) + len(leading) >= self.count
                and all(residuals[i] * process.scale <= allowed for i in leading)
                and self._extremes_settled(values * process.scale, residuals * process.scale, leading)
            )
            if decided or out_of_steps:
                break
        everything = process.steps + len(self.values) == process.size
        # Whatever was found when the steps ran out is kept, too: the residuals will tell how good it is.
        if leading:
            self.locked = torch.cat((self.locked, process.ritz_vectors(small[:, leading])), dim=1)
            self.values.extend(float(values[i]) * process.scale for i in leading)
        self.complete = everything or (decided and not leading)

    def _leading(self, values: krylov.Array) -> list[int]:
        ranks = sorted((abs(value) for value in self.values), reverse=True)
        least = ranks[self.count - 1] + self.tolerance * self.norm if len(ranks) >= self.count else -math.inf
        order = sorted(range(len(values)), key=lambda i: -abs(float(values[i])))
        return [i for i in order[: self.count] if abs(float(values[i])) > least]

    def _extremes_settled(self, values: krylov.Array, residuals: krylov.Array, leading: list[int]) -> bool:
        """No larger value will appear: the extremes of this sweep have converged, or are too small."""
        ranks = [*map(abs, self.values), *(abs(float(values[i])) for i in leading)]
        least = sorted(ranks, reverse=True)[self.count - 1]
        # The smallest values of a semidefinite operator converge late and never matter.
        return all(
            one.is_converged(self.tolerance, self.norm) or abs(one.value) + 2 * one.residual < least
            for one in (krylov.read_extreme(values, residuals, i) for i in (0, -1))
        )


def _rayleigh_ritz(search: _Search) -> Eigenpairs:
    """The best pairs in the span of everything locked, with residuals measured by a last product."""
    operator, basis = search.operator, torch.linalg.qr(search.locked).Q
    image = (operator @ basis).detach()
    products = search.products + basis.shape[1]
    scale = probes.power_of_two_scale(image)
    if math.isinf(scale):
        return _not_finite(products, search.count, operator)
    image = image / (scale or 1.0)
    small = (basis.T @ image).double().cpu().numpy()
    values, rotation = np.linalg.eigh((small + small.T) / 2)
    order = sorted(range(len(values)), key=lambda i: -abs(float(values[i])))[: search.count]
    turn = torch.from_numpy(np.ascontiguousarray(rotation[:, order])).to(basis)
    vectors, chosen = basis @ turn, torch.from_numpy(values[order]).to(basis)
    residuals = torch.linalg.vector_norm(image @ turn - vectors * chosen, dim=0).tolist()
    norm = max(search.norm / scale, krylov.spectral_norm(values)) if scale else 0.0
    rounding = 8 * torch.finfo(operator.dtype).eps * norm
    estimates = []
    for value, residual in zip(values[order].tolist(), residuals, strict=True):
        good = search.complete and residual <= search.tolerance * norm
        reason = f"residual within tolerance={search.tolerance:g} of the norm; no larger one is left"
        if not good:
            fraction = f"{residual / norm:.0e}" if norm else "0"
            reason = (
                f"stopped after {products} products with residual {fraction} of the norm; "
                "raise max_iterations or tolerance"
            )
        estimates.append(Estimate(value * scale, (residual + rounding) * scale, good, reason, products))
    converged = len(estimates) == search.count and all(estimate.converged for estimate in estimates)
    reason = next((estimate.reason for estimate in estimates if not estimate.converged), estimates[0].reason)
    return Eigenpairs(tuple(estimates), vectors, converged, reason, products)


def _not_finite(products: int, count: int, operator: probes.Operator) -> Eigenpairs:
    estimate = Estimate(math.inf, math.inf, False, krylov.NOT_FINITE, products)
    vectors = torch.full((operator.shape[0], count), math.nan, dtype=operator.dtype, device=operator.device)
    return Eigenpairs((estimate,) * count, vectors, False, krylov.NOT_FINITE, products)
