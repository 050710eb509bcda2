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
from hessinit.problem import validate
from hessinit.results.curvature_report import Estimate

Which = Literal["both", "top", "norm"]

# Of an operator with so many rows, as the embedding of a vocabulary, some vectors are kept, not
# all.
_LARGE = 2**24
_BLOCKS_OF_LARGE = 3
# An extreme counts for the norm from this share of it on.
_MAKES_THE_NORM = 0.9


@dataclass(frozen=True)
class LanczosResult:
    """The extreme eigenvalues, from `steps` products in all."""

    top: Estimate
    bottom: Estimate | None  # if asked for
    norm: Estimate  # the largest |eigenvalue|
    steps: int
    ritz: tuple[float, ...]  # all Ritz values, ascending


def lanczos(
    operator: probes.Operator,
    *,
    which: Which = "both",
    tolerance: float = 1e-3,
    max_iterations: int = 200,
    seed: int = 0,
    semidefinite: bool = False,
) -> LanczosResult:
    """The largest and the smallest eigenvalue; the one of larger size to `tolerance` times the spectral norm.

    The error of the other is at most 20 times that. The same for 1e-30·A and 1e30·A. Costs one
    product per step (typically 5 to 30) and keeps one vector per step. With which="top" only the
    largest eigenvalue has to converge, with "norm" the one of largest size.

    >>> extremes = lanczos(torch.diag(torch.linspace(-2.0, 3.0, 50, dtype=torch.float64)))
    >>> abs(extremes.top.value - 3) <= extremes.top.error <= 3e-3
    True
    """
    search = LanczosSearch(
        operator,
        which=which,
        tolerance=tolerance,
        max_iterations=max_iterations,
        seed=seed,
        semidefinite=semidefinite,
    )
    return run_together([search])[0]


@dataclass(frozen=True)
class Start:
    """A normal vector whose covariance is the operator itself, and the square of its length.

    It has a share λ / trace of every eigenvector instead of 1 / size: some products are saved.
    """

    vector: Tensor
    square: float


class LanczosSearch:
    """One run of `lanczos`, step by step."""

    result: LanczosResult  # once it is done
    is_done = False

    def __init__(
        self,
        operator: probes.Operator,
        *,
        which: Which,
        tolerance: float,
        max_iterations: int,
        seed: int,
        semidefinite: bool = False,
        start: Start | None = None,
    ) -> None:
        self._size = probes.operator_size(operator)
        self._start = start
        if which not in ("both", "top", "norm"):
            way = "For the bottom alone pass -operator"
            raise ValueError(
                f"which={which!r} is unknown; choose from 'both', 'top', 'norm'. {way}."
            )
        self._which = which
        self._tolerance = validate.check_tolerance(tolerance)
        self._most = validate.check_whole("max_iterations", max_iterations, at_least=1)
        self._semidefinite = semidefinite
        self._limit = min(max_iterations, self._size)
        first = start.vector if start is not None else probes.probe_stream(operator, seed).draw()
        most = _BLOCKS_OF_LARGE if self._size >= _LARGE else None
        self._process = krylov.LanczosProcess(operator, first, most_blocks=most)

    def launch(self) -> Tensor:
        return self._process.launch()

    def record(self, numbers: Sequence[float]) -> None:
        """Takes a step into account, and judges whether it was the last one."""
        process = self._process
        process.record(numbers)
        if not process.finite:
            high, low = (krylov.not_finite(process.steps + 1, sign) for sign in (1.0, -1.0))
            both = low if self._which != "top" else None
            self.result = LanczosResult(high, both, high, process.steps + 1, ())
            self.is_done = True
            return
        last = process.exhausted or process.steps == self._limit
        if not last and (self._size <= krylov.SMALL or not krylov.worth_checking(process.steps)):
            return
        values, _, residuals = process.ritz()
        norm = krylov.spectral_norm(values)
        top, bottom = (self._read(values, residuals, index, norm) for index in (-1, 0))
        if not last and not self._has_converged(top, bottom, norm):
            return
        tolerance = self._tolerance
        most = self._most
        all_needed = self._which != "norm" or process.steps == self._limit
        needed = [all_needed or abs(one.value) == norm for one in (top, bottom)]
        high = krylov.conclude(top, process, norm, tolerance, most, needed[0])
        low = krylov.conclude(bottom, process, norm, tolerance, most, needed[1])
        below = low if self._which != "top" else None
        ritz = tuple((values * process.scale).tolist())
        found = LanczosResult(high, below, _larger(high, low, tolerance), process.steps, ritz)
        self.result = found
        self.is_done = True

    def vector(self) -> Tensor:
        """The unit Ritz vector of the norm; zeros where there is none, or not all of the basis was kept."""
        process = self._process
        if not process.finite or not process.scale or self._size >= _LARGE:
            return torch.zeros(self._size)
        values, vectors, _ = process.ritz()
        return process.ritz_vectors(vectors[:, [np.abs(values).argmax()]]).squeeze(1)

    def _read(
        self, values: krylov.Array, residuals: krylov.Array, index: int, norm: float
    ) -> krylov.RitzExtreme:
        value = float(values[index])
        # A semidefinite operator has no negative eigenvalue: a small Ritz value bounds the smallest
        # one.
        close = value <= self._tolerance * norm or self._which == "norm"
        if index == 0 and self._semidefinite and value >= 0 and close:
            return krylov.RitzExtreme(value, value, value, bounded=True)
        rare = krylov.rarity(self._tolerance)
        betas = self._process.betas
        unseen = krylov.unseen_distance(values, betas, index, self._dimensions(value), rare)
        is_far = abs(value) <= min(_MAKES_THE_NORM * norm, norm - unseen) and self._which != "norm"
        return krylov.read_extreme(values, residuals, index, unseen, is_far)

    def _dimensions(self, value: float) -> float:
        """A component of the initial vector along a unit vector has, on average, the square 1 over this."""
        if self._start is None:
            return self._size
        # Along an eigenvector it is N(0, λ): of the square of its length, the share λ.
        return min(self._start.square / max(value * self._process.scale, 1e-300), 1e300)

    def _has_converged(
        self, top: krylov.RitzExtreme, bottom: krylov.RitzExtreme, norm: float
    ) -> bool:
        needed = {"both": (top, bottom), "top": (top,), "norm": ()}[self._which]
        if self._which == "norm":
            other, larger = sorted((bottom, top), key=lambda one: abs(one.value))
            if abs(other.value) + (other.unseen or 0.0) > (1 + self._tolerance) * abs(larger.value):
                return False
            needed = (larger,)
        return all(one.is_converged(self._tolerance, norm) for one in needed)


def run_together(searches: Sequence[LanczosSearch]) -> list[LanczosResult]:
    """Run searches in turns: what a GPU computes for all of them is waited for once a step."""
    running = list(searches)
    while running:
        launched = [search.launch() for search in running]
        numbers = torch.stack(launched).tolist()
        for search, found in zip(running, numbers, strict=True):
            search.record(found)
        running = [search for search in running if not search.is_done]
    return [search.result for search in searches]


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


class _Inverse:
    def __init__(self, factor: Tensor) -> None:
        self.factor = factor
        self.shape = tuple(factor.shape)
        self.dtype = factor.dtype
        self.device = factor.device

    def __matmul__(self, vector: Tensor) -> Tensor:
        return torch.cholesky_solve(vector.unsqueeze(1), self.factor).squeeze(1)


def smallest_eigenvalue(matrix: Tensor, *, tolerance: float = 1e-3, seed: int = 0) -> Estimate:
    """The smallest eigenvalue of a positive matrix, by Lanczos on its inverse in fp64; 0 if singular."""
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


class _LockstepRun(krylov.LanczosState):
    def __init__(self, index: int, operator: probes.Operator) -> None:
        self.index = index
        self.operator = operator
        self.dtype = operator.dtype
        self.betas: list[float] = []


def lockstep_tops(
    operators: Sequence[probes.Operator],
    *,
    tolerance: float = 1e-3,
    max_iterations: int = 200,
    seed: int = 0,
) -> list[Estimate]:
    """The top of `lanczos(which="top")` for each operator, with one bookkeeping for all of them."""
    lockstep = _Lockstep(operators, seed)
    limit = min(max_iterations, lockstep.size)
    found = dict[int, Estimate]()
    rare = krylov.rarity(tolerance)
    for step in range(1, limit + 1):
        lockstep.advance()
        over = [
            run.exhausted or not 0 < run.scale < math.inf or step == limit for run in lockstep.runs
        ]
        if (not krylov.worth_checking(step) or lockstep.size <= krylov.SMALL) and not any(over):
            continue
        values, residuals = lockstep.ritz()
        finished = []
        for row, run in enumerate(lockstep.runs):
            # Most runs are far from done most of the time: one comparison tells.
            early = lockstep.size <= krylov.SMALL or residuals[row, -1] > 0.3 * values[row, -1]
            if early and not over[row]:
                continue
            unseen = krylov.unseen_distance(values[row], run.betas, -1, lockstep.size, rare)
            top = krylov.read_extreme(values[row], residuals[row], -1, unseen)
            if over[row] or top.is_converged(tolerance, top.value):
                finished.append(row)
                found[run.index] = krylov.conclude(top, run, top.value, tolerance, max_iterations)
        if finished:
            lockstep.drop(finished)
        if not lockstep.runs:
            break
    return [found[index] for index in range(len(operators))]


class _Lockstep:
    """The Lanczos bases of the operators still running; numpy's calls cost a fraction of torch's."""

    def __init__(self, operators: Sequence[probes.Operator], seed: int) -> None:
        initial = probes.probe_stream(operators[0], seed).draw()
        vector = initial.cpu().numpy()
        self._device = initial.device
        self.size = len(vector)
        count = len(operators)
        rows = min(_ROWS, self.size + 1)
        self._basis = np.empty((count, rows, self.size), dtype=vector.dtype)
        self._basis[:, 0] = vector / np.linalg.norm(vector)
        self.runs = [_LockstepRun(index, operator) for index, operator in enumerate(operators)]
        self._small = np.zeros((count, rows, rows))
        self._betas = np.zeros(count)
        self._largest = np.zeros(count)
        self._rounding = 10 * float(torch.finfo(initial.dtype).eps)

    def advance(self) -> None:
        step = self.runs[0].steps
        vectors = torch.from_numpy(self._basis[:, step]).to(self._device)
        found = [run.operator @ vector for run, vector in zip(self.runs, vectors, strict=True)]
        products = torch.stack(found).detach().cpu().numpy()
        if step == 0:  # powers of two keep every run the same for 1e-30·A and 1e30·A
            for run, product in zip(self.runs, products, strict=True):
                run.scale = probes.power_of_two_scale(torch.from_numpy(product))
        inverse = [1 / run.scale if 0 < run.scale < math.inf else 1.0 for run in self.runs]
        known = self._basis[:, : step + 1]
        alphas = np.zeros(len(self.runs))
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is looked for below
            remainder = products * np.array(inverse, dtype=products.dtype)[:, None]
            # Twice is enough (Parlett, after Kahan): one pass leaves ghosts of converged
            # eigenvalues.
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
        finite = np.isfinite(alphas) & np.isfinite(betas)
        alphas = np.where(finite, alphas, 0.0)
        betas = np.where(finite, betas, 0.0)
        self._small[:, step, step] = alphas
        if step:
            self._small[:, step, step - 1] = self._betas
        self._largest = np.maximum(self._largest, np.maximum(np.abs(alphas), betas))
        exhausted = (betas <= self._rounding * self._largest) | (step + 1 == self.size)
        self._betas = np.where(exhausted, 0.0, betas)
        states = zip(
            self.runs, exhausted.tolist(), finite.tolist(), self._betas.tolist(), strict=True
        )
        for run, ended, good, beta in states:
            run.steps = step + 1
            run.exhausted = ended
            run.betas.append(beta)
            if not good:
                run.scale = math.inf

    def ritz(self) -> tuple[krylov.Array, krylov.Array]:
        """Values and residuals of all runs, ascending."""
        steps = self.runs[0].steps
        values, vectors = krylov.small_eigenpairs(self._small[:, :steps, :steps])
        return values, self._betas[:, None] * np.abs(vectors[:, -1])

    def drop(self, finished: Sequence[int]) -> None:
        kept = [row for row in range(len(self.runs)) if row not in finished]
        self.runs = [self.runs[row] for row in kept]
        self._basis = self._basis[kept]
        self._small = self._small[kept]
        self._betas = self._betas[kept]
        self._largest = self._largest[kept]


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenvalues in the order asked for; `vectors[:, i]` is the unit eigenvector of `values[i]`.

    The error of a value is its measured residual ‖A v − λ v‖. `products` is the cost of all pairs
    together. There are fewer than asked for only when `max_iterations` ran out.
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

    A Lanczos iteration sees one copy of a multiple eigenvalue. So what has converged is locked, and
    further iterations run orthogonal to it, until one finds nothing among the first `count`. A last
    product with every vector measures the residuals. Costs at most `max_iterations` products plus
    one per vector.

    >>> matrix = torch.diag(torch.tensor([5.0, 5.0, 5.0, -7.0, 1.0, 0.0, 2.0, 3.0], dtype=torch.float64))
    >>> [round(value.value, 6) for value in top_eigenpairs(matrix, 4).values]
    [-7.0, 5.0, 5.0, 5.0]
    """
    size = probes.operator_size(operator)
    validate.check_whole("count", count, at_least=1)
    if count > size:
        has = f"it is {size} × {size}. Pass count={size} or less"
        raise ValueError(f"count={count} is more than the operator has: {has}.")
    validate.check_tolerance(tolerance)
    validate.check_whole("max_iterations", max_iterations, at_least=count)
    search = _Search(operator, count, tolerance)
    stream = probes.probe_stream(operator, seed)
    while not search.complete and search.products < max_iterations and search.finite:
        search.sweep(stream.draw(), max_iterations)
    return search.rayleigh_ritz()


class _Search:
    def __init__(self, operator: probes.Operator, count: int, tolerance: float) -> None:
        self.operator = operator
        self.count = count
        self.tolerance = tolerance
        self.locked = torch.empty(
            (operator.shape[0], 0), dtype=operator.dtype, device=operator.device
        )
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
            values, small, residuals = process.ritz()
            values = values * process.scale
            residuals = residuals * process.scale
            self.norm = max(self.norm, krylov.spectral_norm(values))
            leading = self._leading(values)
            decided = process.exhausted or self._decided(values, residuals, leading)
            if decided or out_of_steps:
                break
        everything = process.steps + len(self.values) == process.size
        # Whatever was found when the steps ran out is kept, too: the residuals will tell how good
        # it is.
        if leading:
            self.locked = torch.cat((self.locked, process.ritz_vectors(small[:, leading])), dim=1)
            self.values.extend(float(values[i]) for i in leading)
        self.complete = everything or (decided and not leading)

    def _leading(self, values: krylov.Array) -> list[int]:
        ranks = sorted(map(abs, self.values), reverse=True)
        least = (
            ranks[self.count - 1] + self.tolerance * self.norm
            if len(ranks) >= self.count
            else -math.inf
        )
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
        scale = math.inf
        products = self.products
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
        vectors = basis @ turn
        chosen = torch.from_numpy(values[order]).to(basis)
        residuals = torch.linalg.vector_norm(image @ turn - vectors * chosen, dim=0).tolist()
        norm = max(self.norm / scale, krylov.spectral_norm(values)) if scale else 0.0
        rounding = 8 * torch.finfo(self.operator.dtype).eps * norm
        estimates = []
        for value, residual in zip(values[order].tolist(), residuals, strict=True):
            good = self.complete and residual <= self.tolerance * norm
            reason = (
                f"residual within tolerance={self.tolerance:g} of the norm; no larger one is left"
            )
            if not good:
                left = f"residual {residual / (norm or 1.0):.0e} of the norm"
                reason = f"stopped after {products} products with {left}; raise max_iterations or tolerance"
            estimates.append(
                Estimate(value * scale, (residual + rounding) * scale, good, reason, products)
            )
        failed = [estimate for estimate in estimates if not estimate.converged]
        converged = len(estimates) == self.count and not failed
        return Eigenpairs(
            tuple(estimates), vectors, converged, (failed or estimates)[0].reason, products
        )


def _by_size(values: krylov.Array) -> list[int]:
    return sorted(range(len(values)), key=lambda i: -abs(float(values[i])))
