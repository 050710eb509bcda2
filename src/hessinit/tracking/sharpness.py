"""One measurement in the middle of training: ‖H‖, the stable rate, and the layers where asked for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from hessinit.advising.adaptive import Adaptive
from hessinit.advising.rates import adaptive_rates, build_engine
from hessinit.advising.scaled_edge import scaled_edge
from hessinit.curvature.engines import Effort, Ends, Engine
from hessinit.curvature.evaluation import Evaluation, evaluate
from hessinit.measurement.measure import (
    in_running_order,
    note_unchecked,
    note_uncounted,
    notes_on,
    versions_of,
)
from hessinit.problem.determinism import check_draw_repeats
from hessinit.problem.problem import Forward, Loss, Problem, explained_memory
from hessinit.tracking.stepping import YOUNG, Stepping


@dataclass(frozen=True)
class Sharpness:
    """What one measurement found; `weights` are those that were measured, `note` is a remark."""

    loss: float
    norm: float
    error: float
    converged: bool
    stable_learning_rate: float
    layers: dict[str, float]
    products: int
    weights: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Subject:
    """What is measured, again and again: always the same examples, and the same random numbers."""

    model: nn.Module
    loss: Loss
    data: Any
    stepping: Stepping
    layers: str | Iterable[str] | None
    forward: Forward | None
    dropout: str
    reduction: str
    curvature: str
    each_layer: bool
    effort: Effort

    def problem(self, check: bool = False) -> Problem:
        """The model as it is now; its derivatives are checked once, before the first point."""
        return Problem(
            self.model,
            self.loss,
            self.data,
            layers=self.stepping.weights() or self.layers,
            forward=self.forward,
            dropout=self.dropout,
            reduction=self.reduction,
            check=check,
            seed=self.effort.seed,
        )

    def look(self, check: bool) -> dict[str, Any]:
        """Refuses what cannot be measured, or has other derivatives; returns the facts that do not change."""
        problem = self.problem(check)
        with problem.settings(), explained_memory(problem):
            evaluations = evaluate(problem)
            check_draw_repeats(problem, problem.batches[0], evaluations[0].output)
            drew = problem.drew
            if check:
                build_engine(evaluations, self.curvature, self.effort)
            problem.drew = drew
            if not problem.drew:
                problem.dropout = "refuse"  # nothing was frozen, so there is nothing to note
            uncounted = note_uncounted(problem, self.stepping.moved()) if self.stepping.name else ()
            return {
                "examples": problem.examples,
                "notes": (
                    *notes_on(problem, evaluations),
                    *note_unchecked(check),
                    *self.stepping.notes,
                    *uncounted,
                ),
                "versions": versions_of(problem),
            }

    def measure(self) -> Sharpness:
        problem = self.problem()
        with problem.settings(), explained_memory(problem):
            evaluations = evaluate(problem)
            engine = build_engine(evaluations, self.curvature, self.effort)
            names = list(problem.leaves)
            layers = {}
            if self.each_layer:
                ends = engine.ends_of_each(names)
                layers = {
                    layer.name: ends[layer.parameter].norm.value
                    for layer in in_running_order(problem, evaluations)
                }
            found = engine.ends(names)
            stable, products, note = self._stable(engine, found, evaluations)
            return Sharpness(
                loss=sum(one.loss_value * one.weight for one in evaluations),
                norm=found.norm.value,
                error=found.norm.error,
                converged=found.norm.converged,
                stable_learning_rate=stable,
                layers=layers,
                products=found.top.products + found.bottom.products + products,
                weights=tuple(names),
                note=note,
            )

    def _stable(self, engine: Engine, found: Ends, evaluations: list[Evaluation]) -> tuple[float, int, str]:
        """The optimizer's largest stable rate, the products that it took, and a remark.

        It goes by the top eigenvalue: along negative curvature every rate leads away.
        """
        stepping, leaves = self.stepping, evaluations[0].problem.leaves
        rule = stepping.read()
        if rule is None:  # what was said at the beginning is not said again at every point
            return math.nan, 0, "" if stepping.refusal in stepping.notes else stepping.refusal
        slowness = stepping.slowness(leaves)
        if isinstance(rule, Adaptive) and (age := stepping.age(leaves)) < YOUNG:
            moments = "mini-batches"
            rates = adaptive_rates(rule, None, evaluations, self.curvature, moments, self.effort, slowness)
            # RMSprop does not correct its mean square for the start at 0.
            grown = math.sqrt(1 - rule.memory**age) if age and rule.kind == "rmsprop" else 1.0
            stable = rule.edge(rates.norm.value / grown) if age else rates.stable_rate(rule)
            return stable, rates.norm.products, ""
        decay, divisor = stepping.decay(leaves), stepping.divisor(leaves)
        if divisor is None and slowness is None and bool((decay == decay[0]).all()):
            return rule.edge(max(found.top.value + float(decay[0]), 0.0)), 0, ""
        curvature = engine.operator(list(leaves))
        stable, top = scaled_edge(rule, curvature, divisor, slowness, decay, self.effort)
        return stable, top.products, ""
