"""The two rules: one number for the whole network, or one scale for every layer."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hessinit.curvature.loss_factor import LINEAR_LOSS, SATURATED_LOSS
from hessinit.errors import ProblemError
from hessinit.initializing.coupled_solve import CoupledSolve, Vector
from hessinit.initializing.freedoms import Path
from hessinit.initializing.gain_search import SATURATES, GainSearch
from hessinit.initializing.workbench import Look, Workbench
from hessinit.results.initialization import Measurement

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
    """Follow a path of scales until the network's norm meets the target; `first` is the norm at its start."""

    bench: Workbench
    path: Path
    target: float
    tolerance: float
    most: int
    most_sharpening: float
    first: float | None = None
    _looks: dict[float, Look] = field(default_factory=dict)
    _rows: list[Measurement] = field(default_factory=list)

    def run(self) -> Outcome:
        search = GainSearch(
            self._measure, self._is_admissible, self._volume, self.tolerance, self.most, self.path.lowest
        )
        found = search.run()
        self._scale_(found.t)
        reason = found.reason
        if reason == SATURATES:
            reason += (
                f": the loss would pass {self._ceiling():.3g}, {self.most_sharpening:g} times that of a "
                "silent network"
            )
        return Outcome(tuple(self._rows), reason)

    def _scale_(self, t: float) -> None:
        self.bench.scale_(self.path.logs(t))

    def _look(self, t: float) -> Look:
        if t not in self._looks:
            self._scale_(t)
            self._looks[t] = self.bench.look()
        return self._looks[t]

    def _measure(self, t: float) -> float:
        look = self._look(t)
        self._scale_(t)
        known = self.first if t == 0 else None
        norm = known or (self._norm() if look.is_finite else math.inf)
        self._rows.append(Measurement(t=t, norm=norm, loss=look.loss))
        if norm == 0:
            return -math.inf
        return math.log(norm / self.target) if math.isfinite(norm) else math.inf

    def _norm(self) -> float:
        try:
            return self.bench.network_norm()
        except ProblemError as failure:
            # A softmax that is sure of everything looks like a loss that is linear; where it bent before, it
            # is not.
            flat = str(failure) in (LINEAR_LOSS, SATURATED_LOSS)
            if not flat or not any(row.norm > 0 for row in self._rows):
                raise
            return sys.float_info.min

    def _is_admissible(self, t: float) -> bool:
        look = self._look(t)
        return look.is_finite and look.loss <= self._ceiling()

    def _ceiling(self) -> float:
        """So many times the loss of zeros, or of the gentlest start seen where that is less."""
        losses = [look.loss for look in self._looks.values() if look.is_finite]
        losses += [look.silent for look in self._looks.values() if math.isfinite(look.silent)]
        least = min(losses, default=math.inf)
        return least + (self.most_sharpening - 1) * abs(least) if least else math.inf

    def _volume(self, t: float) -> float:
        """Twice the log of the output's size, or what stands for it."""
        if self.path.pace is not None:
            return self.path.pace * t
        size = self._look(t).size
        return 2 * math.log(size) if size > 0 else -math.inf


@dataclass
class LayersRule:
    """Scale each weight so that every layer's norm meets the target."""

    bench: Workbench
    names: Sequence[str]
    target: float
    tolerance: float
    most: int
    most_sharpening: float
    _ceiling: float = math.inf
    _looks: dict[bytes, Look] = field(default_factory=dict)
    _rows: list[Measurement] = field(default_factory=list)
    _first: dict[str, float] | None = None

    def run(self) -> Outcome:
        start = self._first_finite()
        if start is None:
            return Outcome((), "the network is not finite, or saturated, however small its weights are")
        self._first = self._norms(start)
        for _ in range(_REVIVALS):  # numbers may have underflowed
            if any(self._first.values()):
                break
            start = start + math.log(4.0)
            self._first = self._norms(start)
        silent = [name for name in self.names if not self._first.get(name, 0.0) > 0]
        self.names = [name for name, keep in zip(self.names, start, strict=True) if name not in silent]
        if not self.names:
            return Outcome((), "no layer has curvature (‖H‖ = 0), so no scale gives it any", tuple(silent))
        at = np.full(len(self.names), start[0])
        self._looks.clear()  # of vectors that had other names
        powers = self._powers(at)
        solve = CoupledSolve(self._measure, self._is_admissible, powers, self.tolerance, self.most)
        solved = solve.run(at)
        self._scale_(solved.scales)
        return Outcome(tuple(self._rows), solved.reason, tuple(silent))

    def _norms(self, at: Vector) -> dict[str, float]:
        self._scale_(at)
        return self.bench.layer_norms()

    def _scale_(self, logs: Vector) -> None:
        self.bench.scale_(dict(zip(self.names, logs.tolist(), strict=True)))

    def _look(self, at: Vector) -> Look:
        if at.tobytes() not in self._looks:
            self._scale_(at)
            self._looks[at.tobytes()] = self.bench.look()
        return self._looks[at.tobytes()]

    def _is_admissible(self, at: Vector) -> bool:
        look = self._look(at)
        return look.is_finite and look.loss <= self._ceiling

    def _first_finite(self) -> Vector | None:
        """The scales as they are, or all smaller until nothing overflows or saturates."""
        step, t = _SMALL_STEP, 0.0
        for _ in range(12):
            at = np.full(len(self.names), t)
            look = self._look(at)
            if look.is_finite:
                # What one gain may do to the loss, every scale on its own may do half as much again.
                least = min(look.loss, look.silent) if math.isfinite(look.silent) else look.loss
                self._ceiling = least + (1.5 * self.most_sharpening - 1) * abs(least)
                if look.loss <= self._ceiling:
                    return at
            t -= step
            step *= 2
        return None

    def _powers(self, at: Vector) -> Vector:
        """With which power of each weight the output grows, by one forward each."""
        base = self._look(at).size
        powers = np.ones(len(self.names))
        for index in range(len(self.names)):
            moved = at.copy()
            moved[index] += _SMALL_STEP
            size = self._look(moved).size
            if 0 < base < math.inf and 0 < size < math.inf:
                powers[index] = math.log(size / base) / _SMALL_STEP
        return powers

    def _measure(self, at: Vector) -> Vector:
        loss = self._look(at).loss
        norms = self._first if self._first is not None else self._norms(at)
        self._first = None
        distances = np.array(
            [math.log(norms[name] / self.target) if norms[name] > 0 else -math.inf for name in self.names]
        )
        worst = int(np.nanargmax(np.abs(distances)))
        name = self.names[worst]
        self._rows.append(Measurement(t=None, norm=norms[name], loss=loss, layer=name))
        return distances
