"""Checks of the user's arguments and of what the model returns."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from hessinit.errors import ProblemError, choose
from hessinit.problem.batches import tensors_in
from hessinit.problem.layers import all_finite


def check_model(model: Any, forward: Any) -> None:
    """Refuse a model that is no module, and a `forward` that is not callable."""
    if not isinstance(model, nn.Module):
        hint = " Pass an instance, not the class." if isinstance(model, type) else ""
        raise ProblemError(f"model is a {type(model).__name__}; it must be a torch.nn.Module.{hint}")
    if forward is not None and not callable(forward):
        raise ProblemError(
            f"forward is a {type(forward).__name__}; it must be callable as forward(model, inputs)."
        )


def check_arguments(
    model: Any, loss: Any, forward: Any, dtype: Any, dropout: str, reduction: str = "auto", check: Any = True
) -> None:
    check_model(model, forward)
    if isinstance(loss, type):
        raise ProblemError(f"loss is the class {loss.__name__}; pass an instance: {loss.__name__}().")
    if not callable(loss):
        raise ProblemError(f"loss is a {type(loss).__name__}; it must be callable as loss(output, target).")
    if dtype not in (None, torch.float32, torch.float64):
        raise ProblemError(
            f"dtype={dtype} is not supported; choose torch.float32, torch.float64, or None for the better "
            "of float32 and the model's own."
        )
    choose("dropout", dropout, ["refuse", "freeze"])
    choose("reduction", reduction, ["auto", "mean", "sum"])
    check_switches(check=check)


def check_whole(name: str, value: Any, at_least: int) -> int:
    """The value as an int; refuses anything but a whole number from `at_least` up."""
    try:
        number = operator.index(value)
    except TypeError:
        number = at_least - 1
    if not at_least <= number < 2**63:
        raise ProblemError(f"{name}={value!r} must be a whole number, {at_least} or more.")
    return number


def check_switches(**switches: Any) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ProblemError(f"{name}={value!r} must be True or False.")


def check_tolerance(tolerance: Any) -> float:
    """The value as a float; refuses anything but a relative error between 0 and 1."""
    try:
        fine = 0 < float(tolerance) < 1
    except (TypeError, ValueError):
        fine = False
    if not fine:
        raise ProblemError(f"tolerance={tolerance!r} must be a relative error between 0 and 1, such as 1e-3.")
    return float(tolerance)


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DataParallel, DistributedDataParallel or torch.compile: these have one derivative."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif hasattr(model, "_orig_mod") and isinstance(model._orig_mod, nn.Module):
            model = model._orig_mod
        else:
            return model


def check_dropout(model: nn.Module, dropout: str) -> None:
    """Refuse active dropout: every product would see another mask."""
    if dropout == "freeze":
        return
    active = [
        f"{name or 'the model'} ({type(one).__name__})" for name, one in model.named_modules() if _drops(one)
    ]
    if active:
        raise ProblemError(
            f"dropout is active (train mode) in {', '.join(active)}: every product would see another mask, "
            'so there is no single Hessian. Call model.eval(), or pass dropout="freeze" to keep one mask.'
        )


def _drops(module: nn.Module) -> bool:
    if not module.training:
        return False
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    return isinstance(module, nn.MultiheadAttention) and module.dropout > 0


def check_finite_inputs(inputs: Any, place: str) -> None:
    """Refuse inputs with NaN or inf before the forward; targets may hold NaN where a loss masks it."""
    for tensor in tensors_in(inputs):
        if tensor.is_floating_point() and not all_finite(tensor) and not _is_mask(tensor):
            bad = int((~torch.isfinite(tensor)).sum())
            raise ProblemError(
                f"{place}the inputs hold {bad} NaN or inf among {tensor.numel()} values; clean them first. "
                f"Are they beyond the range of {tensor.dtype}? Scale them, or pass dtype=torch.float64."
            )


def _is_mask(tensor: Tensor) -> bool:
    """Zeros and -inf only, as added to attention scores."""
    return bool(((tensor == 0) | (tensor == -torch.inf)).all()) and bool((tensor == 0).any())


def check_output(output: Any, forward: Any) -> None:
    """Refuse an output that is not one real tensor."""
    if not isinstance(output, Tensor):
        who = "forward=" if forward is not None else "the model"
        found, way = f"a {type(output).__name__}", "model(**x).logits"
        if isinstance(output, (tuple, list)):
            found, way = f"{found} of {len(output)}", "model(x)[0]"
        elif isinstance(output, Mapping) and not hasattr(output, "logits"):
            found, way = f"{found} with keys {list(output)}", f"model(x)[{next(iter(output), 'key')!r}]"
        raise ProblemError(
            f"{who} returned {found}; curvature needs one tensor. Pass forward=lambda model, x: {way}."
        )
    if output.dtype not in (torch.float32, torch.float64):
        raise ProblemError(
            f"the model's output has dtype {output.dtype}; it must be real and of float32 or better, as the "
            "weights are while measuring: rounding drowns second derivatives. Leave casts (autocast, or "
            ".to()) out."
        )


def check_loss_value(value: Any) -> None:
    """Refuse a loss that is not one real number."""
    if not (isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()):
        shown = f"a {type(value).__name__}"
        if isinstance(value, Tensor):
            shown = f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
        raise ProblemError(
            f"the loss returned {shown}; it must be one real number in a tensor. Average it "
            '(reduction="mean", or .mean()) or sum it.'
        )
