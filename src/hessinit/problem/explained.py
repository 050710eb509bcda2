"""Errors of evaluating a problem, explained: what failed, where, and the way out."""

from __future__ import annotations

import contextlib
import re
import traceback
import types
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hessinit.errors import DerivativeError, ProblemError
from hessinit.problem import checks
from hessinit.problem.batches import tensors_in
from hessinit.problem.problem import Forward

if TYPE_CHECKING:
    from hessinit.problem.functional import FunctionalProblem

_NO_DERIVATIVE = re.compile(r"derivative for '?(?:aten::)?(\w+)'? is not implemented")
RECOMPUTES = (
    "the forward recomputes activations (torch.utils.checkpoint) or stores them by hooks, which "
    "would run outside of measuring, on other weights and buffers. Turn it off while measuring (in "
    "Hugging Face models: model.gradient_checkpointing_disable())."
)
# torch has no class of error for it, and as many wordings as operations.
_MIXED = re.compile(r"dtype|scalar type|type \(.*\) and .*type", re.IGNORECASE)


@contextlib.contextmanager
def explained(
    model: nn.Module, inputs: Any, forward: Forward | None, converted: bool
) -> Iterator[None]:
    """Turn known errors of the forward into a `ProblemError` with the way out; pass on others."""
    try:
        yield
    except (TypeError, AttributeError) as failure:
        if forward is not None or isinstance(inputs, Tensor):
            raise
        if not any(True for _ in tensors_in(inputs)):
            raise ProblemError(
                f"the model takes no {type(inputs).__name__}: {failure}. Convert the inputs with "
                "torch.as_tensor."
            ) from failure
        call = "model(**x)" if isinstance(inputs, Mapping) else "model(*x)"
        raise ProblemError(
            f"the model, called with one {type(inputs).__name__}, failed: {failure}. If it takes "
            f"its inputs one by one, pass forward=lambda model, x: {call}; several batches are "
            "passed as a list."
        ) from failure
    except (RuntimeError, ValueError, IndexError) as failure:
        if str(failure) == RECOMPUTES:
            raise ProblemError(RECOMPUTES) from None
        if "differentiated Tensors does not require grad" in str(failure):
            raise ProblemError(
                "the forward differentiates by a tensor that is held constant while measuring: a "
                "parameter that is frozen or not among the measured layers (by default biases and "
                f'norm gains are not). layers="{checks.EVERYTHING}" measures all that are '
                "trained."
            ) from failure
        if converted and _MIXED.search(str(failure)):
            raise ProblemError(
                f"the forward failed on weights converted to float32 or better: {failure}. It "
                "seems to cast by itself; let it follow the weights instead, as in "
                "x.to(self.linear.weight.dtype)."
            ) from failure
        explain_module(failure, model, inputs)
        raise


def _frames_in_torch(failure: BaseException) -> list[types.FrameType]:
    """The frames of the failure if a module or function of torch.nn refused its input, or none."""

    def module_of(frame: types.FrameType) -> str:
        return str(frame.f_globals["__name__"])

    frames = [frame for frame, _ in traceback.walk_tb(failure.__traceback__)]
    # `Substitutes` stands between a module and torch's function.
    frames = [frame for frame in frames if not module_of(frame).startswith("hessinit.")]
    by_torch = bool(frames) and module_of(frames[-1]).startswith("torch.nn.")
    if by_torch and not _NO_MEMORY.search(str(failure)):
        return frames
    return []


def explain_module(failure: Exception, model: nn.Module, inputs: Any) -> None:
    """Raise an error that names the layer of torch that refused its input; return if none did."""
    names = {id(module): name for name, module in model.named_modules()}
    for frame in reversed(_frames_in_torch(failure)):
        module = frame.f_locals.get("self")
        layer_input = frame.f_locals.get("input")
        is_layer = isinstance(module, nn.Module) and not [*module.children()]
        if is_layer and isinstance(layer_input, Tensor):
            layer = str(module)
            if name := names.get(id(module)):
                layer = f"Its layer {name}, {module},"
            raise ProblemError(
                f"the model failed on inputs of {describe_tensors(inputs)}. {layer} got "
                f"{describe_tensors(layer_input)}: {str(failure).rstrip('.')}. Change the layer, or the "
                "shape or dtype of the inputs."
            ) from failure


def describe_tensors(structure: Any) -> str:
    """Shape and dtype of every tensor, or the type of what is none."""
    tensors = [
        f"shape {tuple(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')}"
        for tensor in tensors_in(structure)
    ]
    return ", ".join(tensors) or f"type {type(structure).__name__}"


@contextlib.contextmanager
def explained_loss(output: Any, targets: Any) -> Iterator[None]:
    """Turn a complaint of torch's loss about shapes or dtypes into a `ProblemError`."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError, TypeError) as failure:
        if isinstance(failure, ProblemError) or not _frames_in_torch(failure):
            raise
        if not isinstance(output, Tensor):
            checks.check_output(output, None)
        hint = (
            "Give the loss what it takes: targets.long() for class numbers, targets.float() of the "
            "shape of the output for values"
        )
        if isinstance(failure, IndexError) and isinstance(targets, Tensor):
            classes = output.shape[1 if output.ndim > 1 else 0]
            hint = (
                f"Class numbers go from 0 to {classes - 1} for {classes} outputs, and the targets "
                f"from {targets.min()} to {targets.max()}: renumber them, or give the last layer "
                "more outputs"
            )
        raise ProblemError(
            f"the loss failed on an output of {describe_tensors(output)} and targets of "
            f"{describe_tensors(targets)}: {str(failure).rstrip('.')}. {hint}."
        ) from failure


@contextlib.contextmanager
def explained_derivatives(*, of_loss: bool = False) -> Iterator[None]:
    """Turn torch's error on a missing second derivative into one that names the function."""
    try:
        yield
    except RuntimeError as failure:
        if (missing := _NO_DERIVATIVE.search(str(failure))) is None:
            raise
        name = missing[1].strip("_").removesuffix("_backward")
        if of_loss:
            raise DerivativeError(
                f"torch has no second derivative of {name}, which the loss uses, and every "
                "curvature needs it. Write the loss with other functions, such as log_softmax, "
                "torch.exp and sums."
            ) from failure
        raise DerivativeError(
            f"torch has no second derivative of {name}. Leave the weights before it out (layers=), "
            "or write the function with others, such as torch.exp, sums and square roots."
        ) from failure


_NO_MEMORY = re.compile(
    "out of memory|not enough memory|n.t allocate memory|alloc_failed", re.IGNORECASE
)


@contextlib.contextmanager
def explained_memory(problem: FunctionalProblem) -> Iterator[None]:
    """Turn a failed allocation into a `ProblemError` that says what to reduce."""
    try:
        yield
    except (RuntimeError, MemoryError) as failure:
        out_of_memory = isinstance(failure, (torch.OutOfMemoryError, MemoryError))
        if not out_of_memory and not _NO_MEMORY.search(str(failure)):
            raise
        # The frames that failed still hold what they had built.
        traceback.clear_frames(failure.__traceback__)
        weights = sum(leaf.numel() for leaf in problem.leaves.values())
        raise ProblemError(
            f"out of memory on {problem.device} with {problem.examples} examples and {weights:,} "
            "weights. Pass fewer examples (all batches are held at once), or measure fewer layers "
            "(layers=...), or a single curvature without top, trace or density."
        ) from failure
