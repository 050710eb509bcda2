"""Whether the model is finite as it trains: its buffers, and its output in its own precision."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from hessinit.problem.batches import Batch
from hessinit.problem.checks import unwrap
from hessinit.problem.problem import Forward
from hessinit.problem.randomness import untouched_random_state
from hessinit.problem.structures import map_tensors, tensors_in

_SHORT = (torch.float16, torch.bfloat16)
_STATISTICS = ("running_mean", "running_var")


def find_bad_buffer(model: nn.Module) -> str | None:
    """The first that holds NaN; statistics of normalization may not hold inf either.

    Elsewhere inf is meant: in the masks of attention, or where a minimum is looked for.

    >>> model = nn.BatchNorm1d(2)
    >>> model.running_var[1] = torch.inf
    >>> find_bad_buffer(model)
    'running_var'
    """
    for name, buffer in model.named_buffers():
        if not buffer.is_floating_point():
            continue
        bad = ~buffer.isfinite() if name.split(".")[-1] in _STATISTICS else buffer.isnan()
        if bool(bad.any()):
            return name
    return None


def overflows_in_own_precision(model: nn.Module, batch: Batch, forward: Forward | None) -> torch.dtype | None:
    """The dtype of a model in half precision whose output is not finite, though that in fp32 is.

    Costs a copy of the model and one forward. A forward that fails in half precision, as some functions do
    on a CPU, is not judged.
    """
    inner = unwrap(model)
    kinds = [one.dtype for one in inner.parameters() if one.dtype in _SHORT]
    if not kinds:
        return None

    def convert(tensor: Tensor) -> Tensor:
        kind = kinds[0] if tensor.is_floating_point() else None
        return tensor.detach().to(device=device, dtype=kind, copy=True)

    device = next(inner.parameters()).device
    try:
        with untouched_random_state(device), torch.no_grad():
            twin, inputs = copy.deepcopy(inner), map_tensors(convert, batch.inputs)
            output: Any = twin(inputs) if forward is None else forward(twin, inputs)
    except Exception:  # whatever the user's own code raises
        return None
    finite = all(bool(one.isfinite().all()) for one in tensors_in(output) if one.is_floating_point())
    return None if finite else kinds[0]
