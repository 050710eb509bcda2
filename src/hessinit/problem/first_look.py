"""One evaluation before the work begins: is the problem finite, deterministic, and a function of the weights?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hessinit.errors import ProblemError
from hessinit.problem.batches import Batch
from hessinit.problem.problem import Problem


@dataclass(frozen=True)
class FirstLook:
    """The output of a batch and its loss, with their graph."""

    output: Tensor
    loss: Tensor


def take_first_look(problem: Problem, batch: Batch) -> FirstLook:
    """Evaluate once, and once more on half of the examples under other random numbers; costs half a gradient.

    If the half agrees with the whole, the forward is deterministic. If not, the examples may just see each other (as in
    BatchNorm's train mode): then a second whole evaluation decides.
    """
    output = problem.output(batch)
    loss = problem.loss_of(output, batch)
    _check_finite(problem, batch, output, loss)
    _check_dependence(output, loss)
    if problem.dropout != "freeze" and not _half_agrees(problem, batch, output):
        with torch.no_grad():
            again = problem.output(batch, draw=1)
        if again.shape != output.shape or not _agree(again, output):
            raise ProblemError(
                "the model's output changes from call to call on the same batch, so there is no single Hessian. "
                'Make the forward deterministic (model.eval()), or pass dropout="freeze" to keep one draw.'
            )
    return FirstLook(output, loss)


def _half_agrees(problem: Problem, batch: Batch, output: Tensor) -> bool:
    if output.ndim < 1 or output.shape[0] != batch.size or batch.size < 2:
        return False
    some = torch.arange(0, batch.size, 2)
    try:
        with torch.no_grad():
            half = problem.output(batch.take(some), draw=1)
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
        return False  # the model needs the whole batch; a forward that fails on the whole has failed before
    whole = output[some.to(output.device)]
    return half.shape == whole.shape and _agree(half, whole)


def _agree(one: Tensor, other: Tensor) -> bool:
    """Equal but for the rounding of differently blocked sums."""
    with torch.no_grad():
        rounding = torch.finfo(one.dtype).eps ** 0.6  # 7e-5 in fp32, 4e-10 in fp64
        return bool((one - other).abs().max() <= rounding * other.abs().max())


def _check_dependence(output: Tensor, loss: Tensor) -> None:
    if not output.requires_grad:
        raise ProblemError(
            "the model's output does not depend on any measured weight: it was detached, computed under torch.no_grad(), "
            "or the weights are not used. Remove the detach, or measure other layers."
        )
    if not loss.requires_grad:
        raise ProblemError("the loss is not a function of the model's output (it was detached, or ignores its argument).")


def _check_finite(problem: Problem, batch: Batch, output: Tensor, loss: Tensor) -> None:
    if bool(torch.isfinite(output).all()) and bool(torch.isfinite(loss).all()):
        return
    if bool(torch.isfinite(output).all()):
        raise ProblemError(f"the loss is {loss.item()} though the model's output is finite; check the targets and the loss.")
    where = first_not_finite(problem, batch)
    raise ProblemError(
        f"the model's output holds NaN or inf{where}. Its weights are too large for this dtype or this depth: "
        "scale them down (or measure with dtype=torch.float64)."
    )


def first_not_finite(problem: Problem, batch: Batch) -> str:
    """Names the first module whose output is not finite, by running once more with temporary hooks."""
    found: list[str] = []

    def watch(name: str) -> object:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            if not found and isinstance(output, Tensor) and output.is_floating_point():
                if not bool(torch.isfinite(output).all()):
                    found.append(name)

        return hook

    handles = [
        module.register_forward_hook(watch(name))  # type: ignore[arg-type]
        for name, module in problem.model.named_modules()
        if name and not any(module.children())
    ]
    try:
        problem.output(batch)
    finally:
        for handle in handles:
            handle.remove()
    return f" ({found[0]} is the first layer whose output does)" if found else ""
