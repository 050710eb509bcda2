"""The settings under which curvature can be measured, and the promise that all is put back afterwards."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextlib.contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """The model in train or eval mode, as its own `train` understands it; every module gets its own back."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        for module, was in before:
            module.training = was


@contextlib.contextmanager
def twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Run the forward with kernels that have a second derivative, in full precision, and no autocast.

    Fused attention and cuDNN's recurrent kernels have only a first one, oneDNN's not in every version;
    the settings live in thread-local or global switches of torch, never in the model, and are put back on
    leaving.
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
        before = torch.get_float32_matmul_precision()
    except (
        RuntimeError
    ):  # torch refuses to tell once the newer switches, one for each backend, have been used
        with _full_precision_backends():
            yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def _full_precision_backends() -> Iterator[None]:
    switches: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "ieee"
        yield
    finally:
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of TF32 on Intel GPUs whenever these flags are touched
        switch = torch.backends.mkldnn.flags(enabled=False)
        switch.__enter__()
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            switch.__exit__(None, None, None)
