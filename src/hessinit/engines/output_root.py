"""The square root of the loss's curvature at the output, one small block per example."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hessinit.operators.evaluation import Evaluation


@dataclass(frozen=True)
class OutputRoot:
    """`H_z = scale · Σ_c S_c S_cᵀ` in every example: `columns` is (C, examples, …output).

    Directions that no example bends (for softmax: all logits moving together) are left out, so C may be below the
    number of outputs.
    """

    columns: Tensor
    scale: float


def output_root(evaluation: Evaluation) -> OutputRoot | str:
    """The root of `H_z`, or one sentence that says why there is none of this form."""
    size, width = evaluation.output.shape[0], evaluation.output[0].numel()
    blocks = _blocks(evaluation)
    if not _separate(evaluation, blocks):
        return "the loss couples the examples"
    matrices = blocks.double().cpu().numpy()
    matrices = (matrices + matrices.transpose(0, 2, 1)) / 2
    scale = float(np.abs(matrices).max())
    if not np.isfinite(scale) or scale == 0.0:
        return "the loss has no curvature at the output"
    values, vectors = np.linalg.eigh(matrices / scale)
    rounding = float(torch.finfo(evaluation.output.dtype).eps) * width * 4
    if values.min() < -rounding:
        return "the loss is not convex in the output"
    roots = (vectors * np.sqrt(np.clip(values, 0.0, None))[:, None, :]) @ vectors.transpose(0, 2, 1)
    # The symmetric root has the same null space as H_z: what is null for the mean is null in every example.
    kept_values, kept = np.linalg.eigh((matrices / scale).mean(0))
    kept = kept[:, kept_values > rounding * kept_values[-1]]
    columns = np.ascontiguousarray((roots @ kept).transpose(2, 0, 1)).reshape(-1, *evaluation.output.shape)
    assert columns.shape[1] == size
    return OutputRoot(torch.as_tensor(columns).to(evaluation.output), scale)


def _blocks(evaluation: Evaluation) -> Tensor:
    """(examples, width, width): the Hessian of the loss by each example's own output."""
    output = evaluation.output
    size, width = output.shape[0], output[0].numel()
    rows = []
    for place in range(width):
        direction = torch.zeros(size, width, dtype=output.dtype, device=output.device)
        direction[:, place] = 1.0
        rows.append(evaluation.output_hessian(direction.view_as(output)).reshape(size, width))
    return torch.stack(rows, dim=1).detach()


def _separate(evaluation: Evaluation, blocks: Tensor) -> bool:
    """Whether a change of some examples' outputs leaves the loss gradient of the others alone."""
    output = evaluation.output
    size, width = output.shape[0], output[0].numel()
    generator = torch.Generator().manual_seed(evaluation.problem.seed)
    direction = torch.randn(size, width, generator=generator, dtype=torch.float64).to(output)
    found = evaluation.output_hessian(direction.view_as(output)).reshape(size, width)
    expected = torch.bmm(blocks, direction.unsqueeze(2)).squeeze(2)
    rounding = torch.finfo(output.dtype).eps ** 0.6
    return bool((found - expected).abs().max() <= rounding * blocks.abs().max() * width)
