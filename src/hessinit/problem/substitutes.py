"""Functions of torch whose second derivative is missing or wrong, and what stands in for them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from hessinit.errors import DerivativeError, argument


class Substitutes(TorchFunctionMode):
    """While active, the functions below run as compositions of ordinary differentiable ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _SUBSTITUTES.get(func, func)(*args, **(kwargs or {}))


def _weight_norm(direction: Tensor, length: Tensor, dim: int = 0) -> Tensor:
    """The fused one treats the norm as a constant in its second derivative (seen in torch 2.13)."""
    if dim == -1:
        norm = direction.norm()
    else:
        rows = direction.transpose(0, dim).flatten(1).norm(dim=1)
        norm = rows.view([-1 if axis == dim else 1 for axis in range(direction.ndim)])
    return direction * (length / norm)


def _embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, *positional: Any, **named: Any
) -> Tensor:
    """The fused one has no second derivative at all."""
    names = ["max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights"]
    names += ["include_last_offset", "padding_idx"]
    options = {**dict(zip(names, positional, strict=False)), **named}
    mode = options.get("mode", "mean")
    padding = options.get("padding_idx")
    refused = ("max_norm", "scale_grad_by_freq", "per_sample_weights", "include_last_offset")
    if mode == "max" or any(options.get(name) not in (None, False) for name in refused):
        raise DerivativeError(
            "EmbeddingBag has no second derivative with mode='max' or any of "
            f"{', '.join(refused)}; use mode='sum' or 'mean' without these options, or leave it "
            "out (",
            argument("layers"),
            ").",
        )
    if offsets is None:
        offsets = torch.arange(0, input.numel(), input.shape[1], device=input.device)
    flat = input.flatten()
    bags = torch.searchsorted(offsets, torch.arange(len(flat), device=flat.device), right=True) - 1
    rows = F.embedding(flat, weight, padding)
    counted = torch.ones_like(flat, dtype=rows.dtype)
    if padding is not None:
        counted = (flat != padding % weight.shape[0]).to(rows.dtype)
    sums = rows.new_zeros(len(offsets), weight.shape[1]).index_add(
        0, bags, rows * counted.unsqueeze(1)
    )
    if mode == "sum":
        return sums
    sizes = counted.new_zeros(len(offsets)).index_add(0, bags, counted)
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
    if scale_grad_by_freq or max_norm is not None:
        raise DerivativeError(
            f"an Embedding has scale_grad_by_freq={scale_grad_by_freq} and max_norm={max_norm}: "
            "the first divides its gradient by how often each word comes, the second rewrites its "
            "weight in the forward, so that what is trained has no Hessian. Measure without these "
            "two."
        )
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


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Any:
    return Hardsigmoid.apply(input, inplace)  # type: ignore[no-untyped-call]


_SUBSTITUTES: dict[Any, Callable[..., Any]] = {
    torch._weight_norm: _weight_norm,
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
    F.hardsigmoid: _hardsigmoid,
}


@contextlib.contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """The model in train or eval mode, as its own `train` understands it; put back on leaving."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        for module, training_before in modes:
            module.training = training_before


@contextlib.contextmanager
def twice_differentiable(model: nn.Module, *, tf32: bool = False) -> Iterator[None]:
    """Run the forward with kernels that have a second derivative, without autocast.

    Products are in full precision or TF32. Fused attention and cuDNN's recurrent kernels have only
    a first derivative, oneDNN's not in every version. Only switches of torch are set, and all are
    put back on leaving.
    """
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        # It looks for NaN in every gradient, which batched ones refuse: each failure would print a
        # traceback.
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        # The encoder's, for what needs no gradient, gives zeros where training does not.
        stack.callback(
            torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled()
        )
        torch.backends.mha.set_fastpath_enabled(False)
        for kind in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        if "torch._dynamo" in sys.modules:
            # Whatever is compiled runs as it was written: compiled code has only a first
            # derivative.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if default_device().type != "cpu":
            # For our own vectors; the forward gets the user's back.
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(matrix_products(tf32=tf32))
        if torch.cuda.is_available():
            cudnn = torch.backends.cudnn
            stack.enter_context(
                cudnn.flags(enabled=not recurrent, deterministic=True, allow_tf32=tf32)
            )
        if recurrent and torch.backends.mkldnn.is_available():
            onednn: Any = torch.backends.mkldnn
            stack.callback(setattr, onednn, "enabled", onednn.enabled)
            onednn.enabled = False
        yield


@contextlib.contextmanager
def matrix_products(*, tf32: bool) -> Iterator[None]:
    """TF32 keeps 10 bits of the mantissa: a norm is off by up to 1e-3. CPUs have it too."""
    with contextlib.ExitStack() as stack:
        try:
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
        except RuntimeError:
            # torch refuses to tell once the newer switches, one for each backend, have been used.
            backends: Any = torch.backends
            switches = [backends.cuda.matmul, backends.mkldnn.matmul]
            for switch in switches:
                stack.callback(setattr, switch, "fp32_precision", switch.fp32_precision)
                switch.fp32_precision = "tf32" if tf32 else "ieee"
        yield


def default_device() -> torch.device:
    """Where new tensors go, also inside of `with torch.device(...)`."""
    return torch.empty(0).device  # torch.get_default_device does not see a `with` in torch 2.6
