"""`H_z`, the Hessian of the loss by the output: products, a closed form, a factorization."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hessinit.curvature import krylov, layer_uses
from hessinit.errors import DerivativeError, WeightsError
from hessinit.problem.batches import Batch
from hessinit.problem.checks import name_large_inputs
from hessinit.problem.functional import FunctionalProblem, explained_derivatives

if TYPE_CHECKING:
    from hessinit.curvature.evaluation import BatchGraph


@dataclass(frozen=True)
class LossHessianLimits:
    """Sizes from which `H_z` is computed in another way, and thresholds for its rounding error."""

    large_output: int = 2**23  # a further copy of so many numbers takes memory that counts
    least_closed_form: int = 2**13  # of fewer outputs the Gram engine factors `H_z`
    last_digits: int = 16  # the closed form and the loss may differ by so many, for logits of 1
    tiny_curvature: float = 1e-60  # what is below, and times_flatter than at smaller outputs,
    times_flatter: float = 1e12  # is only rounding error
    largest_rounding: float = 1e-4  # of an output's own curvature; beyond, a root is only rounding


LIMITS = LossHessianLimits()

LINEAR_LOSS = (
    "the loss is linear in the model's output, so its Gauss-Newton curvature is zero everywhere. "
    "If the model ends in log_softmax and the loss is NLLLoss, move log_softmax into the loss: "
    "return logits and use CrossEntropyLoss. Otherwise measure the exact Hessian: "
    'curvature="hessian".'
)
SATURATED_LOSS = (
    "the loss is saturated: it bends at smaller outputs of the model, but at these it is flat or "
    "straight to the last digit, as a softmax is that is sure of every example."
)
DRAW_AGAIN = (
    "Scale the weights of the last layers down, or draw new ones; in training, the learning rate "
    "was too large."
)
FLAT_LOSS = (
    "the loss has no curvature at these outputs of the model, though it has at others, as a "
    "fourth power at 0: its Gauss-Newton curvature is zero here. Measure at other weights."
)


class OutputLoss:
    """The loss as a function of the output of some examples, cut off from the model."""

    def __init__(self, problem: FunctionalProblem, output: Tensor, batch: Batch) -> None:
        self.problem = problem
        self.batch = batch
        self.output = output

    @cached_property
    def gradient(self) -> tuple[Tensor, Tensor]:
        """The detached output and the loss gradient by it, differentiable, in the loss's dtype."""
        cut = self.output.detach().to(self.problem.loss_dtype).requires_grad_()
        loss = self.problem.loss_of(cut, self.batch)
        (gradient,) = torch.autograd.grad(loss, cut, create_graph=True)
        return cut, gradient

    def hessian(self, tangent: Tensor) -> Tensor:
        """`H_z` times a tangent of the output."""
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

    Works through a few rows at a time, so that no second copy of a vocabulary's logits is held;
    in the dtype of the weights, which is that of the loss.
    """

    def __init__(self, logits: Tensor, class_dimension: int, weights: Tensor) -> None:
        self._logits = logits
        self._class_dimension = class_dimension
        self._weights = weights

    @classmethod
    def recognize(cls, loss: OutputLoss) -> SoftmaxHessian | None:
        """The closed form, if it gives the loss's own product with `H_z`, up to rounding.

        A cross-entropy does not bend along ones, as other losses of logits do: half of the tangent
        is ones.
        """
        logits = loss.output.detach()
        tangent = krylov.random_like(logits, loss.problem.seed, loss.problem.loss_dtype) + 1
        product = loss.hessian(tangent)
        for dimension in (-1, 1) if logits.ndim > 2 else (-1,):
            weights = torch.zeros_like(tangent.select(dimension, 0)).unsqueeze(dimension)
            closed_form = cls(logits, dimension, weights)
            if bool(product.any()) and closed_form._fit_weights(tangent, product):
                return closed_form
        return None

    def _fit_weights(self, tangent: Tensor, product: Tensor) -> bool:
        """Find and store the weight of each row; returns whether they explain the whole product."""
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
                LIMITS.last_digits * digit * largest
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
        """`H_z` times the tangent, which is overwritten."""
        for logits, weights, rows in self._rows(tangent):
            shares = torch.softmax(logits, 1, dtype=weights.dtype)
            along = rows.to(weights.dtype)
            mean = (shares * along).sum(1, keepdim=True)
            rows.copy_(shares.mul_(along.sub_(mean)).mul_(weights))
        return tangent

    def sample(self, noise: Tensor) -> Tensor:
        """Normal numbers with covariance `H_z`, from standard normal ones, which it overwrites."""
        for logits, weights, rows in self._rows(noise):
            shares = torch.softmax(logits, 1, dtype=weights.dtype)
            roots = shares.sqrt()
            along = (roots * rows).sum(1, keepdim=True)
            rows.copy_(roots.mul_(rows).sub_(shares.mul_(along)).mul_(weights.sqrt()))
        return noise

    def _rows(self, tangent: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Logits, weights and tangents of a few examples at a time, the classes in dimension 1."""
        step = max(1, LIMITS.large_output // tangent[0].numel())
        tensors = (self._logits, self._weights, tangent)
        classes_last = [tensor.movedim(self._class_dimension, -1) for tensor in tensors]
        for first in range(0, len(tangent), step):
            logits, weights, along = (tensor[first : first + step] for tensor in classes_last)
            classes = logits.shape[-1]
            rows = along.reshape(-1, classes)
            yield logits.reshape(-1, classes), weights.reshape(-1, 1), rows
            if rows.data_ptr() != along.data_ptr():
                along.copy_(rows.view_as(along))


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
        """Normal numbers with covariance `H_z`, from standard normal ones like the output."""
        count = self.columns.shape[:2]
        coefficients = noise.reshape(-1)[: count.numel()].view(count)
        scaled = torch.einsum("cn,cn...->n...", coefficients, self.columns)
        return scaled * math.sqrt(self.scale)


def factor_loss_hessian(graph: BatchGraph) -> LossFactor | str:
    """The factorization of `H_z`, or one sentence that says why there is none of this form."""
    blocks = _blocks(graph.at_output)
    # Tiny matrices: numpy's calls cost a fraction of torch's.
    matrices = blocks.double().numpy(force=True)
    scale = float(np.abs(matrices).max())
    if not math.isfinite(scale):
        return "the loss's curvature at the output is not finite"
    noise = _noise_of_separate_examples(graph.at_output, blocks)
    if noise is None:
        return "the loss couples the examples"
    if scale < LIMITS.tiny_curvature:
        check_curved(graph)
    matrices = (matrices + matrices.transpose(0, 2, 1)) / (2 * scale)
    # Each output is judged against its own curvature: a head with a millionth of the loss has
    # layers, too.
    sizes = np.sqrt(np.abs(np.diagonal(matrices, axis1=1, axis2=2)).max(0))
    inverse = np.divide(1.0, sizes, out=np.zeros_like(sizes), where=sizes > 0)
    normalized = matrices * inverse[:, None] * inverse
    noise_of_outputs = float((noise / scale * inverse**2).max())
    rounding = 4 * matrices.shape[1] * float(np.finfo(np.float64).eps) + noise_of_outputs
    if rounding > LIMITS.largest_rounding:
        return "rounding hides whether the loss is convex in the output"
    # Orthonormal columns: what the mean of semidefinite matrices sends to zero, each of them does.
    values, vectors = np.linalg.eigh(normalized.mean(0))
    basis: krylov.Array = vectors[:, values > rounding * max(values[-1], 0.0)]
    projected = basis.T @ normalized @ basis
    lowest = 0.0
    try:
        roots = np.linalg.cholesky(projected)
    except np.linalg.LinAlgError:  # three times slower, but singular matrices are welcome
        values, vectors = np.linalg.eigh(projected)
        roots = vectors * np.sqrt(np.clip(values, 0.0, None))[:, None]
        lowest = float(values.min())
    roots = basis @ roots
    # An output with a zero diagonal entry and nonzero off-diagonal ones shows only in the product.
    squares = sizes[:, None] * (roots @ roots.transpose(0, 2, 1)) * sizes
    allowed = 10 * rounding * np.maximum(sizes[:, None] * sizes, np.finfo(np.float64).tiny)
    if lowest < -rounding or not (np.abs(squares - matrices) <= allowed).all():
        return "the loss is not convex in the output"
    factors = np.ascontiguousarray((sizes[:, None] * roots).transpose(2, 0, 1))
    columns = torch.from_numpy(factors).to(graph.output)
    return LossFactor(columns.view(-1, *graph.output.shape), scale)


def _blocks(loss: OutputLoss) -> Tensor:
    """(examples, width, width): the Hessian of the loss by each example's own output."""
    size = loss.output.shape[0]
    width = loss.output[0].numel()
    cut, gradient = loss.gradient
    if not gradient.requires_grad:
        return cut.new_zeros(size, width, width)
    unit = torch.eye(width, dtype=cut.dtype, device=cut.device).unsqueeze(1)
    directions = unit.expand(width, size, width).reshape(width, *loss.output.shape)
    (rows,) = layer_uses.batched_grad(gradient, [cut], directions) or (None,)
    if rows is None:
        rows = torch.stack([loss.hessian(direction) for direction in directions])
    return rows.detach().reshape(width, size, width).transpose(0, 1)


def _noise_of_separate_examples(loss: OutputLoss, blocks: Tensor) -> krylov.Array | None:
    """The rounding error of `H_z` for each output, or None if the loss couples the examples."""
    size, width = blocks.shape[:2]
    random = krylov.random_like(loss.output, loss.problem.seed, blocks.dtype)
    direction = random.view(size, width)
    products = [loss.hessian((factor * direction).view_as(loss.output)) for factor in (1, 3)]
    product, thrice = (product.reshape(size, width) for product in products)
    expected = torch.bmm(blocks, direction.unsqueeze(2)).squeeze(2)
    noise = 16 * (thrice / 3 - product).abs().amax(0)  # thrice the direction rounds differently
    allowed = noise.max() + torch.finfo(blocks.dtype).eps ** 0.6 * expected.abs().amax(0)
    if not bool(((product - expected).abs() <= allowed).all()):
        return None
    return np.asarray(noise.tolist(), dtype=np.float64)


def check_curved(graph: BatchGraph) -> None:
    """Refuse a loss that is linear in the output: it has no Gauss-Newton curvature.

    Refuses also the curvature of a softmax that is so sure that only rounding is left of it.
    """
    probe = krylov.random_like(graph.output, graph.problem.seed)
    curvature = float(graph.output_hessian(probe).abs().max())
    if curvature < LIMITS.tiny_curvature:
        _refuse_flat_loss(graph, curvature)


def _refuse_flat_loss(graph: BatchGraph, curvature: float) -> None:
    """Say whether the loss is linear everywhere, or saturated, or flat at these outputs alone.

    Returns if it bends here, though little, and nowhere many times more.
    """
    output = graph.output.detach()
    problem = graph.problem
    probe = krylov.random_like(output, problem.seed)
    size = float(output.abs().max()) or 1.0
    beyond = output + size * probe
    for point in (*(output * (length / size) for length in (1.0, 1e-3, 1e-6, 1e-9)), beyond):
        loss = problem.loss_of(point.requires_grad_(), graph.batch)
        (gradient,) = torch.autograd.grad(loss, point, create_graph=True)
        if not gradient.requires_grad:
            break
        with explained_derivatives(of_loss=True):
            (bend,) = torch.autograd.grad(gradient, point, probe, materialize_grads=True)
        if bool((bend.isfinite() & (bend.abs() > LIMITS.times_flatter * curvature)).any()):
            if point is beyond:
                raise WeightsError(FLAT_LOSS)
            raise WeightsError(
                f"{SATURATED_LOSS} {name_large_inputs(graph.batch.inputs) or DRAW_AGAIN}"
            )
    if not curvature:
        raise DerivativeError(LINEAR_LOSS)
