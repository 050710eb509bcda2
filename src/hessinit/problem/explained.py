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
from hessinit.problem import validate
from hessinit.problem.batches import tensors_in
from hessinit.problem.problem import Forward

if TYPE_CHECKING:
    from hessinit.problem.functional import FunctionalProblem

_NO_DERIVATIVE = re.compile(r"derivative for '?(?:aten::)?(\w+)'? is not implemented")
RECOMPUTES = (
    "the forward recomputes activations (torch.utils.checkpoint) or stores them by hooks, which would run "
    "outside of measuring, on other weights and buffers. Turn it off while measuring "
    "(in Hugging Face models: model.gradient_checkpointing_disable())."
)
# torch has no class of error for it, and as many wordings as operations.
_MIXED = re.compile(r"dtype|scalar type|type \(.*\) and .*type", re.IGNORECASE)


@contextlib.contextmanager
def explained(
    model: nn.Module, inputs: Any, forward: Forward | None, converted: bool
) -> Iterator[None]:
    """Turn known errors of the forward into a `ProblemError` with the way out; other errors pass."""
    try:
        yield
    except (TypeError, AttributeError) as failure:
        if forward is not None or isinstance(inputs, Tensor):
            raise
        if not any(True for _ in tensors_in(inputs)):
            what = f"the model takes no {type(inputs).__name__}: {failure}"
            raise ProblemError(f"{what}. Convert the inputs with torch.as_tensor.") from failure
        call = "model(**x)" if isinstance(inputs, Mapping) else "model(*x)"
        raise ProblemError(
            f"the model, called with one {type(inputs).__name__}, failed: {failure}. If it takes its "
            f"inputs one by one, pass forward=lambda model, x: {call}; several batches are passed as a list."
        ) from failure
    except (RuntimeError, ValueError, IndexError) as failure:
        if str(failure) == RECOMPUTES:
            raise ProblemError(RECOMPUTES) from None
        if "differentiated Tensors does not require grad" in str(failure):
            raise ProblemError(
                "the forward differentiates by a tensor that is held constant while measuring: a parameter "
                "that is frozen or not among the measured layers (by default biases and norm gains are not). "
                f'layers="{validate.EVERYTHING}" measures all that are trained.'
            ) from failure
        if converted and _MIXED.search(str(failure)):
            raise ProblemError(
                f"the forward failed on weights converted to float32 or better: {failure}. It seems to cast "
                "by itself; let it follow the weights instead, as in x.to(self.linear.weight.dtype)."
            ) from failure
        explain_module(failure, model, inputs)
        raise


def _frames_in_torch(failure: BaseException) -> list[types.FrameType]:
    """The frames of the failure if a module or function of torch.nn refused what it was given, or none."""
    walked = [frame for frame, _ in traceback.walk_tb(failure.__traceback__)]
    # `Substitutes` stands between a module and torch's function.
    frames = [frame for frame in walked if not frame.f_globals["__name__"].startswith("hessinit.")]
    by_torch = bool(frames) and frames[-1].f_globals["__name__"].startswith("torch.nn.")
    return frames if by_torch and not _NO_MEMORY.search(str(failure)) else []


def explain_module(failure: Exception, model: nn.Module, inputs: Any) -> None:
    """Name the layer that refused its input, and the shapes; return where it was no layer of torch."""
    names = {id(module): name for name, module in model.named_modules()}
    for frame in reversed(_frames_in_torch(failure)):
        module = frame.f_locals.get("self")
        given = frame.f_locals.get("input")
        if isinstance(module, nn.Module) and isinstance(given, Tensor) and not [*module.children()]:
            layer = (
                f"Its layer {names[id(module)]}, {module},"
                if names.get(id(module))
                else f"{module}"
            )
            raise ProblemError(
                f"the model failed on inputs of {describe_tensors(inputs)}. {layer} got "
                f"{describe_tensors(given)}: "
                f"{str(failure).rstrip('.')}. Change the layer, or the shape or dtype of the inputs."
            ) from failure


def describe_tensors(structure: Any) -> str:
    """Shape and dtype of every tensor, or the type of what is none."""
    found = [f"shape {tuple(one.shape)} in {str(one.dtype)[6:]}" for one in tensors_in(structure)]
    return ", ".join(found) or f"type {type(structure).__name__}"


@contextlib.contextmanager
def explained_loss(output: Any, targets: Any) -> Iterator[None]:
    """Turn what a loss of torch says of the shape or dtype of its arguments into a `ProblemError`."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError, TypeError) as failure:
        if isinstance(failure, ProblemError) or not _frames_in_torch(failure):
            raise
        if not isinstance(output, Tensor):
            validate.check_output(output, None)
        way = "Give the loss what it takes: targets.long() for class numbers, targets.float() of the shape "
        way += "of the output for values"
        if isinstance(failure, IndexError) and isinstance(targets, Tensor):
            classes = output.shape[1 if output.ndim > 1 else 0]
            way = f"Class numbers go from 0 to {classes - 1} for {classes} outputs, and the targets from "
            way += f"{targets.min()} to {targets.max()}: renumber them, or give the last layer more outputs"
        raise ProblemError(
            f"the loss failed on an output of {describe_tensors(output)} and targets of "
            f"{describe_tensors(targets)}: {str(failure).rstrip('.')}. {way}."
        ) from failure


@contextlib.contextmanager
def explained_derivatives(*, of_loss: bool = False) -> Iterator[None]:
    """Turn torch's error on a missing second derivative into a `DerivativeError` that names the function."""
    try:
        yield
    except RuntimeError as failure:
        if (missing := _NO_DERIVATIVE.search(str(failure))) is None:
            raise
        name = missing[1].strip("_").removesuffix("_backward")
        raise DerivativeError(
            f"torch has no second derivative of {name}, which the loss uses, and every curvature needs it. "
            "Write the loss with other functions, such as log_softmax, torch.exp and sums."
            if of_loss
            else f"torch has no second derivative of {name}. Leave the weights before it out (layers=), or "
            "write the function with others, such as torch.exp, sums and square roots."
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
        known = isinstance(failure, (torch.OutOfMemoryError, MemoryError))
        if not known and not _NO_MEMORY.search(str(failure)):
            raise
        # The frames that failed still hold what they had built.
        traceback.clear_frames(failure.__traceback__)
        weights = sum(leaf.numel() for leaf in problem.leaves.values())
        raise ProblemError(
            f"out of memory on {problem.device} with {problem.examples} examples and {weights:,} weights. "
            "Pass fewer examples (all batches are held at once), or measure fewer layers (layers=...), or a "
            "single curvature without top, trace or density."
        ) from failure
