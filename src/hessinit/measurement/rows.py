"""The rows of a curvature report: the engines that one measurement needs, and what they find."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from hessinit.curvature import derivative_check, engines, rounding_error, shares
from hessinit.curvature import progress as progress_of
from hessinit.curvature.evaluation import Evaluation, unused_leaves
from hessinit.errors import ProblemError, choose, list_of
from hessinit.measurement.facts import facts_of
from hessinit.problem.double_backward import matrix_products
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.ranks import Ranks
from hessinit.problem.validate import Layer
from hessinit.results.curvature_report import (
    ONLY_BOUNDED,
    CurvatureReport,
    Estimate,
    LayerCurvature,
    Spread,
)

SPECTRUM_DETAILS = ("trace", "frobenius", "density")
LAYER_DETAILS = ("jacobians", "diagnostics")


@dataclass(frozen=True)
class Details:
    """What a report is to hold besides norms.

    >>> Details.read(["trace", "top-3"])
    Details(names=('trace',), top=3)
    """

    names: tuple[str, ...] = ()
    top: int = 0

    @classmethod
    def read(cls, details: Any) -> Details:
        """From names; "top-5" asks for the five largest eigenvalues."""
        names = [details] if isinstance(details, str) else list_of(details)
        if not names and details not in ((), []):
            raise ProblemError(f"details={details!r} must be names, such as {_EXAMPLE}.")
        top = 0
        plain = []
        for name in names:
            count = str(name).removeprefix("top-")
            if count != str(name) and count.isdecimal() and int(count) > 0:
                top = max(top, int(count))
            else:
                choose("details", name, [*SPECTRUM_DETAILS, *LAYER_DETAILS, "top-5"])
                plain.append(name)
        return cls(tuple(plain), top)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    @property
    def spectrum(self) -> bool:
        return self.top > 0 or any(name in self.names for name in SPECTRUM_DETAILS)


_EXAMPLE = 'details=["trace", "top-5"]'


def check_choices(curvature: str, estimator: str) -> None:
    """Refuse a curvature or an estimator that there is not, or that do not go together."""
    choose("curvature", curvature, ["gauss-newton", "hessian", "both"])
    choose("estimator", estimator, ["auto", "gram", "lanczos"])
    if curvature == "hessian" and estimator == "gram":
        raise ProblemError(
            "estimator='gram' measures Gauss-Newton curvature only; for curvature='hessian' choose "
            "'auto' or 'lanczos'."
        )


class Rows:
    """The engines that one measurement needs, and the rows of the report that they fill."""

    def __init__(
        self,
        problem: FunctionalProblem,
        evaluations: list[Evaluation],
        curvature: str,
        estimator: str,
        settings: engines.LanczosSettings,
        details: Details | None = None,
    ) -> None:
        self.problem = problem
        self.evaluations = evaluations
        self._details = details or Details()
        self._settings = settings
        self._rounding: dict[str, list[rounding_error.Rounding]] = {}  # of each rank
        self._curvature = curvature
        self._kind = "gauss-newton" if curvature == "gauss-newton" else "hessian"
        self._both = curvature == "both"
        self._estimator = estimator
        self._precision = ""
        self.main = self._build(self._kind, evaluations)

    def _build(self, kind: str, evaluations: list[Evaluation]) -> engines.Engine:
        return engines.build_engine(evaluations, kind, self._settings, self._estimator)

    @property
    def reason(self) -> str:
        """Why the main engine, and the precision of its products if it is not that of the weights."""
        return self.main.reason + self._precision

    @cached_property
    def _engines(self) -> list[engines.Engine]:
        engines_used = [self.main]
        if self._both:
            engines_used.append(self._build("gauss-newton", self.evaluations))
        if len(self.evaluations) > 1:
            # Each batch alone: how much does the answer depend on the batch?
            for evaluation in self.evaluations:
                engines_used.append(self._build(self._kind, [evaluation.alone()]))
        return engines_used

    @cached_property
    def whole(self) -> engines.Extremes:
        """The extremes of the network, by the main engine."""
        return self.main.extremes([layer.parameter for layer in self.problem.layers])

    def layers(self, layers: Sequence[Layer]) -> dict[str, LayerCurvature]:
        """The rows of these layers, by parameter."""
        names = [layer.parameter for layer in layers]
        by_engine = [engine.extremes_of_each(names) for engine in self._engines]
        rows = {}
        for layer in layers:
            name = layer.parameter
            rows[name] = self._row(layer, [name], [extremes[name] for extremes in by_engine])
        return rows

    def network(self) -> LayerCurvature:
        names = [layer.parameter for layer in self.problem.layers]
        network = Layer("network", "", (), (sum(layer.size for layer in self.problem.layers),))
        extremes = [self.whole]
        for engine in self._engines[1:]:
            self._settings.done(progress_of.NETWORK)
            extremes.append(engine.extremes(names))
        return self._row(network, names, extremes)

    def fill(
        self, layers: Sequence[Layer], network: bool, ranks: Ranks | None
    ) -> dict[str, LayerCurvature]:
        """The rows by parameter; "" is the network, if asked for. In a distributed job: of all ranks."""

        def find(names: Collection[str]) -> dict[str, LayerCurvature]:
            rows = self.layers([layer for layer in layers if layer.parameter in names])
            if "" in names:
                rows[""] = self.network()
            return rows

        sizes = {layer.parameter: layer.size for layer in layers}
        if network:
            sizes[""] = sum(sizes.values())
        if ranks is None:
            return find(sizes)
        if ranks.split == "layers":
            return ranks.divide(sizes, find)
        own_engines = self._engines[: 1 + self._both]
        for kind in (self._kind, "gauss-newton")[: len(own_engines)]:
            rounding = rounding_error.relative_rounding(self.evaluations, kind)
            self._rounding[kind] = ranks.exchange(rounding)
        unused = unused_leaves(self.evaluations)
        shared = [
            shares.SharedEngine(ranks, own_engines, number, unused)
            for number in range(len(own_engines))
        ]
        self.main = shared[0]
        self._engines = [*shared]
        return ranks.lead(lambda: find(sizes), partial(shares.multiply, own_engines))

    @contextlib.contextmanager
    def faster(self) -> Iterator[None]:
        """TF32 in matrix products, where the error of its rounding is below the tolerance."""
        by_lanczos = isinstance(self.main, engines.LanczosEngine)
        problem = self.problem
        has_tf32 = problem.device.type == "cuda" and problem.dtype == torch.float32
        # Kinks magnify rounding.
        if has_tf32 and by_lanczos and not derivative_check.has_kinks(self.evaluations[0]):
            with matrix_products(tf32=True):
                rounding = rounding_error.relative_rounding(self.evaluations, self._kind, "tf32")
                errors = [rounding.network, *rounding.layers.values()]
                largest = max(error.relative for error in errors)
                if rounding_error.CAUTION * largest <= self._settings.tolerance:
                    self._rounding[self._kind] = [rounding]
                    self._precision = "; matrix products in TF32"
                    yield
                    return
        yield

    def bounded_network(self, rows: Sequence[LayerCurvature]) -> LayerCurvature:
        """Bounds of the network's norm by the layers': at least the largest, at most their sum."""
        if len(rows) == 1:  # it is the network
            return replace(rows[0], name="network", aliases=(), shape=(rows[0].parameters,))
        norms = sorted(row.norm for row in rows)
        semidefinite = self._kind == "gauss-newton" and all(row.bottom.value >= 0 for row in rows)
        error_of_top = math.inf  # not inf - inf
        error_of_bottom = math.inf
        if semidefinite:
            error_of_top = sum(norms[:-1])
            error_of_bottom = 0.0
        size = sum(layer.size for layer in self.problem.layers)
        return LayerCurvature(
            name="network",
            shape=(size,),
            curvature=self._kind,
            top=Estimate(norms[-1], error_of_top, False, ONLY_BOUNDED, 0),
            bottom=Estimate(0.0, error_of_bottom, semidefinite, ONLY_BOUNDED, 0),
            engine=self.main.name,
            engine_reason=self.reason,
        )

    def report(
        self, layers: tuple[LayerCurvature, ...], network: LayerCurvature
    ) -> CurvatureReport:
        """The rows with what the problem and the main engine say about them."""
        return CurvatureReport(
            layers=layers,
            network=network,
            curvature=self._curvature,
            tolerance=self._settings.tolerance,
            engine=self.main.name,
            engine_reason=self.reason,
            **facts_of(self.problem, self.evaluations),
        )

    def _rounded(
        self, extremes: engines.Extremes, curvature: str, parameter: str
    ) -> engines.Extremes:
        """The extremes with the rounding error of the operator; of the whole network without a parameter."""
        if curvature not in self._rounding:
            rounding = rounding_error.relative_rounding(self.evaluations, curvature)
            self._rounding[curvature] = [rounding]
        errors = [
            rounding.layers[parameter] if parameter else rounding.network
            for rounding in self._rounding[curvature]
        ]
        largest = max(errors, key=lambda error: (not error.is_all, error.relative))
        return engines.with_rounding(extremes, largest, self._settings.tolerance)

    def _row(
        self, layer: Layer, names: Sequence[str], by_engine: Sequence[engines.Extremes]
    ) -> LayerCurvature:
        """A row of the report from the extremes that each engine found."""
        extremes = self._rounded(by_engine[0], self._kind, layer.parameter)
        approximation = None
        of_batches = by_engine[1:]
        if self._both:
            approximation = self._rounded(by_engine[1], "gauss-newton", layer.parameter).norm
            of_batches = by_engine[2:]
        norms = tuple(batch_extremes.norm.value for batch_extremes in of_batches)
        row = LayerCurvature(
            name=layer.name,
            aliases=layer.aliases,
            shape=layer.shape,
            curvature=self._kind,
            top=extremes.top,
            bottom=extremes.bottom,
            approximation=approximation,
            spread=Spread(norms) if norms else None,
            engine=extremes.engine,
            engine_reason=extremes.reason + self._precision,
        )
        if self._details.spectrum:
            row = replace(row, **self._measure_spectrum(names))
        return row

    def _measure_spectrum(self, names: Sequence[str]) -> Mapping[str, Any]:
        operator = self._settings.watched(self.main.operator(names), [progress_of.SPECTRUM])
        return engines.measure_spectrum(
            operator,
            self._settings,
            top=self._details.top,
            trace="trace" in self._details,
            frobenius="frobenius" in self._details,
            density="density" in self._details,
        )
