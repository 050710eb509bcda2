"""How far a measurement is: products and finished layers are counted, and reported."""

from __future__ import annotations

import math
import time
from collections import Counter

from torch import Tensor

from hessinit.curvature.operators import LinearOperator
from hessinit.problem.checks import layer_name
from hessinit.progress import PACE, OnProgress, ProgressState

NETWORK = "network"
SPECTRUM = "spectrum"


def expected_products(tolerance: float, max_iterations: int = 200) -> float:
    """Return the products of a Lanczos run that stops at the tolerance.

    About 7 at 0.1, 10 at 0.01 and 14 at 0.001; typically 5 to 9, 7 to 15 and 9 to 25.
    """
    return min(max_iterations, max(3.0, 4 - 3.2 * math.log10(tolerance)))


class Progress:
    """Counts and reports products and finished layers: after two seconds, four times a second.

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
        """Report the time that the plan expects, before the first product, if it is long."""
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
        products_left = sum(max(1.0, products_per_block - self._products[name]) for name in running)
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


class Watched(LinearOperator):
    """An operator whose products are counted."""

    def __init__(self, operator: LinearOperator, progress: Progress, name: str) -> None:
        super().__init__(operator.shape, operator)
        self.operator = operator
        self.progress = progress
        self.name = name

    def _product(self, vector: Tensor) -> Tensor:
        product = self.operator @ vector
        self.progress.product(self.name)
        return product
