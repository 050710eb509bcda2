"""The Lanczos process, for one operator or for many in lockstep: probes, Ritz values, errors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hessinit.results.curvature_report import Estimate

Array = npt.NDArray[np.float64]

# Takes the vectors (runs, n) and the numbers of the runs, and returns the product of each vector
# with the matrix of its run.
Products = Callable[[Tensor, Sequence[int]], Tensor]


class Operator(Protocol):
    """A symmetric n × n matrix known by its products; a plain symmetric torch matrix is one."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def __matmul__(self, other: Tensor, /) -> Tensor: ...


def ranks_of(operator: Operator) -> Reduction | None:
    """The ranks that hold the other parts of the operator's vectors, if any."""
    return getattr(operator, "ranks", None)


def operator_size(operator: Operator) -> int:
    """The length of the operator's vectors; in a job, of the part that this rank holds."""
    shape = tuple(operator.shape)
    is_empty = shape[:1] == (0,) and ranks_of(operator) is None
    if len(shape) != 2 or shape[0] != shape[1] or is_empty:
        raise ValueError(
            f"the operator has shape {shape}; spectra need a square, non-empty one, such as "
            "A.T @ A."
        )
    if operator.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"the operator has dtype {operator.dtype}; convert it to torch.float32 or "
            "torch.float64."
        )
    return shape[0]


def products_with(operators: Sequence[Operator]) -> Products:
    """Products of each run's vector with its own operator."""

    def products(vectors: Tensor, runs: Sequence[int]) -> Tensor:
        if len(runs) == 1:
            return (operators[runs[0]] @ vectors[0]).unsqueeze(0)  # long vectors are not copied
        pairs = zip(runs, vectors, strict=True)
        return torch.stack([operators[run] @ vector for run, vector in pairs])

    return products


def powers_of_two(largest: Array, dtype: torch.dtype) -> Array:
    """The powers of two just below positive numbers; 0 for 0, and inf for what is not finite.

    Each is, as its inverse, a normal number of the dtype, so that scaling by it is exact.
    """
    limit = largest_exponent(dtype)
    exponents = np.clip(np.frexp(largest)[1] - 1, -limit, limit)
    powers = np.where(largest == 0, 0.0, np.ldexp(1.0, exponents))
    return np.where(np.isfinite(largest), powers, np.inf)


def power_of_two_scale(vector: Tensor) -> float:
    """The power of two just below the largest |entry|; costs one host synchronization.

    It is 0 for a zero vector, and inf when an entry is not finite.

    >>> power_of_two_scale(torch.tensor([3.0, -5.0])), power_of_two_scale(torch.zeros(2))
    (4.0, 0.0)
    """
    largest = np.array(float(vector.detach().abs().max()))
    return float(powers_of_two(largest, vector.dtype))


def largest_exponent(dtype: torch.dtype) -> int:
    return 126 if dtype == torch.float32 else 1000


@dataclass(frozen=True)
class BasisMemory:
    """How the Lanczos vectors are stored."""

    # A basis grows by blocks of about this many numbers (4 to 256 rows a run), without copying.
    numbers_per_block: int = 2**22
    rows_per_block: int = 256
    # Of an operator with so many rows, such as the embedding of a vocabulary, only the last blocks
    # are kept.
    size_of_large: int = 2**24
    blocks_of_large: int = 3


MEMORY = BasisMemory()


class Reduction(Protocol):
    """Adds up what the ranks of a job hold, where each has a part of every vector."""

    @property
    def rank(self) -> int: ...
    def sum(self, tensor: Tensor, /) -> Tensor: ...
    def max(self, tensor: Tensor, /) -> Tensor: ...


class RitzSpectrum(NamedTuple):
    """The Ritz values of one run, ascending, and their residuals, both in units of `scale`.

    `vectors` are the eigenvectors of the tridiagonal matrix, `betas` its subdiagonal and the β that
    comes next, 0 once the Krylov space is invariant. `scale` is inf if a product was not finite.
    """

    values: Array
    vectors: Array
    residuals: Array
    betas: Array
    scale: float
    is_exhausted: bool
    dtype: torch.dtype

    @property
    def steps(self) -> int:
        return len(self.values)

    @property
    def norm(self) -> float:
        """The largest |Ritz value|."""
        return max(abs(float(self.values[0])), abs(float(self.values[-1])))


class LanczosProcess:
    """Lanczos with full reorthogonalization: one run for each row of `initial`, all in lockstep.

    Every run is orthogonal to the orthonormal columns of `locked` (deflation). Its numbers are in
    units of its scale, a power of two chosen from the first product, so the iteration is the same
    for 1e-30·A and 1e30·A. A run is `exhausted` when its Krylov space is invariant or a product was
    not finite: then there is nothing left to do. With `most_blocks`, only the last vectors are
    kept, for the Ritz values alone: orthogonality fades where an eigenvalue has converged.
    """

    def __init__(
        self,
        products: Products,
        initial: Tensor,
        locked: Tensor | None = None,
        most_blocks: int | None = None,
        ranks: Reduction | None = None,
    ) -> None:
        count, self.size = initial.shape
        self._ranks = ranks
        self.total_size = int(self._sum(torch.tensor(self.size)))
        self.runs = list(range(count))
        self.steps = 0
        self.exhausted = np.zeros(count, dtype=bool)
        self._products = products
        self._most_blocks = most_blocks
        self._scales = np.ones(count)
        self._tridiagonals = np.zeros((count, 32, 32))  # their lower triangles
        self._betas = np.zeros((count, 32))
        self._largest = np.zeros(count)
        self._roundoff = 10 * torch.finfo(initial.dtype).eps
        self._locked: list[Tensor] = []
        if locked is not None and locked.shape[1]:
            self._locked.append(locked.T.contiguous().unsqueeze(0))
        self._room = self.total_size - sum(block.shape[1] for block in self._locked)
        self._blocks: list[Tensor] = []
        self._rows_used = 0
        self._current = self._next_row(initial)
        largest = np.array(float(self._largest_entries(initial.detach()).max()))
        scale = float(powers_of_two(largest, initial.dtype))
        torch.mul(initial.detach(), 1 / scale, out=self._current)
        for _ in range(2):
            _project_out(self._current, self._locked, self._sum)
        self._current.div_(self._norms(self._current).unsqueeze(1))

    def step(self) -> None:
        """Extend the basis of each run by a vector, and its tridiagonal matrix by a row.

        Costs one product for each run.
        """
        self.record(self.launch().cpu().numpy())

    def launch(self) -> Tensor:
        """Compute the products and orthogonalize them; returns a column of numbers for each run.

        `record` reads these numbers, which a GPU may still compute. That is the only
        synchronization of a step, so that of several processes can be one.
        """
        products = self._products(self._current, self.runs).detach()
        if not self.steps:
            largest = self._largest_entries(products)
            limit = largest_exponent(products.dtype)
            exponents = (torch.frexp(largest).exponent - 1).clamp(-limit, limit)
            # Powers of two: to multiply by them is exact.
            self._inverses = torch.ldexp(torch.ones_like(largest), -exponents)
        basis = [*self._locked, *self._blocks[:-1], self._blocks[-1][:, : self._rows_used]]
        candidate = self._next_row(self._current)
        torch.mul(products, self._inverses.unsqueeze(1), out=candidate)
        # Twice is enough (Parlett, after Kahan): one pass leaves ghosts of converged eigenvalues.
        along = _project_out(candidate, basis, self._sum)
        correction = _project_out(candidate, basis, self._sum)
        norms = self._norms(candidate)
        candidate.div_(norms.unsqueeze(1))
        self._current = candidate
        return torch.stack((self._inverses, along[:, -1], correction[:, -1], norms)).double()

    def record(self, numbers: Array) -> None:
        """Extend the tridiagonal matrices by the numbers that `launch` returned."""
        is_finite = np.isfinite(numbers).all(axis=0)
        self._scales = np.where(is_finite, 1 / numbers[0], np.inf)
        along, correction, betas = np.where(is_finite, numbers[1:], 0.0)
        alphas = along + correction
        self._largest = np.maximum(self._largest, np.maximum(np.abs(alphas), betas))
        self.steps += 1
        # A β at the level of roundoff means that the space is invariant. Then the Ritz values are
        # all the eigenvalues along whose eigenvectors the initial vector has a component; a random
        # one has a component along each, with probability 1.
        is_invariant = betas <= self._roundoff * self._largest
        self.exhausted = is_invariant | (self.steps == self._room)
        row = self.steps - 1
        if row == self._betas.shape[1]:
            self._tridiagonals = np.pad(self._tridiagonals, ((0, 0), (0, row), (0, row)))
            self._betas = np.pad(self._betas, ((0, 0), (0, row)))
        self._tridiagonals[:, row, row] = alphas
        if row:
            self._tridiagonals[:, row, row - 1] = self._betas[:, row - 1]
        self._betas[:, row] = np.where(self.exhausted, 0.0, betas)

    def keep(self, rows: Sequence[int]) -> None:
        """Continue only the runs in these rows."""
        self.runs = [self.runs[row] for row in rows]
        self._largest = self._largest[rows]
        self._tridiagonals = self._tridiagonals[rows]
        self._betas = self._betas[rows]
        self._inverses = self._inverses[rows]
        for number, block in enumerate(self._blocks):
            is_last = number == len(self._blocks) - 1
            used = self._rows_used if is_last else block.shape[1]
            self._blocks[number] = block.new_empty(len(rows), *block.shape[1:])
            self._blocks[number][:, :used] = block[rows, :used]
        self._current = self._blocks[-1][:, self._rows_used - 1]

    def ritz(self) -> list[RitzSpectrum]:
        """What each current run knows about its spectrum."""
        betas = self._betas[:, : self.steps]
        values, vectors = small_eigenpairs(self._tridiagonals[:, : self.steps, : self.steps])
        residuals = betas[:, -1:] * np.abs(vectors[:, -1])  # ‖A y − θ y‖ = β |last entry|
        scales = self._scales.tolist()
        runs = zip(values, vectors, residuals, betas, scales, self.exhausted.tolist(), strict=True)
        return [RitzSpectrum._make([*run, self._current.dtype]) for run in runs]

    def ritz_vectors(self, vectors: Array) -> Tensor:
        """The Ritz vectors (n, k) of the first run.

        `vectors` are eigenvectors (steps, k) of its tridiagonal matrix.
        """
        coefficients = torch.from_numpy(np.ascontiguousarray(vectors)).to(self._current)
        result = self._current.new_zeros((self.size, coefficients.shape[1]))
        row = 0
        for block in self._blocks:
            rows = min(block.shape[1], self.steps - row)
            if rows > 0:
                result.addmm_(block[0, :rows].T, coefficients[row : row + rows])
            row += rows
        return result.div_(self._norms(result.T))

    def _sum(self, numbers: Tensor) -> Tensor:
        return numbers if self._ranks is None else self._ranks.sum(numbers).to(numbers.dtype)

    def _norms(self, vectors: Tensor) -> Tensor:
        """The length of each row."""
        norms = torch.linalg.vector_norm(vectors, dim=1)
        return norms if self._ranks is None else self._sum(norms.square()).sqrt()

    def _largest_entries(self, vectors: Tensor) -> Tensor:
        """The largest |entry| of each row."""
        # A rank may hold no entry.
        largest = vectors.abs().amax(dim=1) if vectors.shape[1] else vectors.new_zeros(len(vectors))
        return largest if self._ranks is None else self._ranks.max(largest).to(vectors.dtype)

    def _next_row(self, like: Tensor) -> Tensor:
        if not self._blocks or self._rows_used == self._blocks[-1].shape[1]:
            fitting = max(4, MEMORY.numbers_per_block // (len(like) * self.total_size))
            rows = min(self._room + 1, MEMORY.rows_per_block, fitting)
            self._blocks.append(like.new_empty(len(like), rows, self.size))
            self._rows_used = 0
            if self._most_blocks is not None:
                del self._blocks[: -self._most_blocks]
        self._rows_used += 1
        return self._blocks[-1][:, self._rows_used - 1]


def _project_out(
    vectors: Tensor, basis: Sequence[Tensor], add_up: Callable[[Tensor], Tensor]
) -> Tensor:
    """Subtract from each vector its projection on the basis of its run, in place.

    Returns the coefficients along the last block. `add_up` sums those of the parts of a vector that
    several ranks hold, which make one run at a time.
    """
    coefficients = vectors
    for block in basis:
        if len(block) == 1:
            coefficients = add_up(torch.mv(block[0], vectors[0])).unsqueeze(0)
            vectors[0].addmv_(block[0].T, coefficients[0], alpha=-1)
        elif block.device.type == "cpu":
            coefficients = _project_out_on_cpu(vectors, block)
        else:
            coefficients = torch.bmm(block, vectors.unsqueeze(2)).squeeze(2)
            vectors -= torch.bmm(block.mT, coefficients.unsqueeze(2)).squeeze(2)
    return coefficients


def _project_out_on_cpu(vectors: Tensor, block: Tensor) -> Tensor:
    # MKL's batched product with vectors takes 3 to 15 times as long as numpy's.
    rows = block.numpy()
    numbers = vectors.numpy()
    with np.errstate(invalid="ignore", over="ignore"):  # `record` looks for what is not finite
        coefficients = np.matmul(rows, numbers[:, :, None])
        numbers -= np.matmul(coefficients.transpose(0, 2, 1), rows)[:, 0]
    return torch.from_numpy(coefficients[:, :, 0])


# Above this size numpy's eigh starts a second pool of threads: two pools wait for each other on few
# cores.
_LARGEST_FOR_NUMPY = 24


def small_eigenpairs(matrices: Array) -> tuple[Array, Array]:
    """Eigenvalues (ascending) and eigenvectors of symmetric matrices; reads the lower triangles."""
    if matrices.shape[-1] <= _LARGEST_FOR_NUMPY:
        values, vectors = np.linalg.eigh(matrices)
        return values, vectors
    pairs = torch.linalg.eigh(torch.from_numpy(np.ascontiguousarray(matrices)))
    return pairs.eigenvalues.numpy(), pairs.eigenvectors.numpy()


def worth_checking(steps: int) -> bool:
    """Whether to solve the small eigenproblem now.

    At most a twelfth more steps are taken than needed.

    >>> [steps for steps in range(25, 60) if worth_checking(steps)]
    [26, 28, 30, 32, 34, 36, 39, 42, 45, 48, 52, 56]
    """
    return 4 <= steps <= 24 or (steps > 24 and steps % max(2, steps // 12) == 0)


@dataclass(frozen=True)
class StoppingRule:
    """When a Ritz value is taken for an eigenvalue.

    benchmarks/unseen_eigenvalues.py and benchmarks/tolerances.py count what this misses.
    """

    # The residual must be below this share of √tolerance, so that the gap to the next Ritz value
    # means something.
    settled_residual: float = 0.03
    # How far beyond the value, in tolerances, a rare eigenvalue may lie unseen near convergence.
    most_unseen: float = 3.0
    # The same beyond an end that cannot be the norm: for a Hessian, 3 would take a fifth more
    # products, and 20 takes 1 % more.
    most_unseen_far: float = 20.0
    # An extreme may make the norm from this share of it on.
    share_of_norm: float = 0.9
    # An operator of at most this size is searched to the end: among so few dimensions, an initial
    # vector that hardly sees the leading eigenvector is not rare.
    small_size: int = 16
    # The shares of initial vectors that may miss an eigenvalue, at a fine and at a rough tolerance.
    rarest: float = 0.01
    most_frequent: float = 0.05
    # Of several runs in lockstep, those with a residual above this share of the value are not
    # looked at: most runs are far from done most of the time.
    early_residual: float = 0.3


STOPPING = StoppingRule()


def rarity(tolerance: float) -> float:
    """The share of initial vectors that may miss an eigenvalue, if there is one where they would.

    1 % for a tolerance of 1e-3 and less, 5 % for 0.1: whoever asks for one digit wants it soon, and
    few layers have such an eigenvalue (benchmarks/tolerances.py counts what is missed).

    >>> [round(rarity(tolerance), 3) for tolerance in (1e-6, 1e-3, 1e-2, 0.1, 0.5)]
    [0.01, 0.01, 0.032, 0.05, 0.05]
    """
    return min(max(math.sqrt(tolerance / 10), STOPPING.rarest), STOPPING.most_frequent)


@dataclass(frozen=True)
class RitzExtreme:
    """An extreme Ritz value, its residual ‖A y − θ y‖, and the Kato–Temple bound.

    `unseen` is how far beyond the value an eigenvalue may lie, as by `unseen_distance`.
    """

    value: float
    residual: float
    bound: float
    unseen: float = 0.0
    is_bounded: bool = False  # from both sides, so that the residual does not matter
    is_far: bool = False  # too small to be the norm

    def is_converged(self, tolerance: float, norm: float) -> bool:
        """Within `tolerance · norm`, as far as one initial vector can tell.

        The Ritz value is a lower bound of the norm, and with `unseen` a probable upper one. Near
        convergence the Kato–Temple bound is smaller. It trusts a gap that is unknown in an unsplit
        cluster, or while a larger eigenvalue still grows out of the initial vector; so the residual
        must be small, and an eigenvalue much further out unlikely.
        """
        if self.is_bounded:
            return self.bound <= tolerance * norm
        if self.unseen <= tolerance * norm:
            return True
        if self.is_far:
            return max(self.residual, self.unseen / STOPPING.most_unseen_far) <= tolerance * norm
        is_certain = self.unseen <= STOPPING.most_unseen * tolerance * norm
        is_settled = self.residual <= STOPPING.settled_residual * math.sqrt(tolerance) * norm
        return is_certain and is_settled and self.bound <= tolerance * norm

    def error(self, tolerance: float, norm: float) -> float:
        """At most `tolerance · norm` after convergence; of a far end, what may lie unseen."""
        if not self.is_converged(tolerance, norm):
            return max(self.residual, self.unseen)
        # In an unsplit cluster the eigenvalue is off by the residual or a little more, not by the
        # bound.
        most = tolerance * norm * (STOPPING.most_unseen_far if self.is_far else 1)
        return min(max(self.bound, 3 * self.residual, self.unseen), max(self.bound, most))


def kato_temple_bound(spectrum: RitzSpectrum, index: int) -> float:
    """How far the first (index 0) or last (index -1) Ritz value is from an eigenvalue, at most.

    |θ − λ| ≤ r for some eigenvalue λ, and |θ − λ| ≤ r²/gap, where gap is the distance from θ to the
    other eigenvalues (Kato–Temple; Parlett, theorem 11.7.1). Here the gap is taken from the next
    Ritz value less its own residual.
    """
    residual = float(spectrum.residuals[index])
    if spectrum.steps == 1:
        return residual
    neighbour = 1 if index == 0 else -2
    distance = abs(float(spectrum.values[index]) - float(spectrum.values[neighbour]))
    gap = distance - float(spectrum.residuals[neighbour])
    return residual * (residual / gap) if gap > residual else residual


def unseen_distance(
    values: Array, betas: Sequence[float] | Array, index: int, size: float, rare: float = 0.01
) -> float:
    """How far beyond an extreme Ritz value an eigenvalue can lie unseen.

    This holds but for the share `rare` of all initial vectors.

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
    beside = values[1:] if index == 0 else values[:-1]
    gaps = np.abs(beside - values[index])
    if gaps.size and not gaps.min() > 0:
        gaps = np.maximum(gaps, np.finfo(np.float64).tiny)
    limit = math.log(math.sqrt(2 * size / math.pi) / rare) + float(np.log(betas).sum())
    # Newton's steps for log d in log d + Σ log(d + gapᵢ) = limit, convex and increasing: from
    # above, every one of them is an upper bound. At first the gaps alone, or d alone.
    logarithm = min(limit - float(np.log(gaps).sum()), limit / len(values))
    for _ in range(8):
        distance = math.exp(logarithm)
        excess = logarithm + float(np.log(distance + gaps).sum()) - limit
        if excess <= 1e-3:
            break
        logarithm -= excess / (1 + float((distance / (distance + gaps)).sum()))
    return math.exp(logarithm)


NOT_FINITE = "a product was not finite (inf or nan); look for inf or nan in the weights and inputs"


def not_finite(products: int, sign: float = 1.0) -> Estimate:
    """The estimate where a product was inf or nan: infinite, never zero."""
    reason = NOT_FINITE.replace("a product", f"product {products}") + ", or use torch.float64"
    return Estimate(sign * math.inf, math.inf, False, reason, products)


ProbeKind = Literal["gaussian", "rademacher"]
_SEED_OF_RANK = 1_000_003  # apart from the seeds of one rank, which differ by small numbers

# A GPU draws longer probes itself: about a thousand times as fast as a CPU.
_LONGEST_FROM_CPU = 2**16


@functools.lru_cache(maxsize=256)
def _mixed_seed(seed: int) -> int:
    # After torch.manual_seed(0) the user's own weights are the numbers that seed 0 gives: probes
    # from the same seed would not be random with respect to the operator (50 % off in tests).
    return int(np.random.SeedSequence(seed, spawn_key=(0x4E55,)).generate_state(1)[0])


class ProbeStream:
    """An endless sequence of probes that depends only on seed, size, dtype and kind.

    Probes are drawn on the CPU, so every device sees the same ones, but for long ones, which a GPU
    draws by itself in a thousandth of the time. The global random state is left alone.
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
        self.size = size
        self.kind = kind
        self.dtype = dtype
        self.device = device
        is_on_gpu = torch.device(device).type == "cuda"
        draws_on_gpu = is_on_gpu and size > _LONGEST_FROM_CPU and kind == "gaussian"
        generator = torch.Generator(device if draws_on_gpu else "cpu")
        self._generator = generator.manual_seed(_mixed_seed(seed % 2**64))

    def draw(self) -> Tensor:
        generator = self._generator
        if self.kind == "gaussian":
            device = generator.device
            probe = torch.randn(self.size, generator=generator, dtype=self.dtype, device=device)
            return probe.to(self.device)
        # Eight signs from every random byte: ten times as fast as a number for each sign.
        count = -(-self.size // 8)
        bits = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
        signs = torch.from_numpy(np.unpackbits(bits.numpy(), count=self.size))
        return signs.to(self.dtype).mul_(2).sub_(1).to(self.device)

    def draw_block(self, count: int) -> Tensor:
        """The next `count` probes as the columns of a (size, count) matrix."""
        return torch.stack([self.draw() for _ in range(count)], dim=1)


def probe_stream(operator: Operator, seed: int, kind: ProbeKind = "gaussian") -> ProbeStream:
    ranks = ranks_of(operator)
    size = operator_size(operator)
    if ranks is not None:
        seed += _SEED_OF_RANK * ranks.rank
    return ProbeStream(size, seed=seed, kind=kind, dtype=operator.dtype, device=operator.device)


def random_like(tensor: Tensor, seed: int, dtype: torch.dtype | None = None) -> Tensor:
    """A random tensor of the shape and device, with the identity as its covariance."""
    dtype = dtype or tensor.dtype
    shape = tensor.shape
    size = tensor.numel()
    splits = [
        (math.prod(shape[:dimension]), math.prod(shape[dimension:]))
        for dimension in range(1, len(shape))
    ]
    if size <= _LONGEST_FROM_CPU or not splits:
        return ProbeStream(size, seed=seed, dtype=dtype, device=tensor.device).draw().view(shape)
    # An outer product: to draw a number for every weight of a large model takes longer than some
    # gradients.
    rows, columns = min(splits, key=sum)
    numbers = ProbeStream(rows + columns, seed=seed, dtype=dtype, device=tensor.device).draw()
    return torch.outer(numbers[:rows], numbers[rows:]).view(shape)
