"""The three operators of the project, each for one layer or for several together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hessinit.operators.base import LinearOperator, join, split
from hessinit.operators.evaluation import Evaluation


class WeightOperator(LinearOperator):
    """Something that acts on the weights of `names`, summed over the evaluated batches."""

    def __init__(self, evaluations: Sequence[Evaluation], names: Sequence[str]) -> None:
        leaves = evaluations[0].leaves
        self.evaluations = list(evaluations)
        self.names = list(names)
        self.shapes = [tuple(leaves[name].shape) for name in names]
        size = sum(leaves[name].numel() for name in names)
        self.shape = (size, size)
        self.dtype = leaves[names[0]].dtype
        self.device = evaluations[0].problem.device


class HessianOperator(WeightOperator):
    """The exact Hessian of the loss: reverse over reverse, on one retained gradient graph.

    A product costs about two gradients for the whole network, less for late layers.
    """

    def _product(self, vector: Tensor) -> Tensor:
        tangents = split(vector, self.shapes)
        total: Tensor | None = None
        for evaluation in self.evaluations:
            leaves = [evaluation.leaves[name] for name in self.names]
            pairs = [
                (evaluation.gradients[name], tangent)
                for name, tangent in zip(self.names, tangents, strict=True)
                if evaluation.gradients[name].requires_grad
            ]
            if pairs:
                gradients, directions = zip(*pairs, strict=True)
                parts = torch.autograd.grad(
                    gradients, leaves, directions, retain_graph=True, materialize_grads=True
                )
                product = join(parts)
            else:
                product = torch.zeros_like(vector)  # a loss that is linear in these weights
            total = _accumulate(total, product, evaluation.weight)
        assert total is not None
        return total


class GaussNewtonOperator(WeightOperator):
    """`Jᵀ H_z J`, the paper's Theorem 1: the loss's curvature seen through the model's first derivative.

    The exact Hessian's block for piecewise-linear networks. A product costs about two gradients.
    """

    def _product(self, vector: Tensor) -> Tensor:
        tangents = split(vector, self.shapes)
        total: Tensor | None = None
        for evaluation in self.evaluations:
            moved = evaluation.push(self.names, tangents)
            product = join(evaluation.pull(self.names, evaluation.output_hessian(moved)))
            total = _accumulate(total, product, evaluation.weight)
        assert total is not None
        return total


class JacobianOperator(WeightOperator):
    """`J`: the derivative of all outputs of all batches by the weights, (outputs, weights)."""

    def __init__(self, evaluations: Sequence[Evaluation], names: Sequence[str]) -> None:
        super().__init__(evaluations, names)
        self._rows = [evaluation.output.numel() for evaluation in self.evaluations]
        self.shape = (sum(self._rows), self.shape[1])

    def _product(self, vector: Tensor) -> Tensor:
        tangents = split(vector, self.shapes)
        return join([evaluation.push(self.names, tangents) for evaluation in self.evaluations])

    def _adjoint_product(self, vector: Tensor) -> Tensor:
        parts = zip(self.evaluations, vector.split(self._rows), strict=True)
        pulled = [join(e.pull(self.names, part.view_as(e.output))) for e, part in parts]
        return torch.stack(pulled).sum(0)


def _accumulate(total: Tensor | None, product: Tensor, weight: float) -> Tensor:
    product = product.detach() if weight == 1.0 else product.detach() * weight
    return product if total is None else total + product
