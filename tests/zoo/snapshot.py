"""Everything about a model, its loss, its batch and the random generators that measuring must not change."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def snapshot(model: nn.Module, loss: Any, batch: Any) -> dict[str, Any]:
    """A picture to compare with `==`: tensors stand as their dtype, shape and bytes."""
    picture: dict[str, Any] = {
        "torch random state": bits(torch.get_rng_state()),
        "python random state": random.getstate(),
        "numpy random state": repr(numpy.random.get_state()),  # noqa: NPY002 (the global one is at stake)
        "default dtype": torch.get_default_dtype(),
        "gradient mode": torch.is_grad_enabled(),
        "batch": [bits(tensor) for tensor in tensors(batch)],
    }
    for name, value in model.state_dict().items():
        picture[f"state of {name}"] = bits(value)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        picture[f"parameter {name}"] = (id(parameter), parameter.data_ptr(), parameter.requires_grad)
        picture[f"gradient of {name}"] = None if parameter.grad is None else bits(parameter.grad)
    for name, module in model.named_modules():
        hooks = [list(getattr(module, kind).values()) for kind in HOOKS]
        picture[f"module {name}"] = (type(module).__name__, module.training, hooks, sorted(vars(module)))
    if isinstance(loss, nn.Module):
        picture["loss"] = [(name, bits(value)) for name, value in loss.state_dict().items()]
    return picture


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    missing = object()
    return [key for key in before | after if before.get(key, missing) != after.get(key, missing)]


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.detach().contiguous().numpy().tobytes()


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors(list(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors([getattr(value, part.name) for part in dataclasses.fields(value)])
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from tensors(entry)
