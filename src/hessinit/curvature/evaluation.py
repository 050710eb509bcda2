"""Evaluations of a batch: output and loss, their graphs, derivatives, and what a gradient costs."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hessinit.curvature import layer_uses, tangents
from hessinit.curvature.loss_hessian import (
    LIMITS,
    LossFactor,
    OutputLoss,
    SoftmaxHessian,
    factor_loss_hessian,
)
from hessinit.errors import ProblemError, argument
from hessinit.problem.batches import Batch, cast, tensors_in
from hessinit.problem.checks import check_forward
from hessinit.problem.functional import FunctionalProblem


def weights_in(problem: FunctionalProblem, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights of the problem in the dtype, without a graph."""
    weights = {**problem.leaves, **problem.constants}
    return {name: cast(weight, dtype, weight.device) for name, weight in weights.items()}


class graph_property(cached_property):  # type: ignore[type-arg]  # noqa: N801 (as cached_property)
    """A part of the graphs: built on first use, freed by `BatchGraph.graphs`."""


class BatchGraph:
    """Output and loss of a batch with their graphs, at the problem's weights or at others."""

    def __init__(
        self,
        problem: FunctionalProblem,
        batch: Batch,
        weight: float = 1.0,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.problem = problem
        self.batch = batch
        self.weight = weight  # of this batch in the loss of all
        self.leaves = problem.leaves
        if weights is not None:
            self.leaves = {name: weights[name] for name in problem.leaves}
        self._weights = weights

    @contextlib.contextmanager
    def graphs(self, *, anew: bool = False) -> Iterator[None]:
        """Free the graphs, and most of the memory, at the end of the block.

        With `anew` they are freed at its start, too. Whatever is used after that is built again.
        """
        try:
            if anew:
                self._free_graphs()
            yield
        finally:
            self._free_graphs()

    def _free_graphs(self) -> None:
        for name in list(vars(self)):
            if isinstance(getattr(type(self), name, None), graph_property):
                del vars(self)[name]

    @graph_property
    def output(self) -> Tensor:
        return self.problem.output(self.batch, weights=self._weights)

    @graph_property
    def loss(self) -> Tensor:
        return self.problem.loss_of(self.output, self.batch)

    @graph_property
    def uses(self) -> layer_uses.Uses:
        return layer_uses.find_uses(self.output, self.leaves)

    @graph_property
    def gradients(self) -> dict[str, Tensor]:
        """The loss gradient by every leaf, itself differentiable."""
        return self._by_leaf(self.loss, None)

    @graph_property
    def adjoint(self) -> tuple[Tensor, dict[str, Tensor]]:
        """A placeholder `u` and `Jᵀu`: its derivative by `u`, in which it is linear, is `J`."""
        placeholder = torch.zeros_like(self.output, requires_grad=True)
        return placeholder, self._by_leaf(self.output, placeholder)

    def _by_leaf(self, output: Tensor, cotangent: Tensor | None) -> dict[str, Tensor]:
        leaves = list(self.leaves.values())
        gradients = torch.autograd.grad(
            output, leaves, cotangent, create_graph=True, materialize_grads=True
        )
        return dict(zip(self.leaves, gradients, strict=True))

    @graph_property
    def at_output(self) -> OutputLoss:
        return OutputLoss(self.problem, self.output, self.batch)

    @graph_property
    def softmax(self) -> SoftmaxHessian | None:
        """The closed form of `H_z`, where the output is large and the loss is a cross-entropy."""
        if self.output.numel() <= LIMITS.least_closed_form or self.output.ndim < 2:
            return None
        closed_form = SoftmaxHessian.recognize(self.at_output)
        if closed_form is not None:
            del self.at_output  # its graph holds the output several times over
        return closed_form

    @cached_property
    def factor(self) -> LossFactor | str:
        """The factorization of `H_z`, or why there is none; it outlives the graphs."""
        return factor_loss_hessian(self)

    def output_hessian(self, tangent: Tensor, *, overwrite: bool = False) -> Tensor:
        """`H_z` times a tangent of the output, in its dtype; cheap, the model is not involved."""
        factor = vars(self).get("factor")  # where an engine has needed it
        if isinstance(factor, LossFactor):
            return factor.product(tangent)
        if self.softmax is None:
            return self.at_output.hessian(tangent)
        return self.softmax.product(tangent if overwrite else tangent.clone())

    @graph_property
    def _recorded(self) -> tangents.RecordedGraph:
        return tangents.RecordedGraph(self.output)

    @property
    def numbers_per_node(self) -> float:
        """The mean size of what the operations of the forward return."""
        return self._recorded.numbers_per_node()

    def push(self, names: Sequence[str], changes: Sequence[Tensor]) -> Tensor:
        """`J` times a change of the named leaves.

        Tangents pass through the recorded graph; where that cannot be, `Jᵀu` is differentiated by
        `u`.
        """
        leaves = [self.leaves[name] for name in names]
        changes = [change.to(leaf.dtype) for change, leaf in zip(changes, leaves, strict=True)]
        recorded = self._recorded
        with contextlib.suppress(tangents.NoTangentError):
            tangent = recorded.push(leaves, changes)
            return torch.zeros_like(self.output) if tangent is None else tangent
        placeholder, adjoint = self.adjoint
        return _grad_along([adjoint[name] for name in names], [placeholder], changes)[0]

    def hessian(self, names: Sequence[str], changes: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The Hessian of the loss times a change of the named leaves, reverse over reverse."""
        gradients = [self.gradients[name] for name in names]
        leaves = [self.leaves[name] for name in names]
        return _grad_along(gradients, leaves, changes)

    def pull(self, names: Sequence[str], cotangent: Tensor) -> tuple[Tensor, ...]:
        """`Jᵀ` times a cotangent of the output, for the named leaves."""
        leaves = [self.leaves[name] for name in names]
        output = self.output
        return torch.autograd.grad(
            output, leaves, cotangent, retain_graph=True, materialize_grads=True
        )

    def loss_gradients(self) -> Sequence[Tensor]:
        """The gradient of the loss by every leaf, times the weight of this batch.

        The graphs are freed.
        """
        with self.graphs():
            loss = self.loss
        leaves = list(self.leaves.values())
        gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
        if self.weight == 1:
            return gradients
        return [gradient * self.weight for gradient in gradients]

    def at_weights(self, weights: Mapping[str, Tensor]) -> BatchGraph:
        """The same batch at other weights, with graphs of its own."""
        leaves = {name: weights[name].requires_grad_() for name in self.leaves}
        return BatchGraph(self.problem, self.batch, weights={**weights, **leaves})

    def in_float64(self) -> BatchGraph:
        """The same batch at the same weights in float64, with graphs of its own."""
        return self.at_weights(weights_in(self.problem, torch.float64))


def _grad_along(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], changes: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    differentiable = [
        (output, change.to(output.dtype))
        for output, change in zip(outputs, changes, strict=True)
        if output.requires_grad
    ]
    if not differentiable:
        return tuple(torch.zeros_like(tensor) for tensor in inputs)
    dependent, along = zip(*differentiable, strict=True)
    return torch.autograd.grad(dependent, inputs, along, retain_graph=True, materialize_grads=True)


class Evaluation(BatchGraph):
    """A batch at the problem's weights, checked: finite, deterministic, a function of them."""

    separable: bool  # whether a part of the batch can be evaluated alone
    adds_to_loss: str | None = None  # a weight on which the loss depends beside the output

    def __init__(self, problem: FunctionalProblem, batch: Batch) -> None:
        super().__init__(problem, batch)
        call, self.separable = check_forward(problem, batch)
        self.output = call.output
        self.output_shape = call.output.shape
        self.sample = _sample(batch, call.output)
        self.drew = call.drew
        self.casts_output = call.casts_output
        self.forward_seconds = call.seconds
        self.loss_value = float(call.loss.detach())
        if call.output.numel() <= LIMITS.large_output:
            self.loss = call.loss  # of a large output its graph holds several copies
        # When each leaf was first used, in the forward's own count; None for one that is not used.
        self.moments = {name: uses[0].moment if uses else None for name, uses in self.uses.items()}
        # The rows of embeddings that get no gradient.
        self.paddings = {
            name: {use.padding for use in uses} - {None} for name, uses in self.uses.items()
        }
        self._checks_made: set[str] = set()

    def weighted(self, weight: float, moments: dict[str, int | None] | None = None) -> Evaluation:
        """The same evaluation with another weight in the loss; what is built already is shared."""
        made = copy.copy(self)
        made.weight = weight
        made.moments = self.moments if moments is None else moments
        return made

    def loss_of_sample(self) -> OutputLoss:
        """The loss of a sample's outputs, or of all outputs if the loss needs the whole batch."""
        outputs = self.output.detach()
        sample = outputs[self.sample.to(outputs.device)]
        loss_of_sample = OutputLoss(self.problem, sample, self.batch.take(self.sample))
        with contextlib.suppress(Exception):  # whatever a loss that needs the whole batch raises
            assert loss_of_sample.gradient is not None
            return loss_of_sample
        return OutputLoss(self.problem, outputs, self.batch)

    def output_at_hand(self) -> Tensor | None:
        """The output without its graph, if it need not be built again."""
        output = vars(self).get("output")
        return None if output is None else output.detach()

    def is_due(self, check: str) -> bool:
        """Whether a check of the derivatives is wanted; each is made once."""
        due = self.problem.check and check not in self._checks_made
        self._checks_made.add(check)
        return due


def _sample(batch: Batch, output: Tensor) -> Tensor:
    """The numbers of some examples; of one or two, where they are large."""
    examples = batch.sample()
    inputs = sum(tensor.numel() for tensor in tensors_in(batch.inputs))
    if inputs // batch.size > 2**16:  # an image of 224², with all that its layers make of it
        examples = examples[:2]
    outputs = output[:1].numel() if output.ndim else 1
    return examples[:1] if outputs > LIMITS.large_output // 8 else examples


@contextlib.contextmanager
def graphs_of(evaluations: Sequence[BatchGraph], *, anew: bool = False) -> Iterator[None]:
    """Free the graphs of all evaluations at the end of the block; `anew`, also at its start."""
    with contextlib.ExitStack() as stack:
        for evaluation in evaluations:
            stack.enter_context(evaluation.graphs(anew=anew))
        yield


def join_evaluations(evaluations: list[Evaluation]) -> list[Evaluation]:
    """The evaluations of all batches, weighted by their examples if the loss is a mean."""
    problem = evaluations[0].problem
    if len(evaluations) == 1:
        return evaluations
    reduction = find_reduction(evaluations)
    if reduction is None:
        raise ProblemError(
            "whether the loss adds its examples up or averages them decides how several batches "
            "are joined, and its values do not tell: it compares examples, or depends on the size "
            "of a batch. Pass ",
            argument("reduction", "mean"),
            " (batches are averaged over examples) or ",
            argument("reduction", "sum"),
            " (they are added up).",
        )
    if reduction != "mean":
        return evaluations
    return [evaluation.weighted(evaluation.batch.rows / problem.rows) for evaluation in evaluations]


_SAME_FACTOR = 1e-3  # relative difference up to which two factors of a gradient are the same


def find_reduction(evaluations: Sequence[Evaluation]) -> str | None:
    """Whether the loss is a "mean" or a "sum" over examples; None if it is neither.

    Where the outputs of a batch are joined with others, the gradients of a mean shrink by the
    batch's share.
    """
    problem = evaluations[0].problem
    if problem.reduction != "auto":
        return problem.reduction
    first = evaluations[0]
    last = evaluations[-1]
    pairs = [(first, first)]
    if last is not first:
        pairs += [(first, last), (last, first)]
    factors = [_shrinkage(evaluation, joined) for evaluation, joined in pairs]
    numbers = [factor for factor in factors if factor is not None]
    if not numbers:
        # Torch's own losses are what they say; that of anybody else may say anything.
        from_torch = type(problem.loss).__module__ == "torch.nn.modules.loss"
        return str(getattr(problem.loss, "reduction", None)) if from_torch else None
    if all(abs(factor - 1) < _SAME_FACTOR for factor in numbers):
        return "sum"
    doubled, *shares = factors
    halves = doubled is None or abs(doubled - 0.5) < _SAME_FACTOR
    adds_to_one = None in shares or not shares or abs(sum(numbers[-2:]) - 1) < _SAME_FACTOR
    return "mean" if halves and adds_to_one else None


def _shrinkage(evaluation: Evaluation, joined: Evaluation) -> float | None:
    """The factor by which another batch shrinks the gradient by the outputs; nan if it turns it."""
    targets = evaluation.batch.joined_targets(joined.batch)
    outputs = [evaluation.output.detach(), joined.output.detach()]
    if targets is None or outputs[0].ndim == 0 or outputs[0].shape[1:] != outputs[1].shape[1:]:
        return None
    joined_outputs = torch.cat(outputs).requires_grad_()
    try:
        loss = evaluation.problem.loss_of(joined_outputs, targets)
    except Exception:  # whatever a loss that knows its batch raises
        return None
    (gradient,) = torch.autograd.grad(loss, joined_outputs)
    together = gradient[: len(outputs[0])].double()
    alone = evaluation.at_output.gradient[1].detach().double()
    square = float((alone * alone).sum())
    if square == 0 or not math.isfinite(square):
        return None
    factor = float((together * alone).sum()) / square
    off = float((together - factor * alone).norm())
    return factor if off <= _SAME_FACTOR * abs(factor) * math.sqrt(square) else math.nan


def unused_leaves(evaluations: Sequence[Evaluation]) -> set[str]:
    """The weights that no batch's forward touches."""
    return {
        name
        for name in evaluations[0].leaves
        if all(evaluation.moments[name] is None for evaluation in evaluations)
    }


# A gradient shorter than this is timed twice, and the shorter one counts: a cold start or another
# process may have doubled it.
_SHORT_SECONDS = 0.005


@dataclass(frozen=True)
class LossGradient:
    """The gradient of the loss of all batches, and the seconds of its forwards and backwards."""

    by_leaf: Mapping[str, Tensor]
    output: Tensor  # of the first batch
    seconds: float


def loss_gradient(evaluations: Sequence[Evaluation]) -> LossGradient:
    """The gradient of the loss by the measured weights, from the graphs, which are freed.

    Costs a backward pass; the seconds of the forward are those of each evaluation's first one.
    """
    by_leaf = dict[str, Tensor]()
    outputs = list[Tensor]()
    seconds = 0.0
    for evaluation in evaluations:
        assert evaluation.loss is not None  # its graph is built before the clock starts
        outputs = outputs or [evaluation.output.detach()]
        started = evaluation.problem.clock()
        gradients = evaluation.loss_gradients()
        seconds += evaluation.forward_seconds + evaluation.problem.clock() - started
        for name, part in zip(evaluation.leaves, gradients, strict=True):
            by_leaf[name] = by_leaf[name] + part if name in by_leaf else part
    return LossGradient(by_leaf, outputs[0], seconds)


def gradient_seconds(problem: FunctionalProblem) -> float:
    """The seconds of a forward and backward of all batches, of the plain model, on warm caches."""
    weights = {**problem.leaves, **problem.constants}
    seconds = list[float]()
    while not seconds or (len(seconds) < 2 and seconds[-1] < _SHORT_SECONDS):
        started = problem.clock()
        for batch in problem.batches:
            problem.output_and_gradients(batch, weights, list(problem.leaves))
        seconds.append(problem.clock() - started)
    return min(seconds)


def in_gradients(seconds: float | None, gradient: float | None) -> float | None:
    """The cost in gradients, from the seconds of one; None where one of both is not known."""
    return seconds / gradient if seconds is not None and gradient else None


def cost_since(started: float, evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """The fields `seconds` and `gradients` of a result; the graphs are freed."""
    seconds = evaluations[0].problem.clock() - started
    gradient = loss_gradient(evaluations).seconds
    return {"seconds": seconds, "gradients": in_gradients(seconds, gradient)}
