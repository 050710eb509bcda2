"""Guards at the door: the value, the rule and the way out, before any work is done."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from hessinit.errors import ProblemError, choose
from hessinit.problem.batches import Batch
from hessinit.problem.layers import Layer
from hessinit.problem.structures import tensors_in


def check_arguments(model: Any, loss: Any, forward: Any, dtype: Any, dropout: str) -> None:
    """Types of what the user passed."""
    if not isinstance(model, nn.Module):
        hint = " Pass an instance, not the class." if isinstance(model, type) else ""
        raise ProblemError(f"model is a {type(model).__name__}; it must be a torch.nn.Module.{hint}")
    if not callable(loss):
        raise ProblemError(f"loss is a {type(loss).__name__}; it must be callable as loss(output, target).")
    if isinstance(loss, type):
        raise ProblemError(f"loss is the class {loss.__name__}; pass an instance: {loss.__name__}().")
    if forward is not None and not callable(forward):
        raise ProblemError(f"forward is a {type(forward).__name__}; it must be callable as forward(model, inputs).")
    if dtype not in (None, torch.float32, torch.float64):
        raise ProblemError(f"dtype={dtype} is not supported; choose torch.float32, torch.float64 or None (at least fp32).")
    choose("dropout", dropout, ["refuse", "freeze"])


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DataParallel, DistributedDataParallel or torch.compile, whose wrappers cannot be differentiated twice."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif hasattr(model, "_orig_mod") and isinstance(model._orig_mod, nn.Module):
            model = model._orig_mod
        else:
            return model


def check_parameters(model: nn.Module, layers: tuple[Layer, ...]) -> None:
    """Real floating-point weights with values, all in one place."""
    devices: dict[torch.device, str] = {}
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ProblemError(f"{name} is lazy and has no shape yet; run the model once on a batch before measuring.")
        kind = type(parameter.data).__name__
        if "DTensor" in kind or "ShardedTensor" in kind or hasattr(parameter, "_is_flat_param"):
            raise ProblemError(
                f"{name} is sharded ({kind}): one rank holds only a part of it. Measure before sharding the model, "
                "or gather the full weights first (for FSDP: summon_full_params or full_tensor())."
            )
        if parameter.device.type == "meta":
            raise ProblemError(f"{name} is on the meta device and has no values; materialize it (model.to_empty, then init).")
        devices.setdefault(parameter.device, name)
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ProblemError(f"the parameters lie on different devices ({places}); move the model to one: model.to(device).")
    for layer in layers:
        parameter = model.get_parameter(layer.parameter)
        if not parameter.is_floating_point():
            raise ProblemError(
                f"{layer.name} has dtype {parameter.dtype}; curvature needs real floating-point weights. "
                "Convert the model (model.float()), or leave it out with layers=."
            )
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not bool(torch.isfinite(parameter.detach()).all()):
            raise ProblemError(
                f"{name} holds NaN or inf (it is the first parameter that does); initialize it again before measuring."
            )


def check_dropout(model: nn.Module, dropout: str) -> None:
    """Active dropout draws another mask for every product: there is no single Hessian."""
    if dropout == "freeze":
        return
    active = [name or type(module).__name__ for name, module in model.named_modules() if _drops(module)]
    if active:
        shown = ", ".join(active[:4]) + (f" and {len(active) - 4} more" if len(active) > 4 else "")
        verb = "is" if len(active) == 1 else "are"
        raise ProblemError(
            f"{shown} {verb} active (train mode): every product would see another mask, so there is no single Hessian. "
            'Call model.eval(), or pass dropout="freeze" to keep one mask.'
        )


def _drops(module: nn.Module) -> bool:
    if not module.training:
        return False
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    return isinstance(module, nn.MultiheadAttention) and module.dropout > 0


def check_finite_batch(batch: Batch, position: int, total: int) -> None:
    """NaN in, NaN out: say so before the forward."""
    place = f" of batch {position}" if total > 1 else ""
    for role, structure in (("inputs", batch.inputs), ("targets", batch.targets)):
        for tensor in tensors_in(structure):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                bad = int((~torch.isfinite(tensor)).sum())
                raise ProblemError(f"the {role}{place} hold {bad} NaN or inf among {tensor.numel()} values; clean them first.")


def check_output(output: Any, forward: Any) -> None:
    """A single real tensor."""
    if not isinstance(output, Tensor):
        who = "forward=" if forward is not None else "the model"
        if isinstance(output, (tuple, list)):
            found, way = f"a {type(output).__name__} of {len(output)}", "lambda model, x: model(x)[0]"
        elif hasattr(output, "logits"):
            found, way = f"a {type(output).__name__}", "lambda model, x: model(**x).logits"
        elif isinstance(output, dict):
            found, way = f"a dict with keys {list(output)}", f"lambda model, x: model(x)[{next(iter(output), 'key')!r}]"
        else:
            found, way = f"a {type(output).__name__}", "lambda model, x: model(x).some_tensor"
        raise ProblemError(f"{who} returned {found}; curvature needs one tensor. Pass forward={way}.")
    if not output.is_floating_point():
        raise ProblemError(f"the model's output has dtype {output.dtype}; it must be real and floating point.")


def check_loss_value(value: Any) -> None:
    """One number that can be differentiated."""
    if not isinstance(value, Tensor):
        raise ProblemError(f"the loss returned a {type(value).__name__}; it must return a scalar tensor.")
    if value.numel() != 1:
        raise ProblemError(
            f"the loss has shape {tuple(value.shape)}; it must be a single number. "
            'Average it (reduction="mean", or .mean()) or sum it.'
        )
    if not value.is_floating_point():
        raise ProblemError(f"the loss has dtype {value.dtype}; it must be real and floating point.")
