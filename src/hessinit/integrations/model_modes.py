"""Switches of a model that are turned for a while, and turned back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def differentiable_outputs(model: nn.Module) -> Iterator[None]:
    """Without the gradient checkpoints of Transformers, and with outputs by name.

    Checkpoints save memory in a backward pass and give the same numbers, but no forward-mode derivative.
    """
    modules: list[Any] = list(model.modules())
    checkpointed = [one for one in modules if getattr(one, "gradient_checkpointing", False) is True]
    as_tuples = [one for one in configurations(model) if getattr(one, "return_dict", True) is False]
    try:
        for module in checkpointed:
            module.gradient_checkpointing = False
        for config in as_tuples:
            config.return_dict = True
        yield
    finally:
        for module in checkpointed:
            module.gradient_checkpointing = True
        for config in as_tuples:
            config.return_dict = False


def configurations(model: nn.Module) -> list[Any]:
    """Those of the model and its parts, which often share one."""
    found = [getattr(module, "config", None) for module in model.modules()]
    return list({id(one): one for one in found if one is not None}.values())
