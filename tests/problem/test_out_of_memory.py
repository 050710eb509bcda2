"""Out of memory is answered with what was asked for and what to reduce; other errors pass unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hessinit
from tiny import LOSS, Calling, batch, raise_from


def failing(error: BaseException, call: int = 1) -> Calling:
    """Raises at its `call`-th call, and from then on."""
    count = raise_from(call, error)

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        count()
        return net(x)

    return Calling(forward)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: not enough memory: you tried"),
        MemoryError("Unable to allocate 8 GiB for an array"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_forward_that_runs_out_of_memory_is_told_what_to_reduce(error: BaseException) -> None:
    message = "out of memory on cpu with 6 examples and 35 weights. Pass fewer examples.*fewer layers"
    with pytest.raises(hessinit.ProblemError, match=message) as caught:
        hessinit.measure(failing(error), LOSS, batch())
    assert caught.value.__cause__ is error


def test_an_allocation_that_really_fails_is_explained() -> None:
    model = Calling(lambda net, x: net(x) + torch.ones(2**56)[:3])
    with pytest.raises(hessinit.ProblemError, match="out of memory on cpu with 6 examples"):
        hessinit.measure(model, LOSS, batch())


def test_operators_explain_it_too() -> None:
    with pytest.raises(hessinit.ProblemError, match="out of memory on cpu with 6 examples"):
        hessinit.hessian(failing(MemoryError()), LOSS, batch())


@pytest.mark.parametrize("error", [RuntimeError("the user's own"), KeyError("theirs"), KeyboardInterrupt()])
def test_other_errors_come_through_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        hessinit.measure(failing(error), LOSS, batch())
    assert caught.value is error
