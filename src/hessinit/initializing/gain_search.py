"""The gain at which a network's norm meets a target: one number `t`, few measurements.

log λ rises with the log gain `t` until the softmax saturates, and falls afterwards. The root on the first
rising branch is wanted: the smallest one. What a forward tells is cheap. Whether `t` is admissible: the loss
is finite and not far above that of a silent network. And the `volume`, twice the log of the output's size:
log λ is almost a straight line in it, also where it bends in `t`, as in deep tanh networks. So the search
works in volumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

_LONGEST_STEP = 6.0  # of the volume, where the target itself is not farther away
_FLAT = 0.05  # a slope of log λ by the volume below this leads nowhere
_CLOSE = 0.05  # a volume that is known so well is known well enough
_FIRST_STEP = 0.05
_FARTHEST = 10.0  # in t, at once
_MOST_STEPS = 12


@dataclass(frozen=True)
class Point:
    """A measured `t`: `distance` is log(λ/target), inf where λ is not finite, -inf where it is 0."""

    t: float
    volume: float
    distance: float


@dataclass(frozen=True)
class Found:
    """The `t` to take. `reason` is empty where the target was met."""

    t: float
    reason: str = ""


SATURATES = "a sharper start would saturate"
_FLAT_ABOVE = "‖H‖ rises no further when the weights grow"
_FLAT_BELOW = "‖H‖ falls no further when the weights shrink"
_LOWEST = "normalizations undo much of a gain, and a smaller one would stop the learning"
_DEAD = "the network has no curvature (‖H‖ = 0), so no scale gives it any"
_NEVER_FINITE = "the network is not finite, or saturated, however small its weights are"
_JUMPS = "‖H‖ jumps over the target between two nearly equal gains"


@dataclass
class GainSearch:
    """`measure(t)` gives log(λ/target) and is dear; `is_admissible(t)` and `volume(t)` are cheap."""

    measure: Callable[[float], float]
    is_admissible: Callable[[float], bool]
    volume: Callable[[float], float]
    tolerance: float
    most: int
    lowest: float = -math.inf
    points: list[Point] = field(default_factory=list)
    _low: Point | None = None  # too gentle
    _high: Point | None = None  # too sharp
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
            point = Point(step, self.volume(step), self.measure(step))
            self.points.append(point)
            if abs(point.distance) <= self.tolerance:
                return Found(point.t)
            if len(self.points) >= self.most:
                return Found(self._nearest().t, f"{self.most} measurements were not enough")
            step = self._next(point)
        return step

    def _next(self, point: Point) -> float | Found:
        if point.distance == -math.inf:
            return self._revive(point)
        self._narrow(point)
        if self._low is None:
            assert self._high is not None
            return self._downwards(self._high)
        if self._high is None:
            return self._upwards(self._low)
        return self._between(self._low, self._high)

    def _narrow(self, point: Point) -> None:
        """Illinois: an end that stays while the other moves twice counts for half as far the next time."""
        before = self.points[-2].distance if len(self.points) > 1 else 0.0
        same_side = before * point.distance > 0
        if point.distance < 0:
            if same_side and self._high is not None:
                self._high = replace(self._high, distance=self._high.distance / 2)
            self._low = point
        else:
            if same_side and self._low is not None:
                self._low = replace(self._low, distance=self._low.distance / 2)
            self._high = point

    def _downwards(self, high: Point) -> float | Found:
        if high.t <= self.lowest:
            return Found(self.lowest, _LOWEST)
        step = self._downwards_freely(high)
        return step if isinstance(step, Found) else max(step, self.lowest)

    def _downwards_freely(self, high: Point) -> float | Found:
        if not math.isfinite(high.distance):
            return self._retreat(high.t)
        slope, known = self._slope(high)
        if known and slope <= _FLAT and (slope == 0 or len(self.points) > 2):
            return Found(_least_moved(self.points).t, _FLAT_BELOW)
        step = min(high.distance / (slope if slope > _FLAT else 1.0), max(_LONGEST_STEP, 2 * high.distance))
        t = self._find(high, high.volume - step)
        return t if t < high.t else Found(_least_moved(self.points).t, _FLAT_BELOW)

    def _upwards(self, low: Point) -> float | Found:
        slope, known = self._slope(low)
        if known and slope <= _FLAT:
            return Found(max(self.points, key=lambda point: point.distance).t, _FLAT_ABOVE)
        step = min(-low.distance / max(slope, _FLAT), max(_LONGEST_STEP, -2 * low.distance))
        t = self._find(low, low.volume + step)
        if self.volume(t) - low.volume <= _CLOSE and self._forbidden < math.inf:
            return Found(low.t, SATURATES)
        return t if t > low.t else Found(low.t, _FLAT_ABOVE)

    def _between(self, low: Point, high: Point) -> float | Found:
        if high.t - low.t < 1e-6:
            return Found(low.t, _JUMPS)
        if not math.isfinite(high.distance) or not math.isfinite(high.volume):
            return (low.t + high.t) / 2
        share = min(max(-low.distance / (high.distance - low.distance), 0.02), 0.98)
        wanted = low.volume + share * (high.volume - low.volume)
        return self._interpolate(low.t, low.volume, high.t, high.volume, wanted)

    def _slope(self, point: Point) -> tuple[float, bool]:
        """Of log λ by the volume: from the nearest other measurement, or 1; and whether it is known."""
        others = [p for p in self.points if math.isfinite(p.distance) and p.t != point.t]
        if not others:
            return 1.0, False
        other = min(others, key=lambda p: abs(p.volume - point.volume))
        if other.volume == point.volume:
            return 0.0, True  # biases alone make the output
        return (point.distance - other.distance) / (point.volume - other.volume), True

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

    def _find(self, start: Point, wanted: float) -> float:
        """The t of about that volume, or the last admissible one on the way to it."""
        up = wanted > start.volume
        near, near_volume, step = start.t, start.volume, _FIRST_STEP
        for _ in range(_MOST_STEPS):
            t = near + (step if up else -step)
            if abs(t - start.t) > _FARTHEST:
                break
            if up and not self._allowed(t):  # gentler is always allowed
                return self._edge(near, near_volume, wanted)
            volume = self.volume(t)
            if (volume - wanted) * (1 if up else -1) >= 0:
                return self._interpolate(near, near_volume, t, volume, wanted)
            rate = (volume - near_volume) / (t - near)
            near, near_volume = t, volume
            step = min(max(abs(wanted - volume) / rate if rate > 0 else 2 * step, 0.01), 4 * step)
        return near

    def _edge(self, near: float, near_volume: float, wanted: float) -> float:
        """Between an admissible t and one that is not."""
        far = self._forbidden
        for _ in range(_MOST_STEPS):
            if far - near < 1e-4:
                break
            t = (near + far) / 2
            if not self._allowed(t):
                far = t
                continue
            volume = self.volume(t)
            if volume >= wanted:
                return self._interpolate(near, near_volume, t, volume, wanted)
            close, near, near_volume = volume - near_volume < _CLOSE, t, volume
            if close:
                break
        return near

    def _interpolate(
        self, low: float, low_volume: float, high: float, high_volume: float, wanted: float
    ) -> float:
        """By false position, from two sides, until the volume is right to a part of the way."""
        enough = max(0.02 * abs(wanted - low_volume), self.tolerance / 4)
        t = high if abs(high_volume - wanted) < abs(low_volume - wanted) else low
        first, last = low_volume - wanted, high_volume - wanted
        for _ in range(_MOST_STEPS):
            if min(abs(first), abs(last)) <= 0 or first * last > 0 or not math.isfinite(first - last):
                break
            t = low + (high - low) * min(max(first / (first - last), 0.02), 0.98)
            here = self.volume(t) - wanted
            if abs(here) <= enough:
                break
            if here * last > 0:
                high, last, first = t, here, first / 2
            else:
                low, first, last = t, here, last / 2
        return t

    def _revive(self, dead: Point) -> float | Found:
        """No curvature at all: numbers may have underflowed, so larger weights are tried."""
        t = dead.t + math.log(4.0)
        tried = sum(point.distance == -math.inf for point in self.points)
        if tried > 3 or tried < len(self.points) or not self._allowed(t):
            return Found(0.0, _DEAD)
        return t

    def _nearest(self) -> Point:
        return min(self.points, key=lambda point: abs(point.distance))


def _least_moved(points: list[Point]) -> Point:
    """Hardly farther from the target than the nearest, and moved the least."""
    least = min(abs(point.distance) for point in points)
    near = [point for point in points if abs(point.distance) <= 1.1 * least]
    return min(near, key=lambda point: abs(point.t))
