"""The Lanczos iteration, the error bounds of its Ritz values, and the rule by which it stops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hessinit.curvature import probes
from hessinit.results.curvature_report import Estimate

Array = npt.NDArray[np.float64]

# The basis grows by blocks of about this many numbers (4 to 256 rows), without copying.
_NUMBERS_PER_BLOCK = 2**22
_LARGEST_FOR_NUMPY = 24


class LanczosState:
    dtype: torch.dtype
    steps = 0
    scale = 0.0
    exhausted = False


class LanczosProcess(LanczosState):
    """Lanczos with full reorthogonalization, orthogonal to the orthonormal columns of `locked` (deflation).

    All numbers are in units of `scale`, a power of two chosen from the first product, so the
    iteration is the same for 1e-30·A and 1e30·A. `exhausted` means that the Krylov space is
    invariant, `finite` turns False when a product is not finite; after either there is nothing left
    to do. With `most_blocks`, only the last vectors are kept, for the Ritz values alone:
    orthogonality fades where an eigenvalue has converged.
    """

    def __init__(
        self,
        operator: probes.Operator,
        initial: Tensor,
        locked: Tensor | None = None,
        most_blocks: int | None = None,
    ) -> None:
        self.operator = operator
        self.size = probes.operator_size(operator)
        self.dtype = operator.dtype
        self.finite = True
        self._most_blocks = most_blocks
        self.tridiagonal = np.zeros((32, 32))  # the lower triangle
        self.betas: list[float] = []  # one a step
        self._largest = self._beta = 0.0
        self._limit = probes.largest_exponent(operator.dtype)
        self._roundoff = 10 * torch.finfo(operator.dtype).eps
        self._locked = [] if locked is None or not locked.shape[1] else [locked.T.contiguous()]
        self._room = self.size - sum(len(rows) for rows in self._locked)
        self._blocks: list[Tensor] = []
        self._rows_used = 0
        self._current = self._next_row()
        torch.mul(initial.detach(), 1 / probes.power_of_two_scale(initial), out=self._current)
        for _ in range(2):
            self._orthogonalize(self._current, self._locked)
        self._current.div_(torch.linalg.vector_norm(self._current))

    def step(self) -> None:
        """One product: extends the basis by a vector and the tridiagonal matrix by a row."""
        self.record(self.launch().tolist())

    def launch(self) -> Tensor:
        """The product and its orthogonalization; returns numbers for `record`, which a GPU may still compute.

        Reading them is the only synchronisation of a step, so that of several runs can be one.
        """
        product = (self.operator @ self._current).detach()
        if not self.scale:
            self._most = product.abs().max()
            exponent = (torch.frexp(self._most).exponent - 1).clamp(-self._limit, self._limit)
            self._inverse = torch.ldexp(
                torch.ones_like(self._most), -exponent
            )  # exact: a power of two
        basis = [*self._locked, *self._blocks[:-1], self._blocks[-1][: self._rows_used]]
        candidate = self._next_row()
        torch.mul(product, self._inverse, out=candidate)
        # Twice is enough (Parlett, after Kahan): one pass leaves ghosts of converged eigenvalues.
        first = self._orthogonalize(candidate, basis)
        second = self._orthogonalize(candidate, basis)
        norm = torch.linalg.vector_norm(candidate)
        candidate.div_(norm)
        self._current = candidate
        return torch.stack((self._most, first[-1], second[-1], norm)).double()

    def record(self, numbers: Sequence[float]) -> None:
        largest, along, correction, beta = numbers
        if not self.scale:
            self.scale = probes.power_of_two_of(largest, self._limit)
            if self.scale == 0.0:
                self._record(0.0, 0.0)
                return
        alpha = along + correction
        self.finite = math.isfinite(largest + alpha + beta)
        if self.finite:
            self._record(alpha, beta)

    def ritz(self) -> tuple[Array, Array, Array]:
        """Ritz values (ascending), eigenvectors of the tridiagonal matrix, residuals; in units of `scale`."""
        values, vectors = small_eigenpairs(self.tridiagonal[: self.steps, : self.steps])
        return values, vectors, self._beta * np.abs(vectors[-1])  # ‖A y − θ y‖ = β |last entry|

    def ritz_vectors(self, vectors: Array) -> Tensor:
        """The Ritz vectors (n, k) of eigenvectors (steps, k) of the tridiagonal matrix."""
        coefficients = torch.from_numpy(np.ascontiguousarray(vectors)).to(self._current)
        result = self._current.new_zeros((self.size, coefficients.shape[1]))
        row = 0
        for block in self._blocks:
            rows = min(len(block), self.steps - row)
            if rows > 0:
                result.addmm_(block[:rows].T, coefficients[row : row + rows])
            row += rows
        return result.div_(torch.linalg.vector_norm(result, dim=0))

    @staticmethod
    def _orthogonalize(vector: Tensor, basis: list[Tensor]) -> Tensor:
        """Subtract the projection on the basis; returns the coefficients along its last block."""
        coefficients = vector
        for block in basis:
            coefficients = torch.mv(block, vector)
            vector.addmv_(block.T, coefficients, alpha=-1)
        return coefficients

    def _record(self, alpha: float, beta: float) -> None:
        row = self.steps
        if row == len(self.tridiagonal):
            self.tridiagonal = np.pad(self.tridiagonal, (0, row))
        self.tridiagonal[row, row] = alpha
        if row:
            self.tridiagonal[row, row - 1] = self._beta
        self._largest = max(self._largest, abs(alpha), beta)
        self.steps = row + 1
        # A β at the level of roundoff means that the space is invariant: the Ritz values are
        # eigenvalues, all to which the initial vector has a component (a random one has one to
        # each, with probability 1).
        self.exhausted = beta <= self._roundoff * self._largest or self.steps == self._room
        self._beta = 0.0 if self.exhausted else beta
        self.betas.append(self._beta)

    def _next_row(self) -> Tensor:
        if not self._blocks or self._rows_used == len(self._blocks[-1]):
            rows = min(self._room + 1, 256, max(4, _NUMBERS_PER_BLOCK // self.size))
            self._blocks.append(
                torch.empty(rows, self.size, dtype=self.dtype, device=self.operator.device)
            )
            self._rows_used = 0
            if self._most_blocks is not None:
                del self._blocks[: -self._most_blocks]
        self._rows_used += 1
        return self._blocks[-1][self._rows_used - 1]


def small_eigenpairs(matrices: Array) -> tuple[Array, Array]:
    # Beyond, numpy starts a second pool of threads, and two pools on few cores wait for each other.
    if matrices.shape[-1] <= _LARGEST_FOR_NUMPY:
        values, vectors = np.linalg.eigh(matrices)
        return values, vectors
    found = torch.linalg.eigh(torch.from_numpy(np.ascontiguousarray(matrices)))
    return found[0].numpy(), found[1].numpy()


def worth_checking(steps: int) -> bool:
    """Whether to solve the small eigenproblem now: at most a twelfth more steps are taken than needed.

    >>> [steps for steps in range(25, 60) if worth_checking(steps)]
    [26, 28, 30, 32, 34, 36, 39, 42, 45, 48, 52, 56]
    """
    return 4 <= steps <= 24 or (steps > 24 and steps % max(2, steps // 12) == 0)


# The residual must be below this share of √tolerance, so that the gap to the next Ritz value means
# something.
CAUTION = 0.03
# How far beyond the value, in tolerances, a rare eigenvalue may lie unseen near convergence; and
# beyond an end that cannot be the norm, where 3 would take a fifth more products for a Hessian, and
# 20 take 1 % more.
MAX_UNSEEN = 3.0
MAX_UNSEEN_FAR = 20.0


def rarity(tolerance: float) -> float:
    """The share of initial vectors that may miss an eigenvalue, if there is one where they would.

    1 % for a tolerance of 1e-3 and less, 5 % for 0.1: whoever asks for one digit wants it soon, and
    few layers have such an eigenvalue (benchmarks/tolerances.py counts what is missed).

    >>> [round(rarity(tolerance), 3) for tolerance in (1e-6, 1e-3, 1e-2, 0.1, 0.5)]
    [0.01, 0.01, 0.032, 0.05, 0.05]
    """
    return min(max(math.sqrt(tolerance / 10), 0.01), 0.05)


@dataclass(frozen=True)
class RitzExtreme:
    """An extreme Ritz value, its residual ‖A y − θ y‖, and the Kato–Temple bound.

    `unseen` is how far beyond it an eigenvalue may lie, as by `unseen_distance`; None if nobody
    asks.
    """

    value: float
    residual: float
    bound: float
    unseen: float | None = None
    bounded: bool = False  # from both sides, so that the residual does not matter
    is_far: bool = False  # too small to be the norm

    def is_converged(self, tolerance: float, norm: float) -> bool:
        """Within `tolerance · norm`, as far as one initial vector can tell.

        The Ritz value is a lower bound of the norm, and with `unseen` a probable upper one. Near
        convergence the Kato–Temple bound is smaller. It trusts a gap that is unknown in an unsplit
        cluster, or while a larger eigenvalue still grows out of the initial vector; so the residual
        must be small, and an eigenvalue much further out unlikely.
        """
        if self.bounded:
            return self.bound <= tolerance * norm
        if self.unseen is not None and self.unseen <= tolerance * norm:
            return True
        if self.unseen is None or self.is_far:
            return max(self.residual, (self.unseen or 0.0) / MAX_UNSEEN_FAR) <= tolerance * norm
        is_certain = self.unseen <= MAX_UNSEEN * tolerance * norm
        is_settled = self.residual <= CAUTION * math.sqrt(tolerance) * norm
        return is_certain and is_settled and self.bound <= tolerance * norm

    def error(self, tolerance: float, norm: float) -> float:
        """At most `tolerance · norm` after convergence; of a far end, what may lie unseen."""
        unseen = self.unseen or 0.0
        if not self.is_converged(tolerance, norm):
            return max(self.residual, unseen)
        # In an unsplit cluster the eigenvalue is off by the residual or a little more, not by the
        # bound.
        most = tolerance * norm * (MAX_UNSEEN_FAR if self.is_far else 1)
        return min(max(self.bound, 3 * self.residual, unseen), max(self.bound, most))


def read_extreme(
    values: Array, residuals: Array, index: int, unseen: float | None = None, is_far: bool = False
) -> RitzExtreme:
    """The first (index 0) or last (index -1) of the ascending Ritz values.

    |θ − λ| ≤ r for some eigenvalue λ, and |θ − λ| ≤ r²/gap, gap being the distance from θ to the others
    (Kato–Temple; Parlett, theorem 11.7.1), here taken from the next Ritz value less its own residual.
    """
    value = float(values[index])
    residual = float(residuals[index])
    bound = residual
    if len(values) > 1:
        neighbour = 1 if index == 0 else -2
        gap = abs(value - float(values[neighbour])) - float(residuals[neighbour])
        if gap > residual:
            bound = residual * (residual / gap)
    return RitzExtreme(value, residual, bound, unseen, is_far=is_far)


def unseen_distance(
    values: Array, betas: Sequence[float], index: int, size: float, rare: float = 0.01
) -> float:
    """How far beyond an extreme Ritz value an eigenvalue can lie unseen, but for a rare initial vector.

    The next Lanczos vector is p(A) times the initial one, p(λ) = Π(λ − θᵢ) / Πβᵢ. If the initial
    vector has the component γ along an eigenvector with the eigenvalue λ, the next one has γ·p(λ),
    at most 1. A random vector has |γ| below rare·√(π / 2 size) with the probability `rare`; so λ
    lies where p(λ) is at most √(2 size / π) / rare (van Dorsselaer, Hochstenbach, van der Vorst,
    Computing probabilistic bounds for extreme eigenvalues of symmetric matrices with the Lanczos
    method, 2000).

    >>> unseen_distance(np.array([0.0, 1.0]), [0.5, 1e-4], -1, 100) < 0.04
    True
    """
    if betas[-1] <= 0:
        return 0.0
    gaps = np.abs(values - values[index])
    gaps = np.delete(gaps, index if index == 0 else len(gaps) - 1)
    if gaps.size and not gaps.min() > 0:
        gaps = np.maximum(gaps, np.finfo(np.float64).tiny)
    limit = math.log(math.sqrt(2 * size / math.pi) / rare) + float(np.log(betas).sum())
    # Newton's steps for log d in log d + Σ log(d + gapᵢ) = limit, convex and increasing: from
    # above, every one of them is an upper bound. At first the gaps alone, or d alone.
    place = min(limit - float(np.log(gaps).sum()), limit / len(values))
    for _ in range(8):
        distance = math.exp(place)
        above = place + float(np.log(distance + gaps).sum()) - limit
        if above <= 1e-3:
            break
        place -= above / (1 + float((distance / (distance + gaps)).sum()))
    return math.exp(place)


def spectral_norm(values: Array) -> float:
    return max(abs(float(values[0])), abs(float(values[-1])))


# So small an operator is searched to the end: among so few dimensions, an initial vector that
# hardly sees the leading eigenvector is not rare.
SMALL = 16


def conclude(
    extreme: RitzExtreme,
    state: LanczosState,
    norm: float,
    tolerance: float,
    max_iterations: int,
    needed: bool = True,
) -> Estimate:
    steps = state.steps
    scale = state.scale
    if scale == 0:
        return Estimate(0.0, 0.0, True, "the operator is zero on a random vector", steps)
    if math.isinf(scale):
        return not_finite(steps)
    # Products and basis carry rounding errors of a few units in the last place of the norm.
    rounding = 8 * torch.finfo(state.dtype).eps
    error = extreme.error(tolerance, norm)
    reachable = tolerance >= rounding
    is_exact = state.exhausted and not extreme.bounded
    converged = reachable and (is_exact or extreme.is_converged(tolerance, norm))
    if not reachable:
        level = f"the rounding level {rounding:.0e} of {state.dtype}"
        reason = (
            f"tolerance={tolerance:g} is below {level}; use torch.float64 or a larger tolerance"
        )
    elif is_exact:
        reason = f"exact up to rounding: {steps} steps span all that the operator reaches"
    elif converged:
        reason = f"settled, error {error / norm:.0e} of the norm, within tolerance={tolerance:g}"
    elif not needed:
        reason = (
            f"known to {error / norm:.0e} of the norm, which the other end of the spectrum makes"
        )
    else:
        left = f"residual {extreme.residual / norm:.0e} of the norm"
        reason = f"stopped at max_iterations={max_iterations} with {left}; raise max_iterations or tolerance"
    error = (error + rounding * norm) * scale
    return Estimate(extreme.value * scale, error, converged, reason, steps)


NOT_FINITE = "a product was not finite (inf or nan); look for inf or nan in the weights and inputs"


def not_finite(products: int, sign: float = 1.0) -> Estimate:
    """The estimate where a product was inf or nan: infinite, never zero."""
    reason = NOT_FINITE.replace("a product", f"product {products}") + ", or use torch.float64"
    return Estimate(sign * math.inf, math.inf, False, reason, products)
