"""Scales that bring every layer's norm to one target: a small nonlinear system in the log scales.

A layer's norm hardly depends on its own scale: for homogeneous networks log λ_k = c_k + 2 Σ_{j≠k} log s_j. A
weight before a normalization has only its own effect, of opposite sign. Both are written J = 2·1δᵀ − 2·I with
δ_j the power with which the output grows with weight j, which forwards alone tell. What a softmax adds is the
same for all layers and follows the output's size: it is learned on the way, the rest by Broyden's rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]

_LONGEST_STEP = math.log(20.0)
_SINGULAR = 1e-2
_HALVINGS = 10
_SHORTEST_STEP = 1e-3

_CAPPED = "a sharper start would saturate; most_sharpening= says how loud it may be"


@dataclass(frozen=True)
class Solved:
    """The log scales to take, and how far the worst layer is from the target there."""

    scales: Vector
    distances: Vector
    reason: str = ""

    @property
    def worst(self) -> float:
        return float(np.abs(self.distances).max())

    def is_better_than(self, other: Solved) -> bool:
        """By the worst layer; where that one cannot be moved, the others decide."""
        if abs(self.worst - other.worst) > 0.02 * other.worst:
            return self.worst < other.worst
        return float(np.linalg.norm(self.distances)) < float(np.linalg.norm(other.distances))


@dataclass
class CoupledSolve:
    """`measure(x)` gives log(λ_k/target) at log scales x and is dear; `is_admissible(x)` costs a forward."""

    measure: Callable[[Vector], Vector]
    is_admissible: Callable[[Vector], bool]
    powers: Vector
    tolerance: float
    most: int
    visited: list[Vector] = field(default_factory=list)
    capped: bool = False  # whether the last step was cut short

    def run(self, start: Vector | None = None) -> Solved:
        """Damped quasi-Newton steps from `start` (zeros); the best point met is what comes back.

        >>> powers = np.ones(3)  # a homogeneous network of three layers
        >>> measure = lambda x: 2 * (x.sum() - x) + np.array([1.0, -2.0, 3.0])
        >>> solve = CoupledSolve(measure, lambda x: True, powers, 0.05, 6)
        >>> solved = solve.run()
        >>> bool(solved.worst < 1e-9), len(solve.visited)
        (True, 2)
        """
        count = len(self.powers)
        jacobian = 2 * np.outer(np.ones(count), self.powers) - 2 * np.eye(count)
        at = np.zeros(count) if start is None else start
        best = Solved(at, self._measured(at))
        reach = _LONGEST_STEP
        while best.worst > self.tolerance:
            if len(self.visited) >= self.most:
                return Solved(best.scales, best.distances, f"{self.most} measurements were not enough")
            step = _limited(_solve(jacobian, -best.distances), reach)
            step = self._admissible_step(best.scales, step)
            if np.abs(step).max() < _SHORTEST_STEP:
                why = _CAPPED if self.capped else _unmoved(best, self.tolerance)
                return Solved(best.scales, best.distances, why)
            trial = Solved(best.scales + step, self._measured(best.scales + step))
            if not np.isfinite(trial.distances).all():
                reach = float(np.abs(step).max()) / 4
                continue
            jacobian = _learned(jacobian, step, trial.distances - best.distances)
            if trial.is_better_than(best):
                best, reach = trial, min(2 * reach, _LONGEST_STEP)
            else:
                reach = float(np.abs(step).max()) / 2
        return best

    def _measured(self, at: Vector) -> Vector:
        self.visited.append(at)
        return self.measure(at)

    def _admissible_step(self, at: Vector, step: Vector) -> Vector:
        """As much of it as stays finite and does not saturate."""
        self.capped = not self.is_admissible(at + step)
        if not self.capped:
            return step
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.is_admissible(at + middle * step) else (low, middle)
            if low and high - low < 0.02:
                break
        return low * step


def _solve(jacobian: Vector, wanted: Vector) -> Vector:
    """Least squares: a layer whose norm no scale changes must not drag the others along."""
    step = np.linalg.lstsq(jacobian, wanted, rcond=_SINGULAR / max(len(wanted), 1))[0]
    return step.astype(np.float64)


def _limited(step: Vector, reach: float) -> Vector:
    longest = float(np.abs(step).max())
    return step if longest <= reach else step * (reach / longest)


def _learned(jacobian: Vector, step: Vector, change: Vector) -> Vector:
    """First what all layers have in common, then the rest by Broyden's rule."""
    missed = change - jacobian @ step
    together = float(step.sum())
    if abs(together) > 0.1 * float(np.abs(step).sum()):
        jacobian = jacobian + missed.mean() / together
        missed = missed - missed.mean()
    return jacobian + np.outer(missed, step) / float(step @ step)


def _unmoved(best: Solved, tolerance: float) -> str:
    off = int((np.abs(best.distances) > tolerance).sum())
    layers = "1 layer has a norm" if off == 1 else f"{off} layers have norms"
    return f"{layers} that no scale of the weights brings nearer to the target"
