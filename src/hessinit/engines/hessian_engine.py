"""The exact Hessian, layer by layer through the layer's own output where that is possible.

A weight `W` that is used once, linearly, acts on the loss only through the output `a` of that call. Its
Hessian is then `Aᵀ H_a A` with `A = ∂a/∂W` known in closed form (`push` and `pull`) and `H_a` the Hessian
by `a`: the products leave out the layer itself and everything before it. For a dense layer with fewer rows
of input than inputs, the directions of `W` that no input sees have no curvature: the search runs in the
(rows × outputs) others, which is often hundreds of times smaller.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hessinit.engines.calls import Call, DenseCall, read_call
from hessinit.engines.ends import UNUSED, Effort, Ends
from hessinit.engines.lanczos_engine import find_ends
from hessinit.operators.base import LinearOperator
from hessinit.operators.blocks import HessianOperator
from hessinit.operators.evaluation import Evaluation, unused_leaves
from hessinit.results.estimates import Estimate


class OutputHessian:
    """`H_a`: the Hessian of the loss by the output of one call, by its products."""

    def __init__(self, evaluation: Evaluation, edge: GradientEdge, gradient: Tensor) -> None:
        self._weight = evaluation.weight
        self._edge = edge
        self._gradient = gradient

    def product(self, tangent: Tensor) -> Tensor:
        """Zero where the gradient does not change with the output, as for a loss linear in it."""
        if not self._gradient.requires_grad:
            return torch.zeros_like(tangent)
        found: Tensor | None = torch.autograd.grad(
            self._gradient,
            [self._edge],
            tangent.view_as(self._gradient),
            retain_graph=True,
            allow_unused=True,
        )[0]
        if found is None:
            return torch.zeros_like(tangent)
        return found if self._weight == 1.0 else found * self._weight


class CallHessian(LinearOperator):
    """`Aᵀ H_a A` on the flat weight, summed over batches."""

    def __init__(self, parts: Sequence[tuple[Call, OutputHessian]], leaf: Tensor) -> None:
        self._parts = parts
        self._weight_shape = leaf.shape
        self.shape = (leaf.numel(), leaf.numel())
        self.dtype, self.device = leaf.dtype, leaf.device

    def _product(self, vector: Tensor) -> Tensor:
        weight = vector.view(self._weight_shape)
        found = [call.pull(hessian.product(call.push(weight))).reshape(-1) for call, hessian in self._parts]
        return found[0] if len(found) == 1 else torch.stack(found).sum(0)


class SeenHessian(LinearOperator):
    """For a dense call, on the directions its inputs see: `Lᵀ H_a L`, `L Lᵀ` their inner products."""

    def __init__(self, call: DenseCall, hessian: OutputHessian) -> None:
        self._hessian = hessian
        inputs = call.inputs.double()
        inner = inputs @ inputs.T
        root, failure = torch.linalg.cholesky_ex(inner)
        if int(failure):  # inputs that depend on each other, as equal examples do
            values, vectors = torch.linalg.eigh(inner)
            kept = values > 1e-14 * values[-1]
            root = vectors[:, kept] * values[kept].sqrt()
        self._root = root.to(call.inputs)
        self._outputs = call.outputs
        size = self._root.shape[1] * call.outputs
        self.shape = (size, size)
        self.dtype, self.device = call.inputs.dtype, call.inputs.device

    def _product(self, vector: Tensor) -> Tensor:
        moved = self._hessian.product(self._root @ vector.view(-1, self._outputs))
        return (self._root.T @ moved).reshape(-1)


class HessianEngine:
    """Lanczos at both ends of the exact Hessian."""

    name = "lanczos"
    reason = "exact second derivatives, reverse over reverse"

    def __init__(self, evaluations: Sequence[Evaluation], effort: Effort) -> None:
        self._evaluations = evaluations
        self._effort = effort
        self._unused = unused_leaves(evaluations)
        self._calls = [_single_calls(evaluation) for evaluation in evaluations]

    def operator(self, names: Sequence[str]) -> LinearOperator:
        return HessianOperator(self._evaluations, names)

    def ends_of_each(self, names: Sequence[str]) -> dict[str, Ends]:
        return {name: self.ends([name]) for name in names}

    def ends(self, names: Sequence[str]) -> Ends:
        if all(name in self._unused for name in names):
            return Ends(UNUSED, UNUSED, self.name, self.reason)
        operator = self._through_output(names[0]) if len(names) == 1 else None
        found = find_ends(operator or self.operator(names), self._effort, None, self.name, self.reason)
        weights = sum(self._evaluations[0].problem.leaves[name].numel() for name in names)
        return found if operator is None or operator.shape[0] == weights else _with_zero(found)

    def _through_output(self, name: str) -> LinearOperator | None:
        if not all(name in calls for calls in self._calls):
            return None
        parts = [calls[name] for calls in self._calls]
        leaf = self._evaluations[0].problem.leaves[name]
        call, hessian = parts[0]
        if len(parts) == 1 and isinstance(call, DenseCall) and call.rows < call.inputs.shape[1]:
            seen = SeenHessian(call, hessian)
            return seen if seen.shape[0] else CallHessian(parts, leaf)  # inputs of zeros see nothing
        return CallHessian(parts, leaf)


def _single_calls(evaluation: Evaluation) -> dict[str, tuple[Call, OutputHessian]]:
    """The leaves that are used exactly once, by a call with a known derivative."""
    leaves = evaluation.problem.leaves
    calls = {
        name: read_call(uses[0], leaves[name]) for name, uses in evaluation.uses.items() if len(uses) == 1
    }
    known = {name: call for name, call in calls.items() if call is not None}
    edges = [GradientEdge(evaluation.uses[name][0].node, 0) for name in known]
    if not edges:
        return {}
    gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
        evaluation.loss, edges, create_graph=True, allow_unused=True
    )
    return {
        name: (call, OutputHessian(evaluation, edge, gradient))
        for (name, call), edge, gradient in zip(known.items(), edges, gradients, strict=True)
        if gradient is not None
    }


def _with_zero(ends: Ends) -> Ends:
    """The directions left out of the search have the eigenvalue 0."""
    top = ends.top if ends.top.value > 0 else _zero(ends.top)
    return dataclasses.replace(
        ends, top=top, bottom=ends.bottom if ends.bottom.value < 0 else _zero(ends.bottom)
    )


def _zero(other: Estimate) -> Estimate:
    """The eigenvalue 0 in place of one on the wrong side of it, as far as that one is known."""
    error = max(0.0, other.error - abs(other.value))
    reason = other.reason if error else "the inputs do not see some directions of the weight"
    return dataclasses.replace(other, value=0.0, error=error, reason=reason)
