"""Largest and smallest eigenvalue, and the engines that compute them: Gram, Lanczos, exact Hessian."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hessinit.curvature import (
    derivative_check,
    lanczos,
    layer_uses,
    operators,
    rounding_error,
    stochastic,
)
from hessinit.curvature.evaluation import (
    Evaluation,
    LossFactor,
    check_curved,
    factor_loss_hessian,
    unused_leaves,
)
from hessinit.curvature.gram import LayerGram, SumOfGrams, WrittenGram, known_calls, trace_grams
from hessinit.curvature.krylov import STOPPING, Operator
from hessinit.curvature.probes import ProbeStream, random_like
from hessinit.curvature.progress import NETWORK, Progress, Watched
from hessinit.errors import ProblemError
from hessinit.results.curvature_report import Estimate


@dataclass(frozen=True)
class Extremes:
    """The largest and the smallest eigenvalue, and the engine that computed them."""

    top: Estimate
    bottom: Estimate
    engine: str
    reason: str
    vector: Tensor | None = field(
        default=None, compare=False
    )  # of any length: that of the norm, if known

    @property
    def norm(self) -> Estimate:
        larger = self.top if abs(self.top.value) >= abs(self.bottom.value) else self.bottom
        return replace(larger, value=abs(larger.value))


@dataclass(frozen=True)
class LanczosSettings:
    tolerance: float
    max_iterations: int
    seed: int
    progress: Progress | None = field(default=None, compare=False)

    def watched(self, operator: Operator, names: Sequence[str]) -> Operator:
        """The block of these leaves, its products counted where somebody wants to know."""
        name = names[0] if len(names) == 1 else NETWORK
        return operator if self.progress is None else Watched(operator, self.progress, name)

    def done(self, *names: str) -> None:
        for name in names:
            if self.progress is not None:
                self.progress.layer_done(name)

    def goal(self, which: lanczos.Which, *, is_semidefinite: bool = False) -> lanczos.Goal:
        return lanczos.Goal(
            which=which,
            tolerance=self.tolerance,
            max_iterations=self.max_iterations,
            is_semidefinite=is_semidefinite,
        )

    @property
    def options(self) -> dict[str, Any]:
        return {
            "tolerance": self.tolerance,
            "max_iterations": self.max_iterations,
            "seed": self.seed,
        }


class Engine(ABC):
    """Computes the extreme eigenvalues of curvature blocks: of one layer, or of several together."""

    name = "lanczos"
    reason: str
    ends: lanczos.Which = (
        "both"  # of the spectrum, that must converge in a block that may be indefinite
    )
    _settings: LanczosSettings

    def extremes_of_each(self, names: Sequence[str]) -> dict[str, Extremes]:
        return {name: self._measured(name) for name in names}

    def _measured(self, name: str) -> Extremes:
        found = self.extremes([name])
        self._settings.done(name)
        return found

    @abstractmethod
    def extremes(self, names: Sequence[str]) -> Extremes:
        """The extremes of the block of these leaves together."""

    @abstractmethod
    def operator(self, names: Sequence[str]) -> operators.LinearOperator:
        """The block itself, acting on flat weights."""

    def is_cheap(self, names: Sequence[str]) -> bool:
        """Whether all these leaves are measured without further products."""
        return False

    def _search(
        self, rank: int | None, *blocks: Operator, starts: Sequence[lanczos.Start | None] = (None,)
    ) -> list[Extremes]:
        """Lanczos; a semidefinite block without full rank has the smallest eigenvalue 0."""
        searches = []
        for operator, start in zip(blocks, starts, strict=True):
            size = int(operator.shape[0])
            which: lanczos.Which = "top" if rank is not None and rank < size else self.ends
            goal = self._settings.goal(which, is_semidefinite=rank is not None)
            # For both ends it has no part in the null space, and would not see an eigenvalue 0.
            usable = start if size > STOPPING.small_size and which != "both" else None
            searches.append(lanczos.LanczosSearch.of(operator, goal, self._settings.seed, usable))
        found = []
        for operator, result in zip(blocks, lanczos.run_together(searches), strict=True):
            bottom = result.bottom or zero_bottom(rank or 0, int(operator.shape[0]))
            # One run finds both: its products are counted once.
            found.append(Extremes(result.top, replace(bottom, products=0), self.name, self.reason))
        return found if len(found) > 1 else [replace(found[0], vector=searches[0].vector())]


def with_rounding(
    extremes: Extremes, rounding: rounding_error.RoundingError, tolerance: float
) -> Extremes:
    """Add the rounding error of the operator; beyond `tolerance`, the estimates have not converged."""
    norm = extremes.norm.value
    fraction = rounding_error.CAUTION * rounding.relative
    if not fraction or not math.isfinite(norm):
        return extremes
    if rounding.is_all:
        error = (1 + fraction) * norm + extremes.norm.error
        zero = Estimate(
            0.0, error, True, "zero, up to the rounding of float32", extremes.top.products
        )
        return replace(extremes, top=zero, bottom=replace(zero, products=0))

    def widen(estimate: Estimate) -> Estimate:
        wider = replace(estimate, error=math.hypot(estimate.error, fraction * norm))
        if rounding.relative <= tolerance or not estimate.converged:
            return wider
        left = f"rounding in {rounding.unit} leaves an error of {fraction:.0e} of the norm"
        fuller = "precision='full' or a larger tolerance"
        way = "dtype=torch.float64" if rounding.unit == "float32" else fuller
        return replace(wider, converged=False, reason=f"{left}; pass {way}")

    return replace(extremes, top=widen(extremes.top), bottom=widen(extremes.bottom))


UNUSED = Estimate(0.0, 0.0, True, "the forward does not use this weight", 0)


def scaled(estimate: Estimate, factor: float) -> Estimate:
    return replace(estimate, value=estimate.value * factor, error=estimate.error * factor)


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
    found: dict[str, Any] = {}
    if top:
        count = min(top, operator.shape[0])
        found["eigenvalues"] = lanczos.top_eigenpairs(operator, count, **settings.options).values
    if trace:
        found["trace"] = stochastic.hutch_plus_plus(operator, seed=settings.seed)
    if frobenius:
        found["frobenius"] = stochastic.frobenius_norm(operator, seed=settings.seed)
    if density:
        found["density"] = stochastic.spectral_density(operator, seed=settings.seed)
    return found


class LanczosEngine(Engine):
    """One Lanczos run per block; `rank` bounds that of a semidefinite curvature, None if it is indefinite.

    Where nobody looked whether it is, `ends` is "norm": its other end is left with the error that
    it has.
    """

    def __init__(
        self,
        evaluations: Sequence[Evaluation],
        settings: LanczosSettings,
        reason: str,
        rank: int | None,
        ends: lanczos.Which = "both",
        roots: Sequence[LossFactor] = (),
    ) -> None:
        self._evaluations = evaluations
        self._settings = settings
        self.reason = reason
        self._rank = rank
        self.ends = ends
        self._roots = roots
        for evaluation, root in zip(evaluations, roots, strict=False):
            evaluation.factor = root

    def operator(self, names: Sequence[str]) -> operators.WeightOperator:
        return operators.GaussNewtonOperator(self._evaluations, names)

    @cached_property
    def _recorder(self) -> operators.Recorder | None:
        """Where the kernels of a product are so small that starting them takes longer than running them."""
        cuda = self._evaluations[0].problem.device.type == "cuda"
        small = cuda and max(one.numbers_per_node for one in self._evaluations) < _FEW_NUMBERS
        return operators.Recorder(self._evaluations) if small else None

    def _stream(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._recorder is None else self._recorder.stream()

    def _block(self, names: Sequence[str]) -> Operator:
        operator = self.operator(names)
        recorder = self._recorder
        block = operator if recorder is None else operators.RecordedOperator(operator, recorder)
        return self._settings.watched(block, names)

    def extremes(self, names: Sequence[str]) -> Extremes:
        with self._stream():
            return self._search(self._rank, self._block(names), starts=[self._start(names)])[0]

    def _start(self, names: Sequence[str]) -> lanczos.Start | None:
        """`Jᵀ S w` of random numbers w, where `S Sᵀ` is the loss's Hessian by the output."""
        vectors, squares = self._starts
        square = sum(squares.get(name, 0.0) for name in names)
        if not 0 < square < math.inf:
            return None
        return lanczos.Start(operators.join([vectors[name] for name in names]), square)

    @cached_property
    def _starts(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        names = list(self._evaluations[0].leaves)
        sums = dict[str, Tensor]()
        for number, evaluation in enumerate(self._evaluations):
            output = evaluation.output
            root = self._roots[number] if self._roots else evaluation.softmax
            if root is None:
                return {}, {}
            seed = self._settings.seed + number
            stream = ProbeStream(
                output.numel(), seed=seed, dtype=output.dtype, device=output.device
            )
            pulled = evaluation.pull(names, root.sample(stream.draw().view_as(output)))
            for name, one in zip(names, pulled, strict=True):
                part = one * math.sqrt(evaluation.weight)
                sums[name] = sums[name] + part if name in sums else part
        squares = torch.stack(
            [torch.linalg.vector_norm(one).double().square() for one in sums.values()]
        )
        return sums, dict(zip(names, squares.tolist(), strict=True))

    def extremes_of_each(self, names: Sequence[str]) -> dict[str, Extremes]:
        """In groups, whose Lanczos vectors take less memory than those of the largest layer."""
        sizes = {name: self._evaluations[0].leaves[name].numel() for name in names}
        found: dict[str, Extremes] = {}
        with self._stream():
            for group in _groups(names, sizes):
                blocks = [self._block([name]) for name in group]
                starts = [self._start([name]) for name in group]
                found |= zip(group, self._search(self._rank, *blocks, starts=starts), strict=True)
                self._settings.done(*group)
        return found


_LEAST_TOGETHER = 2**20
# On average for an operation of the forward.
_FEW_NUMBERS = 2**23


def _groups(names: Sequence[str], sizes: Mapping[str, int]) -> list[list[str]]:
    groups = list[list[str]]()
    room = 0
    for name in names:
        if sizes[name] > room:
            groups.append([])
            room = max(max(sizes.values()) // 4, _LEAST_TOGETHER)
        groups[-1].append(name)
        room -= sizes[name]
    return groups


def zero_bottom(rank: int, size: int) -> Estimate:
    """The smallest eigenvalue of a positive semidefinite matrix that is larger than its rank."""
    return Estimate(
        0.0, 0.0, True, f"positive semidefinite, with rank at most {rank} for {size} weights", 0
    )


@dataclass(frozen=True)
class OutputHessian:
    """`H_a`: the Hessian of the loss by the output of a call, from the gradient that arrives at its edge."""

    call: layer_uses.Call
    edge: GradientEdge
    gradient: Tensor
    weight: float

    def product(self, tangent: Tensor) -> Tensor:
        found = None
        along = tangent.view_as(self.gradient)
        if self.gradient.requires_grad:
            (found,) = torch.autograd.grad(
                self.gradient, [self.edge], along, retain_graph=True, allow_unused=True
            )
        # None where the gradient does not change with the output, as for a loss linear in it.
        return torch.zeros_like(tangent) if found is None else found * self.weight


class CallHessian(operators.LinearOperator):
    """`Aᵀ H_a A` on the flat weight, summed over batches."""

    def __init__(self, uses: Sequence[OutputHessian], leaf: Tensor) -> None:
        self._uses = uses
        self._weight_shape = leaf.shape
        self.shape = (leaf.numel(), leaf.numel())
        self.dtype = leaf.dtype
        self.device = leaf.device

    def _product(self, vector: Tensor) -> Tensor:
        weight = vector.view(self._weight_shape)
        moved = [use.call.pull(use.product(use.call.push(weight))) for use in self._uses]
        return operators.add_up(moved).reshape(-1)


def seen_hessian(use: OutputHessian) -> CallHessian | None:
    """`Lᵀ H_a L`, where `L Lᵀ` are the inner products of the inputs: a smaller matrix; None for zeros."""
    inputs = use.call.inputs.double()
    inner = inputs @ inputs.T
    root, failure = torch.linalg.cholesky_ex(inner)
    if int(failure):  # inputs that depend on each other, as equal examples do
        values, vectors = torch.linalg.eigh(inner)
        kept = values > 1e-14 * values[-1]
        root = vectors[:, kept] * values[kept].sqrt()
    seen = layer_uses.DenseCall(
        root.to(use.call.inputs), use.call.output_shape, stored_transposed=True
    )
    weight = seen.inputs.new_empty(seen.inputs.shape[1], use.call.output_shape[1])
    return CallHessian([replace(use, call=seen)], weight) if weight.numel() else None


class HessianEngine(Engine):
    reason = "exact second derivatives, reverse over reverse"

    def __init__(self, evaluations: Sequence[Evaluation], settings: LanczosSettings) -> None:
        self._evaluations = evaluations
        self._settings = settings
        self._unused = unused_leaves(evaluations)
        self._calls = [_single_calls(evaluation) for evaluation in evaluations]

    def operator(self, names: Sequence[str]) -> operators.LinearOperator:
        return operators.HessianOperator(self._evaluations, names)

    def extremes(self, names: Sequence[str]) -> Extremes:
        if all(name in self._unused for name in names):
            return Extremes(UNUSED, UNUSED, self.name, self.reason)
        through = self._through_output(names[0]) if len(names) == 1 else None
        operator = through or self.operator(names)
        (found,) = self._search(None, self._settings.watched(operator, names))
        weights = sum(self._evaluations[0].problem.leaves[name].numel() for name in names)
        if operator.shape[0] == weights:
            return found
        # The directions that the inputs do not span have the eigenvalue 0.
        top = found.top if found.top.value > 0 else _zero(found.top)
        return replace(
            found, top=top, bottom=found.bottom if found.bottom.value < 0 else _zero(found.bottom)
        )

    def _through_output(self, name: str) -> operators.LinearOperator | None:
        if not all(name in calls for calls in self._calls):
            return None
        uses = [calls[name] for calls in self._calls]
        seen = None
        call = uses[0].call
        if (
            len(uses) == 1
            and isinstance(call, layer_uses.DenseCall)
            and call.rows < call.inputs.shape[1]
        ):
            seen = seen_hessian(uses[0])
        return seen or CallHessian(uses, self._evaluations[0].problem.leaves[name])


def _zero(estimate: Estimate) -> Estimate:
    error = max(0.0, estimate.error - abs(estimate.value))
    reason = estimate.reason if error else "the inputs do not see some directions of the weight"
    return replace(estimate, value=0.0, error=error, reason=reason)


def _single_calls(evaluation: Evaluation) -> dict[str, OutputHessian]:
    """The leaves that are used exactly once, by a call with a known derivative."""
    uses = evaluation.uses
    known = [
        one for one in known_calls(uses, evaluation.problem.leaves, 1) if len(uses[one.name]) == 1
    ]
    if not known:
        return {}
    gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
        evaluation.loss, [one.edge for one in known], create_graph=True, allow_unused=True
    )
    pairs = zip(known, gradients, strict=True)
    found = [(one, gradient) for one, gradient in pairs if gradient is not None]
    return {
        one.name: OutputHessian(one.call, one.edge, grad, evaluation.weight) for one, grad in found
    }


# Beyond, the Cholesky factor of a matrix of that size costs more than the search it saves.
_LARGEST_MATRIX = 2048


class GramCurvature(operators.LinearOperator):
    """`VᵀV` on the weights of one or several layers, summed over batches: the Gauss-Newton block."""

    def __init__(self, per_batch: Sequence[Sequence[LayerGram]]) -> None:
        self.per_batch = per_batch
        first = per_batch[0]
        self.shapes = [gram.weight_shape for gram in first]
        size = sum(int(torch.Size(shape).numel()) for shape in self.shapes)
        self.shape = (size, size)
        self.dtype = first[0].dtype
        self.device = first[0].device

    def _product(self, vector: Tensor) -> Tensor:
        weights = operators.split(vector, self.shapes)
        found = []
        for grams in self.per_batch:
            moved = operators.add_up(
                [gram.push(weight) for gram, weight in zip(grams, weights, strict=True)]
            )
            moved = moved * grams[0].scale
            found.append(operators.join([gram.pull(moved) for gram in grams]))
        return sum(found[1:], found[0])


class GramLinearization(derivative_check.GraphLinearization):
    """The Jacobian as the Gram engine computes it, in the coordinates `Sᵀz` of the output."""

    def __init__(
        self, evaluation: Evaluation, columns: Tensor, grams: Mapping[str, LayerGram]
    ) -> None:
        super().__init__(evaluation)
        self._columns = columns
        self._grams = grams

    def coordinates(self, output: Tensor, examples: Tensor | None = None) -> Tensor:
        columns = (
            self._columns if examples is None else self._columns[:, examples.to(output.device)]
        )
        return (columns.to(output.dtype) * output).reshape(*columns.shape[:2], -1).sum(2).T

    def push(self, direction: Mapping[str, Tensor]) -> Tensor:
        known, others = self._pushed(direction)
        found = [change.view(-1, len(self._columns)) for change in known.values()]
        if others:
            found.append(super().push(others))  # in these coordinates
        return torch.stack(found).sum(0)

    def effects(
        self, direction: Mapping[str, Tensor], cotangent: Tensor | None = None
    ) -> dict[str, float]:
        known, others = self._pushed(direction)
        found = {name: float(change.double().norm()) for name, change in known.items()}
        if others:
            seed = derivative_check.seed_of_check(self.evaluation)
            factors = random_like(self._columns.reshape(*self._columns.shape[:2], -1)[..., 0], seed)
            found |= super().effects(others, torch.einsum("cn,cn...->n...", factors, self._columns))
        return found

    def _pushed(
        self, direction: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Mapping[str, Tensor]]:
        known = {name: gram.push(direction[name]) for name, gram in self._grams.items()}
        return known, {name: part for name, part in direction.items() if name not in known}


class GramEngine(Engine):
    """`grams` holds, per batch, the layers whose uses are known; `general` takes the others."""

    name = "gram"

    def __init__(
        self,
        grams: Sequence[dict[str, LayerGram]],
        unused: set[str],
        general: LanczosEngine,
        reason: str,
    ) -> None:
        self._grams = grams
        self._unused = unused
        self._general = general
        self.reason = reason
        self._settings = general._settings

    def is_cheap(self, names: Sequence[str]) -> bool:
        return self._known(names) is not None

    def _known(self, names: Sequence[str]) -> list[str] | None:
        used = [name for name in names if name not in self._unused]
        return used if all(name in grams for name in used for grams in self._grams) else None

    def operator(self, names: Sequence[str]) -> operators.LinearOperator:
        known = self._known(names)
        if not known or len(known) < len(names):
            return self._general.operator(names)
        return GramCurvature([[grams[name] for name in known] for grams in self._grams])

    def extremes_of_each(self, names: Sequence[str]) -> dict[str, Extremes]:
        # The small Gram problems run in lockstep.
        small = [name for name in names if self._is_small([name])]
        grams = [self._grams[0][name] for name in small]
        options = self._settings.options
        watched = [
            self._settings.watched(gram, [name]) for name, gram in zip(small, grams, strict=True)
        ]
        tops = lanczos.largest_eigenvalues(watched, **options) if grams else []
        self._settings.done(*small)
        solved = zip(small, grams, tops, strict=True)
        found = {name: self._from_gram(top, [gram]) for name, gram, top in solved}
        unknown = [name for name in names if self._known([name]) is None]
        found |= self._general.extremes_of_each(unknown) if unknown else {}
        return {name: found.get(name) or self._measured(name) for name in names}

    def extremes(self, names: Sequence[str]) -> Extremes:
        known = self._known(names)
        if known is None:
            return self._general.extremes(names)
        if not known:
            return Extremes(UNUSED, UNUSED, self.name, self.reason)
        per_batch = [[grams[name] for name in known] for grams in self._grams]
        settings = self._settings
        first, *others = [gram for grams in per_batch for gram in grams]
        if self._is_small(known):
            gram: operators.LinearOperator = SumOfGrams([first, *others]) if others else first
            search = lanczos.LanczosSearch.of(
                settings.watched(gram, names), settings.goal("top"), settings.seed
            )
            found = self._from_gram(lanczos.run_together([search])[0].top, [first, *others])
            vector = search.vector().to(first.device, first.dtype)
            pulled = operators.join([one.pull(vector) for one in (first, *others)])
            return replace(found, vector=pulled if len(known) == len(names) else None)
        if len(known) < len(names):
            # An unused weight makes the block singular, whatever the size of the rest.
            block = settings.watched(GramCurvature(per_batch), names)
            top = lanczos.lanczos(block, which="top", **settings.options).top
            return Extremes(top, UNUSED, self.name, self.reason)
        if isinstance(first, WrittenGram) and not others and first.weights <= _LARGEST_MATRIX:
            matrix = first.factor.T @ first.factor
            top = scaled(lanczos.lanczos(matrix, which="top", **settings.options).top, first.scale)
            bottom = lanczos.smallest_eigenvalue(
                matrix, tolerance=settings.tolerance, seed=settings.seed
            )
            return Extremes(top, scaled(bottom, first.scale), self.name, self.reason)
        rank = sum(grams[0].shape[0] for grams in per_batch)
        return self._search(rank, settings.watched(GramCurvature(per_batch), names))[0]

    def _is_small(self, names: Sequence[str]) -> bool:
        """One batch, with fewer outputs than weights: the Gram matrix is the smaller of the two."""
        grams = [self._grams[0][name] for name in names if name in self._grams[0]]
        few = bool(grams) and grams[0].shape[0] < sum(gram.weights for gram in grams)
        return few and len(self._grams) == 1

    def _from_gram(self, top: Estimate, grams: Sequence[LayerGram]) -> Extremes:
        bottom = zero_bottom(grams[0].shape[0], sum(gram.weights for gram in grams))
        return Extremes(scaled(top, grams[0].scale), bottom, self.name, self.reason)


# Rough costs: a backward pass is less than half a gradient, a block by Lanczos a dozen products of
# 0.4.
_GRADIENTS_PER_COLUMN = 0.4
_GRADIENTS_PER_BLOCK = 5.0
# Lanczos keeps vectors of this length, and the rows of the inner products are squared.
_MOST_ROWS = 16_384


def build_engine(
    evaluations: Sequence[Evaluation],
    curvature: str,
    settings: LanczosSettings,
    estimator: str = "auto",
) -> Engine:
    """The engine of "gauss-newton" or "hessian", after the check of the derivatives.

    Gauss-Newton goes by Gram matrices where examples and outputs allow it and it is cheaper, else
    by Lanczos.
    """
    for evaluation in evaluations:
        derivative_check.check_loss(evaluation)
        if curvature == "hessian":
            derivative_check.check_gradients(evaluation)
    if curvature == "hessian":
        return HessianEngine(evaluations, settings)
    ends: lanczos.Which = "both"
    reason = "estimator='lanczos' was asked for"
    costly = too_many_outputs(evaluations) if estimator == "auto" else None
    if costly:
        reason = costly
        ends = "norm"
    elif estimator != "lanczos":
        found = _gram_engine(evaluations, settings)
        if isinstance(found, GramEngine) or (estimator == "auto" and isinstance(found, Engine)):
            return found
        reason = found if isinstance(found, str) else found.reason
        if estimator == "gram":
            refused = f"estimator='gram' cannot measure this problem: {reason}"
            raise ProblemError(f"{refused}. Use estimator='auto'.")
    for evaluation in evaluations:
        check_curved(evaluation)
        derivative_check.check_outputs(evaluation)
    # A cross-entropy is convex in the output.
    convex = ends == "norm" and all(evaluation.softmax is not None for evaluation in evaluations)
    rank = sum(evaluation.output.numel() for evaluation in evaluations) if convex else None
    return LanczosEngine(evaluations, settings, reason, rank, ends)


def too_many_outputs(evaluations: Sequence[Evaluation]) -> str | None:
    """Why Lanczos is cheaper than a backward pass for every output, or None if it is not."""
    columns = max((one.output[:1].numel() for one in evaluations if one.output.ndim), default=0)
    rows = sum(evaluation.output.numel() for evaluation in evaluations)
    blocks = len(evaluations[0].problem.leaves) + 1
    if rows > _MOST_ROWS:
        return f"{rows} outputs in all are too many for vectors of that length"
    if columns * _GRADIENTS_PER_COLUMN > blocks * _GRADIENTS_PER_BLOCK:
        return f"{columns} outputs per example are too many for one backward pass each"
    return None


def loss_roots(evaluations: Sequence[Evaluation]) -> list[LossFactor] | str:
    """The root of each batch's loss Hessian, which the Gram engine needs; or why there is none."""
    if any(evaluation.output.ndim < 1 for evaluation in evaluations):
        return "the output has no dimension that counts examples"
    factors = [factor_loss_hessian(evaluation) for evaluation in evaluations]
    refusals = [one for one in factors if isinstance(one, str)]
    return refusals[0] if refusals else [one for one in factors if not isinstance(one, str)]


def _gram_engine(evaluations: Sequence[Evaluation], settings: LanczosSettings) -> Engine | str:
    """The Gram engine, or Lanczos where it knows no layer; or why there is none."""
    roots = loss_roots(evaluations)
    if isinstance(roots, str):
        return roots
    grams = [
        trace_grams(evaluation, root) for evaluation, root in zip(evaluations, roots, strict=True)
    ]
    rank = sum(root.columns.shape[0] * root.columns.shape[1] for root in roots)
    unused = unused_leaves(evaluations)
    leaves = [name for name in evaluations[0].problem.leaves if name not in unused]
    others = [name for name in leaves if not all(name in found for found in grams)]
    alone = len(others) == len(leaves)
    reason = gram_reason(roots[0].columns.shape[0], len(others), len(leaves))
    why = reason if alone else f"its {_UNKNOWN_CALLS}"
    general = LanczosEngine(evaluations, settings, why, rank, roots=roots)
    for evaluation, root, gram in zip(evaluations, roots, grams, strict=True):
        known = {name: one for name, one in gram.items() if name not in others}
        linear = None if alone else GramLinearization(evaluation, root.columns, known)
        derivative_check.check_outputs(evaluation, linear)
    return general if alone else GramEngine(grams, unused, general, reason)


_UNKNOWN_CALLS = "calls mix the examples, or are none of dense, convolution, embedding"


def gram_reason(columns: int, others: int, leaves: int) -> str:
    """Why the Gram engine, or why Lanczos where it knows no layer."""
    if others == leaves:
        return f"no layer is known: their {_UNKNOWN_CALLS}"
    few = f"few outputs, {columns} shared backward pass{'' if columns == 1 else 'es'}"
    return f"{few}; {others} of {leaves} layers by Lanczos" if others else few
