"""One batch evaluated once; its graph is kept and shared by every operator and every layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from hessinit.operators.second_derivative import check_second_derivative
from hessinit.problem.batches import Batch
from hessinit.problem.first_look import FirstLook, take_first_look
from hessinit.problem.graph import Use, find_uses
from hessinit.problem.problem import Problem


class Evaluation:
    """A batch's output and loss with their graph, and the derivative graphs that are built on first use."""

    def __init__(self, problem: Problem, batch: Batch, weight: float) -> None:
        self.problem = problem
        self.batch = batch
        self.weight = weight
        self._checked = False
        look: FirstLook = take_first_look(problem, batch)
        self.output = look.output
        self.loss = look.loss
        self.loss_value = float(look.loss.detach())
        # When each leaf was first used, in the forward's own count; None for a leaf it does not touch.
        self.moments = {name: uses[0].moment if uses else None for name, uses in self.uses.items()}

    def require_second_derivative(self) -> None:
        """Refuse a forward that torch cannot differentiate twice; looked at once."""
        if not self._checked:
            check_second_derivative(self)
            self._checked = True

    def forget(self) -> None:
        """Let the graphs go and with them most of the memory; whoever needs them next evaluates once more."""
        for name in ("output", "loss", "uses", "gradients", "adjoint", "output_gradient"):
            self.__dict__.pop(name, None)

    @cached_property
    def output(self) -> Tensor:
        """The model's output, with its graph."""
        return self.problem.output(self.batch)

    @cached_property
    def loss(self) -> Tensor:
        """The loss of that output."""
        return self.problem.loss_of(self.output, self.batch)

    @cached_property
    def uses(self) -> dict[str, list[Use]]:
        """Where the forward used each leaf."""
        return find_uses(self.output, self.problem.leaves)

    @cached_property
    def gradients(self) -> dict[str, Tensor]:
        """The loss gradient by every leaf, itself differentiable: one backward pass for all products."""
        self.require_second_derivative()
        found = torch.autograd.grad(
            self.loss, list(self.problem.leaves.values()), create_graph=True, materialize_grads=True
        )
        return dict(zip(self.problem.leaves, found, strict=True))

    @cached_property
    def adjoint(self) -> tuple[Tensor, dict[str, Tensor]]:
        """A placeholder `u` and `Jᵀu`, linear in `u`: differentiating it by `u` gives products with `J`."""
        placeholder = torch.zeros_like(self.output, requires_grad=True)
        found = torch.autograd.grad(
            self.output,
            list(self.problem.leaves.values()),
            placeholder,
            create_graph=True,
            materialize_grads=True,
        )
        return placeholder, dict(zip(self.problem.leaves, found, strict=True))

    @cached_property
    def output_gradient(self) -> tuple[Tensor, Tensor]:
        """The output cut off from the model, and the loss gradient by it, differentiable."""
        cut = self.output.detach().requires_grad_()
        loss = self.problem.loss_of(cut, self.batch)
        (gradient,) = torch.autograd.grad(loss, cut, create_graph=True)
        return cut, gradient

    def output_hessian(self, tangent: Tensor) -> Tensor:
        """`H_z` times a tangent of the output; cheap, the model is not involved."""
        cut, gradient = self.output_gradient
        if not gradient.requires_grad:
            return torch.zeros_like(tangent)
        (product,) = torch.autograd.grad(gradient, cut, tangent, retain_graph=True, materialize_grads=True)
        return product

    def push(self, names: Sequence[str], tangents: Sequence[Tensor]) -> Tensor:
        """`J` times a change of the named leaves, by differentiating `Jᵀu` by `u` (no forward-mode gaps)."""
        self.require_second_derivative()
        return self.push_unchecked(names, tangents)

    def push_unchecked(self, names: Sequence[str], tangents: Sequence[Tensor]) -> Tensor:
        """The same, whatever the second derivatives are worth."""
        placeholder, adjoint = self.adjoint
        pairs = [
            (adjoint[name], t) for name, t in zip(names, tangents, strict=True) if adjoint[name].requires_grad
        ]
        if not pairs:
            return torch.zeros_like(self.output)
        outputs, weights = zip(*pairs, strict=True)
        (tangent,) = torch.autograd.grad(
            outputs, placeholder, weights, retain_graph=True, materialize_grads=True
        )
        return tangent

    def pull(self, names: Sequence[str], cotangent: Tensor) -> tuple[Tensor, ...]:
        """`Jᵀ` times a cotangent of the output, for the named leaves."""
        leaves = [self.problem.leaves[name] for name in names]
        return torch.autograd.grad(self.output, leaves, cotangent, retain_graph=True, materialize_grads=True)


def evaluate(problem: Problem) -> list[Evaluation]:
    """Every batch once. Means are weighted by examples, so a short batch counts for less; sums add up."""
    total = problem.examples
    first = Evaluation(problem, problem.batches[0], 1.0)
    if len(problem.batches) == 1:
        return [first]
    sums = reduces_by_sum(first)
    first.weight = 1.0 if sums else problem.batches[0].size / total
    return [first] + [
        Evaluation(problem, batch, 1.0 if sums else batch.size / total) for batch in problem.batches[1:]
    ]


def reduces_by_sum(evaluation: Evaluation) -> bool:
    """Whether the loss adds its examples up: found by giving it every example twice."""
    reduction = getattr(evaluation.problem.loss, "reduction", None)
    if isinstance(reduction, str):
        return reduction == "sum"
    output = evaluation.output.detach()
    if output.ndim == 0:
        return False
    # Not the batch's own size: outputs and targets may be flattened over examples and positions.
    batch = Batch(evaluation.batch.inputs, evaluation.batch.targets, output.shape[0])
    twice = batch.take(torch.arange(batch.size).repeat(2))
    try:
        doubled = float(evaluation.problem.loss_of(output.repeat(2, *[1] * (output.ndim - 1)), twice))
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False
    once = float(evaluation.loss.detach())
    return abs(doubled - 2 * once) < abs(doubled - once)


def unused_leaves(evaluations: Sequence[Evaluation]) -> set[str]:
    """The weights that no batch's forward touches."""
    unused = set(evaluations[0].problem.leaves)
    for evaluation in evaluations:
        unused -= {name for name, moment in evaluation.moments.items() if moment is not None}
    return unused
