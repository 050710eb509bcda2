"""Out of memory is answered with what was asked for and what would fit; other errors pass unchanged."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import hessinit
from tiny import LOSS, Calling, batch, network, raise_from


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
def test_a_forward_that_runs_out_of_memory_is_told_to_take_half(error: BaseException) -> None:
    message = "out of memory on cpu with 6 examples and 35 weights.* About 3 examples would fit.*fewer layers"
    with pytest.raises(hessinit.ProblemError, match=message) as caught:
        hessinit.measure(failing(error), LOSS, batch())
    assert caught.value.__cause__ is error


def test_an_allocation_that_really_fails_is_explained() -> None:
    model = Calling(lambda net, x: net(x) + torch.ones(2**56)[:3])
    with pytest.raises(hessinit.ProblemError, match="About 3 examples would fit"):
        hessinit.measure(model, LOSS, batch())


def test_the_need_of_one_example_is_stated_where_the_forward_can_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_out(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch.autograd, "grad", run_out)
    with pytest.raises(hessinit.ProblemError, match="about .* an example, .* available. About") as caught:
        hessinit.measure(network(dtype=torch.float64), LOSS, batch())
    # Two linear layers keep their inputs, tanh its output: 4 + 5 numbers of 8 bytes, and not many more.
    stated = re.search(r"about ([\d.]+) (bytes|KiB) an example", str(caught.value))
    assert stated is not None
    size = float(stated[1]) * {"bytes": 1, "KiB": 1024}[stated[2]]
    assert 8 * 9 * 8 <= size <= 20 * 20 * 8


def test_a_single_example_that_does_not_fit_is_told_other_ways() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(hessinit.ProblemError, match="Not even one example may fit; measure fewer layers"):
        hessinit.measure(failing(error), LOSS, batch(1))


def test_several_batches_are_known_to_be_held_together() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(
        hessinit.ProblemError, match="12 examples.*About 6 examples.*held at once, so pass fewer"
    ):
        hessinit.measure(failing(error, call=3), LOSS, [batch(), batch()])


def test_operators_explain_it_too() -> None:
    with pytest.raises(hessinit.ProblemError, match="out of memory on cpu with 6 examples"):
        hessinit.hessian(failing(MemoryError()), LOSS, batch())


@pytest.mark.parametrize("error", [RuntimeError("the user's own"), KeyError("theirs"), KeyboardInterrupt()])
def test_other_errors_come_through_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        hessinit.measure(failing(error), LOSS, batch())
    assert caught.value is error
