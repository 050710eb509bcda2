"""Fit the curvature along symmetries: weights get as sharp as a rate allows; the function stays.

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

from hessinit.curvature import operators
from hessinit.curvature.engine_choice import build_engine
from hessinit.curvature.evaluation import evaluate
from hessinit.curvature.preconditioner import (
    AdamRule,
    ScaledCurvature,
    gradient_moments,
    spectral_norm,
)
from hessinit.init.scales import ProblemFactory, finite_or_inf, lanczos_settings, network_estimator
from hessinit.init.symmetries import SYMMETRY_TOLERANCE, Blocks, SymmetryBlock, output_change
from hessinit.problem.checks import layer_name
from hessinit.results.initialization import Symmetry

NormOf = Callable[[Sequence[str]], float]


@dataclass(frozen=True)
class SymmetrySteps:
    """How far and how often blocks are scaled (benchmarks/initialize_cost.py counts the looks)."""

    largest_log: float = math.log(1e3)
    most_looks: int = 3
    # Bisections of a factor that moves the output, by the eps of a normalization.
    bisections: int = 7


SYMMETRY_STEPS = SymmetrySteps()


class SymmetricFit(NamedTuple):
    """What was scaled; `reason` says why the target was missed, or is empty.

    `output_change` is that of the function, relative: rounding and the eps of normalizations.
    """

    target: float
    symmetries: tuple[Symmetry, ...]
    output_change: float
    reason: str


class SymmetryScaler:
    """Multiplies the present weights by factors of symmetries, and measures the blocks."""

    def __init__(
        self, factory: ProblemFactory, blocks: Blocks, adam: AdamRule | None, tolerance: float
    ) -> None:
        self._factory = factory
        self._blocks = blocks
        self._free = blocks.free
        self._adam = adam
        self._tolerance = tolerance
        self._law = 2.0 if adam is None else 1.0  # the norm falls with this power of the factor
        scaled = {name for block in blocks.scalable for name in block.exponents}
        parameters = factory.model.named_parameters()
        self._parameters = {name: weight for name, weight in parameters if name in scaled}
        self._norms: dict[SymmetryBlock, float] = {}
        self._remaining_norm = 0.0
        self._logs: dict[SymmetryBlock, float] = {}  # of the factors so far

    def fit_blocks_(self, target: float | None) -> SymmetricFit:
        """Bring the scale-free block to the `target`, and the others to at most that.

        A `target` of None takes the sharpest weights as they are, for lr="auto". Costs two norms of
        the scale-free weights, one of all others, and where that is too large two of each.
        """
        self._measure(target)
        if target is None:
            target = max(self._remaining_norm, *self._norms.values())
        before = dict(self._norms)
        self._logs = dict.fromkeys(self._norms, 0.0)
        self._scale_inexact_(target)
        change, bounded = self._scale_exact_(target)
        symmetries = tuple(
            Symmetry(
                weights=block.weights,
                scale_free=block is self._free,
                exact=block.exact,
                factors={
                    name: math.exp(log) for name, log in _logs_of_parameters({block: log}).items()
                },
                norm_before=before[block],
                norm=self._norms[block],
            )
            for block, log in self._logs.items()
            if log or block is self._free
        )
        return SymmetricFit(target, symmetries, change, self._reason_missed(target, bounded))

    def _measure(self, target: float | None, every_block: bool = False) -> None:
        """Measure the scale-free weights; if others exceed the target, every block and the rest."""
        remaining = self._blocks.remaining
        by_gains = self._blocks.scalable[1:]
        with self._curvature() as norm_of:
            self._norms = {self._free: norm_of(self._free.weights)}
            self._remaining_norm = 0.0
            # No block of a semidefinite matrix is sharper than the matrix.
            names = [*(name for block in by_gains for name in block.weights), *remaining]
            if every_block or target is None or norm_of(names) > target:
                self._norms |= {block: norm_of(block.weights) for block in by_gains}
                self._remaining_norm = norm_of(remaining)

    def _scale_inexact_(self, target: float) -> None:
        """Make the blocks flat enough whose symmetry changes the function: these come first."""
        for _ in range(SYMMETRY_STEPS.most_looks):
            logs = {
                block: self._log(block, norm / target)
                for block, norm in self._norms.items()
                if not block.exact
            }
            logs = {block: log for block, log in logs.items() if log > math.log1p(self._tolerance)}
            if not logs:
                break
            self._multiply_(logs)
            self._note(logs)
            self._measure(target, every_block=True)

    def _scale_exact_(self, target: float) -> tuple[float, bool]:
        """Scale the other blocks; return the output's change, and if it bounded the factors."""
        free = self._free
        total_change = 0.0
        bounded = False
        logs = {
            block: self._log(block, norm / target)
            for block, norm in self._norms.items()
            if block.exact
        }
        for _ in range(SYMMETRY_STEPS.most_looks):
            norm_before = self._norms[free]
            logs, change, bounded = self._scale_unmoved_(logs)
            total_change += change
            self._note(logs)
            with self._curvature() as norm_of:
                self._norms |= {block: norm_of(block.weights) for block, log in logs.items() if log}
            norm = self._norms[free]
            if bounded or abs(norm / target - 1) <= self._tolerance:
                break
            # Adam's eps, where gradients are tiny, bends the law: go on with the slope that was
            # measured.
            if logs[free] and 0 < norm < math.inf:
                slope = math.log(norm_before / norm) / (logs[free] * free.power)
                self._law = min(max(slope, self._law / 2), 2 * self._law)
            logs = {free: self._log(free, norm / target)}
        return total_change, bounded

    def _log(self, block: SymmetryBlock, excess: float) -> float:
        """The log factor that takes this excess away; only scale-free weights get sharper."""
        if not 0 < excess < math.inf:
            return 0.0
        log = math.log(excess) / (self._law * block.power)
        largest = SYMMETRY_STEPS.largest_log
        return min(max(log, -largest if block is self._free else 0.0), largest)

    def _scale_unmoved_(
        self, logs: dict[SymmetryBlock, float]
    ) -> tuple[dict[SymmetryBlock, float], float, bool]:
        """Scale as far as the output stays; return the logs, its change, and if it bounded them."""
        start = self._factory.functional()
        fraction = 1.0
        low = 0.0
        high = 1.0
        best = dict.fromkeys(logs, 0.0)
        best_change = 0.0
        with start.settings():
            for _ in range(SYMMETRY_STEPS.bisections):
                part = {block: fraction * log for block, log in logs.items()}
                change = output_change(start, _logs_of_parameters(part))
                if change <= SYMMETRY_TOLERANCE.unmoved:
                    best = part
                    best_change = change
                    low = fraction
                else:
                    high = fraction
                if low == 1.0:
                    break
                fraction = (low + high) / 2
        self._multiply_(best)
        return best, best_change, low < 1.0

    @torch.no_grad()
    def _multiply_(self, logs: Mapping[SymmetryBlock, float]) -> None:
        for name, log in _logs_of_parameters(logs).items():
            self._parameters[name].mul_(math.exp(log))

    def _note(self, logs: Mapping[SymmetryBlock, float]) -> None:
        self._logs |= {block: self._logs.get(block, 0.0) + log for block, log in logs.items()}

    def _reason_missed(self, target: float, bounded: bool) -> str:
        free = self._norms[self._free]
        if not abs(free / target - 1) <= self._tolerance:
            reason = "it does not answer to the scale"
            if bounded:
                reason = "a normalization's eps bounds the scale"
            return f"the scale-free weights have ‖H‖ = {free:.3g}, not {target:.3g}: {reason}"
        norms = {block.weights: norm for block, norm in self._norms.items()}
        norms[self._blocks.remaining] = self._remaining_norm
        limit = target * (1 + self._tolerance)
        sharp = "; ".join(
            f"{', '.join(map(layer_name, names[:2]))} has ‖H‖ = {norm:.3g}"
            for names, norm in norms.items()
            if norm > limit
        )
        return f"{sharp}, above {target:.3g}, and no symmetry lowers it" if sharp else ""

    @contextlib.contextmanager
    def _curvature(self) -> Iterator[NormOf]:
        """The norm that the optimizer sees of weights together: ‖H‖, or ‖P^-½ H P^-½‖ for Adam.

        Several fits of one call draw the same weights: what was measured there is not measured
        again.
        """
        digest = self._factory.digest()
        with contextlib.ExitStack() as stack:
            engine = functools.cache(lambda: self._measuring(stack))

            def norm_of(weights: Sequence[str]) -> float:
                key = ("norm", digest, self._adam, *weights)
                return self._factory.once(key, lambda: engine()(weights)) if weights else 0.0

            yield norm_of

    def _measuring(self, stack: contextlib.ExitStack) -> NormOf:
        problem = self._factory.functional(measured=True)
        curvature = self._factory.curvature
        settings = lanczos_settings(problem, self._tolerance / 5)
        scales: dict[str, Tensor] = {}
        stack.enter_context(problem.settings())
        evaluations = evaluate(problem)
        engine = build_engine(evaluations, curvature, settings, network_estimator(evaluations))
        if self._adam is not None:
            _, square, _ = gradient_moments(evaluations)
            scale = torch.where(square > 0, square.sqrt() + self._adam.eps, torch.inf)
            pieces = operators.split(scale, [leaf.shape for leaf in problem.leaves.values()])
            scales = dict(zip(problem.leaves, pieces, strict=True))

        def norm_of(weights: Sequence[str]) -> float:
            if not scales:
                return finite_or_inf(engine.extremes(weights).norm.value)
            scale = operators.join([scales[name] for name in weights])
            operator = ScaledCurvature(engine.operator(weights), scale)
            semidefinite = curvature == "gauss-newton"
            return finite_or_inf(spectral_norm(operator, settings, semidefinite=semidefinite).value)

        return norm_of


def _logs_of_parameters(logs: Mapping[SymmetryBlock, float]) -> dict[str, float]:
    by_name: dict[str, float] = {}
    for block, log in logs.items():
        for name, power in block.exponents.items():
            by_name[name] = by_name.get(name, 0.0) + log * power
    return by_name
