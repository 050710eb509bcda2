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

    The error of a value is its measured residual ‖A v − λ v‖. `products` is the cost of all pairs together.
    There are fewer than asked for only when `max_iterations` ran out.
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

    A Lanczos iteration sees one copy of a multiple eigenvalue. So what has converged is locked, and further
    iterations run orthogonal to it, until one finds nothing among the first `count`. A last product with
    every vector measures the residuals. Costs at most `max_iterations` products plus one per vector.

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
    stream = probes.probe_stream(operator, seed)
    while not search.complete and search.products < max_iterations and search.finite:
        search.sweep(stream.draw(), max_iterations)
    return search.rayleigh_ritz()


class _Search:
    def __init__(self, operator: probes.Operator, count: int, tolerance: float) -> None:
        self.operator, self.count, self.tolerance = operator, count, tolerance
        self.locked = torch.empty((operator.shape[0], 0), dtype=operator.dtype, device=operator.device)
        self.values: list[float] = []
        self.norm, self.products, self.complete, self.finite = 0.0, 0, False, True

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
            values, small, residuals = process.ritz()
            values, residuals = values * process.scale, residuals * process.scale
            self.norm = max(self.norm, krylov.spectral_norm(values))
            leading = self._leading(values)
            decided = process.exhausted or self._decided(values, residuals, leading)
            if decided or out_of_steps:
                break
        everything = process.steps + len(self.values) == process.size
        # Whatever was found when the steps ran out is kept, too: the residuals will tell how good it is.
        if leading:
            self.locked = torch.cat((self.locked, process.ritz_vectors(small[:, leading])), dim=1)
            self.values.extend(float(values[i]) for i in leading)
        self.complete = everything or (decided and not leading)

    def _leading(self, values: krylov.Array) -> list[int]:
        ranks = sorted(map(abs, self.values), reverse=True)
        least = ranks[self.count - 1] + self.tolerance * self.norm if len(ranks) >= self.count else -math.inf
        return [i for i in _by_size(values)[: self.count] if abs(float(values[i])) > least]

    def _decided(self, values: krylov.Array, residuals: krylov.Array, leading: list[int]) -> bool:
        """The leading values are converged, and the extremes of this sweep, too, or too small to matter."""
        ranks = [*map(abs, self.values), *(abs(float(values[i])) for i in leading)]
        if len(ranks) < self.count or any(residuals[leading] > 0.5 * self.tolerance * self.norm):
            return False
        least = sorted(ranks, reverse=True)[self.count - 1]
        # The smallest values of a semidefinite operator converge late and never matter.
        return all(
            one.is_converged(self.tolerance, self.norm) or abs(one.value) + 2 * one.residual < least
            for one in (krylov.read_extreme(values, residuals, i) for i in (0, -1))
        )

    def rayleigh_ritz(self) -> Eigenpairs:
        """The best pairs in the span of everything locked, with residuals measured by a last product."""
        scale, products = math.inf, self.products
        if self.finite:
            basis = torch.linalg.qr(self.locked).Q
            image = (self.operator @ basis).detach()
            products += basis.shape[1]
            scale = probes.power_of_two_scale(image)
        if math.isinf(scale):
            estimate = Estimate(math.inf, math.inf, False, krylov.NOT_FINITE, products)
            vectors = self.locked.new_full((len(self.locked), self.count), math.nan)
            return Eigenpairs((estimate,) * self.count, vectors, False, krylov.NOT_FINITE, products)
        image = image / (scale or 1.0)
        small = (basis.T @ image).double().cpu().numpy()
        values, rotation = np.linalg.eigh((small + small.T) / 2)
        order = _by_size(values)[: self.count]
        turn = torch.from_numpy(np.ascontiguousarray(rotation[:, order])).to(basis)
        vectors, chosen = basis @ turn, torch.from_numpy(values[order]).to(basis)
        residuals = torch.linalg.vector_norm(image @ turn - vectors * chosen, dim=0).tolist()
        norm = max(self.norm / scale, krylov.spectral_norm(values)) if scale else 0.0
        rounding = 8 * torch.finfo(self.operator.dtype).eps * norm
        estimates = []
        for value, residual in zip(values[order].tolist(), residuals, strict=True):
            good = self.complete and residual <= self.tolerance * norm
            reason = f"residual within tolerance={self.tolerance:g} of the norm; no larger one is left"
            if not good:
                reason = (
                    f"stopped after {products} products with residual {residual / (norm or 1.0):.0e} of the "
                    "norm; raise max_iterations or tolerance"
                )
            estimates.append(Estimate(value * scale, (residual + rounding) * scale, good, reason, products))
        failed = [estimate for estimate in estimates if not estimate.converged]
        converged = len(estimates) == self.count and not failed
        return Eigenpairs(tuple(estimates), vectors, converged, (failed or estimates)[0].reason, products)


def _by_size(values: krylov.Array) -> list[int]:
    return sorted(range(len(values)), key=lambda i: -abs(float(values[i])))
