"""A user's activation as a plain function of fp64 vectors, checked to be elementwise."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hessinit.errors import ProblemError
from hessinit.problem.preserve import Draws, untouched_random_state

Function = Callable[[Tensor], Tensor]

CPU = torch.device("cpu")


@contextlib.contextmanager
def elementwise(function: Function | nn.Module) -> Iterator[Function]:
    """`function` on fp64 vectors on the CPU, whatever its own dtype and device and the caller's settings.

    Refuses what is random or not elementwise. A module is copied; it and the generators stay as they were.
    """
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        untouched_random_state(CPU),
        CPU,  # the default device for tensors that `function` makes
    ):
        evaluate = _evaluation(function)
        _refuse_unless_elementwise(evaluate, name_of(function))
        yield evaluate


def slope_of(function: Function) -> Function:
    """The derivative of an elementwise function, as autograd has it."""

    def slope(z: Tensor) -> Tensor:
        with torch.enable_grad():
            z = z.clone().requires_grad_()
            value = function(z)
            if not value.requires_grad:  # as of z > 0
                return torch.zeros_like(z)
            slopes: tuple[Tensor | None, ...] = torch.autograd.grad(value.sum(), z, allow_unused=True)
        return torch.zeros_like(z) if slopes[0] is None else slopes[0]

    return slope


def name_of(activation: object) -> str:
    """What to call it in a message."""
    if isinstance(activation, nn.Module):
        text = " ".join(repr(activation).split())
        return text if len(text) <= 60 else type(activation).__name__
    return str(getattr(activation, "__name__", None) or repr(activation))


def _evaluation(function: Function | nn.Module) -> Function:
    """`function` as it is called on a vector; refuses what is not a tensor of the same shape."""
    name = name_of(function)

    def failure(error: Exception) -> ProblemError:
        return ProblemError(
            f"{name} could not be evaluated on an fp64 vector on the CPU ({type(error).__name__}: {error}). "
            "A gain belongs to a function of one number; pass that function, of tensors of any shape, alone."
        )

    try:
        call: Callable[[Tensor], Any] = (
            _own_copy(function).forward if isinstance(function, nn.Module) else function
        )
    except Exception as error:
        raise failure(error) from error

    def evaluate(z: Tensor) -> Tensor:
        try:
            result = call(z.clone())  # it may write in place
        except Exception as error:
            raise failure(error) from error
        if not isinstance(result, Tensor) or result.shape != z.shape or result.is_complex():
            raise _not_elementwise(name, "it does not give one real number for each that it gets")
        return result.double()

    return evaluate


def _own_copy(module: nn.Module) -> nn.Module:
    """A copy in fp64 on the CPU, without hooks: they belong to the user, and may hold on to anything."""
    memo: dict[int, Any] = {
        id(hooks): OrderedDict()
        for part in module.modules()
        for name, hooks in vars(part).items()
        if name.endswith("_hooks")
    }
    return copy.deepcopy(module, memo).to(device=CPU, dtype=torch.float64)


def _refuse_unless_elementwise(evaluate: Function, name: str) -> None:
    z = torch.linspace(-3, 3.1, 64, dtype=torch.float64)
    value = evaluate(z)
    near = 1e-5 * float(value.nan_to_num(0, 0, 0).abs().max())  # room for a function that computes in fp32

    def same(first: Tensor, second: Tensor) -> bool:
        return torch.allclose(first, second, rtol=0, atol=near, equal_nan=True)

    if not same(evaluate(z), value) or _draws(evaluate, z):
        raise ProblemError(
            f"{name} is random: two calls differ, so no single gain describes it. Call .eval() on it, or "
            "pass the activation without its noise."
        )
    # Shuffled, and some left out, the smallest and the largest among them: whatever looks at neighbours,
    # positions, sums or extremes gives something else.
    some = (torch.arange(64) * 27 % 64)[5:40]
    if not same(evaluate(z[some]), value[some]):
        raise _not_elementwise(name, "its value at one unit depends on the other units")


def _draws(evaluate: Function, z: Tensor) -> bool:
    """Whether each of three calls moves a global generator; one alone may be another thread's doing."""
    for _ in range(3):
        draws = Draws(0, CPU)
        evaluate(z)
        if not draws.happened():
            return False
    return True


def _not_elementwise(name: str, reason: str) -> ProblemError:
    return ProblemError(
        f"{name} is not elementwise: {reason}. A gain belongs to a function of one number; pass the "
        "elementwise function alone, and treat the rest as a layer."
    )
