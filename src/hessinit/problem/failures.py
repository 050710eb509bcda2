"""What to say when the user's own forward or loss fails for a reason that measuring brought about."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks

from hessinit.errors import ProblemError
from hessinit.problem.batches import Batch
from hessinit.problem.structures import tensors_in

_NO_DERIVATIVE = re.compile(r"derivative for '?(?:aten::)?(\w+)'? is not implemented")
_RECOMPUTES = (
    "the forward recomputes activations (torch.utils.checkpoint) or stores them by hooks, which would run "
    "outside of measuring, on other weights and buffers. Turn it off while measuring "
    "(in Hugging Face models: model.gradient_checkpointing_disable())."
)
# torch has no class of error for it, and as many wordings as operations.
_MIXED = re.compile(r"dtype|scalar type|type \(.*\) and .*type", re.IGNORECASE)


@contextlib.contextmanager
def explained(
    model: nn.Module, batch: Batch, forward: Callable[..., Any] | None, converted: bool
) -> Iterator[None]:
    """Around a forward: name the way out where there is one, and let every other error through."""
    # A recomputation finds the model's own tensors: of another dtype, or buffers that it would write to.
    stateful = any(
        module.training and any(True for _ in module.buffers(recurse=False)) for module in model.modules()
    )
    guard = disable_saved_tensors_hooks(_RECOMPUTES) if converted or stateful else contextlib.nullcontext()
    try:
        with guard:
            yield
    except (TypeError, AttributeError) as failure:
        if forward is not None or isinstance(batch.inputs, Tensor):
            raise
        call = "model(**x)" if isinstance(batch.inputs, Mapping) else "model(*x)"
        raise ProblemError(
            f"the model, called with one {type(batch.inputs).__name__}, failed: {failure}. If it takes its "
            f"inputs one by one, pass forward=lambda model, x: {call}; several batches are passed as a list."
        ) from failure
    except RuntimeError as failure:
        if str(failure) == _RECOMPUTES:
            raise ProblemError(_RECOMPUTES) from None
        if converted and _MIXED.search(str(failure)):
            raise ProblemError(
                f"the forward failed on weights converted to float32 or better: {failure}. It seems to cast "
                "by itself; let it follow the weights instead, as in x.to(self.linear.weight.dtype)."
            ) from failure
        raise


@contextlib.contextmanager
def explained_derivatives(*, of_loss: bool = False) -> Iterator[None]:
    """Some functions of torch have a first derivative only; it says so in words of its own."""
    try:
        yield
    except RuntimeError as failure:
        missing = _NO_DERIVATIVE.search(str(failure))
        if missing is None:
            raise
        name = missing[1].strip("_").removesuffix("_backward")
        raise ProblemError(
            f"torch has no second derivative of {name}, which the loss uses, and every curvature needs it. "
            "Write the loss with other functions, such as log_softmax, torch.exp and sums."
            if of_loss
            else f"torch has no second derivative of {name}. The exact Hessian needs it everywhere in the "
            "model, Gauss-Newton behind weights that are not used by a dense, convolution or embedding "
            "call. Leave these weights out (layers=), or write the function with others, such as torch.exp, "
            "sums and square roots."
        ) from failure


@contextlib.contextmanager
def explained_loss(output: Tensor, batch: Batch) -> Iterator[None]:
    """Around a loss: outputs and targets that count different examples are the usual reason to fail."""
    try:
        yield
    except (ValueError, RuntimeError, IndexError) as failure:
        shapes = [tuple(tensor.shape) for tensor in tensors_in(batch.targets)]
        if len(shapes) != 1 or output.ndim == 0 or shapes[0][:1] == output.shape[:1]:
            raise
        raise ProblemError(
            f"the loss failed on an output of shape {tuple(output.shape)} and targets of shape {shapes[0]}: "
            f"{str(failure).rstrip('.')}. Both must count the same examples."
        ) from failure
