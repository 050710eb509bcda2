"""The searches of `initialize_`: one gain for the whole network, or one scale for every layer.

Network: log λ rises with the log gain `t` until the softmax saturates, and falls afterwards. The
smallest root is sought, on the first rising branch. A forward is cheap. It tells whether `t` is
admissible: the loss is finite and not far above that of a zero output. And the `log_power`, the log
of the output's mean square: log λ is almost a straight line in it, also where it bends in `t`, as
in deep tanh networks. So the search works in log powers.

Layers: a small nonlinear system in the log scales. A layer's norm hardly depends on its own scale:
for homogeneous networks log λ_k = c_k + 2 Σ_{j≠k} log s_j. A weight before a normalization has only
its own effect, of opposite sign. Both are written J = 2·1δᵀ − 2·I with δ_j the power with which the
output grows with weight j, which forwards alone tell. What a softmax adds is the same for all
layers and follows the output's size: it is learned on the way, the rest by Broyden's rule.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hessinit.results.initialization import Measurement

if TYPE_CHECKING:
    from hessinit.init.options import FitRequest
    from hessinit.init.scales import OutputStatistics, ScaledModel, ScalingPath

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class GainSteps:
    """The steps of the search for one gain; tests/init/test_search.py bounds their number."""

    longest_in_power: float = 6.0  # of the log_power, where the target itself is not farther away
    flat: float = 0.05  # a slope of log λ by the log_power below this leads nowhere
    close: float = 0.05  # a log_power that is known so well is known well enough
    first: float = 0.05
    farthest: float = 10.0  # in t, at once
    most: int = 12


@dataclass(frozen=True)
class CoupledSteps:
    """The steps of the search for one scale a layer."""

    longest: float = math.log(20.0)
    shortest: float = 1e-3
    halvings: int = 10
    # Directions with smaller singular values, relative to the largest, are left out of a step.
    singular: float = 1e-2


GAIN_STEPS = GainSteps()
COUPLED_STEPS = CoupledSteps()


@dataclass(frozen=True)
class SearchPoint:
    """A measured `t`: `distance` is log(λ/target), inf if λ is not finite, -inf if it is 0."""

    t: float
    log_power: float
    distance: float


@dataclass(frozen=True)
class GainRoot:
    """The `t` to take. `reason` is empty where the target was met."""

    t: float
    reason: str = ""


_SATURATES = "sharper weights would saturate"
_FLAT_ABOVE = "‖H‖ rises no further when the weights grow"
_FLAT_BELOW = "‖H‖ falls no further when the weights shrink"
_LOWEST = "normalizations undo much of a gain, and a smaller one would stop the learning"
_DEAD = (
    "there is no curvature (‖H‖ = 0): units are dead or numbers underflow; draw the weights by a "
    "scheme"
)
_NEVER_FINITE = "the network is not finite, or saturated, however small its weights are"


@dataclass
class GainSearch:
    """Finds the `t` at which `measure(t)`, log(λ/target), is 0; only `measure` is expensive."""

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

    def run(self) -> GainRoot:
        """Find the smallest root from t = 0, or what comes nearest to it."""
        step: float | GainRoot = 0.0 if self._allowed(0.0) else self._retreat(0.0)
        while not isinstance(step, GainRoot):
            point = SearchPoint(step, self.log_power(step), self.measure(step))
            self.points.append(point)
            if abs(point.distance) <= self.tolerance:
                return GainRoot(point.t)
            if len(self.points) >= self.max_measurements:
                nearest = min(self.points, key=lambda point: abs(point.distance))
                return GainRoot(nearest.t, f"{self.max_measurements} measurements were not enough")
            step = self._next(point)
        return step

    def _next(self, point: SearchPoint) -> float | GainRoot:
        if point.distance == -math.inf:
            return GainRoot(0.0, _DEAD)
        # Illinois: an end that stays while the other moves twice counts for half as far the next
        # time.
        opposite = self._high if point.distance < 0 else self._low
        if opposite is not None and self.points[-2].distance * point.distance > 0:
            opposite = replace(opposite, distance=opposite.distance / 2)
        if point.distance < 0:
            self._low = point
            self._high = opposite
        else:
            self._low = opposite
            self._high = point
        if self._low is None:
            return self._downwards(point)
        return self._upwards(point) if self._high is None else self._between(self._low, self._high)

    def _downwards(self, high: SearchPoint) -> float | GainRoot:
        if high.t <= self.lowest:
            return GainRoot(self.lowest, _LOWEST)
        if not math.isfinite(high.distance):
            return self._retreat(high.t)
        slope = self._slope(high)
        if slope is not None and slope <= GAIN_STEPS.flat and (slope == 0 or len(self.points) > 2):
            t = high.t
        else:
            divisor = slope if slope is not None and slope > GAIN_STEPS.flat else 1.0
            longest = max(GAIN_STEPS.longest_in_power, 2 * high.distance)
            t = self._find(high, high.log_power - min(high.distance / divisor, longest))
        if t < high.t:
            return max(t, self.lowest)
        # Hardly farther from the target than the nearest, and moved the least.
        least = min(abs(point.distance) for point in self.points)
        near = [point.t for point in self.points if abs(point.distance) <= 1.1 * least]
        return GainRoot(min(near, key=abs), _FLAT_BELOW)

    def _upwards(self, low: SearchPoint) -> float | GainRoot:
        slope = self._slope(low)
        if slope is not None and slope <= GAIN_STEPS.flat:
            return GainRoot(max(self.points, key=lambda point: point.distance).t, _FLAT_ABOVE)
        longest = max(GAIN_STEPS.longest_in_power, -2 * low.distance)
        step = min(-low.distance / (slope or 1.0), longest)
        t = self._find(low, low.log_power + step)
        if self.log_power(t) - low.log_power <= GAIN_STEPS.close and self._forbidden < math.inf:
            return GainRoot(low.t, _SATURATES)
        return t if t > low.t else GainRoot(low.t, _FLAT_ABOVE)

    def _between(self, low: SearchPoint, high: SearchPoint) -> float:
        if not math.isfinite(high.distance) or not math.isfinite(high.log_power):
            return (low.t + high.t) / 2
        fraction = min(max(-low.distance / (high.distance - low.distance), 0.02), 0.98)
        power = low.log_power + fraction * (high.log_power - low.log_power)
        return self._approach(low.t, low.log_power, high.t, high.log_power, power)

    def _slope(self, point: SearchPoint) -> float | None:
        """Of log λ by the log_power, from the nearest other measurement; None without another."""
        finite = [p for p in self.points if math.isfinite(p.distance) and p.t != point.t]
        if not finite:
            return None
        nearest = min(finite, key=lambda p: abs(p.log_power - point.log_power))
        if nearest.log_power == point.log_power:
            return 0.0  # biases alone make the output
        return (point.distance - nearest.distance) / (point.log_power - nearest.log_power)

    def _allowed(self, t: float) -> bool:
        if t < self._forbidden and not self.is_admissible(t):
            self._forbidden = t
        return t < self._forbidden

    def _retreat(self, t: float) -> float | GainRoot:
        smaller = _first_admissible(self._allowed, t)
        return GainRoot(0.0, _NEVER_FINITE) if smaller is None else max(smaller, self.lowest)

    def _find(self, origin: SearchPoint, power: float) -> float:
        """The t of about that log_power, or the last admissible one on the way to it."""
        direction = 1 if power > origin.log_power else -1
        far = math.inf
        near = origin.t
        near_power = origin.log_power
        step = GAIN_STEPS.first
        for _ in range(2 * GAIN_STEPS.most):
            t = (near + far) / 2 if far < math.inf else near + direction * step
            if abs(t - origin.t) > GAIN_STEPS.farthest or far - near < 1e-4:
                break
            if direction > 0 and not self._allowed(t):  # flatter is always allowed
                far = self._forbidden
                continue
            log_power = self.log_power(t)
            if (log_power - power) * direction >= 0:
                return self._approach(near, near_power, t, log_power, power)
            change = log_power - near_power
            rate = change / (t - near)
            near = t
            near_power = log_power
            if far < math.inf and change < GAIN_STEPS.close:
                break
            length = abs(power - log_power) / rate if rate > 0 else 2 * step
            step = min(max(length, 0.01), 4 * step)
        return near

    def _approach(
        self, low: float, low_power: float, high: float, high_power: float, power: float
    ) -> float:
        """By false position, from two sides, until the log_power is right to a part of the way."""
        enough = max(0.02 * abs(power - low_power), self.tolerance / 4)
        t = high if abs(high_power - power) < abs(low_power - power) else low
        first = low_power - power
        last = high_power - power
        for _ in range(GAIN_STEPS.most):
            enclosed = first != 0 != last and first * last <= 0
            if not enclosed or not math.isfinite(first - last):
                break
            t = low + (high - low) * min(max(first / (first - last), 0.02), 0.98)
            here = self.log_power(t) - power
            if abs(here) <= enough:
                break
            if here * last > 0:
                high = t
                last = here
                first = first / 2
            else:
                low = t
                first = here
                last = last / 2
        return t


def _first_admissible(is_admissible: Callable[[float], bool], t: float) -> float | None:
    """The first admissible value below `t`, in steps that double."""
    steps = [GAIN_STEPS.first * 2**doublings for doublings in range(GAIN_STEPS.most)]
    below = itertools.islice(itertools.accumulate(steps, operator.sub, initial=t), 1, None)
    return next(filter(is_admissible, below), None)


# --- One scale for every layer ---

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
    """Finds the log scales at which `measure`, log(λ_k/target), is 0; `is_admissible` is cheap."""

    measure: Callable[[Vector], Vector]
    is_admissible: Callable[[Vector], bool]
    powers: Vector
    tolerance: float
    max_measurements: int
    visited: list[Vector] = field(default_factory=list)
    capped: bool = False  # whether the last step was cut short

    def run(self, origin: Vector | None = None) -> Solved:
        """The best point met by damped quasi-Newton steps from `origin` (zeros)."""
        count = len(self.powers)
        jacobian = 2 * np.outer(np.ones(count), self.powers) - 2 * np.eye(count)
        start = np.zeros(count) if origin is None else origin
        best = Solved(start, self._measured(start))
        longest = COUPLED_STEPS.longest
        while best.worst > self.tolerance:
            if len(self.visited) >= self.max_measurements:
                return replace(best, reason=f"{self.max_measurements} measurements were not enough")
            # Least squares: a layer whose norm no scale changes must not drag the others along.
            cutoff = COUPLED_STEPS.singular / max(count, 1)
            step = np.linalg.lstsq(jacobian, -best.distances, rcond=cutoff)[0]
            step = step.astype(np.float64) * (longest / max(longest, float(np.abs(step).max())))
            step = self._admissible_step(best.scales, step)
            if np.abs(step).max() < COUPLED_STEPS.shortest:
                missed = int((np.abs(best.distances) > self.tolerance).sum())
                stuck = (
                    f"no scale of the weights brings {missed} of {count} norms nearer to the target"
                )
                return replace(best, reason=_CAPPED if self.capped else stuck)
            trial = Solved(best.scales + step, self._measured(best.scales + step))
            if not np.isfinite(trial.distances).all():
                longest = float(np.abs(step).max()) / 4
                continue
            # First what all layers have in common, then the rest by Broyden's rule.
            error = trial.distances - best.distances - jacobian @ step
            total = float(step.sum())
            if abs(total) > 0.1 * float(np.abs(step).sum()):
                jacobian = jacobian + error.mean() / total
                error = error - error.mean()
            jacobian = jacobian + np.outer(error, step) / float(step @ step)
            if trial.is_better_than(best):
                best = trial
                longest = min(2 * longest, COUPLED_STEPS.longest)
            else:
                longest = float(np.abs(step).max()) / 2
        return best

    def _measured(self, at: Vector) -> Vector:
        self.visited.append(at)
        return self.measure(at)

    def _admissible_step(self, at: Vector, step: Vector) -> Vector:
        self.capped = not self.is_admissible(at + step)
        if not self.capped:
            return step
        low = 0.0
        high = 1.0
        for _ in range(COUPLED_STEPS.halvings):
            middle = (low + high) / 2
            if self.is_admissible(at + middle * step):
                low = middle
            else:
                high = middle
            if low and high - low < 0.02:
                break
        return low * step


@dataclass(frozen=True)
class Outcome:
    """The weights are where the search left them; `reason` is empty where it met the target."""

    measurements: tuple[Measurement, ...]
    reason: str = ""
    unreachable: tuple[str, ...] = ()


@dataclass
class LossCap:
    """The largest loss allowed: `factor` times as far above the lowest as that of a zero output.

    The smallest loss met takes the place of the zero output's if it is less. `unit` is that of
    `ScaledModel.loss_unit`; without a lowest loss there is no cap.
    """

    factor: float
    unit: float
    _least: float = math.inf

    @property
    def value(self) -> float:
        return self._least + (self.factor - 1) * self.unit

    def admits(self, output: OutputStatistics) -> bool:
        losses = [output.loss, output.zero_loss] if output.is_finite else [output.zero_loss]
        self._least = min([self._least, *filter(math.isfinite, losses)])
        return output.is_finite and output.loss <= self.value


def solve_network(
    model: ScaledModel,
    path: ScalingPath,
    target: float,
    request: FitRequest,
    lowest: float = -math.inf,
) -> Outcome:
    """Follow a path from t = 0, not below `lowest`, until the network's norm meets the target."""
    measurements: list[Measurement] = []
    cap = LossCap(request.fit.max_sharpening, model.loss_unit())

    def output(t: float) -> OutputStatistics:
        model.scale_(path.logs(t))
        return model.output()

    def measure(t: float) -> float:
        loss = output(t).loss
        norm = model.network_norm()
        measurements.append(Measurement(t=t, norm=norm, loss=loss))
        return log_ratio(norm, target)

    def log_power(t: float) -> float:
        if path.pace is not None:
            return path.pace * t
        size = output(t).size
        return 2 * math.log(size) if size > 0 else -math.inf

    root = GainSearch(
        measure,
        lambda t: cap.admits(output(t)),
        log_power,
        request.search_tolerance,
        request.max_measurements,
        lowest,
    ).run()
    model.scale_(path.logs(root.t))
    reason = root.reason
    if reason == _SATURATES:
        reason += (
            f": the initial loss would exceed {cap.value:.3g}, {cap.factor:g}× the loss of a zero "
            "output"
        )
    return Outcome(tuple(measurements), reason)


def solve_layers(
    model: ScaledModel, names: Sequence[str], target: float, request: FitRequest
) -> Outcome:
    """Scale each weight so that every layer's norm meets the target."""
    measurements: list[Measurement] = []
    # Every scale on its own may raise the loss half as much again as one gain.
    cap = LossCap(1.5 * request.fit.max_sharpening, model.loss_unit())

    def output(logs: Vector) -> OutputStatistics:
        model.scale_(dict(zip(names, logs.tolist(), strict=True)))
        return model.output()

    def is_admissible(logs: Vector) -> bool:
        return cap.admits(output(logs))

    def measure(logs: Vector) -> Vector:
        loss = output(logs).loss
        norms = model.layer_norms()
        distances = np.array([log_ratio(norms[name], target) for name in names])
        name = names[int(np.nanargmax(np.abs(distances)))]
        measurements.append(Measurement(t=None, norm=norms[name], loss=loss, layer=name))
        return distances

    def gain_is_admissible(t: float) -> bool:
        return is_admissible(np.full(len(names), t))

    t = 0.0 if gain_is_admissible(0.0) else _first_admissible(gain_is_admissible, 0.0)
    if t is None:
        model.scale_({})
        return Outcome((), _NEVER_FINITE)
    norms = model.layer_norms()
    flat = [name for name in names if not norms.get(name, 0.0) > 0]
    names = [name for name in names if name not in flat]
    if not names:
        model.scale_({})
        return Outcome((), _DEAD, tuple(flat))
    start = np.full(len(names), t)
    # With which power of each weight the output grows, by one forward each.
    size = output(start).size
    powers = np.ones(len(names))
    for index, scales in enumerate(start + GAIN_STEPS.first * np.eye(len(names))):
        grown = output(scales).size
        if 0 < size < math.inf and 0 < grown < math.inf:
            powers[index] = math.log(grown / size) / GAIN_STEPS.first
    solved = CoupledSolve(
        measure, is_admissible, powers, request.search_tolerance, request.max_measurements
    ).run(start)
    output(solved.scales)
    return Outcome(tuple(measurements), solved.reason, tuple(flat))


def log_ratio(norm: float, target: float) -> float:
    """log(norm/target); -inf for a norm of 0, inf for one that is not finite."""
    if norm == 0:
        return -math.inf
    return math.log(norm / target) if 0 < norm < math.inf else math.inf
