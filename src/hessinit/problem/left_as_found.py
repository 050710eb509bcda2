"""The settings under which curvature can be measured, and the promise that all is put back afterwards."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hessinit.problem.substitutes import Substitutes


@contextlib.contextmanager
def random_state(seed: int, device: torch.device) -> Iterator[None]:
    """Seed every generator a forward may draw from; afterwards each continues as if nothing had happened."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def untouched_random_state() -> Iterator[None]:
    """Let someone draw (a DataLoader does, even without shuffling) and go on as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[]):
        yield


@contextlib.contextmanager
def twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Run the forward with kernels that have a second derivative, in full precision, and no autocast.

    Fused attention and the cuDNN and oneDNN recurrent kernels have only a first one; the settings live in thread-local
    or global switches of torch, never in the model, and are put back on leaving.
    """
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(Substitutes())
        for kind in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.cuda.is_available():
            # TF32 keeps 10 bits of the mantissa: a norm measured with it is off by up to 1e-3.
            cudnn = torch.backends.cudnn
            stack.enter_context(cudnn.flags(enabled=not recurrent, deterministic=True, allow_tf32=False))
            stack.enter_context(_full_precision_matmul())
        if recurrent and torch.backends.mkldnn.is_available():
            stack.enter_context(_without_onednn())
        yield


@contextlib.contextmanager
def _full_precision_matmul() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


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
