"""Are the weights real numbers, here, whole, and finite?"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hessinit.errors import ProblemError
from hessinit.problem.layers import Layer


def check_present(model: nn.Module) -> None:
    """Every weight has a shape and a value, whole, and on one device."""
    for path, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ProblemError(_sharded(path or "the model", "FSDP"))
    devices: dict[torch.device, str] = {}
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ProblemError(f"{name} is lazy and has no shape yet; run the model on a batch once first.")
        kind = type(parameter.data).__name__
        if kind in ("DTensor", "ShardedTensor"):
            raise ProblemError(_sharded(name, kind))
        if parameter.device.type == "meta":
            raise ProblemError(
                f"{name} is on the meta device and has no values; give it some: "
                "model.to_empty(device=...), then initialize or load it."
            )
        devices.setdefault(parameter.device, name)
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ProblemError(
            f"the parameters lie on different devices ({places}); move the model to one: model.to(device)."
        )


def check_apart(model: nn.Module) -> None:
    """No two parameters hold the same numbers: an optimizer would move both with each of their gradients."""
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.layout is torch.strided and parameter.numel():
            by_storage.setdefault(parameter.untyped_storage().data_ptr(), []).append(
                (name, parameter.detach())
            )
    for shared in by_storage.values():
        for (name, one), (other, another) in itertools.combinations(shared, 2):
            if one.dtype == another.dtype and _overlap(one, another):
                raise ProblemError(
                    f"{name} and {other} are two parameters on the same memory: each gradient step moves "
                    f"both, so neither has a curvature of its own. Make them one parameter ({other} = "
                    f"{name})."
                )


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two views of a storage share an element, also where they interleave."""
    first, second = sorted((one, other), key=lambda view: view.storage_offset())
    end = first.storage_offset() + sum(
        (n - 1) * step for n, step in zip(first.shape, first.stride(), strict=True)
    )
    if end < second.storage_offset():
        return False
    size = one.untyped_storage().nbytes() // one.element_size()
    touched = torch.zeros(size, dtype=torch.uint8)
    for view in (one, other):
        touched.as_strided(view.shape, view.stride(), view.storage_offset()).add_(1)
    return bool((touched > 1).any())


def _sharded(name: str, kind: str) -> str:
    return (
        f"{name} is sharded ({kind}): a rank may hold only a part of it. Measure before the model is "
        "sharded, or copy the full weights into a plain model (get_model_state_dict of "
        "torch.distributed.checkpoint.state_dict, with StateDictOptions(full_state_dict=True))."
    )


def check_values(model: nn.Module, layers: tuple[Layer, ...]) -> None:
    """Real, dense and finite."""
    for layer in layers:
        parameter = model.get_parameter(layer.parameter)
        if not parameter.is_floating_point():
            # model.float() is no way out: it converts floating-point weights alone.
            raise ProblemError(
                f"{layer.name} has dtype {parameter.dtype}; curvature needs real floating-point weights. "
                "Hold it as one (a complex weight as torch.view_as_real of it), or leave this weight out "
                "with layers=."
            )
        if parameter.layout is not torch.strided:
            raise ProblemError(
                f"{layer.name} is a sparse tensor ({parameter.layout}): whether what it leaves out may move "
                "is up to each operation. Hold it as a dense weight, times a mask in the forward if need be, "
                "or leave this weight out with layers=."
            )
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not all_finite(parameter.detach()):
            raise ProblemError(
                f"{name} holds NaN or inf (it is the first parameter that does); "
                "initialize it again before measuring."
            )


def all_finite(tensor: Tensor) -> bool:
    """No NaN and no inf. A sum is ten times faster than a look at each value, and overflows only rarely."""
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())
