"""What every engine offers, the extreme eigenvalues of layers' curvature; the Lanczos engine."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hessinit.curvature import lanczos, operators, rounding_error, stochastic
from hessinit.curvature.evaluation import Evaluation
from hessinit.curvature.krylov import STOPPING, Operator, ProbeStream
from hessinit.curvature.loss_hessian import LossFactor
from hessinit.curvature.progress import NETWORK, Progress, Watched
from hessinit.results.curvature_report import Estimate


@dataclass(frozen=True)
class Extremes:
    """The largest and the smallest eigenvalue, and the engine that computed them."""

    top: Estimate
    bottom: Estimate
    engine: str
    reason: str
    vector: Tensor | None = field(default=None, compare=False)  # of the norm, of any length

    @property
    def norm(self) -> Estimate:
        larger = self.top if abs(self.top.value) >= abs(self.bottom.value) else self.bottom
        return replace(larger, value=abs(larger.value))


@dataclass(frozen=True)
class LanczosSettings:
    """When Lanczos stops, its seed, and who is told of every product."""

    tolerance: float
    max_iterations: int
    seed: int
    progress: Progress | None = field(default=None, compare=False)

    def watched(
        self, operator: operators.LinearOperator, names: Sequence[str]
    ) -> operators.LinearOperator:
        """The block of these leaves; its products are counted if progress is reported."""
        name = names[0] if len(names) == 1 else NETWORK
        return operator if self.progress is None else Watched(operator, self.progress, name)

    def report_done(self, *names: str) -> None:
        for name in names:
            if self.progress is not None:
                self.progress.layer_done(name)

    def search(
        self,
        operator: Operator,
        which: lanczos.Which,
        *,
        semidefinite: bool = False,
        start: lanczos.Start | None = None,
    ) -> lanczos.LanczosSearch:
        """A Lanczos run that has not begun."""
        goal = lanczos.Goal(
            which=which,
            tolerance=self.tolerance,
            max_iterations=self.max_iterations,
            is_semidefinite=semidefinite,
        )
        return lanczos.LanczosSearch.of(operator, goal, self.seed, start)

    def largest_eigenvalue(self, operator: Operator) -> Estimate:
        return lanczos.run_together([self.search(operator, "top")])[0].top


class Engine(ABC):
    """Computes the extreme eigenvalues of curvature blocks, of one layer or of several together."""

    name = "lanczos"
    reason: str
    ends: lanczos.Which = "both"  # that must converge in a block that may be indefinite
    rank: int | None = None  # at most that of a semidefinite curvature; None if it is indefinite
    settings: LanczosSettings
    states_rounding = False  # whether the stated errors include that of the products

    def extremes_of_each(self, names: Sequence[str]) -> dict[str, Extremes]:
        """The extremes of every leaf's own block."""
        return {name: self._extremes_of_layer(name) for name in names}

    def _extremes_of_layer(self, name: str) -> Extremes:
        extremes = self.extremes([name])
        self.settings.report_done(name)
        return extremes

    @abstractmethod
    def extremes(self, names: Sequence[str]) -> Extremes:
        """The extremes of the block of these leaves together."""

    @abstractmethod
    def operator(self, names: Sequence[str]) -> operators.LinearOperator:
        """The block itself, acting on flat weights."""

    def is_cheap(self, names: Sequence[str]) -> bool:
        """Whether all these leaves are measured without further products."""
        return False

    def unused(self) -> Extremes:
        """The extremes of leaves that the forward does not use."""
        return Extremes(UNUSED, UNUSED, self.name, self.reason)

    def _search(
        self,
        rank: int | None,
        blocks: Sequence[Operator],
        starts: Sequence[lanczos.Start | None] | None = None,
    ) -> list[Extremes]:
        """Lanczos; a semidefinite block without full rank has the smallest eigenvalue 0."""
        searches = []
        for operator, start in zip(blocks, starts or [None] * len(blocks), strict=True):
            size = int(operator.shape[0])
            which: lanczos.Which = "top" if rank is not None and rank < size else self.ends
            # For both ends it has no part in the null space, and would not see an eigenvalue 0.
            if size <= STOPPING.small_size or which == "both":
                start = None
            semidefinite = rank is not None
            searches.append(
                self.settings.search(operator, which, semidefinite=semidefinite, start=start)
            )
        extremes = []
        for operator, result in zip(blocks, lanczos.run_together(searches), strict=True):
            bottom = result.bottom or zero_bottom(rank or 0, int(operator.shape[0]))
            # One run finds both: its products are counted once.
            bottom = replace(bottom, products=0)
            extremes.append(Extremes(result.top, bottom, self.name, self.reason))
        if len(extremes) == 1:
            return [replace(extremes[0], vector=searches[0].vector())]
        return extremes


UNUSED = Estimate(0.0, 0.0, True, "the forward does not use this weight", 0)


def scaled(estimate: Estimate, factor: float) -> Estimate:
    return replace(estimate, value=estimate.value * factor, error=estimate.error * factor)


def zero_bottom(rank: int, size: int) -> Estimate:
    """The smallest eigenvalue of a positive semidefinite matrix that is larger than its rank."""
    reason = f"positive semidefinite, with rank at most {rank} for {size} weights"
    return Estimate(0.0, 0.0, True, reason, 0)


def with_rounding(
    extremes: Extremes, rounding: rounding_error.RoundingError, tolerance: float
) -> Extremes:
    """Add the rounding error of the operator; beyond `tolerance`, nothing counts as converged."""
    norm = extremes.norm.value
    fraction = rounding_error.ROUNDING.caution * rounding.relative
    if not fraction or not math.isfinite(norm):
        return extremes
    if rounding.is_all:
        error = (1 + fraction) * norm + extremes.norm.error
        reason = "zero, up to the rounding of float32"
        zero = Estimate(0.0, error, True, reason, extremes.top.products)
        return replace(extremes, top=zero, bottom=replace(zero, products=0))

    def widen(estimate: Estimate) -> Estimate:
        wider = replace(estimate, error=math.hypot(estimate.error, fraction * norm))
        if rounding.relative <= tolerance or not estimate.converged:
            return wider
        advice = "precision='full' or a larger tolerance"
        if rounding.unit == "float32":
            advice = "dtype=torch.float64"
        error = f"rounding in {rounding.unit} leaves an error of {fraction:.0e} of the norm"
        return replace(wider, converged=False, reason=f"{error}; pass {advice}")

    return replace(extremes, top=widen(extremes.top), bottom=widen(extremes.bottom))


def measure_spectrum(
    operator: Operator,
    settings: LanczosSettings,
    *,
    top: int,
    trace: bool,
    frobenius: bool,
    density: bool,
) -> dict[str, Any]:
    """The numbers asked for, under the names of `LayerCurvature`'s fields."""
    spectrum: dict[str, Any] = {}
    if top:
        count = min(top, operator.shape[0])
        pairs = lanczos.top_eigenpairs(
            operator,
            count,
            tolerance=settings.tolerance,
            max_iterations=settings.max_iterations,
            seed=settings.seed,
        )
        spectrum["eigenvalues"] = pairs.values
    if trace:
        spectrum["trace"] = stochastic.hutch_plus_plus(operator, seed=settings.seed)
    if frobenius:
        spectrum["frobenius"] = stochastic.frobenius_norm(operator, seed=settings.seed)
    if density:
        spectrum["density"] = stochastic.spectral_density(operator, seed=settings.seed)
    return spectrum


@dataclass(frozen=True)
class LanczosEngineSizes:
    """Sizes up to which layers are searched together, and products recorded."""

    searched_together: int = 2**20  # weights whose Lanczos vectors are kept at a time, at least
    recorded: int = 2**23  # numbers per operation: of fewer, a GPU starts kernels longer than runs


SIZES = LanczosEngineSizes()


class LanczosEngine(Engine):
    """One Lanczos run for each block.

    `rank` bounds that of a semidefinite curvature; it is None if the curvature is indefinite. If
    definiteness is unknown, `ends="norm"`: only the end of larger size must converge.
    """

    def __init__(
        self,
        evaluations: Sequence[Evaluation],
        settings: LanczosSettings,
        reason: str,
        rank: int | None,
        ends: lanczos.Which = "both",
        factors: Sequence[LossFactor] = (),
    ) -> None:
        self._evaluations = evaluations
        self.settings = settings
        self.reason = reason
        self.rank = rank
        self.ends = ends
        self._factors = factors

    def operator(self, names: Sequence[str]) -> operators.WeightOperator:
        return operators.GaussNewtonOperator(self._evaluations, names)

    @cached_property
    def _recorder(self) -> operators.KernelRecorder | None:
        """For kernels so small that starting them takes longer than running them."""
        if self._evaluations[0].problem.device.type != "cuda":
            return None
        numbers = max(evaluation.numbers_per_node for evaluation in self._evaluations)
        return operators.KernelRecorder(self._evaluations) if numbers < SIZES.recorded else None

    @contextlib.contextmanager
    def _stream(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._recorder is not None:
                stack.enter_context(self._recorder.stream())
            yield

    def _block(self, names: Sequence[str]) -> Operator:
        operator = self.operator(names)
        recorder = self._recorder
        block = operator if recorder is None else operators.RecordedOperator(operator, recorder)
        return self.settings.watched(block, names)

    def extremes(self, names: Sequence[str]) -> Extremes:
        with self._stream():
            return self._search(self.rank, [self._block(names)], [self._start(names)])[0]

    def _start(self, names: Sequence[str]) -> lanczos.Start | None:
        """`Jᵀ S w` of random numbers w, where `S Sᵀ` is the loss's Hessian by the output."""
        vectors, squares = self._starts
        square = sum(squares.get(name, 0.0) for name in names)
        if not 0 < square < math.inf:
            return None
        return lanczos.Start(operators.join([vectors[name] for name in names]), square)

    @cached_property
    def _starts(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Each leaf's start vector and the square of its length; empty where `S` is unknown."""
        names = list(self._evaluations[0].leaves)
        sums = dict[str, Tensor]()
        for number, evaluation in enumerate(self._evaluations):
            output = evaluation.output
            root = self._factors[number] if self._factors else evaluation.softmax
            if root is None:
                return {}, {}
            seed = self.settings.seed + number
            stream = ProbeStream(
                output.numel(), seed=seed, dtype=output.dtype, device=output.device
            )
            pulled = evaluation.pull(names, root.sample(stream.draw().view_as(output)))
            for name, gradient in zip(names, pulled, strict=True):
                part = gradient * math.sqrt(evaluation.weight)
                sums[name] = sums[name] + part if name in sums else part
        squares = torch.stack(
            [torch.linalg.vector_norm(start).double().square() for start in sums.values()]
        )
        return sums, dict(zip(names, squares.tolist(), strict=True))

    def extremes_of_each(self, names: Sequence[str]) -> dict[str, Extremes]:
        """In groups, whose Lanczos vectors take less memory than those of the largest layer."""
        sizes = {name: self._evaluations[0].leaves[name].numel() for name in names}
        extremes: dict[str, Extremes] = {}
        with self._stream():
            for group in _groups(names, sizes):
                blocks = [self._block([name]) for name in group]
                starts = [self._start([name]) for name in group]
                extremes |= zip(group, self._search(self.rank, blocks, starts), strict=True)
                self.settings.report_done(*group)
        return extremes


def _groups(names: Sequence[str], sizes: Mapping[str, int]) -> list[list[str]]:
    groups = list[list[str]]()
    room = 0
    for name in names:
        if sizes[name] > room:
            groups.append([])
            room = max(max(sizes.values()) // 4, SIZES.searched_together)
        groups[-1].append(name)
        room -= sizes[name]
    return groups
