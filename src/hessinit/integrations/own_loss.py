"""The loss that a model works out by itself when it is given labels, to compare ours with."""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hessinit.integrations.model_modes import configurations, differentiable_outputs
from hessinit.problem.batches import cast
from hessinit.problem.preserve import UserState, untouched_random_state, untouched_sources

# Logits near zero give almost the same loss whatever the labels: little is left to tell two losses apart.
_RELATIVE, _ABSOLUTE = 5e-5, 1e-6


@dataclass(frozen=True)
class OwnLoss:
    """A model's loss of a batch in eval mode, and the logits that it was made from."""

    value: float
    logits: Tensor
    tolerance: float

    def agrees(self, other: float) -> bool:
        """Whether it is the same number, up to the rounding of the model's dtype."""
        if math.isnan(other) or math.isnan(self.value):
            return math.isnan(other) and math.isnan(self.value)
        return math.isclose(other, self.value, rel_tol=self.tolerance, abs_tol=_ABSOLUTE)


def find_own_loss(model: nn.Module, inputs: Any, labels: Tensor, extra: Mapping[str, Any]) -> OwnLoss | None:
    """One forward without gradients, in eval mode, which leaves the model as found; None for other models.

    Also None where the call fails: a loss that the model does not know is no loss to compare with.
    """
    parameters = inspect.signature(model.forward).parameters
    first = next(model.parameters(), None)
    if "labels" not in parameters or not isinstance(inputs, Mapping) or first is None:
        return None
    call = cast({**inputs, **extra, "labels": labels}, first.dtype, first.device)
    call["labels"] = labels.to(first.device)  # of their own dtype: classes at once come as doubles, too
    try:
        with _left_as_found(model, first.device):
            output = model(**call)
    except Exception:
        return None
    loss, logits = getattr(output, "loss", None), getattr(output, "logits", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not isinstance(logits, Tensor):
        return None
    rounding = 8 * torch.finfo(loss.dtype).eps if loss.is_floating_point() else 0.0
    return OwnLoss(loss.item(), _at_least_single(logits), max(_RELATIVE, rounding))


@contextlib.contextmanager
def _left_as_found(model: nn.Module, device: torch.device) -> Iterator[None]:
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with contextlib.ExitStack() as stack:
        stack.enter_context(untouched_random_state(device))
        stack.enter_context(UserState(model).lent())
        stack.enter_context(
            untouched_sources(*configurations(model))
        )  # classifiers note there what they guess
        stack.enter_context(differentiable_outputs(model))
        model.eval()  # an attribute like the others
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # the same call warns again when it is measured
        try:
            yield
        finally:
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


def _at_least_single(logits: Tensor) -> Tensor:
    """As most models do before they work out their loss."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
