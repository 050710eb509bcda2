"""The diagnostics of every layer, over all batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hessinit.curvature.evaluation import Evaluation, unused_leaves
from hessinit.diagnostics.activity import activation_name, count_saturated, living_units
from hessinit.diagnostics.correlation import Correlation, CorrelationStudy
from hessinit.diagnostics.moments import Moments
from hessinit.problem.layer_values import Passage, record
from hessinit.problem.problem import Problem
from hessinit.results.curvature_report import Diagnostics


def diagnose(problem: Problem, evaluations: list[Evaluation]) -> dict[str, Diagnostics]:
    """What each measured parameter's layer gives on, and what comes back to it; by the parameter's name.

    Gradients are those of the loss over all batches, so two halves tell the same as the whole. Uses of one
    weight (time steps, tied layers) are pooled. Costs a forward and at most 11 backward passes for each
    batch, and the memory of one graph. Runs inside `problem.settings()`.
    """
    gathered = {name: _Gathered() for name in problem.leaves}
    study = CorrelationStudy(problem.seed, problem.dtype)
    for evaluation in evaluations:
        recorded = record(problem, evaluation.batch)
        loss = problem.loss_of(recorded.output, evaluation.batch) * evaluation.weight
        passages = [(name, one) for name, found in recorded.passages.items() for one in found]
        tensors = [recorded.output, *problem.leaves.values(), *(one.after.value for _, one in passages)]
        inputs: Any = [recorded.output, *problem.leaves.values(), *(one.after.edge for _, one in passages)]
        found = torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
        gradients = iter(
            torch.zeros_like(tensor) if gradient is None else gradient.detach()
            for tensor, gradient in zip(tensors, found, strict=True)
        )
        by_output = next(gradients)
        for name in problem.leaves:
            gathered[name].add_weight_gradient(next(gradients))
        for name, passage in passages:
            gathered[name].add(passage, next(gradients))
        study.add(recorded, by_output)
    unused = unused_leaves(evaluations)
    return {name: one.conclude(study.conclude(name), name in unused) for name, one in gathered.items()}


class _Gathered:
    """One layer's numbers so far."""

    def __init__(self) -> None:
        self._before, self._after, self._gradient = Moments(), Moments(), Moments()
        self._names: list[str] = []
        self._alive: dict[int, Tensor] = {}
        self._saturated, self._saturable = 0, 0
        self._weight_gradient: Tensor | None = None

    def add(self, passage: Passage, gradient: Tensor) -> None:
        self._before.add(passage.own.value)
        self._after.add(passage.after.value)
        self._gradient.add(gradient)
        name = activation_name(passage.activation)
        if name not in self._names:
            self._names.append(name)
        alive = living_units(passage)
        if alive is not None:
            # As many units as in another use are the same units: those of a cell at its next step, say.
            known = self._alive.get(len(alive))
            self._alive[len(alive)] = alive if known is None else alive | known
        saturated = count_saturated(passage)
        if saturated is not None:
            self._saturated += saturated[0]
            self._saturable += saturated[1]

    def add_weight_gradient(self, gradient: Tensor) -> None:
        known = self._weight_gradient
        self._weight_gradient = gradient if known is None else known + gradient

    def conclude(self, correlation: Correlation, unused: bool) -> Diagnostics:
        if unused or self._weight_gradient is None:
            return Diagnostics(reason="the forward does not use it")
        norm = float(torch.linalg.vector_norm(self._weight_gradient, dtype=torch.float64))
        if not self._after.count:
            return Diagnostics(weight_gradient_norm=norm, reason="it never meets the batch")
        units = sum(len(alive) for alive in self._alive.values())
        dead = units - sum(int(alive.sum()) for alive in self._alive.values())
        return Diagnostics(
            activation=", ".join(name or "none" for name in self._names) if any(self._names) else "",
            activation_mean=self._after.mean,
            activation_std=self._after.std,
            preactivation_std=self._before.std,
            gradient_mean=self._gradient.mean,
            gradient_std=self._gradient.std,
            weight_gradient_norm=norm,
            dead=dead / units if units else None,
            saturated=self._saturated / self._saturable if self._saturable else None,
            correlation=correlation.strength,
            correlated=correlation.share,
            pairs=correlation.pairs,
            reason=f"no correlation: {correlation.reason}" if correlation.reason else "",
        )
