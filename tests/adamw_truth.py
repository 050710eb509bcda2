"""The stability limit of AdamW with parameter groups before its first step, from dense fp64 matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dense import dense_curvature, layer_parameters


def dense_adamw_limit(model: nn.Module, loss: Any, batch: Any, optimizer: torch.optim.Optimizer) -> float:
    """For a model in fp64: `P` from the gradient and those of its eight parts, decay on the diagonal.

    The rate is that of the fastest group, while the others keep their proportion to it.
    """
    names = list(layer_parameters(model).values())
    weights = [model.get_parameter(name) for name in names]
    group_of = {id(one): group for group in optimizer.param_groups for one in group["params"]}
    groups = [group_of[id(one)] for one in weights]
    sizes = torch.tensor([one.numel() for one in weights])

    def spread(key: str) -> Tensor:
        return torch.repeat_interleave(torch.tensor([group[key] for group in groups]).double(), sizes)

    def gradient(part: slice) -> Tensor:
        found = torch.autograd.grad(loss(model(batch[0][part]), batch[1][part]), weights)
        return torch.cat([one.flatten() for one in found])

    whole, count = gradient(slice(None)), min(8, len(batch[1]))
    noise = torch.stack([gradient(slice(k, None, count)) for k in range(count)]).var(0) / count
    beta, eps = optimizer.param_groups[0]["betas"][0], optimizer.param_groups[0]["eps"]
    relative = spread("lr") / spread("lr").max()
    root = (relative / (torch.maximum(whole.square(), noise).sqrt() + eps)).sqrt()
    matrix = dense_curvature(model, loss, batch, "gauss-newton").network
    decay = (1 + beta) / (1 - beta) * torch.diag(spread("weight_decay") * relative)
    top = float(torch.linalg.eigvalsh(root[:, None] * matrix * root + decay).max())
    step = relative * whole / (whole.abs() + eps)
    first = float(whole @ step) / float(step @ matrix @ step)
    return min((2 + 2 * beta) / ((1 - beta) * top), 2 * first)
