"""The square root of the loss's curvature at the output, one small block per example."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hessinit.curvature.evaluation import Evaluation
from hessinit.curvature.krylov import Array
from hessinit.curvature.layer_uses import batched_grad
from hessinit.curvature.probes import ProbeStream
from hessinit.errors import ProblemError, WeightsError

LINEAR_LOSS = (
    "the loss is linear in the model's output, so its Gauss-Newton curvature is zero everywhere. If the "
    "model ends in log_softmax and the loss is NLLLoss, move log_softmax into the loss: return logits and "
    'use CrossEntropyLoss. Otherwise measure the exact Hessian: curvature="hessian".'
)
SATURATED_LOSS = (
    "the loss is saturated: it bends at smaller outputs of the model, but at these it is flat or straight to "
    "the last digit, as a softmax is that is sure of every example. Scale the weights of the last layers "
    "down, or draw new ones; in training, the learning rate was too large."
)
# Of an output's own curvature; beyond, a square root would be one of rounding errors.
_MOST_ROUNDING = 1e-4


@dataclass(frozen=True)
class LossFactor:
    """`H_z = scale · Σ_c S_c S_cᵀ` in every example: `columns` is (C, examples, …output).

    Directions that no example bends (for softmax: all logits moving together) are left out.
    """

    columns: Tensor
    scale: float


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
    if scale == 0.0:
        raise _flat_loss_error(evaluation)
    matrices = (matrices + matrices.transpose(0, 2, 1)) / (2 * scale)
    # Each output is judged against its own curvature: a head with a millionth of the loss has layers, too.
    sizes = np.sqrt(np.abs(np.diagonal(matrices, axis1=1, axis2=2)).max(0))
    inverse = np.divide(1.0, sizes, out=np.zeros_like(sizes), where=sizes > 0)
    own = matrices * inverse[:, None] * inverse
    rounding = 4 * matrices.shape[1] * float(np.finfo(np.float64).eps) + float(
        (noise / scale * inverse**2).max()
    )
    if rounding > _MOST_ROUNDING:
        return "rounding hides whether the loss is convex in the output"
    # Orthonormal columns: what the mean of semidefinite matrices sends to zero, each of them does.
    values, vectors = np.linalg.eigh(own.mean(0))
    kept: Array = vectors[:, values > rounding * max(values[-1], 0.0)]
    roots = _roots(kept.T @ own @ kept, rounding)
    if roots is None or not _close(kept @ roots, sizes, matrices, 10 * rounding):
        return "the loss is not convex in the output"
    factors = sizes[:, None] * (kept @ roots)
    columns = torch.from_numpy(np.ascontiguousarray(factors.transpose(2, 0, 1))).to(evaluation.output)
    return LossFactor(columns.view(-1, *evaluation.output.shape), scale)


def _roots(matrices: Array, rounding: float) -> Array | None:
    try:
        return np.asarray(np.linalg.cholesky(matrices), dtype=np.float64)
    except np.linalg.LinAlgError:
        values, vectors = np.linalg.eigh(matrices)  # three times slower, but singular matrices are welcome
    if (values < -rounding).any():
        return None
    roots: Array = vectors * np.sqrt(np.clip(values, 0.0, None))[:, None]
    return roots


def _close(roots: Array, sizes: Array, matrices: Array, rounding: float) -> bool:
    """Whether `S Sᵀ` gives the matrices back.

    It does not if an output with a zero diagonal entry has nonzero off-diagonal ones (an indefinite matrix).
    """
    squares = sizes[:, None] * (roots @ roots.transpose(0, 2, 1)) * sizes
    allowed = rounding * np.maximum(sizes[:, None] * sizes, np.finfo(np.float64).tiny)
    return bool((np.abs(squares - matrices) <= allowed).all())


def _blocks(evaluation: Evaluation) -> Tensor:
    """(examples, width, width): the Hessian of the loss by each example's own output."""
    output = evaluation.output
    size, width = output.shape[0], output[0].numel()
    cut, gradient = evaluation.output_gradient
    if not gradient.requires_grad:
        return cut.new_zeros(size, width, width)
    unit = torch.eye(width, dtype=cut.dtype, device=cut.device).unsqueeze(1).expand(width, size, width)
    directions = unit.reshape(width, *output.shape)
    (rows,) = batched_grad(gradient, [cut], directions) or (None,)
    if rows is None:
        rows = torch.stack([evaluation.output_hessian(direction) for direction in directions])
    return rows.detach().reshape(width, size, width).transpose(0, 1)


def _noise_of_separate_examples(evaluation: Evaluation, blocks: Tensor) -> Array | None:
    """The rounding error of `H_z` for each output, or None if the loss couples the examples.

    A product with three times the direction rounds differently: the difference estimates the rounding error.
    """
    output = evaluation.output
    size, width = output.shape[0], output[0].numel()
    seed = evaluation.problem.seed
    probe = ProbeStream(output.numel(), seed=seed, dtype=blocks.dtype, device=output.device).draw()
    direction = probe.view(size, width)
    found, thrice = (
        evaluation.output_hessian((factor * direction).view_as(output)).reshape(size, width)
        for factor in (1, 3)
    )
    expected = torch.bmm(blocks, direction.unsqueeze(2)).squeeze(2)
    noise = 16 * (thrice / 3 - found).abs().amax(0)
    allowed = noise.max() + torch.finfo(blocks.dtype).eps ** 0.6 * expected.abs().amax(0)
    if not bool(((found - expected).abs() <= allowed).all()):
        return None
    return np.asarray(noise.tolist(), dtype=np.float64)


def check_curved(evaluation: Evaluation) -> None:
    """A loss that is linear in the output has no Gauss-Newton curvature: refuse, never print zeros."""
    output, seed = evaluation.output, evaluation.problem.seed
    probe = ProbeStream(output.numel(), seed=seed, dtype=output.dtype, device=output.device).draw()
    if not bool(evaluation.output_hessian(probe.view_as(output)).any()):
        raise _flat_loss_error(evaluation)


def _flat_loss_error(evaluation: Evaluation) -> ProblemError:
    """Linear everywhere, or saturated: then the loss bends at some smaller outputs."""
    output, problem = evaluation.output.detach(), evaluation.problem
    probe = ProbeStream(output.numel(), seed=problem.seed, dtype=output.dtype, device=output.device).draw()
    size = float(output.abs().max()) or 1.0
    for length in (1.0, 1e-3, 1e-6, 1e-9):
        smaller = (output * (length / size)).requires_grad_()
        loss = problem.loss_of(smaller, evaluation.batch)
        (gradient,) = torch.autograd.grad(loss, smaller, create_graph=True)
        if not gradient.requires_grad:
            break
        (bend,) = torch.autograd.grad(gradient, smaller, probe.view_as(output), materialize_grads=True)
        if bool((bend.isfinite() & (bend != 0)).any()):
            return WeightsError(SATURATED_LOSS)
    return ProblemError(LINEAR_LOSS)
