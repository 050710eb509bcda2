"""Fit the curvature along symmetries: blocks of weights get as sharp as a rate allows; the function stays.

A symmetry that multiplies a block of weights by f divides its curvature by f², and by f in the norm that Adam
sees. So the norms at the drawn weights tell every factor, and a second look confirms them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hessinit.curvature import engines, operators
from hessinit.curvature.evaluation import Evaluation, evaluate
from hessinit.curvature.preconditioner import AdamRule, ScaledCurvature, gradient_moments, spectral_norm
from hessinit.init.scales import ProblemFactory, network_estimator
from hessinit.init.symmetries import Exponents, find_symmetries, output_change
from hessinit.problem.problem import Problem
from hessinit.problem.validate import layer_name
from hessinit.results.initialization import Symmetry

# The largest relative change of the output (rms) up to which it counts as unmoved.
UNMOVED = 1e-2
_LARGEST_LOG = math.log(1e3)
_HALVINGS = 8
_MOST_LOOKS = 3


@dataclass(frozen=True, eq=False)
class Block:
    """Weights whose joint curvature one factor sets, and the exponents that keep the function as it is."""

    weights: tuple[str, ...]
    exponents: Exponents

    @property
    def power(self) -> float:
        """The exponent of the weights: their curvature falls with twice this power of the factor."""
        return min(self.exponents[name] for name in self.weights)


@dataclass(frozen=True)
class Blocks:
    """First the scale-free weights, then those that gains of normalizations set; and the rest."""

    scalable: tuple[Block, ...]
    rest: tuple[str, ...]

    @property
    def free(self) -> Block:
        return self.scalable[0]


def find_blocks(factory: ProblemFactory, allowed: Sequence[str]) -> Blocks | None:
    """The blocks among the `allowed` weights; None where no weight is scale-free.

    Every symmetry that is used was confirmed by forwards: the output moves by less than 1 %.
    """
    problem = factory.problem()
    parameters = dict(problem.model.named_parameters())
    weights = [name for name in problem.leaves if parameters[name].ndim > 1]
    frozen = [name for name, one in parameters.items() if not one.requires_grad]
    fixed = [*frozen, *(name for name in weights if name not in allowed)]
    with problem.settings():
        symmetries = find_symmetries(problem, fixed)
        free = _confirmed(problem, symmetries.scale_free(weights), weights)
        if free is None:
            return None
        scalable, rest = [free], [name for name in weights if name not in free.weights]
        for exponents in symmetries.against_gains(weights, free.weights):
            block = _confirmed(problem, exponents, rest)
            if block is not None:
                scalable.append(block)
                rest = [name for name in rest if name not in block.weights]
        return Blocks(tuple(scalable), tuple(rest))


def _confirmed(problem: Problem, exponents: Exponents | None, weights: Sequence[str]) -> Block | None:
    block = tuple(name for name in weights if exponents and exponents.get(name, 0.0) > 0)
    if exponents is None or not block:
        return None
    half, twice = ({name: sign * math.log(2) * one for name, one in exponents.items()} for sign in (-1, 1))
    return Block(block, exponents) if output_change(problem, half, twice) <= UNMOVED else None


class BlockCurvature:
    """The norms that an optimizer sees of blocks of weights: ‖H‖, or ‖P^-½ H P^-½‖ for Adam."""

    def __init__(
        self, evaluations: Sequence[Evaluation], curvature: str, tolerance: float, adam: AdamRule | None
    ) -> None:
        problem = evaluations[0].problem
        self._settings = engines.LanczosSettings(tolerance, 200, problem.seed)
        estimator = network_estimator(evaluations)
        self._engine = engines.build_engine(evaluations, curvature, self._settings, estimator)
        self._semidefinite = curvature == "gauss-newton"
        self._scales: dict[str, Tensor] = {}
        if adam is not None:
            _, square, _ = gradient_moments(evaluations)
            scale = torch.where(square > 0, square.sqrt() + adam.eps, torch.inf)
            pieces = operators.split(scale, [leaf.shape for leaf in problem.leaves.values()])
            self._scales = dict(zip(problem.leaves, pieces, strict=True))

    def norm(self, weights: Sequence[str]) -> float:
        """That of these weights together; 0 for none."""
        if not weights:
            return 0.0
        if not self._scales:
            found = self._engine.extremes(weights).norm.value
        else:
            scale = operators.join([self._scales[name] for name in weights])
            operator = ScaledCurvature(self._engine.operator(weights), scale)
            found = spectral_norm(operator, self._settings, semidefinite=self._semidefinite).value
        return found if math.isfinite(found) else math.inf


@dataclass(frozen=True)
class SymmetricFit:
    """What was scaled; `reason` says why the target was missed, or is empty.

    `output_change` is that of the function, relative: rounding and the eps of normalizations.
    """

    target: float
    symmetries: tuple[Symmetry, ...]
    output_change: float
    reason: str


class SymmetryScaler:
    """Writes the present weights times the factors of symmetries, and measures the blocks there."""

    def __init__(
        self, factory: ProblemFactory, blocks: Blocks, adam: AdamRule | None, tolerance: float
    ) -> None:
        self._factory, self._blocks, self._adam, self._tolerance = factory, blocks, adam, tolerance
        self._law = 2.0 if adam is None else 1.0
        moved = {name for block in blocks.scalable for name in block.exponents}
        self._parameters = {name: one for name, one in factory.model.named_parameters() if name in moved}
        self._base = {name: one.detach().clone() for name, one in self._parameters.items()}
        self._start = factory.problem()

    def fit_(self, target: float | None) -> SymmetricFit:
        """Bring the scale-free block to the `target`, and the others to at most that.

        A `target` of None takes the scale-free weights as they are, for lr="auto". Costs two norms of the
        scale-free weights, one of all others, and where that is too large two of each.
        """
        free = self._blocks.free
        with self._curvature() as norm_of:
            found = {free: norm_of(free.weights)}
            target = found[free] if target is None else target
            others = [name for block in self._blocks.scalable[1:] for name in block.weights]
            rest = 0.0
            # No block of a semidefinite matrix is sharper than the matrix.
            if norm_of([*others, *self._blocks.rest]) > target:
                found |= {block: norm_of(block.weights) for block in self._blocks.scalable[1:]}
                rest = norm_of(self._blocks.rest)
        before, logs = dict(found), {block: self._log(block, found[block] / target) for block in found}
        change, bounded = self._write_unmoved_(logs)
        for look in range(_MOST_LOOKS):
            moved = [block for block, log in logs.items() if log]
            with self._curvature() if moved else contextlib.nullcontext(lambda _: 0.0) as norm_of:
                found |= {block: norm_of(block.weights) for block in moved}
            if bounded or look == _MOST_LOOKS - 1 or abs(found[free] / target - 1) <= self._tolerance:
                break
            logs[free] += self._log(free, found[free] / target)
            change, bounded = self._write_unmoved_(logs)
        symmetries = tuple(
            Symmetry(
                weights=block.weights, scale_free=block is free, norm_before=before[block], norm=found[block],
                factors={name: math.exp(log * power) for name, power in block.exponents.items()},
            )
            for block, log in logs.items()
        )  # fmt: skip
        reason = self._why_missed(found, target, rest, bounded)
        return SymmetricFit(target, symmetries, change, reason)

    def _log(self, block: Block, excess: float) -> float:
        """The logarithm of the factor that takes this excess away; only scale-free weights get sharper."""
        if not 0 < excess < math.inf:
            return 0.0
        log = math.log(excess) / (self._law * block.power)
        return min(max(log, -_LARGEST_LOG if block is self._blocks.free else 0.0), _LARGEST_LOG)

    def _write_unmoved_(self, logs: dict[Block, float]) -> tuple[float, bool]:
        """Write the factors, nearer to 1 where the output would move; returns its change and whether so."""
        for halving in range(_HALVINGS):
            each = dict.fromkeys(self._base, 0.0)
            for block, log in logs.items():
                for name, power in block.exponents.items():
                    each[name] += log * power
            with self._start.settings():
                change = output_change(self._start, each)
            if change <= UNMOVED:
                with torch.no_grad():
                    for name, value in self._base.items():
                        self._parameters[name].copy_(value * math.exp(each[name]))
                return change, halving > 0
            for block in logs:
                logs[block] /= 1.5
        logs.update(dict.fromkeys(logs, 0.0))
        return 0.0, True

    def _why_missed(self, found: Mapping[Block, float], target: float, rest: float, bounded: bool) -> str:
        free, limit = found[self._blocks.free], target * (1 + self._tolerance)
        if not abs(free / target - 1) <= self._tolerance:
            why = (
                "the eps of a normalization bounds the scale"
                if bounded
                else "it does not answer to the scale"
            )
            return f"the scale-free weights have ‖H‖ = {free:.3g}, not {target:.3g}: {why}"
        sharp = {block.weights: norm for block, norm in found.items() if norm > limit}
        if rest > limit:
            sharp[self._blocks.rest] = rest
        told = [
            f"{', '.join(map(layer_name, names[:2]))} has ‖H‖ = {norm:.3g}" for names, norm in sharp.items()
        ]
        return f"{'; '.join(told)}, above {target:.3g}, and no symmetry lowers it" if told else ""

    @contextlib.contextmanager
    def _curvature(self) -> Iterator[Callable[[Sequence[str]], float]]:
        problem = self._factory.problem(measured=True)
        with problem.settings():
            accuracy, curvature = self._tolerance / 5, self._factory.curvature
            yield BlockCurvature(evaluate(problem), curvature, accuracy, self._adam).norm
