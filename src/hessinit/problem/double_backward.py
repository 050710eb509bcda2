"""Functions of torch whose second derivative is missing or wrong, and what stands in for them."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from hessinit.errors import ProblemError


class Substitutes(TorchFunctionMode):
    """While active, the functions below run as compositions of ordinary differentiable ones."""

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


_SUBSTITUTES: dict[Any, Callable[..., Any]] = {
    torch._weight_norm: _weight_norm,
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
    F.hardsigmoid: lambda input, inplace=False: Hardsigmoid.apply(input, inplace),  # type: ignore[no-untyped-call]
}


@contextlib.contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """The model in train or eval mode, as its own `train` understands it; every module gets its own back."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        for module, was in modes:
            module.training = was


@contextlib.contextmanager
def twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Run the forward with kernels that have a second derivative, in full precision, and no autocast.

    Fused attention and cuDNN's recurrent kernels have only a first one, oneDNN's not in every version. Only
    switches of torch are set, nothing in the model, and all are put back on leaving.
    """
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        # It looks for NaN in every gradient, which batched ones refuse: each failure would print a traceback.
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        for kind in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        if "torch._dynamo" in sys.modules:
            # Whatever is compiled runs as it was written: compiled code has only a first derivative.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))  # for our own vectors; the forward gets the user's back
        # TF32 keeps 10 bits of the mantissa: a norm measured with it is off by up to 1e-3. CPUs have it too.
        stack.enter_context(_full_precision_matmul())
        if torch.cuda.is_available():
            cudnn = torch.backends.cudnn
            stack.enter_context(cudnn.flags(enabled=not recurrent, deterministic=True, allow_tf32=False))
        if recurrent and torch.backends.mkldnn.is_available():
            stack.enter_context(_without_onednn())
        yield


def default_device() -> torch.device:
    """Where new tensors go, also inside of `with torch.device(...)`."""
    return torch.empty(0).device  # torch.get_default_device does not see a `with` in torch 2.6


@contextlib.contextmanager
def _full_precision_matmul() -> Iterator[None]:
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:
        # torch refuses to tell once the newer switches, one for each backend, have been used.
        switches: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
        precisions = [switch.fp32_precision for switch in switches]
        try:
            for switch in switches:
                switch.fp32_precision = "ieee"
            yield
        finally:
            for switch, own in zip(switches, precisions, strict=True):
                switch.fp32_precision = own
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    switch = torch.backends.mkldnn.flags(enabled=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of TF32 on Intel GPUs whenever these flags are touched
        switch.__enter__()
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            switch.__exit__(None, None, None)
