"""From engines to the rows of a report."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hessinit.engines.choose import gauss_newton_engine, hessian_engine
from hessinit.engines.ends import Effort, Ends, Engine, with_rounding
from hessinit.engines.extras import Wanted, measure_extras
from hessinit.operators.evaluation import Evaluation
from hessinit.operators.rounding import Rounding, relative_rounding
from hessinit.problem.layers import Layer
from hessinit.problem.problem import Problem
from hessinit.results.curvature_report import ONLY_BOUNDED, LayerCurvature
from hessinit.results.estimates import Estimate, Spread


class Rows:
    """The engines that one measurement needs, and the rows of the report that they fill."""

    def __init__(
        self,
        problem: Problem,
        evaluations: list[Evaluation],
        curvature: str,
        estimator: str,
        effort: Effort,
        wanted: Wanted,
    ) -> None:
        self._problem = problem
        self._wanted = wanted
        self._effort = effort
        self._kind = "gauss-newton" if curvature == "gauss-newton" else "hessian"

        def build(kind: str, chosen: list[Evaluation]) -> Engine:
            if kind == "hessian":
                return hessian_engine(chosen, effort)
            return gauss_newton_engine(chosen, effort, estimator)

        self.main = build(self._kind, evaluations)
        self._approximate = build("gauss-newton", evaluations) if curvature == "both" else None
        # With several batches, each is also measured alone: how much does the answer depend on the batch?
        alone = [_alone(one) for one in evaluations] if len(evaluations) > 1 else []
        self._single = [build(self._kind, [one]) for one in alone]
        self._evaluations = evaluations
        self._rounding: dict[str, Rounding] = {}

    def layers(self, layers: Sequence[Layer]) -> tuple[LayerCurvature, ...]:
        names = [layer.parameter for layer in layers]
        ends = self.main.ends_of_each(names)
        approximate = self._approximate.ends_of_each(names) if self._approximate else {}
        single = [engine.ends_of_each(names) for engine in self._single]
        return tuple(
            self._row(
                (layer.name, layer.aliases, layer.shape),
                [name],
                self._rounded(ends[name], self._kind, name),
                self._rounded(approximate[name], "gauss-newton", name) if approximate else None,
                [found[name] for found in single],
            )
            for layer, name in zip(layers, names, strict=True)
        )

    def network(self) -> LayerCurvature:
        names = [layer.parameter for layer in self._problem.layers]
        size = sum(layer.size for layer in self._problem.layers)
        ends = self._rounded(self.main.ends(names), self._kind)
        approximate = (
            self._rounded(self._approximate.ends(names), "gauss-newton") if self._approximate else None
        )
        single = [engine.ends(names) for engine in self._single]
        return self._row(("network", (), (size,)), names, ends, approximate, single)

    def bounded_network(self, rows: Sequence[LayerCurvature]) -> LayerCurvature:
        """What the layers tell of the network for free: at least the sharpest, at most their sum."""
        if len(rows) == 1:  # it is the network
            return replace(rows[0], name="network", aliases=(), shape=(rows[0].parameters,))
        norms = [row.norm for row in rows]
        semidefinite = self._kind == "gauss-newton" and all(row.bottom.value >= 0 for row in rows)
        reach = sum(sorted(norms)[:-1]) if semidefinite else math.inf  # not inf - inf
        top = Estimate(max(norms), reach, False, ONLY_BOUNDED, 0)
        size = sum(layer.size for layer in self._problem.layers)
        return LayerCurvature(
            name="network",
            shape=(size,),
            curvature=self._kind,
            top=top,
            bottom=Estimate(0.0, 0.0 if semidefinite else math.inf, semidefinite, ONLY_BOUNDED, 0),
            engine=self.main.name,
            engine_reason=self.main.reason,
        )

    def _rounded(self, ends: Ends, curvature: str, name: str | None = None) -> Ends:
        """With the rounding of the operator in the errors; of the whole network without a name."""
        if curvature not in self._rounding:
            self._rounding[curvature] = relative_rounding(self._evaluations, curvature)
        found = self._rounding[curvature]
        return with_rounding(
            ends, found.network if name is None else found.layers[name], self._effort.tolerance
        )

    def _row(
        self,
        identity: tuple[str, tuple[str, ...], tuple[int, ...]],
        names: Sequence[str],
        ends: Ends,
        approximate: Ends | None,
        single: Sequence[Ends],
    ) -> LayerCurvature:
        name, aliases, shape = identity
        norms = tuple(found.norm.value for found in single)
        extras: dict[str, Any] = {}
        if self._wanted.anything:
            extras = measure_extras(self.main.operator(names), self._wanted, self._effort)
        return LayerCurvature(
            name=name,
            aliases=aliases,
            shape=shape,
            curvature=self._kind,
            top=ends.top,
            bottom=ends.bottom,
            approximation=approximate.norm if approximate else None,
            spread=Spread(norms) if norms else None,
            engine=ends.engine,
            engine_reason=ends.reason,
            **extras,
        )


def _alone(evaluation: Evaluation) -> Evaluation:
    """The same batch and the same graphs, counting as the whole."""
    single = copy.copy(evaluation)
    single.weight = 1.0
    return single
