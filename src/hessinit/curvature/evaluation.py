"""Evaluations of a batch: output, loss, derivative graphs, the factor of the loss Hessian, moved weights."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hessinit.curvature import krylov, layer_uses, probes, tangents
from hessinit.errors import DerivativeError, ProblemError, WeightsError
from hessinit.problem.batches import Batch, cast, tensors_in
from hessinit.problem.determinism import check_forward
from hessinit.problem.explained import explained_derivatives
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.validate import name_large_inputs

Direction = Mapping[str, Tensor]


def output_at(
    evaluation: Evaluation,
    direction: Direction,
    step: float,
    dtype: torch.dtype,
    examples: Tensor | None = None,
) -> Tensor:
    """The output at the weights plus `step` times the direction, of some examples; costs one forward."""
    problem = evaluation.problem
    batch = evaluation.batch if examples is None else evaluation.batch.take(examples)
    with moved(problem, direction, step, dtype) as weights:
        with contextlib.suppress(RuntimeError, ProblemError), torch.no_grad():
            return problem.output(batch, weights=weights, plain=True)
        # A forward that differentiates by its inputs or its weights needs the graph; any other
        # fails again.
        weights = {
            name: weight.requires_grad_(name in direction) for name, weight in weights.items()
        }
        return problem.output(batch, weights=weights, plain=True).detach()


def weights_in(problem: FunctionalProblem, dtype: torch.dtype) -> dict[str, Tensor]:
    own = {**problem.leaves, **problem.constants}
    return {name: cast(weight, dtype, weight.device) for name, weight in own.items()}


@contextlib.contextmanager
def moved(
    problem: FunctionalProblem, direction: Direction, step: float, dtype: torch.dtype
) -> Iterator[dict[str, Tensor]]:
    """The moved weights, also as `.data` of the model's own parameters; their storage is not written to."""
    weights = weights_in(problem, dtype)
    for name, part in direction.items():
        weights[name] = torch.add(weights[name], part.to(dtype), alpha=step)
    own = {name: problem.model.get_parameter(name) for name in direction}
    # Another dtype would cut a parameter off from hooks that wait for its gradient, as those of DDP
    # do.
    own = {name: one for name, one in own.items() if one.dtype == dtype and not one.is_inference()}
    saved = {name: one.data for name, one in own.items()}
    try:
        for name, parameter in own.items():
            parameter.data = weights[name].detach()
        yield weights
    finally:
        for name, parameter in own.items():
            parameter.data = saved[name]


# From here on a copy of the output takes memory that counts.
_LARGE_OUTPUT = 2**23
# From here on the closed form of `H_z` pays; below, the Gram engine factors it.
_LEAST_CLOSED = 2**13
# By which a number of the closed form may differ from the loss's own, for logits of size 1.
_LAST_PLACES = 16


class OutputLoss:
    """The loss as a function of the output of some examples, cut off from the model."""

    def __init__(self, problem: FunctionalProblem, output: Tensor, batch: Batch) -> None:
        self.problem = problem
        self.batch = batch
        self._output = output

    @cached_property
    def gradient(self) -> tuple[Tensor, Tensor]:
        """The detached output and the loss gradient by it, differentiable, in the dtype of the loss."""
        cut = self._output.detach().to(self.problem.loss_dtype).requires_grad_()
        loss = self.problem.loss_of(cut, self.batch)
        (gradient,) = torch.autograd.grad(loss, cut, create_graph=True)
        return cut, gradient

    def hessian(self, tangent: Tensor) -> Tensor:
        cut, gradient = self.gradient
        if not gradient.requires_grad:
            return torch.zeros_like(tangent)
        with explained_derivatives(of_loss=True):
            (product,) = torch.autograd.grad(
                gradient, cut, tangent.to(cut.dtype), retain_graph=True, materialize_grads=True
            )
        return product.to(tangent.dtype)


class SoftmaxHessian:
    """`H_z` of a cross-entropy, in closed form: `w (diag p − p pᵀ)` in every row of logits.

    Works through some rows at a time, so that of a vocabulary's logits no second copy is held; in
    the dtype of the weights, which is that of the loss.
    """

    def __init__(self, output: Tensor, dimension: int, weights: Tensor) -> None:
        self._logits = output
        self._dimension = dimension
        self._weights = weights

    @classmethod
    def found(cls, output: Tensor, loss: OutputLoss, seed: int) -> SoftmaxHessian | None:
        """The closed form, if in every row the loss's own product is that of a cross-entropy, up to rounding.

        A cross-entropy does not bend along ones, as other losses of the logits do: they are half
        the tangent.
        """
        tangent = probes.random_like(output, seed, loss.problem.loss_dtype) + 1
        product = loss.hessian(tangent)
        for dimension in (-1, 1) if output.ndim > 2 else (-1,):
            found = cls(
                output,
                dimension,
                torch.zeros_like(tangent.select(dimension, 0)).unsqueeze(dimension),
            )
            if bool(product.any()) and found._fits(tangent, product):
                return found
        return None

    def _fits(self, tangent: Tensor, product: Tensor) -> bool:
        """Whether some weights of the rows, which are stored, explain every number of the product."""
        digit = torch.finfo(tangent.dtype).eps
        for (logits, weights, along), (_, _, expected) in zip(
            self._rows(tangent), self._rows(product), strict=True
        ):
            shares = torch.softmax(logits, 1, dtype=tangent.dtype)
            along = shares * along
            closed = along - shares * along.sum(1, keepdim=True)
            size = along.abs_()
            largest = 1 + logits.abs().amax(1, keepdim=True).to(size)
            rounding = size.add_(shares * size.sum(1, keepdim=True)).mul_(
                _LAST_PLACES * digit * largest
            )
            # In units of its rounding, a number that a confident softmax makes small counts as any
            # other one.
            closed = closed / rounding.add_(digit**2)
            expected = expected / rounding
            square = closed.square().sum(1, keepdim=True)
            # Where all is rounding, as in a row whose softmax is 0 and 1, nothing tells the weight.
            weights.copy_(
                torch.where(square > 1, (closed * expected).sum(1, keepdim=True) / square, 0)
            )
            allowed = torch.where(square > 1, weights, weights.amax())
            if not bool(((expected - weights * closed).abs() <= allowed).all()):
                return False
        return True

    def product(self, tangent: Tensor) -> Tensor:
        """Overwrites the tangent."""
        for logits, weights, some in self._rows(tangent):
            shares = torch.softmax(logits, 1, dtype=weights.dtype)
            along = some.to(weights.dtype)
            mean = (shares * along).sum(1, keepdim=True)
            some.copy_(shares.mul_(along.sub_(mean)).mul_(weights))
        return tangent

    def sample(self, noise: Tensor) -> Tensor:
        """Overwrites standard normal noise with normal numbers that have `H_z` as their covariance."""
        for logits, weights, some in self._rows(noise):
            shares = torch.softmax(logits, 1, dtype=weights.dtype)
            roots = shares.sqrt()
            along = (roots * some).sum(1, keepdim=True)
            some.copy_(roots.mul_(some).sub_(shares.mul_(along)).mul_(weights.sqrt()))
        return noise

    def _rows(self, tangent: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Logits, weights and tangents, some examples at a time, with the classes in dimension 1."""
        step = max(1, _LARGE_OUTPUT // tangent[0].numel())
        whole = [one.movedim(self._dimension, -1) for one in (self._logits, self._weights, tangent)]
        for part in (slice(first, first + step) for first in range(0, len(tangent), step)):
            logits, weights, some = (one[part] for one in whole)
            count = logits.shape[-1]
            flat = some.reshape(-1, count)
            yield logits.reshape(-1, count), weights.reshape(-1, 1), flat
            if flat.data_ptr() != some.data_ptr():
                some.copy_(flat.view_as(some))


class Evaluation:
    """A batch's output and loss with their graphs, built on first use; at the problem's weights or others."""

    def __init__(
        self,
        problem: FunctionalProblem,
        batch: Batch,
        weight: float = 1.0,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.problem = problem
        self.batch = batch
        self.weight = weight
        self.leaves = (
            problem.leaves if weights is None else {name: weights[name] for name in problem.leaves}
        )
        self._weights = weights
        self.passed: set[str] = set()  # the checks of derivatives that were made
        self.separable = False  # whether a part of the batch can be evaluated alone
        self.drew = False  # random numbers, in the first call
        self.casts_output = False  # to a lower precision than that of the weights
        self.factor: LossFactor | None = None  # of `H_z`, where an engine needed it

    @classmethod
    def inspected(cls, problem: FunctionalProblem, batch: Batch) -> Evaluation:
        """An evaluation that was checked: finite, deterministic, and a function of the weights."""
        one = cls(problem, batch)
        call, one.separable = check_forward(problem, batch)
        one.output = call.output
        one.loss = call.loss
        one.drew = call.drew
        one.casts_output = call.casts_output
        del call
        one.loss_value = float(one.loss.detach())
        if one.output.numel() > _LARGE_OUTPUT:
            del (
                one.loss
            )  # its graph holds the output several times over; whoever needs it evaluates again
        # When each leaf was first used, in the forward's own count; None for a leaf it does not
        # touch.
        one.moments = {name: uses[0].moment if uses else None for name, uses in one.uses.items()}
        one.paddings = {
            name: {use.padding for use in uses} - {None} for name, uses in one.uses.items()
        }
        return one

    loss_value: float
    moments: dict[str, int | None]
    paddings: dict[str, set[int | None]]  # rows of embeddings that get no gradient

    def alone(self) -> Evaluation:
        """The same evaluation as that of the only batch."""
        evaluation = copy.copy(self)
        evaluation.weight = 1.0
        return evaluation

    def forget(self) -> None:
        """Free the graphs and most of the memory; the next use evaluates again."""
        for name in (
            "output",
            "loss",
            "uses",
            "gradients",
            "adjoint",
            "at_output",
            "softmax",
            "_recorded",
        ):
            self.__dict__.pop(name, None)

    @cached_property
    def output(self) -> Tensor:
        return self.problem.output(self.batch, weights=self._weights)

    @cached_property
    def loss(self) -> Tensor:
        return self.problem.loss_of(self.output, self.batch)

    @cached_property
    def uses(self) -> layer_uses.Uses:
        return layer_uses.find_uses(self.output, self.leaves)

    @cached_property
    def gradients(self) -> dict[str, Tensor]:
        """The loss gradient by every leaf, itself differentiable: one backward pass for all products."""
        return self._by_leaf(self.loss, None)

    @cached_property
    def adjoint(self) -> tuple[Tensor, dict[str, Tensor]]:
        """A placeholder `u` and `Jᵀu`, linear in `u`: differentiating it by `u` gives products with `J`."""
        placeholder = torch.zeros_like(self.output, requires_grad=True)
        return placeholder, self._by_leaf(self.output, placeholder)

    def _by_leaf(self, output: Tensor, cotangent: Tensor | None) -> dict[str, Tensor]:
        leaves = list(self.leaves.values())
        found = torch.autograd.grad(
            output, leaves, cotangent, create_graph=True, materialize_grads=True
        )
        return dict(zip(self.leaves, found, strict=True))

    @cached_property
    def at_output(self) -> OutputLoss:
        return OutputLoss(self.problem, self.output, self.batch)

    @cached_property
    def softmax(self) -> SoftmaxHessian | None:
        """The closed form of `H_z`, where the output is large and the loss is a cross-entropy."""
        output = self.output.detach()
        if output.numel() <= _LEAST_CLOSED or output.ndim < 2:
            return None
        found = SoftmaxHessian.found(output, self.at_output, self.problem.seed)
        if found is not None:
            del self.at_output  # its graph holds the output several times over
        return found

    def sample(self) -> Tensor:
        """The numbers of some examples; of one or two, where they are large."""
        some = self.batch.sample()
        numbers = sum(one.numel() for one in tensors_in(self.batch.inputs)) // self.batch.size
        some = (
            some[:2] if numbers > 2**16 else some
        )  # an image of 224², with all that its layers make of it
        each = self.output[:1].numel() if self.output.ndim else 1
        return some[:1] if each > _LARGE_OUTPUT // 8 else some

    def loss_of_some(self) -> OutputLoss:
        """The loss of the outputs of some examples, or of all where it does not take fewer."""
        some = self.sample()
        outputs = self.output.detach()
        part = OutputLoss(self.problem, outputs[some.to(outputs.device)], self.batch.take(some))
        with contextlib.suppress(Exception):  # whatever a loss that needs the whole batch raises
            assert part.gradient is not None
            return part
        return OutputLoss(self.problem, outputs, self.batch)

    def output_hessian(self, tangent: Tensor, *, overwrite: bool = False) -> Tensor:
        """`H_z` times a tangent of the output, in the tangent's dtype; cheap, the model is not involved."""
        if self.factor is not None:
            return self.factor.product(tangent)
        if self.softmax is None:
            return self.at_output.hessian(tangent)
        return self.softmax.product(tangent if overwrite else tangent.clone())

    @cached_property
    def _recorded(self) -> tangents.RecordedGraph:
        return tangents.RecordedGraph(self.output)

    @property
    def numbers_per_node(self) -> float:
        """The mean size of what the operations of the forward return."""
        return self._recorded.numbers_per_node()

    def push(self, names: Sequence[str], along: Sequence[Tensor]) -> Tensor:
        """`J` times a change of the named leaves.

        Tangents pass through the recorded graph; where that cannot be, `Jᵀu` is differentiated by
        `u`.
        """
        leaves = [self.leaves[name] for name in names]
        along = [one.to(leaf.dtype) for one, leaf in zip(along, leaves, strict=True)]
        recorded = self._recorded
        with contextlib.suppress(tangents.NoTangentError):
            found = recorded.push(leaves, along)
            return torch.zeros_like(self.output) if found is None else found
        placeholder, adjoint = self.adjoint
        return _grad_along([adjoint[name] for name in names], [placeholder], along)[0]

    def hessian(self, names: Sequence[str], tangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The Hessian of the loss times a change of the named leaves, reverse over reverse."""
        gradients = [self.gradients[name] for name in names]
        leaves = [self.leaves[name] for name in names]
        return _grad_along(gradients, leaves, tangents)

    def pull(self, names: Sequence[str], cotangent: Tensor) -> tuple[Tensor, ...]:
        """`Jᵀ` times a cotangent of the output, for the named leaves."""
        leaves = [self.leaves[name] for name in names]
        output = self.output
        return torch.autograd.grad(
            output, leaves, cotangent, retain_graph=True, materialize_grads=True
        )


def _grad_along(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], tangents: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    both = zip(outputs, tangents, strict=True)
    pairs = [(output, tangent.to(output.dtype)) for output, tangent in both if output.requires_grad]
    if not pairs:
        return tuple(torch.zeros_like(one) for one in inputs)
    used, along = zip(*pairs, strict=True)
    return torch.autograd.grad(used, inputs, along, retain_graph=True, materialize_grads=True)


def evaluate_at(evaluation: Evaluation, weights: Mapping[str, Tensor] | None = None) -> Evaluation:
    """The same batch at other weights, by default the same ones in float64; with a graph of its own."""
    weights = weights_in(evaluation.problem, torch.float64) if weights is None else weights
    leaves = {name: weights[name].requires_grad_() for name in evaluation.leaves}
    return Evaluation(evaluation.problem, evaluation.batch, weights={**weights, **leaves})


def evaluate(problem: FunctionalProblem) -> list[Evaluation]:
    """One evaluation for each batch, weighted by its examples if the loss is a mean."""
    evaluations = [Evaluation.inspected(problem, batch) for batch in problem.batches]
    if len(evaluations) == 1:
        return evaluations
    reduction = find_reduction(evaluations)
    if reduction is None:
        raise ProblemError(
            "whether the loss adds its examples up or averages them decides how several batches are joined, "
            "and its values do not tell: it compares examples, or depends on the size of a batch. Pass "
            'reduction="mean" (batches are averaged over examples) or reduction="sum" (they are added up).'
        )
    for one in evaluations if reduction == "mean" else []:
        one.weight = one.batch.rows / problem.rows
    return evaluations


def find_reduction(evaluations: Sequence[Evaluation]) -> str | None:
    """Whether the loss is a "mean" or a "sum" over examples; None if it is neither.

    Where the outputs of a batch are joined with others, the gradients of a mean shrink by the
    batch's share.
    """
    problem = evaluations[0].problem
    if problem.reduction != "auto":
        return problem.reduction
    first = evaluations[0]
    second = evaluations[-1]
    pairs = [(first, first), (first, second), (second, first)]
    factors = [
        _shrinkage(one, other) for one, other in (pairs if second is not first else pairs[:1])
    ]
    known = [factor for factor in factors if factor is not None]
    if not known:
        # Torch's own losses are what they say; that of anybody else may say anything.
        torchs_own = type(problem.loss).__module__ == "torch.nn.modules.loss"
        return str(getattr(problem.loss, "reduction", None)) if torchs_own else None
    if all(abs(factor - 1) < _SAME for factor in known):
        return "sum"
    itself, *shares = factors
    halved = itself is None or abs(itself - 0.5) < _SAME
    shared = None in shares or not shares or abs(sum(known[-2:]) - 1) < _SAME
    return "mean" if halved and shared else None


_SAME = 1e-3


def _shrinkage(one: Evaluation, other: Evaluation) -> float | None:
    """The gradient by the outputs of one batch when another is joined, over that without; nan if it turns."""
    joined = one.batch.joined_targets(other.batch)
    outputs = [one.output.detach(), other.output.detach()]
    if joined is None or outputs[0].ndim == 0 or outputs[0].shape[1:] != outputs[1].shape[1:]:
        return None
    place = torch.cat(outputs).requires_grad_()
    try:
        loss = one.problem.loss_of(place, joined)
    except Exception:  # whatever a loss that knows its batch raises
        return None
    (gradient,) = torch.autograd.grad(loss, place)
    found = gradient[: len(outputs[0])].double()
    alone = one.at_output.gradient[1].detach().double()
    square = float((alone * alone).sum())
    if square == 0 or not math.isfinite(square):
        return None
    factor = float((found * alone).sum()) / square
    off = float((found - factor * alone).norm())
    return factor if off <= _SAME * abs(factor) * math.sqrt(square) else math.nan


def unused_leaves(evaluations: Sequence[Evaluation]) -> set[str]:
    """The weights that no batch's forward touches."""
    names = evaluations[0].leaves
    return {name for name in names if all(one.moments[name] is None for one in evaluations)}


LINEAR_LOSS = (
    "the loss is linear in the model's output, so its Gauss-Newton curvature is zero everywhere. If the "
    "model ends in log_softmax and the loss is NLLLoss, move log_softmax into the loss: return logits and "
    'use CrossEntropyLoss. Otherwise measure the exact Hessian: curvature="hessian".'
)
SATURATED_LOSS = (
    "the loss is saturated: it bends at smaller outputs of the model, but at these it is flat or straight to "
    "the last digit, as a softmax is that is sure of every example."
)
DRAW_AGAIN = (
    "Scale the weights of the last layers down, or draw new ones; in training, the learning rate was too "
    "large."
)
# A loss that bends by less, and at smaller outputs by so many times more, has only rounding errors
# left.
_TINY = 1e-60
_MOST_TIMES_FLATTER = 1e12
# Of an output's own curvature; beyond, a square root would be one of rounding errors.
_MOST_ROUNDING = 1e-4


@dataclass(frozen=True)
class LossFactor:
    """`H_z = scale · Σ_c S_c S_cᵀ` in every example: `columns` is (C, examples, …output)."""

    columns: Tensor
    scale: float

    @cached_property
    def _by_example(self) -> Tensor:
        columns = self.columns.reshape(*self.columns.shape[:2], -1)
        return columns.transpose(0, 1).contiguous() * math.sqrt(self.scale)

    def product(self, tangent: Tensor) -> Tensor:
        """`H_z` times a tangent of the output."""
        rows = tangent.reshape(len(self._by_example), 1, -1)
        return torch.bmm(torch.bmm(rows, self._by_example.mT), self._by_example).view_as(tangent)

    def sample(self, noise: Tensor) -> Tensor:
        """Normal numbers that have `H_z` as their covariance, from standard normal ones like the output."""
        count = self.columns.shape[:2]
        factors = noise.reshape(-1)[: count.numel()].view(count)
        return torch.einsum("cn,cn...->n...", factors, self.columns) * math.sqrt(self.scale)


def factor_loss_hessian(evaluation: Evaluation) -> LossFactor | str:
    """The root of `H_z`, or one sentence that says why there is none of this form."""
    blocks = _blocks(evaluation)
    # Tiny matrices: numpy's calls cost a fraction of torch's.
    matrices = blocks.double().numpy(force=True)
    scale = float(np.abs(matrices).max())
    if not math.isfinite(scale):
        return "the loss's curvature at the output is not finite"
    noise = _noise_of_separate_examples(evaluation, blocks)
    if noise is None:
        return "the loss couples the examples"
    if scale < _TINY:
        check_curved(evaluation)
    matrices = (matrices + matrices.transpose(0, 2, 1)) / (2 * scale)
    # Each output is judged against its own curvature: a head with a millionth of the loss has
    # layers, too.
    sizes = np.sqrt(np.abs(np.diagonal(matrices, axis1=1, axis2=2)).max(0))
    inverse = np.divide(1.0, sizes, out=np.zeros_like(sizes), where=sizes > 0)
    own = matrices * inverse[:, None] * inverse
    own_noise = float((noise / scale * inverse**2).max())
    rounding = 4 * matrices.shape[1] * float(np.finfo(np.float64).eps) + own_noise
    if rounding > _MOST_ROUNDING:
        return "rounding hides whether the loss is convex in the output"
    # Orthonormal columns: what the mean of semidefinite matrices sends to zero, each of them does.
    values, vectors = np.linalg.eigh(own.mean(0))
    kept: krylov.Array = vectors[:, values > rounding * max(values[-1], 0.0)]
    small = kept.T @ own @ kept
    lowest = 0.0
    try:
        roots = np.linalg.cholesky(small)
    except np.linalg.LinAlgError:  # three times slower, but singular matrices are welcome
        values, vectors = np.linalg.eigh(small)
        roots = vectors * np.sqrt(np.clip(values, 0.0, None))[:, None]
        lowest = float(values.min())
    roots = kept @ roots
    # An output with a zero diagonal entry and nonzero off-diagonal ones shows only in the product.
    squares = sizes[:, None] * (roots @ roots.transpose(0, 2, 1)) * sizes
    allowed = 10 * rounding * np.maximum(sizes[:, None] * sizes, np.finfo(np.float64).tiny)
    if lowest < -rounding or not (np.abs(squares - matrices) <= allowed).all():
        return "the loss is not convex in the output"
    factors = sizes[:, None] * roots
    columns = torch.from_numpy(np.ascontiguousarray(factors.transpose(2, 0, 1))).to(
        evaluation.output
    )
    return LossFactor(columns.view(-1, *evaluation.output.shape), scale)


def _blocks(evaluation: Evaluation) -> Tensor:
    """(examples, width, width): the Hessian of the loss by each example's own output."""
    output = evaluation.output
    size = output.shape[0]
    width = output[0].numel()
    cut, gradient = evaluation.at_output.gradient
    if not gradient.requires_grad:
        return cut.new_zeros(size, width, width)
    unit = (
        torch.eye(width, dtype=cut.dtype, device=cut.device).unsqueeze(1).expand(width, size, width)
    )
    directions = unit.reshape(width, *output.shape)
    (rows,) = layer_uses.batched_grad(gradient, [cut], directions) or (None,)
    if rows is None:
        rows = torch.stack([evaluation.at_output.hessian(direction) for direction in directions])
    return rows.detach().reshape(width, size, width).transpose(0, 1)


def _noise_of_separate_examples(evaluation: Evaluation, blocks: Tensor) -> krylov.Array | None:
    """The rounding error of `H_z` for each output, or None if the loss couples the examples."""
    output = evaluation.output
    size, width = blocks.shape[:2]
    direction = probes.random_like(output, evaluation.problem.seed, blocks.dtype).view(size, width)
    products = [
        evaluation.at_output.hessian((factor * direction).view_as(output)) for factor in (1, 3)
    ]
    found, thrice = (product.reshape(size, width) for product in products)
    expected = torch.bmm(blocks, direction.unsqueeze(2)).squeeze(2)
    noise = 16 * (thrice / 3 - found).abs().amax(0)  # three times the direction rounds differently
    allowed = noise.max() + torch.finfo(blocks.dtype).eps ** 0.6 * expected.abs().amax(0)
    if not bool(((found - expected).abs() <= allowed).all()):
        return None
    return np.asarray(noise.tolist(), dtype=np.float64)


def check_curved(evaluation: Evaluation) -> None:
    """A loss that is linear in the output has no Gauss-Newton curvature: refuse, never print zeros.

    Nor the curvature of a softmax that is so sure that only rounding is left of it.
    """
    probe = probes.random_like(evaluation.output, evaluation.problem.seed)
    here = float(evaluation.output_hessian(probe).abs().max())
    if here < _TINY and (error := _flat_loss_error(evaluation, here)):
        raise error


def _flat_loss_error(evaluation: Evaluation, here: float) -> ProblemError | None:
    """Linear everywhere; or saturated, if the loss bends at some smaller outputs; or flat at these ones.

    None where it bends by `here`, and by no more than that and many times more elsewhere.
    """
    output = evaluation.output.detach()
    problem = evaluation.problem
    probe = probes.random_like(output, problem.seed)
    size = float(output.abs().max()) or 1.0
    beyond = output + size * probe
    for place in (*(output * (length / size) for length in (1.0, 1e-3, 1e-6, 1e-9)), beyond):
        loss = problem.loss_of(place.requires_grad_(), evaluation.batch)
        (gradient,) = torch.autograd.grad(loss, place, create_graph=True)
        if not gradient.requires_grad:
            break
        (bend,) = torch.autograd.grad(gradient, place, probe, materialize_grads=True)
        if bool((bend.isfinite() & (bend.abs() > _MOST_TIMES_FLATTER * here)).any()):
            cause = name_large_inputs(evaluation.batch.inputs)
            return WeightsError(
                "the loss has no curvature at these outputs of the model, though it has at others, as a "
                "fourth power at 0: its Gauss-Newton curvature is zero here. Measure at other weights."
                if place is beyond
                else f"{SATURATED_LOSS} {cause or DRAW_AGAIN}"
            )
    return None if here else DerivativeError(LINEAR_LOSS)
