"""The searches of `initialize_`: one gain for the whole network, or one scale for every layer.

Network: log λ rises with the log gain `t` until the softmax saturates, and falls afterwards. The smallest
root is sought, on the first rising branch. A forward is cheap. It tells whether `t` is admissible: the loss
is finite and not far above that of a zero output. And the `log_power`, the log of the output's mean square:
log λ is almost a straight line in it, also where it bends in `t`, as in deep tanh networks. So the search
works in log powers.

Layers: a small nonlinear system in the log scales. A layer's norm hardly depends on its own scale: for
homogeneous networks log λ_k = c_k + 2 Σ_{j≠k} log s_j. A weight before a normalization has only its own
effect, of opposite sign. Both are written J = 2·1δᵀ − 2·I with δ_j the power with which the output grows with
weight j, which forwards alone tell. What a softmax adds is the same for all layers and follows the output's
size: it is learned on the way, the rest by Broyden's rule.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hessinit.curvature.evaluation import LINEAR_LOSS, SATURATED_LOSS
from hessinit.errors import ProblemError
from hessinit.results.initialization import Measurement

if TYPE_CHECKING:
    from hessinit.init.defaults import Config
    from hessinit.init.scales import OutputStatistics, ScaledModel, ScalingPath

Vector = npt.NDArray[np.float64]

_LONGEST_POWER_STEP = 6.0  # of the log_power, where the target itself is not farther away
_FLAT = 0.05  # a slope of log λ by the log_power below this leads nowhere
_CLOSE = 0.05  # a log_power that is known so well is known well enough
_FIRST_STEP = 0.05
_FARTHEST = 10.0  # in t, at once
_MOST_STEPS = 12


@dataclass(frozen=True)
class SearchPoint:
    """A measured `t`: `distance` is log(λ/target), inf where λ is not finite, -inf where it is 0."""

    t: float
    log_power: float
    distance: float


@dataclass(frozen=True)
class Found:
    """The `t` to take. `reason` is empty where the target was met."""

    t: float
    reason: str = ""


SATURATES = "sharper weights would saturate"
_FLAT_ABOVE = "‖H‖ rises no further when the weights grow"
_FLAT_BELOW = "‖H‖ falls no further when the weights shrink"
_LOWEST = "normalizations undo much of a gain, and a smaller one would stop the learning"
_DEAD = "the network has no curvature (‖H‖ = 0), so no scale gives it any"
_NEVER_FINITE = "the network is not finite, or saturated, however small its weights are"
_JUMPS = "‖H‖ jumps over the target between two nearly equal gains"


@dataclass
class GainSearch:
    """`measure(t)` gives log(λ/target) and is expensive; `is_admissible(t)` and `log_power(t)` are cheap."""

    measure: Callable[[float], float]
    is_admissible: Callable[[float], bool]
    log_power: Callable[[float], float]
    tolerance: float
    max_measurements: int
    lowest: float = -math.inf
    points: list[SearchPoint] = field(default_factory=list)
    _low: SearchPoint | None = None  # too flat
    _high: SearchPoint | None = None  # too sharp
    _forbidden: float = math.inf  # the smallest t known to be inadmissible

    def run(self) -> Found:
        """Find the smallest root from t = 0, or what comes nearest to it.

        >>> search = GainSearch(lambda t: 4 * t - 1, lambda t: True, lambda t: 2 * t, 0.01, 5)
        >>> found = search.run()
        >>> abs(found.t - 0.25) < 0.01, found.reason, len(search.points)
        (True, '', 3)
        """
        step: float | Found = 0.0 if self._allowed(0.0) else self._retreat(0.0)
        while not isinstance(step, Found):
            point = SearchPoint(step, self.log_power(step), self.measure(step))
            self.points.append(point)
            if abs(point.distance) <= self.tolerance:
                return Found(point.t)
            if len(self.points) >= self.max_measurements:
                nearest = min(self.points, key=lambda point: abs(point.distance))
                return Found(nearest.t, f"{self.max_measurements} measurements were not enough")
            step = self._next(point)
        return step

    def _next(self, point: SearchPoint) -> float | Found:
        if point.distance == -math.inf:
            return self._revive(point)
        self._narrow(point)
        if self._low is None:
            assert self._high is not None
            return self._downwards(self._high)
        if self._high is None:
            return self._upwards(self._low)
        return self._between(self._low, self._high)

    def _narrow(self, point: SearchPoint) -> None:
        """Illinois: an end that stays while the other moves twice counts for half as far the next time."""
        same_side = len(self.points) > 1 and self.points[-2].distance * point.distance > 0
        if point.distance < 0:
            if same_side and self._high is not None:
                self._high = replace(self._high, distance=self._high.distance / 2)
            self._low = point
        else:
            if same_side and self._low is not None:
                self._low = replace(self._low, distance=self._low.distance / 2)
            self._high = point

    def _downwards(self, high: SearchPoint) -> float | Found:
        if high.t <= self.lowest:
            return Found(self.lowest, _LOWEST)
        if not math.isfinite(high.distance):
            step = self._retreat(high.t)
            return step if isinstance(step, Found) else max(step, self.lowest)
        slope, known = self._slope(high)
        flat = known and slope <= _FLAT and (slope == 0 or len(self.points) > 2)
        longest = max(_LONGEST_POWER_STEP, 2 * high.distance)
        change = min(high.distance / (slope if slope > _FLAT else 1.0), longest)
        t = high.t if flat else self._find(high, high.log_power - change)
        return max(t, self.lowest) if t < high.t else Found(self._least_moved().t, _FLAT_BELOW)

    def _upwards(self, low: SearchPoint) -> float | Found:
        slope, known = self._slope(low)
        if known and slope <= _FLAT:
            return Found(max(self.points, key=lambda point: point.distance).t, _FLAT_ABOVE)
        step = min(-low.distance / max(slope, _FLAT), max(_LONGEST_POWER_STEP, -2 * low.distance))
        t = self._find(low, low.log_power + step)
        if self.log_power(t) - low.log_power <= _CLOSE and self._forbidden < math.inf:
            return Found(low.t, SATURATES)
        return t if t > low.t else Found(low.t, _FLAT_ABOVE)

    def _between(self, low: SearchPoint, high: SearchPoint) -> float | Found:
        if high.t - low.t < 1e-6:
            return Found(low.t, _JUMPS)
        if not math.isfinite(high.distance) or not math.isfinite(high.log_power):
            return (low.t + high.t) / 2
        fraction = min(max(-low.distance / (high.distance - low.distance), 0.02), 0.98)
        power = low.log_power + fraction * (high.log_power - low.log_power)
        return self._interpolate(low.t, low.log_power, high.t, high.log_power, power)

    def _slope(self, point: SearchPoint) -> tuple[float, bool]:
        """Of log λ by the log_power: from the nearest other measurement, or 1; and whether it is known."""
        others = [p for p in self.points if math.isfinite(p.distance) and p.t != point.t]
        if not others:
            return 1.0, False
        other = min(others, key=lambda p: abs(p.log_power - point.log_power))
        if other.log_power == point.log_power:
            return 0.0, True  # biases alone make the output
        return (point.distance - other.distance) / (point.log_power - other.log_power), True

    def _allowed(self, t: float) -> bool:
        if t >= self._forbidden:
            return False
        if not self.is_admissible(t):
            self._forbidden = t
            return False
        return True

    def _retreat(self, t: float) -> float | Found:
        """A smaller t that is admissible."""
        step = _FIRST_STEP
        for _ in range(_MOST_STEPS):
            t -= step
            step *= 2
            if self._allowed(t):
                return t
        return Found(0.0, _NEVER_FINITE)

    def _find(self, origin: SearchPoint, power: float) -> float:
        """The t of about that log_power, or the last admissible one on the way to it."""
        up = power > origin.log_power
        near, near_power, step = origin.t, origin.log_power, _FIRST_STEP
        for _ in range(_MOST_STEPS):
            t = near + (step if up else -step)
            if abs(t - origin.t) > _FARTHEST:
                break
            if up and not self._allowed(t):  # flatter is always allowed
                return self._last_admissible(near, near_power, power)
            log_power = self.log_power(t)
            if (log_power - power) * (1 if up else -1) >= 0:
                return self._interpolate(near, near_power, t, log_power, power)
            rate = (log_power - near_power) / (t - near)
            near, near_power = t, log_power
            step = min(max(abs(power - log_power) / rate if rate > 0 else 2 * step, 0.01), 4 * step)
        return near

    def _last_admissible(self, near: float, near_power: float, power: float) -> float:
        """Between an admissible t and one that is not."""
        far = self._forbidden
        for _ in range(_MOST_STEPS):
            if far - near < 1e-4:
                break
            t = (near + far) / 2
            if not self._allowed(t):
                far = t
                continue
            log_power = self.log_power(t)
            if log_power >= power:
                return self._interpolate(near, near_power, t, log_power, power)
            close, near, near_power = log_power - near_power < _CLOSE, t, log_power
            if close:
                break
        return near

    def _interpolate(
        self, low: float, low_power: float, high: float, high_power: float, power: float
    ) -> float:
        """By false position, from two sides, until the log_power is right to a part of the way."""
        enough = max(0.02 * abs(power - low_power), self.tolerance / 4)
        t = high if abs(high_power - power) < abs(low_power - power) else low
        first, last = low_power - power, high_power - power
        for _ in range(_MOST_STEPS):
            if min(abs(first), abs(last)) <= 0 or first * last > 0 or not math.isfinite(first - last):
                break
            t = low + (high - low) * min(max(first / (first - last), 0.02), 0.98)
            here = self.log_power(t) - power
            if abs(here) <= enough:
                break
            if here * last > 0:
                high, last, first = t, here, first / 2
            else:
                low, first, last = t, here, last / 2
        return t

    def _revive(self, dead: SearchPoint) -> float | Found:
        """No curvature at all: numbers may have underflowed, so larger weights are tried."""
        t = dead.t + math.log(4.0)
        tried = sum(point.distance == -math.inf for point in self.points)
        if tried > 3 or tried < len(self.points) or not self._allowed(t):
            return Found(0.0, _DEAD)
        return t

    def _least_moved(self) -> SearchPoint:
        """Hardly farther from the target than the nearest, and moved the least."""
        least = min(abs(point.distance) for point in self.points)
        near = [point for point in self.points if abs(point.distance) <= 1.1 * least]
        return min(near, key=lambda point: abs(point.t))


# --- One scale for every layer ----------------------------------------------------------------------------

_LONGEST_SCALE_STEP = math.log(20.0)
_SINGULAR = 1e-2
_HALVINGS = 10
_SHORTEST_STEP = 1e-3

_CAPPED = "sharper weights would saturate; max_sharpening= limits the initial loss"


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
    """`measure(x)` gives log(λ_k/target) at log scales x and is expensive; `is_admissible(x)` is cheap."""

    measure: Callable[[Vector], Vector]
    is_admissible: Callable[[Vector], bool]
    powers: Vector
    tolerance: float
    max_measurements: int
    visited: list[Vector] = field(default_factory=list)
    capped: bool = False  # whether the last step was cut short

    def run(self, origin: Vector | None = None) -> Solved:
        """The best point met by damped quasi-Newton steps from `origin` (zeros).

        >>> powers = np.ones(3)  # a homogeneous network of three layers
        >>> measure = lambda x: 2 * (x.sum() - x) + np.array([1.0, -2.0, 3.0])
        >>> solve = CoupledSolve(measure, lambda x: True, powers, 0.05, 6)
        >>> solved = solve.run()
        >>> bool(solved.worst < 1e-9), len(solve.visited)
        (True, 2)
        """
        count = len(self.powers)
        jacobian = 2 * np.outer(np.ones(count), self.powers) - 2 * np.eye(count)
        at = np.zeros(count) if origin is None else origin
        best = Solved(at, self._measured(at))
        longest = _LONGEST_SCALE_STEP
        while best.worst > self.tolerance:
            if len(self.visited) >= self.max_measurements:
                return replace(best, reason=f"{self.max_measurements} measurements were not enough")
            # Least squares: a layer whose norm no scale changes must not drag the others along.
            step = np.linalg.lstsq(jacobian, -best.distances, rcond=_SINGULAR / max(count, 1))[0]
            step = self._admissible_step(best.scales, _limited(step.astype(np.float64), longest))
            if np.abs(step).max() < _SHORTEST_STEP:
                return replace(best, reason=_CAPPED if self.capped else _unmoved(best, self.tolerance))
            trial = Solved(best.scales + step, self._measured(best.scales + step))
            if not np.isfinite(trial.distances).all():
                longest = float(np.abs(step).max()) / 4
                continue
            jacobian = _learned(jacobian, step, trial.distances - best.distances)
            if trial.is_better_than(best):
                best, longest = trial, min(2 * longest, _LONGEST_SCALE_STEP)
            else:
                longest = float(np.abs(step).max()) / 2
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


def _limited(step: Vector, longest: float) -> Vector:
    length = float(np.abs(step).max())
    return step if length <= longest else step * (longest / length)


def _learned(jacobian: Vector, step: Vector, change: Vector) -> Vector:
    """First what all layers have in common, then the rest by Broyden's rule."""
    missed = change - jacobian @ step
    total = float(step.sum())
    if abs(total) > 0.1 * float(np.abs(step).sum()):
        jacobian = jacobian + missed.mean() / total
        missed = missed - missed.mean()
    return jacobian + np.outer(missed, step) / float(step @ step)


def _unmoved(best: Solved, tolerance: float) -> str:
    off = int((np.abs(best.distances) > tolerance).sum())
    layers = "1 layer has a norm" if off == 1 else f"{off} layers have norms"
    return f"{layers} that no scale of the weights brings nearer to the target"


# --- The two rules ----------------------------------------------------------------------------------------

_SMALL_STEP = 0.05
_REVIVALS = 3


@dataclass(frozen=True)
class Outcome:
    """The weights are where the search left them; `reason` is empty where it met the target."""

    measurements: tuple[Measurement, ...]
    reason: str = ""
    unreachable: tuple[str, ...] = ()


@dataclass
class NetworkRule:
    """Follow a path of scales until the network's norm meets the target; `first` is the norm at t = 0."""

    model: ScaledModel
    path: ScalingPath
    target: float
    config: Config
    first: float | None = None
    _outputs: dict[float, OutputStatistics] = field(default_factory=dict)
    _rows: list[Measurement] = field(default_factory=list)

    def run(self) -> Outcome:
        config, lowest = self.config, self.path.lowest
        found = GainSearch(
            self._measure, self._is_admissible, self._log_power, config.search_tolerance,
            config.max_measurements, lowest,
        ).run()  # fmt: skip
        self._scale_(found.t)
        reason = found.reason
        if reason == SATURATES:
            reason += (
                f": the initial loss would exceed {self._ceiling():.3g}, {config.max_sharpening:g}× the loss "
                "of a zero output"
            )
        return Outcome(tuple(self._rows), reason)

    def _scale_(self, t: float) -> None:
        self.model.scale_(self.path.logs(t))

    def _output(self, t: float) -> OutputStatistics:
        if t not in self._outputs:
            self._scale_(t)
            self._outputs[t] = self.model.output()
        return self._outputs[t]

    def _measure(self, t: float) -> float:
        output = self._output(t)
        self._scale_(t)
        known = self.first if t == 0 else None
        norm = known or (self._norm() if output.is_finite else math.inf)
        self._rows.append(Measurement(t=t, norm=norm, loss=output.loss))
        if norm == 0:
            return -math.inf
        return math.log(norm / self.target) if math.isfinite(norm) else math.inf

    def _norm(self) -> float:
        try:
            return self.model.network_norm()
        except ProblemError as failure:
            # A softmax that is certain of everything looks like a linear loss; where it was curved before, it
            # is not.
            flat = str(failure) in (LINEAR_LOSS, SATURATED_LOSS)
            if not flat or not any(row.norm > 0 for row in self._rows):
                raise
            return sys.float_info.min

    def _is_admissible(self, t: float) -> bool:
        output = self._output(t)
        return output.is_finite and output.loss <= self._ceiling()

    def _ceiling(self) -> float:
        """`max_sharpening` times the loss of a zero output, or the smallest loss seen where that is less."""
        losses = [output.loss for output in self._outputs.values() if output.is_finite]
        losses += [output.zero_loss for output in self._outputs.values() if math.isfinite(output.zero_loss)]
        least = min(losses, default=math.inf)
        return least + (self.config.max_sharpening - 1) * abs(least) if least else math.inf

    def _log_power(self, t: float) -> float:
        """Twice the log of the output's size, or what stands for it."""
        if self.path.pace is not None:
            return self.path.pace * t
        size = self._output(t).size
        return 2 * math.log(size) if size > 0 else -math.inf


@dataclass
class LayersRule:
    """Scale each weight so that every layer's norm meets the target."""

    model: ScaledModel
    names: Sequence[str]
    target: float
    config: Config
    _ceiling: float = math.inf
    _outputs: dict[bytes, OutputStatistics] = field(default_factory=dict)
    _rows: list[Measurement] = field(default_factory=list)
    _first: dict[str, float] | None = None

    def run(self) -> Outcome:
        origin = self._first_finite()
        if origin is None:
            return Outcome((), _NEVER_FINITE)
        self._first = self._norms(origin)
        for _ in range(_REVIVALS):  # numbers may have underflowed
            if any(self._first.values()):
                break
            origin = origin + math.log(4.0)
            self._first = self._norms(origin)
        flat = [name for name in self.names if not self._first.get(name, 0.0) > 0]
        self.names = [name for name in self.names if name not in flat]
        if not self.names:
            self.model.scale_({})
            return Outcome((), "no layer has curvature (‖H‖ = 0), so no scale gives it any", tuple(flat))
        at = np.full(len(self.names), origin[0])
        self._outputs.clear()  # of vectors that had other names
        tolerance, measurements = self.config.search_tolerance, self.config.max_measurements
        solve = CoupledSolve(self._measure, self._is_admissible, self._powers(at), tolerance, measurements)
        solved = solve.run(at)
        self._scale_(solved.scales)
        return Outcome(tuple(self._rows), solved.reason, tuple(flat))

    def _norms(self, at: Vector) -> dict[str, float]:
        self._scale_(at)
        return self.model.layer_norms()

    def _scale_(self, logs: Vector) -> None:
        self.model.scale_(dict(zip(self.names, logs.tolist(), strict=True)))

    def _output(self, at: Vector) -> OutputStatistics:
        if at.tobytes() not in self._outputs:
            self._scale_(at)
            self._outputs[at.tobytes()] = self.model.output()
        return self._outputs[at.tobytes()]

    def _is_admissible(self, at: Vector) -> bool:
        output = self._output(at)
        return output.is_finite and output.loss <= self._ceiling

    def _first_finite(self) -> Vector | None:
        """The scales as they are, or all smaller until nothing overflows or saturates."""
        step, t = _SMALL_STEP, 0.0
        for _ in range(12):
            at = np.full(len(self.names), t)
            output = self._output(at)
            if output.is_finite:
                # What one gain may do to the loss, every scale on its own may do half as much again.
                least = min(output.loss, output.zero_loss) if math.isfinite(output.zero_loss) else output.loss
                self._ceiling = least + (1.5 * self.config.max_sharpening - 1) * abs(least)
                if output.loss <= self._ceiling:
                    return at
            t -= step
            step *= 2
        return None

    def _powers(self, at: Vector) -> Vector:
        """With which power of each weight the output grows, by one forward each."""
        base = self._output(at).size
        powers = np.ones(len(self.names))
        for index in range(len(self.names)):
            moved = at.copy()
            moved[index] += _SMALL_STEP
            size = self._output(moved).size
            if 0 < base < math.inf and 0 < size < math.inf:
                powers[index] = math.log(size / base) / _SMALL_STEP
        return powers

    def _measure(self, at: Vector) -> Vector:
        loss = self._output(at).loss
        norms = self._first if self._first is not None else self._norms(at)
        self._first = None
        found = [norms[name] for name in self.names]
        distances = np.array([math.log(norm / self.target) if norm > 0 else -math.inf for norm in found])
        name = self.names[int(np.nanargmax(np.abs(distances)))]
        self._rows.append(Measurement(t=None, norm=norms[name], loss=loss, layer=name))
        return distances
