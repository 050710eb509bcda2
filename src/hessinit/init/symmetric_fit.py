"""Fit the curvature along symmetries: blocks of weights get as sharp as a rate allows; the function stays.

A symmetry that multiplies a block of weights by f divides its curvature by f², and by f in the norm
that Adam sees. So the norms at the drawn weights tell every factor, and a second look confirms
them.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hessinit.curvature import engines, operators
from hessinit.curvature.evaluation import evaluate
from hessinit.curvature.preconditioner import (
    AdamRule,
    ScaledCurvature,
    gradient_moments,
    spectral_norm,
)
from hessinit.init.scales import ProblemFactory, finite_or_inf, network_estimator
from hessinit.init.symmetries import Exponents, Symmetries, find_symmetries, output_change
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.validate import layer_name
from hessinit.results.initialization import Symmetry

UNMOVED = 1e-2  # the largest relative change of the output (rms) up to which it counts as unmoved
_LARGEST_LOG = math.log(1e3)
_ATTEMPTS = 7
_MOST_LOOKS = 3


@dataclass(frozen=True, eq=False)
class Block:
    """Weights whose joint curvature one factor sets, and the exponents that keep the function as it is.

    It is kept only nearly, not `exact`, where GELU or its like stands between.
    """

    weights: tuple[str, ...]
    exponents: Exponents
    exact: bool = True

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
    modules = {name.rpartition(".")[0] for name in allowed}

    def is_fixed(name: str) -> bool:
        module, _, own = name.rpartition(".")
        if parameters[name].ndim > 1 or not parameters[name].requires_grad:
            return name not in allowed
        # With `layers`, nothing else is written but the biases beside them.
        return factory.options["layers"] is not None and not (module in modules and "bias" in own)

    fixed = [*filter(is_fixed, parameters)]
    with problem.settings():
        exact = find_symmetries(problem, fixed)
        if exact.scale_free(weights):  # a weight that the output does not see is not meant
            fixed += _unused(problem)
            exact = find_symmetries(problem, fixed)
        if (free := _confirm_free(problem, exact, weights)) is None:
            return None
        nearly = find_symmetries(problem, fixed, nearly=True)
        scalable = [free]
        rest = [name for name in weights if name not in free.weights]
        for symmetries in (exact, nearly):
            for exponents in symmetries.against_gains(weights, free.weights):
                block = _confirmed(problem, exponents, rest, or_nearly=symmetries is nearly)
                if block is not None:
                    scalable.append(block)
                    rest = [name for name in rest if name not in block.weights]
        return Blocks(tuple(scalable), tuple(rest))


def _unused(problem: FunctionalProblem) -> list[str]:
    with torch.enable_grad():
        total = problem.output(problem.batches[0]).sum()
    leaves = [*problem.leaves.values()]
    found: tuple[Tensor | None, ...] = torch.autograd.grad(total, leaves, allow_unused=True)
    return [name for name, gradient in zip(problem.leaves, found, strict=True) if gradient is None]


def _confirm_free(
    problem: FunctionalProblem, symmetries: Symmetries, weights: Sequence[str]
) -> Block | None:
    """All scale-free weights; without those that fail alone, as at a large eps, where all together do."""
    whole = _confirmed(problem, symmetries.scale_free(weights), weights)
    if whole is not None or not symmetries.divides:
        return whole
    groups = symmetries.groups(weights, symmetries.gains)
    alone = (
        _confirmed(problem, symmetries.scale_free(weights, group), weights) for group in groups
    )
    firm = [name for block in alone if block is not None for name in block.weights]
    return _confirmed(problem, symmetries.scale_free(weights, firm), weights)


def _confirmed(
    problem: FunctionalProblem,
    exponents: Exponents | None,
    weights: Sequence[str],
    or_nearly: bool = False,
) -> Block | None:
    """A block whose symmetry leaves the output where it is, at half and at twice the weights."""
    chosen = tuple(name for name in weights if exponents and exponents.get(name, 0.0) > 0)
    if not exponents or not chosen:
        return None
    half, twice = (
        {name: sign * math.log(2) * one for name, one in exponents.items()} for sign in (-1, 1)
    )
    exact = output_change(problem, half, twice) <= UNMOVED
    return Block(chosen, exponents, exact) if exact or or_nearly else None


class SymmetricFit(NamedTuple):
    """What was scaled; `reason` says why the target was missed, or is empty.

    `output_change` is that of the function, relative: rounding and the eps of normalizations.
    """

    target: float
    symmetries: tuple[Symmetry, ...]
    output_change: float
    reason: str


class SymmetryScaler:
    """Multiplies the present weights by the factors of symmetries, and measures the blocks there."""

    def __init__(
        self, factory: ProblemFactory, blocks: Blocks, adam: AdamRule | None, tolerance: float
    ) -> None:
        self._factory = factory
        self._blocks = blocks
        self._adam = adam
        self._tolerance = tolerance
        self._law = 2.0 if adam is None else 1.0
        moved = {name for block in blocks.scalable for name in block.exponents}
        self._parameters = {
            name: one for name, one in factory.model.named_parameters() if name in moved
        }

    def fit_(self, target: float | None) -> SymmetricFit:
        """Bring the scale-free block to the `target`, and the others to at most that.

        A `target` of None takes the sharpest weights as they are, for lr="auto". Costs two norms of
        the scale-free weights, one of all others, and where that is too large two of each.
        """
        free = self._blocks.free
        found, rest = self._measure(target)
        target = max(rest, *found.values()) if target is None else target
        before = dict(found)
        logs = dict.fromkeys(found, 0.0)
        for _ in range(_MOST_LOOKS):  # what changes the function comes first
            changes = {
                one: self._log(one, norm / target) for one, norm in found.items() if not one.exact
            }
            changes = {
                block: log for block, log in changes.items() if log > math.log1p(self._tolerance)
            }
            if not changes:
                break
            self._multiply_(self._logs_of_parameters(changes))
            found, rest = self._measure(target, every_block=True)
            logs |= {block: logs.get(block, 0.0) + log for block, log in changes.items()}
        changes = {
            block: self._log(block, norm / target) for block, norm in found.items() if block.exact
        }
        change = 0.0
        bounded = False
        for _ in range(_MOST_LOOKS):
            before_scaling = found[free]
            changes, moved, bounded = self._scale_unmoved_(changes)
            change += moved
            logs |= {block: logs.get(block, 0.0) + log for block, log in changes.items()}
            with self._curvature() as norm_of:
                found |= {block: norm_of(block.weights) for block, log in changes.items() if log}
            if bounded or abs(found[free] / target - 1) <= self._tolerance:
                break
            # Adam's eps, where gradients are tiny, bends the law: go on with the slope that was
            # found.
            if changes[free] and 0 < found[free] < math.inf:
                slope = math.log(before_scaling / found[free]) / (changes[free] * free.power)
                self._law = min(max(slope, self._law / 2), 2 * self._law)
            changes = {free: self._log(free, found[free] / target)}
        symmetries = tuple(
            Symmetry(
                weights=block.weights,
                scale_free=block is free,
                exact=block.exact,
                factors={
                    name: math.exp(log)
                    for name, log in self._logs_of_parameters({block: log}).items()
                },
                norm_before=before[block],
                norm=found[block],
            )
            for block, log in logs.items()
            if log or block is free
        )
        return SymmetricFit(
            target, symmetries, change, self._why_missed(found, target, rest, bounded)
        )

    def _measure(
        self, target: float | None, every_block: bool = False
    ) -> tuple[dict[Block, float], float]:
        """The norm of the scale-free weights; where others exceed the target, of each block and the rest."""
        free, *others = self._blocks.scalable
        with self._curvature() as norm_of:
            found = {free: norm_of(free.weights)}
            rest = 0.0
            # No block of a semidefinite matrix is sharper than the matrix.
            names = [*(name for block in others for name in block.weights), *self._blocks.rest]
            if every_block or target is None or norm_of(names) > target:
                found |= {block: norm_of(block.weights) for block in others}
                rest = norm_of(self._blocks.rest)
        return found, rest

    def _log(self, block: Block, excess: float) -> float:
        """The logarithm of the factor that takes this excess away; only scale-free weights get sharper."""
        if not 0 < excess < math.inf:
            return 0.0
        log = math.log(excess) / (self._law * block.power)
        return min(max(log, -_LARGEST_LOG if block is self._blocks.free else 0.0), _LARGEST_LOG)

    def _scale_unmoved_(self, logs: dict[Block, float]) -> tuple[dict[Block, float], float, bool]:
        """Scale as far as the output stays; returns the logs, its change, and whether that was not all."""
        start = self._factory.problem()
        tried = 1.0
        low = 0.0
        high = 1.0
        best = dict.fromkeys(logs, 0.0)
        least = 0.0
        with start.settings():
            for _ in range(_ATTEMPTS):
                part = {block: tried * log for block, log in logs.items()}
                change = output_change(start, self._logs_of_parameters(part))
                if change <= UNMOVED:
                    best = part
                    least = change
                    low = tried
                else:
                    high = tried
                if low == 1.0:
                    break
                tried = (low + high) / 2
        self._multiply_(self._logs_of_parameters(best))
        return best, least, low < 1.0

    @staticmethod
    def _logs_of_parameters(logs: Mapping[Block, float]) -> dict[str, float]:
        each: dict[str, float] = {}
        for block, log in logs.items():
            for name, power in block.exponents.items():
                each[name] = each.get(name, 0.0) + log * power
        return each

    @torch.no_grad()
    def _multiply_(self, logs: Mapping[str, float]) -> None:
        for name, log in logs.items():
            self._parameters[name].mul_(math.exp(log))

    def _why_missed(
        self, found: Mapping[Block, float], target: float, rest: float, bounded: bool
    ) -> str:
        free = found[self._blocks.free]
        limit = target * (1 + self._tolerance)
        if not abs(free / target - 1) <= self._tolerance:
            why = (
                "a normalization's eps bounds the scale"
                if bounded
                else "it does not answer to the scale"
            )
            return f"the scale-free weights have ‖H‖ = {free:.3g}, not {target:.3g}: {why}"
        sharp = {block.weights: norm for block, norm in found.items() if norm > limit}
        if rest > limit:
            sharp[self._blocks.rest] = rest
        told = [
            f"{', '.join(map(layer_name, names[:2]))} has ‖H‖ = {norm:.3g}"
            for names, norm in sharp.items()
        ]
        return f"{'; '.join(told)}, above {target:.3g}, and no symmetry lowers it" if told else ""

    @contextlib.contextmanager
    def _curvature(self) -> Iterator[Callable[[Sequence[str]], float]]:
        """The norm that the optimizer sees of some weights together: ‖H‖, or ‖P^-½ H P^-½‖ for Adam.

        Several fits of one call draw the same weights: what was measured there is not measured
        again.
        """
        known = self._factory.norms
        digest = self._factory.digest()
        with contextlib.ExitStack() as stack:
            measuring = functools.cache(lambda: self._measuring(stack))

            def norm(weights: Sequence[str]) -> float:
                key = (digest, self._adam, *weights)
                if weights and key not in known:
                    known[key] = measuring()(weights)
                return known[key] if weights else 0.0

            yield norm

    def _measuring(self, stack: contextlib.ExitStack) -> Callable[[Sequence[str]], float]:
        problem = self._factory.problem(measured=True)
        curvature = self._factory.curvature
        settings = engines.LanczosSettings(self._tolerance / 5, 200, problem.seed)
        scales: dict[str, Tensor] = {}
        stack.enter_context(problem.settings())
        evaluations = evaluate(problem)
        engine = engines.build_engine(
            evaluations, curvature, settings, network_estimator(evaluations)
        )
        if self._adam is not None:
            _, square, _ = gradient_moments(evaluations)
            scale = torch.where(square > 0, square.sqrt() + self._adam.eps, torch.inf)
            pieces = operators.split(scale, [leaf.shape for leaf in problem.leaves.values()])
            scales = dict(zip(problem.leaves, pieces, strict=True))

        def norm(weights: Sequence[str]) -> float:
            if not scales:
                return finite_or_inf(engine.extremes(weights).norm.value)
            scale = operators.join([scales[name] for name in weights])
            operator = ScaledCurvature(engine.operator(weights), scale)
            semidefinite = curvature == "gauss-newton"
            return finite_or_inf(spectral_norm(operator, settings, semidefinite=semidefinite).value)

        return norm
