"""Extreme eigenvalues, leading eigenpairs and largest singular values, with their errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hessinit.curvature import krylov
from hessinit.problem import checks
from hessinit.results.curvature_report import Estimate

Which = Literal["both", "top", "norm"]


@dataclass(frozen=True)
class LanczosResult:
    """The extreme eigenvalues, from `steps` products in all."""

    top: Estimate
    bottom: Estimate | None  # if asked for
    norm: Estimate  # the largest |eigenvalue|
    steps: int
    ritz: tuple[float, ...]  # all Ritz values, ascending


def lanczos(
    operator: krylov.Operator,
    *,
    which: Which = "both",
    tolerance: float = 1e-3,
    max_iterations: int = 200,
    seed: int = 0,
) -> LanczosResult:
    """The extreme eigenvalues; the one of larger size to `tolerance` times the spectral norm.

    The error of the other is at most 20 times that. The same for 1e-30·A and 1e30·A. Costs one
    product per step (typically 5 to 30) and keeps one vector per step. With which="top" only the
    largest eigenvalue has to converge, with "norm" the one of largest size.

    >>> extremes = lanczos(torch.diag(torch.linspace(-2.0, 3.0, 50, dtype=torch.float64)))
    >>> abs(extremes.top.value - 3) <= extremes.top.error <= 3e-3
    True
    """
    goal = Goal(which=which, tolerance=tolerance, max_iterations=max_iterations)
    return run_together([LanczosSearch.of(operator, goal, seed)])[0]


def largest_eigenvalues(
    operators: Sequence[krylov.Operator],
    *,
    tolerance: float = 1e-3,
    max_iterations: int = 200,
    seed: int = 0,
) -> list[Estimate]:
    """The largest eigenvalue of each positive semidefinite operator, by Lanczos in lockstep.

    All operators have the same size, dtype and device. Costs one product with each per step.

    >>> matrices = torch.diag_embed(torch.tensor([[3.0, 1.0, 0.0], [0.5, 2.0, 1.0]]))
    >>> [round(estimate.value, 5) for estimate in largest_eigenvalues(list(matrices))]
    [3.0, 2.0]
    """
    probe = krylov.probe_stream(operators[0], seed).draw()
    goal = Goal(
        which="top", tolerance=tolerance, max_iterations=max_iterations, is_semidefinite=True
    )
    initial = probe.expand(len(operators), -1)
    search = LanczosSearch(krylov.products_with(operators), initial, goal)
    return [result.top for result in run_together([search])]


@dataclass(frozen=True)
class Start:
    """A normal vector whose covariance is the operator itself, and the square of its length.

    It has a share λ / trace of every eigenvector instead of 1 / size: some products are saved.
    """

    vector: Tensor
    square: float


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a search looks for, how exactly, and in how many products at most.

    `rarity` is the share of initial vectors that may miss an eigenvalue; by default that of the
    tolerance.
    """

    which: Which
    tolerance: float
    max_iterations: int
    is_semidefinite: bool = False
    rarity: float | None = None

    def __post_init__(self) -> None:
        if self.which not in ("both", "top", "norm"):
            raise ValueError(
                f"which={self.which!r} is unknown; choose from 'both', 'top', 'norm'. For the "
                "bottom alone pass -operator."
            )
        checks.check_tolerance(self.tolerance)
        checks.check_whole("max_iterations", self.max_iterations, at_least=1)


class LanczosSearch:
    """The search for the extreme eigenvalues of operators in lockstep, step by step.

    There is one run for each row of `initial`. `start_square` is that of `Start`.
    """

    def __init__(
        self,
        products: krylov.Products,
        initial: Tensor,
        goal: Goal,
        start_square: float | None = None,
        ranks: krylov.Reduction | None = None,
    ) -> None:
        self._goal = goal
        self._start_square = start_square
        self._rarity = goal.rarity or krylov.rarity(goal.tolerance)
        self._runs, length = initial.shape
        if ranks is not None:  # whose parts may differ in length
            length = int(ranks.max(torch.tensor(length)))
        self._keeps_all = length < krylov.MEMORY.size_of_large
        most_blocks = None if self._keeps_all else krylov.MEMORY.blocks_of_large
        self._process = krylov.LanczosProcess(
            products, initial, most_blocks=most_blocks, ranks=ranks
        )
        self._size = self._process.total_size
        self._limit = min(goal.max_iterations, self._size)
        self._results: dict[int, LanczosResult] = {}

    @classmethod
    def of(
        cls, operator: krylov.Operator, goal: Goal, seed: int, start: Start | None = None
    ) -> LanczosSearch:
        """The search for one operator, from the probe of the seed or from `start`."""
        stream = krylov.probe_stream(operator, seed)
        initial = stream.draw() if start is None else start.vector
        return cls(
            krylov.products_with([operator]),
            initial.to(operator.device, operator.dtype).unsqueeze(0),
            goal,
            None if start is None else start.square,
            krylov.ranks_of(operator),
        )

    @property
    def is_done(self) -> bool:
        return len(self._results) == self._runs

    @property
    def results(self) -> list[LanczosResult]:
        """The result of each run, once the search is done."""
        return [self._results[run] for run in range(self._runs)]

    def launch(self) -> Tensor:
        """Start a step; `record` takes the numbers that it returns."""
        return self._process.launch()

    def record(self, numbers: krylov.Array) -> None:
        """Record a step, and conclude the runs for which it was the last one."""
        process = self._process
        process.record(numbers)
        over = process.exhausted | (process.steps == self._limit)
        is_small = self._size <= krylov.STOPPING.small_size
        if not over.any() and (is_small or not krylov.worth_checking(process.steps)):
            return
        unfinished = []
        runs = zip(process.runs, over.tolist(), process.ritz(), strict=True)
        for row, (run, is_over, spectrum) in enumerate(runs):
            if is_over or (not is_small and self._has_converged(spectrum)):
                self._results[run] = self._conclude(spectrum)
            else:
                unfinished.append(row)
        if 0 < len(unfinished) < len(process.runs):
            process.keep(unfinished)

    def vector(self) -> Tensor:
        """The unit Ritz vector of the norm; zeros if there is none or the basis was not kept."""
        (spectrum,) = self._process.ritz()
        if not (spectrum.norm and math.isfinite(spectrum.scale) and self._keeps_all):
            return torch.zeros(self._process.size)
        leading = [np.abs(spectrum.values).argmax()]
        return self._process.ritz_vectors(spectrum.vectors[:, leading]).squeeze(1)

    def _has_converged(self, spectrum: krylov.RitzSpectrum) -> bool:
        norm = spectrum.norm
        early = krylov.STOPPING.early_residual * spectrum.values[-1]
        if self._runs > 1 and spectrum.residuals[-1] > early:
            return False
        top = self._extreme(spectrum, -1)
        if self._goal.which == "top":
            return top.is_converged(self._goal.tolerance, norm)
        bottom = self._extreme(spectrum, 0)
        if self._goal.which == "both":
            return all(end.is_converged(self._goal.tolerance, norm) for end in (top, bottom))
        smaller, larger = sorted((bottom, top), key=lambda end: abs(end.value))
        most = abs(smaller.value) + smaller.unseen
        may_be_norm = most > (1 + self._goal.tolerance) * abs(larger.value)
        return not may_be_norm and larger.is_converged(self._goal.tolerance, norm)

    def _extreme(self, spectrum: krylov.RitzSpectrum, index: int) -> krylov.RitzExtreme:
        value = float(spectrum.values[index])
        norm = spectrum.norm
        needs_norm = self._goal.which == "norm"
        # A semidefinite operator has no negative eigenvalue: a small Ritz value bounds the smallest
        # one.
        is_bottom = index == 0 and self._goal.is_semidefinite and value >= 0
        if is_bottom and (needs_norm or value <= self._goal.tolerance * norm):
            return krylov.RitzExtreme(value, value, value, is_bounded=True)
        unseen = krylov.unseen_distance(
            spectrum.values,
            spectrum.betas,
            index,
            self._dimensions(value * spectrum.scale),
            self._rarity,
        )
        below_norm = min(krylov.STOPPING.share_of_norm * norm, norm - unseen)
        return krylov.RitzExtreme(
            value,
            float(spectrum.residuals[index]),
            krylov.kato_temple_bound(spectrum, index),
            unseen,
            is_far=abs(value) <= below_norm and not needs_norm,
        )

    def _dimensions(self, eigenvalue: float) -> float:
        """One over the mean square of the initial vector's component along an eigenvector."""
        if self._start_square is None:
            return self._size
        # Along an eigenvector it is N(0, λ): of the square of its length, the share λ.
        return min(self._start_square / max(eigenvalue, 1e-300), 1e300)

    def _conclude(self, spectrum: krylov.RitzSpectrum) -> LanczosResult:
        steps = spectrum.steps
        is_top_only = self._goal.which == "top"
        if not math.isfinite(spectrum.scale):
            infinite = krylov.not_finite(steps)
            bottom = None if is_top_only else replace(infinite, value=-math.inf)
            return LanczosResult(infinite, bottom, infinite, steps, ())
        ritz = tuple((spectrum.values * spectrum.scale).tolist())
        top = self._estimate(spectrum, -1)
        if is_top_only and self._goal.is_semidefinite:
            return LanczosResult(top, None, top, steps, ritz)
        bottom = self._estimate(spectrum, 0)
        norm = _larger(top, bottom, self._goal.tolerance)
        return LanczosResult(top, None if is_top_only else bottom, norm, steps, ritz)

    def _estimate(self, spectrum: krylov.RitzSpectrum, index: int) -> Estimate:
        norm = spectrum.norm
        steps = spectrum.steps
        tolerance = self._goal.tolerance
        if norm == 0:
            return Estimate(0.0, 0.0, True, "the operator is zero on a random vector", steps)
        extreme = self._extreme(spectrum, index)
        # Products and basis carry rounding errors of a few units in the last place of the norm.
        rounding = 8 * torch.finfo(spectrum.dtype).eps
        error = extreme.error(tolerance, norm)
        is_exact = spectrum.is_exhausted and not extreme.is_bounded
        is_reachable = tolerance >= rounding
        has_converged = is_reachable and (is_exact or extreme.is_converged(tolerance, norm))
        is_other_end = self._goal.which == "norm" and abs(extreme.value) != norm
        if not is_reachable:
            reason = (
                f"tolerance={tolerance:g} is below the rounding level {rounding:.0e} of "
                f"{spectrum.dtype}; use torch.float64 or a larger tolerance"
            )
        elif is_exact:
            reason = f"exact up to rounding: {steps} steps span all that the operator reaches"
        elif has_converged:
            reason = (
                f"settled, error {error / norm:.0e} of the norm, within tolerance={tolerance:g}"
            )
        elif is_other_end and steps < self._limit:
            reason = (
                f"known to {error / norm:.0e} of the norm, which the other end of the spectrum "
                "makes"
            )
        else:
            reason = (
                f"stopped at max_iterations={self._goal.max_iterations} with residual "
                f"{extreme.residual / norm:.0e} of the norm; raise max_iterations or tolerance"
            )
        total = (error + rounding * norm) * spectrum.scale
        return Estimate(extreme.value * spectrum.scale, total, has_converged, reason, steps)


def run_together(searches: Sequence[LanczosSearch]) -> list[LanczosResult]:
    """The results of all runs of the searches, which take their steps in turns.

    The CPU waits for the GPU once a step, for all searches together.
    """
    running = list(searches)
    while running:
        launched = [search.launch() for search in running]
        numbers = torch.cat(launched, dim=1).cpu().numpy()
        first = 0
        for search, columns in zip(running, launched, strict=True):
            search.record(numbers[:, first : first + columns.shape[1]])
            first += columns.shape[1]
        running = [search for search in running if not search.is_done]
    return [result for search in searches for result in search.results]


def _larger(top: Estimate, bottom: Estimate, tolerance: float) -> Estimate:
    """The norm: the larger of |top| and |bottom|, at most the larger of their upper bounds."""
    smaller, larger = sorted((bottom, top), key=lambda end: abs(end.value))
    value = abs(larger.value)
    error = max(larger.error, abs(smaller.value) + smaller.error - value)
    is_settled = larger.converged and error <= larger.error + tolerance * value
    reason = larger.reason
    if larger.converged and not is_settled:
        reason = "the other end of the spectrum may be larger in size; ask for which='both'"
    return Estimate(value, error, is_settled, reason, larger.products)


class _Inverse:
    """The inverse of a matrix, as an operator, from the Cholesky factor of the matrix."""

    def __init__(self, factor: Tensor) -> None:
        self.factor = factor
        self.shape = tuple(factor.shape)
        self.dtype = factor.dtype
        self.device = factor.device

    def __matmul__(self, vector: Tensor) -> Tensor:
        return torch.cholesky_solve(vector.unsqueeze(1), self.factor).squeeze(1)


def smallest_eigenvalue(matrix: Tensor, *, tolerance: float = 1e-3, seed: int = 0) -> Estimate:
    """The smallest eigenvalue of a positive matrix, 0 if it is singular.

    By Lanczos on the inverse in fp64.
    """
    size = matrix.shape[0]
    rounding = float(torch.finfo(matrix.dtype).eps) * size * float(matrix.diagonal().abs().max())
    if not math.isfinite(rounding):
        return Estimate(0.0, math.inf, False, "the matrix is not finite; use torch.float64", 0)
    factor, failure = torch.linalg.cholesky_ex(matrix.double())
    if int(failure):
        return Estimate(0.0, rounding, True, "positive semidefinite and singular up to rounding", 0)
    inverse = lanczos(_Inverse(factor), which="top", tolerance=tolerance, seed=seed).top
    value = 1 / inverse.value
    return replace(inverse, value=value, error=value * inverse.relative_error + rounding)


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
    operator: krylov.Operator,
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

    >>> diagonal = torch.tensor([5.0, 5.0, 5.0, -7.0, 1.0, 0.0, 2.0, 3.0], dtype=torch.float64)
    >>> [round(value.value, 6) for value in top_eigenpairs(torch.diag(diagonal), 4).values]
    [-7.0, 5.0, 5.0, 5.0]
    """
    size = krylov.operator_size(operator)
    checks.check_whole("count", count, at_least=1)
    if count > size:
        raise ValueError(
            f"count={count} is more than the operator has: it is {size} × {size}. Pass "
            f"count={size} or less."
        )
    checks.check_tolerance(tolerance)
    checks.check_whole("max_iterations", max_iterations, at_least=count)
    search = _EigenpairSearch(operator, count, tolerance, max_iterations)
    stream = krylov.probe_stream(operator, seed)
    while not search.is_over:
        search.sweep(stream.draw())
    return search.rayleigh_ritz()


class _EigenpairSearch:
    """Lanczos runs, each orthogonal to the Ritz vectors that the earlier ones have locked."""

    def __init__(
        self, operator: krylov.Operator, count: int, tolerance: float, max_iterations: int
    ) -> None:
        self._operator = operator
        self._count = count
        self._tolerance = tolerance
        self._max_iterations = max_iterations
        size = operator.shape[0]
        self._locked = torch.empty((size, 0), dtype=operator.dtype, device=operator.device)
        self._values: list[float] = []
        self._norm = 0.0
        self._products = 0
        self._is_complete = False
        self._is_finite = True

    @property
    def is_over(self) -> bool:
        out_of_products = self._products >= self._max_iterations
        return self._is_complete or out_of_products or not self._is_finite

    def sweep(self, initial: Tensor) -> None:
        products = krylov.products_with([self._operator])
        process = krylov.LanczosProcess(products, initial.unsqueeze(0), self._locked)
        is_last = is_decided = False
        while not is_last and not is_decided:
            process.step()
            self._products += 1
            is_exhausted = bool(process.exhausted[0])
            is_last = is_exhausted or self._products >= self._max_iterations
            if not is_last and not krylov.worth_checking(process.steps):
                continue
            (spectrum,) = process.ritz()
            self._is_finite = math.isfinite(spectrum.scale)
            if not self._is_finite:
                return
            values = spectrum.values * spectrum.scale
            residuals = spectrum.residuals * spectrum.scale
            self._norm = max(self._norm, abs(float(values[0])), abs(float(values[-1])))
            leading = self._leading(values)
            is_decided = is_exhausted or self._is_decided(values, residuals, leading)
        spans_all = process.steps + len(self._values) == process.size
        # Whatever was found when the products ran out is locked, too: the residuals tell how good
        # it is.
        if leading:
            vectors = process.ritz_vectors(spectrum.vectors[:, leading])
            self._locked = torch.cat((self._locked, vectors), dim=1)
            self._values.extend(values[leading].tolist())
        self._is_complete = spans_all or (is_decided and not leading)

    def _leading(self, values: krylov.Array) -> list[int]:
        """The values of this run that belong to the first `count` of all."""
        leading = _by_size(values)[: self._count]
        if len(self._values) < self._count:
            return leading
        least = sorted(map(abs, self._values), reverse=True)[self._count - 1]
        least += self._tolerance * self._norm
        return [index for index in leading if abs(float(values[index])) > least]

    def _is_decided(
        self, values: krylov.Array, residuals: krylov.Array, leading: list[int]
    ) -> bool:
        """Whether the leading values, and ends of the spectrum that matter, have converged."""
        limit = self._tolerance * self._norm
        sizes = [abs(value) for value in (*self._values, *values[leading].tolist())]
        if len(sizes) < self._count or any(residuals[leading] > 0.5 * limit):
            return False
        least = sorted(sizes, reverse=True)[self._count - 1]
        # The smallest values of a semidefinite operator converge late and never matter.
        ends = ((abs(float(values[index])), float(residuals[index])) for index in (0, -1))
        return all(residual <= limit or size + 2 * residual < least for size, residual in ends)

    def rayleigh_ritz(self) -> Eigenpairs:
        """The best pairs in the span of the locked vectors; a last product measures residuals."""
        count = self._count
        scale = math.inf
        products = self._products
        if self._is_finite:
            basis = torch.linalg.qr(self._locked).Q
            image = (self._operator @ basis).detach()
            products += basis.shape[1]
            scale = krylov.power_of_two_scale(image)
        if math.isinf(scale):
            estimate = Estimate(math.inf, math.inf, False, krylov.NOT_FINITE, products)
            vectors = self._locked.new_full((len(self._locked), count), math.nan)
            return Eigenpairs((estimate,) * count, vectors, False, krylov.NOT_FINITE, products)
        image = image / (scale or 1.0)
        small = (basis.T @ image).double().cpu().numpy()
        values, rotation = np.linalg.eigh((small + small.T) / 2)
        order = _by_size(values)[:count]
        rotated = torch.from_numpy(np.ascontiguousarray(rotation[:, order])).to(basis)
        vectors = basis @ rotated
        leading = torch.from_numpy(values[order]).to(basis)
        residuals = torch.linalg.vector_norm(image @ rotated - vectors * leading, dim=0).tolist()
        norm = 0.0
        if scale:
            norm = max(self._norm / scale, abs(float(values[0])), abs(float(values[-1])))
        rounding = 8 * torch.finfo(self._operator.dtype).eps * norm
        estimates = []
        for value, residual in zip(values[order].tolist(), residuals, strict=True):
            has_converged = self._is_complete and residual <= self._tolerance * norm
            reason = (
                f"stopped after {products} products with residual "
                f"{residual / (norm or 1.0):.0e} of the norm; raise max_iterations or tolerance"
            )
            if has_converged:
                reason = (
                    f"residual within tolerance={self._tolerance:g} of the norm; no larger one is "
                    "left"
                )
            error = (residual + rounding) * scale
            estimates.append(Estimate(value * scale, error, has_converged, reason, products))
        failed = [estimate for estimate in estimates if not estimate.converged]
        converged = len(estimates) == count and not failed
        reason = (failed or estimates)[0].reason
        return Eigenpairs(tuple(estimates), vectors, converged, reason, products)


def _by_size(values: krylov.Array) -> list[int]:
    return sorted(range(len(values)), key=lambda index: -abs(float(values[index])))


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

    values: krylov.Array
    errors: krylov.Array
    converged: bool
    reason: str
    products: int

    @property
    def upper(self) -> krylov.Array:
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
    stream = krylov.ProbeStream(maps.examples * maps.inputs, seed=seed, dtype=dtype)
    squared = _SquaredMap(maps)
    goal = Goal(
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
    search = LanczosSearch(squared.products, initial, goal)
    squares = [result.top for result in run_together([search])]
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
        reason = (
            f"stopped at max_iterations={max_iterations} in {unsettled} examples; raise it or "
            "tolerance"
        )
    products = 2 * max(square.products for square in squares)
    return SingularValues(values * roots, errors * roots, not unsettled, reason, products)


class _SquaredMap:
    """Products with every AᵀA / s, where s is a power of two near the size of the first A v."""

    def __init__(self, maps: BatchedMap) -> None:
        self._maps = maps
        self.scales: krylov.Array = np.zeros(0)

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
