"""Functions of torch whose second derivative is missing or wrong, and what stands in for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hessinit.errors import ProblemError


class Substitutes(TorchFunctionMode):
    """While active, calls of the functions below run as compositions of ordinary differentiable ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _SUBSTITUTES.get(func, func)(*args, **(kwargs or {}))


class PlainCalls(TorchFunctionMode):
    """Torch's own functions, without the renormalization of embeddings (max_norm): it would undo a step."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_embedding_as_it_is if func is F.embedding else func)(*args, **(kwargs or {}))


def _weight_norm(direction: Tensor, length: Tensor, dim: int = 0) -> Tensor:
    """The fused one treats the norm as a constant in its second derivative (seen in torch 2.13)."""
    if dim == -1:
        norm = direction.norm()
    else:
        rows = direction.transpose(0, dim).flatten(1).norm(dim=1)
        norm = rows.view([-1 if place == dim else 1 for place in range(direction.ndim)])
    return direction * (length / norm)


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """The fused one has no second derivative at all."""
    if max_norm is not None or mode == "max" or scale_grad_by_freq:
        raise ProblemError(
            f"EmbeddingBag with mode={mode!r}, max_norm={max_norm}, scale_grad_by_freq={scale_grad_by_freq} "
            "has no second derivative; use mode='sum' or 'mean' without these options, or leave it out."
        )
    if offsets is None:
        bags = torch.arange(input.shape[0], device=input.device).repeat_interleave(input.shape[1])
        count, flat = input.shape[0], input.reshape(-1)
    else:
        count, flat = offsets.shape[0] - int(include_last_offset), input
        marks = torch.zeros(len(flat) + 1, dtype=torch.long, device=input.device)
        marks.index_add_(0, offsets[:count], torch.ones_like(offsets[:count], dtype=torch.long))
        bags = marks[:-1].cumsum(0) - 1
    rows = F.embedding(flat, weight, padding_idx)
    kept = torch.ones_like(flat, dtype=rows.dtype)
    if padding_idx is not None:
        kept = (flat != padding_idx % weight.shape[0]).to(rows.dtype)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape(-1, 1)
    sums = rows.new_zeros(count, weight.shape[1]).index_add(0, bags, rows * kept.unsqueeze(1))
    if mode == "sum":
        return sums
    sizes = kept.new_zeros(count).index_add(0, bags, kept)
    return sums / sizes.clamp(min=1).unsqueeze(1)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """A sparse gradient cannot be differentiated again; the dense one holds the same numbers."""
    if scale_grad_by_freq:
        raise ProblemError(
            "an Embedding has scale_grad_by_freq=True: its gradient is divided by how often each word "
            "comes, so it is not the derivative of the loss, and there is no Hessian. Measure with "
            "scale_grad_by_freq=False."
        )
    return F.embedding(input, weight, padding_idx, max_norm, norm_type)


def _embedding_as_it_is(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, *settings: Any, **others: Any
) -> Tensor:
    return F.embedding(input, weight, padding_idx)


class Hardsigmoid(torch.autograd.Function):
    """Torch's own has no second derivative, not even the zero that it is almost everywhere."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, inplace: bool) -> Tensor:
        ctx.save_for_backward((input.abs() < 3).to(input.dtype) / 6)
        if inplace:
            ctx.mark_dirty(input)
        return F.hardsigmoid(input, inplace)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (slope,) = ctx.saved_tensors
        return gradient * slope, None


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    result: Tensor = Hardsigmoid.apply(input, inplace)  # type: ignore[no-untyped-call]
    return result


_SUBSTITUTES = {
    torch._weight_norm: _weight_norm,
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
    F.hardsigmoid: _hardsigmoid,
}
