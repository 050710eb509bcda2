"""One measurement in the middle of training: ‖H‖, the stable rate, and the layers where asked for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hessinit.advising.adaptive import Adaptive
from hessinit.advising.preconditioned import Preconditioned
from hessinit.advising.rates import adaptive_rates, build_engine
from hessinit.engines.ends import Effort, Ends, Engine
from hessinit.operators.base import LinearOperator
from hessinit.operators.evaluation import Evaluation, evaluate
from hessinit.operators.setting import in_running_order, notes_on, versions_of
from hessinit.problem.memory import explained_memory
from hessinit.problem.problem import Forward, Loss, Problem
from hessinit.spectra.lanczos import lanczos
from hessinit.tracking.stepping import Stepping


@dataclass(frozen=True)
class Sharpness:
    """What one measurement found."""

    loss: float
    norm: float
    error: float
    converged: bool
    stable_lr: float
    layers: dict[str, float]
    products: int


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
    curvature: str
    each_layer: bool
    effort: Effort

    def problem(self) -> Problem:
        """The model as it is now."""
        return Problem(
            self.model,
            self.loss,
            self.data,
            layers=self.stepping.parameters or self.layers,
            forward=self.forward,
            dropout=self.dropout,
            seed=self.effort.seed,
        )

    def look(self) -> dict[str, Any]:
        """One forward, which refuses what cannot be measured, and the facts that do not change."""
        problem = self.problem()
        with problem.settings(), explained_memory(problem):
            evaluations = evaluate(problem)
            problem.output(problem.batches[0])
            if not problem.drew:
                problem.dropout = "refuse"  # nothing was frozen, so there is nothing to note
            return {
                "examples": problem.examples,
                "notes": (*notes_on(problem, evaluations), *self.stepping.notes),
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
            stable, products = self._stable(engine, found, evaluations)
            return Sharpness(
                loss=sum(one.loss_value * one.weight for one in evaluations),
                norm=found.norm.value,
                error=found.norm.error,
                converged=found.norm.converged,
                stable_lr=stable,
                layers=layers,
                products=found.top.products + found.bottom.products + products,
            )

    def _stable(self, engine: Engine, found: Ends, evaluations: list[Evaluation]) -> tuple[float, int]:
        """The optimizer's largest stable rate, and the products that it took.

        It goes by the top eigenvalue: along negative curvature every rate leads away.
        """
        rule = self.stepping.read()
        if rule is None:
            return math.nan, 0
        if isinstance(rule, Adaptive) and not self.stepping.has_state:
            rates = adaptive_rates(rule, None, evaluations, self.curvature, "mini-batches", self.effort)
            return rates.stable_rate(rule), rates.norm.products
        leaves = evaluations[0].problem.leaves
        divisor = self.stepping.divisor(leaves)
        decay = rule.gradient_decay if isinstance(rule, Adaptive) else rule.weight_decay
        if divisor is None:
            return rule.edge(max(found.top.value + decay, 0.0)), 0
        # No start from where the last search ended: where the sharpest direction has changed since, such a
        # search often ends at the old one and cannot tell (docs/tracking.md has the numbers).
        curvature = engine.operator(list(leaves))
        inner = Preconditioned(Decayed(curvature, decay) if decay else curvature, divisor)
        top = lanczos(inner, ends="top", **self.effort.options).top
        return rule.edge(max(top.value, 0.0)), top.products


class Decayed(LinearOperator):
    """`H + decay`: the curvature with that of a weight decay in the gradient."""

    def __init__(self, curvature: LinearOperator, decay: float) -> None:
        self._curvature, self._decay = curvature, decay
        self.shape, self.dtype, self.device = curvature.shape, curvature.dtype, curvature.device

    def _product(self, vector: Tensor) -> Tensor:
        return torch.add(self._curvature @ vector, vector, alpha=self._decay)
