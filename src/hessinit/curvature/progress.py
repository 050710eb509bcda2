"""How far a measurement is, and what it costs in gradients."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hessinit.curvature.evaluation import Evaluation
from hessinit.curvature.probes import Operator
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.validate import layer_name
from hessinit.progress import PACE, OnProgress, ProgressState

NETWORK = "network"
SPECTRUM = "spectrum"


def expected_products(tolerance: float, max_iterations: int = 200) -> float:
    """Products of a Lanczos run that stops at the tolerance: about 7 at 0.1, 10 at 0.01, 14 at 0.001.

    They are typically 5 to 9, 7 to 15 and 9 to 25.
    """
    return min(max_iterations, max(3.0, 4 - 3.2 * math.log10(tolerance)))


class Progress:
    """Counts products and finished layers, and reports them: after two seconds, four times a second.

    The time left is (expected products − products made) · seconds per product so far. Every block
    still to do is expected to take as many products as the finished ones did on average, the first
    `typical`. Each of `passes` measures every layer, and the network if asked for.
    """

    def __init__(
        self,
        report: OnProgress,
        layers: int,
        *,
        passes: int = 1,
        network: bool = True,
        typical: float = 16.0,
    ) -> None:
        self._report = report
        self._layers = layers
        self._passes = passes
        self._typical = typical
        self._blocks = passes * (layers + network)
        self._started = time.perf_counter()
        self._last_report = -math.inf
        self._first_product = math.inf
        self._products: Counter[str] = Counter()
        self._finished: list[str] = []

    def expect(self, seconds: float) -> None:
        """Report the time that the plan expects from now on, before the first product, if it is long."""
        now = time.perf_counter()
        if seconds >= PACE.quiet:
            self._report_state(now, seconds, "")

    def product(self, name: str = "") -> None:
        """Count a product with the block of that name."""
        now = time.perf_counter()
        self._first_product = min(now, self._first_product)
        self._products[name] += 1
        if now - self._started >= PACE.quiet and now - self._last_report >= PACE.between:
            self._report_state(now, self._seconds_left(now), layer_name(name))

    def layer_done(self, name: str) -> None:
        """Count the layer as measured: once for each pass, as for each batch."""
        self._finished.append(name)

    def finish(self) -> None:
        """Report the end, if anything was reported before."""
        if math.isfinite(self._last_report):
            self._finished = [NETWORK] * self._blocks
            self._report_state(time.perf_counter(), 0.0, "")

    def _seconds_left(self, now: float) -> float:
        finished = set(self._finished)
        products_per_block = self._typical
        if finished:
            products = sum(self._products[name] for name in finished)
            products_per_block = products / len(self._finished)
        running = [name for name in self._products if name not in finished | {SPECTRUM}]
        # A running block needs another product at least, however many it has had.
        products_left = sum(
            max(1.0, products_per_block - self._products[name]) for name in running
        )
        waiting = max(0, self._blocks - len(self._finished) - len(running))
        products_left += products_per_block * waiting
        counted = max(1, self._products.total() - 1)
        return products_left * (now - self._first_product) / counted

    def _report_state(self, now: float, seconds_left: float, name: str) -> None:
        self._last_report = now
        self._report(
            ProgressState(
                "layers",
                min(self._layers, len(self._finished) // self._passes),
                self._layers,
                now - self._started,
                seconds_left,
                name,
                self._products.total(),
            )
        )


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
        product = self.operator @ vectors
        self.progress.product(self.name)
        return product


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
