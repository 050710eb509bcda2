"""The Hessian engine: exact second derivatives, by a layer's own output where it is used once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hessinit.curvature import layer_uses, operators
from hessinit.curvature.engine import Engine, Extremes, LanczosSettings
from hessinit.curvature.evaluation import Evaluation, unused_leaves
from hessinit.results.curvature_report import Estimate

# Of the inputs' inner products, over the largest; less is rounding.
_LEAST_EIGENVALUE = 1e-14


@dataclass(frozen=True)
class OutputHessian:
    """`H_a`: the Hessian of the loss by the output of a call.

    It is the derivative of the gradient that arrives at the call's edge.
    """

    call: layer_uses.Call
    edge: GradientEdge
    gradient: Tensor
    weight: float

    def product(self, tangent: Tensor) -> Tensor:
        product = None
        along = tangent.view_as(self.gradient)
        if self.gradient.requires_grad:
            (product,) = torch.autograd.grad(
                self.gradient, [self.edge], along, retain_graph=True, allow_unused=True
            )
        # None where the gradient does not change with the output, as for a loss linear in it.
        return torch.zeros_like(tangent) if product is None else product * self.weight


class CallHessian(operators.LinearOperator):
    """`Aᵀ H_a A` on the flat weight, summed over batches."""

    def __init__(self, uses: Sequence[OutputHessian], leaf: Tensor) -> None:
        super().__init__((leaf.numel(), leaf.numel()), leaf)
        self._uses = uses
        self._weight_shape = leaf.shape

    def _product(self, vector: Tensor) -> Tensor:
        weight = vector.view(self._weight_shape)
        pulled = [use.call.pull(use.product(use.call.push(weight))) for use in self._uses]
        return operators.add_up(pulled).reshape(-1)


def seen_hessian(use: OutputHessian) -> CallHessian | None:
    """`Lᵀ H_a L`, a smaller matrix, where `L Lᵀ` are the inputs' inner products; None for zeros."""
    inputs = use.call.inputs.double()
    inner = inputs @ inputs.T
    root, failure = torch.linalg.cholesky_ex(inner)
    if int(failure):  # inputs that depend on each other, as equal examples do
        values, vectors = torch.linalg.eigh(inner)
        spanned = values > _LEAST_EIGENVALUE * values[-1]
        root = vectors[:, spanned] * values[spanned].sqrt()
    root = root.to(use.call.inputs)
    call = layer_uses.DenseCall(root, use.call.output_shape, stored_transposed=True)
    weight = root.new_empty(root.shape[1], use.call.output_shape[1])
    return CallHessian([replace(use, call=call)], weight) if weight.numel() else None


class HessianEngine(Engine):
    reason = "exact second derivatives, reverse over reverse"

    def __init__(self, evaluations: Sequence[Evaluation], settings: LanczosSettings) -> None:
        self._evaluations = evaluations
        self.settings = settings
        self._unused = unused_leaves(evaluations)
        self._calls = [_single_calls(evaluation) for evaluation in evaluations]

    def operator(self, names: Sequence[str]) -> operators.LinearOperator:
        return operators.HessianOperator(self._evaluations, names)

    def extremes(self, names: Sequence[str]) -> Extremes:
        if all(name in self._unused for name in names):
            return self.unused()
        through_output = self._through_output(names[0]) if len(names) == 1 else None
        operator = through_output or self.operator(names)
        (extremes,) = self._search(None, [self.settings.watched(operator, names)])
        weights = sum(self._evaluations[0].problem.leaves[name].numel() for name in names)
        if operator.shape[0] == weights:
            return extremes
        # The directions that the inputs do not span have the eigenvalue 0.
        top = extremes.top
        bottom = extremes.bottom
        return replace(
            extremes,
            top=top if top.value > 0 else _zero(top),
            bottom=bottom if bottom.value < 0 else _zero(bottom),
        )

    def _through_output(self, name: str) -> operators.LinearOperator | None:
        """The block by products with `H_a`; None where the weight is used more than once."""
        if not all(name in calls for calls in self._calls):
            return None
        uses = [calls[name] for calls in self._calls]
        call = uses[0].call
        smaller = None
        if len(uses) == 1 and isinstance(call, layer_uses.DenseCall):
            smaller = seen_hessian(uses[0]) if call.rows < call.inputs.shape[1] else None
        return smaller or CallHessian(uses, self._evaluations[0].problem.leaves[name])


def _zero(estimate: Estimate) -> Estimate:
    error = max(0.0, estimate.error - abs(estimate.value))
    reason = estimate.reason if error else "the inputs do not see some directions of the weight"
    return replace(estimate, value=0.0, error=error, reason=reason)


def _single_calls(evaluation: Evaluation) -> dict[str, OutputHessian]:
    """The leaves that are used exactly once, by a call with a known derivative."""
    uses = evaluation.uses
    calls = layer_uses.known_calls(uses, evaluation.problem.leaves, 1)
    calls = [layer_call for layer_call in calls if len(uses[layer_call.name]) == 1]
    if not calls:
        return {}
    gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
        evaluation.loss,
        [layer_call.edge for layer_call in calls],
        create_graph=True,
        allow_unused=True,
    )
    return {
        layer_call.name: OutputHessian(
            layer_call.call, layer_call.edge, gradient, evaluation.weight
        )
        for layer_call, gradient in zip(calls, gradients, strict=True)
        if gradient is not None
    }
