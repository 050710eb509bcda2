"""The progress of a measurement, told to the user's function, and its cost in gradients."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hessinit.curvature.evaluation import Evaluation
from hessinit.curvature.probes import Operator
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.validate import layer_name

QUIET_SECONDS = 2.0
SECONDS_BETWEEN = 0.25
NETWORK = "network"
SPECTRUM = "spectrum"


@dataclass(frozen=True)
class ProgressState:
    """How far a measurement is, and what it is at: a `layer`, "network", "spectrum", or "" at the end.

    `products` counts those with curvature matrices. The first ones tell little about the seconds
    left.
    """

    layers_done: int
    layers: int
    products: int
    seconds: float
    seconds_left: float
    layer: str


OnProgress = Callable[[ProgressState], object]


def expected_products(tolerance: float, max_iterations: int = 200) -> float:
    """Products of a Lanczos run that stops at the tolerance: about 7 at 0.1, 10 at 0.01, 14 at 0.001.

    They are typically 5 to 9, 7 to 15 and 9 to 25.
    """
    return min(max_iterations, max(3.0, 4 - 3.2 * math.log10(tolerance)))


class Progress:
    """Counts products and finished layers, and tells `callback`: after two seconds, four times a second.

    The time left is (expected products − products made) · seconds per product so far. Every block
    still to do is expected to take as many products as the finished ones did on average, the first
    `typical`. Each of `passes` measures every layer, and the network if asked for.
    """

    def __init__(
        self,
        callback: OnProgress,
        layers: int,
        *,
        passes: int = 1,
        network: bool = True,
        typical: float = 16.0,
    ) -> None:
        self._callback = callback
        self._layers = layers
        self._passes = passes
        self._typical = typical
        self._blocks = passes * (layers + network)
        self._started = time.perf_counter()
        self._told = -math.inf
        self._first = math.inf
        self._counts: Counter[str] = Counter()
        self._done: list[str] = []

    def expect(self, seconds: float) -> None:
        """The time that the plan expects from now on, told before the first product, if it is long."""
        now = time.perf_counter()
        if seconds >= QUIET_SECONDS:
            self._tell(now, seconds, "")

    def product(self, name: str = "") -> None:
        """One more product was made, for the leaf of that name."""
        now = time.perf_counter()
        self._first = min(now, self._first)
        self._counts[name] += 1
        if now - self._started >= QUIET_SECONDS and now - self._told >= SECONDS_BETWEEN:
            self._tell(now, self._seconds_left(now), layer_name(name))

    def layer_done(self, name: str) -> None:
        """The leaf of that name was measured: once for each pass, as for each batch."""
        self._done.append(name)

    def finish(self) -> None:
        """The last call, if there was one before."""
        if math.isfinite(self._told):
            self._done = [NETWORK] * self._blocks
            self._tell(time.perf_counter(), 0.0, "")

    def _seconds_left(self, now: float) -> float:
        done = set(self._done)
        counts = self._counts
        each = sum(counts[name] for name in done) / len(self._done) if done else self._typical
        running = [count for name, count in counts.items() if name not in done | {SPECTRUM}]
        # What runs needs another product at least, however many it has had.
        left = sum(max(1.0, each - count) for count in running)
        left += each * max(0, self._blocks - len(self._done) - len(running))
        return left * (now - self._first) / max(1, counts.total() - 1)

    def _tell(self, now: float, left: float, layer: str) -> None:
        self._told = now
        done = min(self._layers, len(self._done) // self._passes)
        made = self._counts.total()
        seconds = now - self._started
        self._callback(ProgressState(done, self._layers, made, seconds, left, layer))


class Watched:
    """An operator whose products are counted."""

    def __init__(self, operator: Operator, progress: Progress, name: str) -> None:
        self.operator = operator
        self.progress = progress
        self.name = name
        self.shape = operator.shape
        self.dtype = operator.dtype
        self.device = operator.device

    def __matmul__(self, vectors: Tensor) -> Tensor:
        if vectors.ndim > 1:
            return torch.stack([self @ vector for vector in vectors.unbind(1)], dim=1)
        found = self.operator @ vectors
        self.progress.product(self.name)
        return found


# A gradient shorter than this is timed twice, and the shorter one counts: a cold start or another
# process may have doubled it.
_SHORT_SECONDS = 0.005


class TimedGradient(NamedTuple):
    seconds: float
    output: Tensor  # of the first batch
    by_leaf: dict[str, Tensor]


def timed_gradient(problem: FunctionalProblem, weights: Sequence[float] = ()) -> TimedGradient:
    """Forward and backward of all batches by the measured weights, on warm caches.

    The model runs as in every evaluation of the problem, on copies of the weights; nothing of it
    changes. `weights` are those of the batches in the loss; without them the gradient itself is not
    kept.
    """
    times = list[float]()
    own = {**problem.leaves, **problem.constants}
    names = list(problem.leaves)
    while not times or (len(times) < 2 and times[-1] < _SHORT_SECONDS):
        total = dict[str, Tensor]()
        outputs = list[Tensor]()
        started = clock(problem)
        for number, batch in enumerate(problem.batches):
            output, gradients = problem.output_and_gradients(batch, own, names)
            outputs = outputs or [output]
            for name, one in zip(names, gradients, strict=True) if weights else ():
                part = one if weights[number] == 1 else one * weights[number]
                total[name] = total[name] + part if name in total else part
        times.append(clock(problem) - started)
    return TimedGradient(min(times), outputs[0], total)


def in_gradients(seconds: float | None, gradient: float | None) -> float | None:
    """The cost in gradients; None where one of both is not known."""
    return seconds / gradient if seconds is not None and gradient else None


def cost_of(
    problem: FunctionalProblem,
    evaluations: Sequence[Evaluation],
    started: float,
    gradient: float | None = None,
) -> dict[str, Any]:
    """`seconds` since `started`, and in `gradients`; if none was timed yet, one is, without other graphs."""
    seconds = clock(problem) - started
    for one in evaluations:
        one.forget()
    gradient = timed_gradient(problem).seconds if gradient is None else gradient
    return {"seconds": seconds, "gradients": in_gradients(seconds, gradient)}


def clock(problem: FunctionalProblem) -> float:
    if problem.device.type == "cuda":
        torch.cuda.synchronize(problem.device)
    return time.perf_counter()
