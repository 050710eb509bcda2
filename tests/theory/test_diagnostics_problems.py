"""Closed forms, unused weights, and the whole zoo: nothing crashes and nothing is changed."""

from __future__ import annotations

import gc
import math
import warnings
import weakref

import pytest
import torch
from diagnosing import assert_like, diagnosis
from torch import nn

from hessinit.results.curvature_report import Diagnostics
from zoo import PROBLEMS
from zoo.problem import Problem as ZooProblem
from zoo.snapshot import differences, snapshot


def test_an_identity_gives_its_inputs_on() -> None:
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
    inputs = torch.tensor([[1.0, 3.0], [5.0, 7.0]])
    found = diagnosis(model, nn.MSELoss(reduction="sum"), (inputs, torch.zeros(2, 2)))["weight"]
    assert found.activation == ""
    assert found.activation_mean == 4.0
    assert found.activation_std == found.preactivation_std == pytest.approx(math.sqrt(5))
    assert (found.gradient_mean, found.gradient_std) == (8.0, pytest.approx(2 * math.sqrt(5)))
    assert found.weight_gradient_norm == pytest.approx(float((2 * inputs.T @ inputs).norm()))


def test_an_unused_weight_has_nothing_but_a_reason() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    model.add_module("spare", nn.Linear(4, 4))
    found = diagnosis(
        model, nn.MSELoss(), (torch.randn(9, 3), torch.randn(9, 2)), forward=lambda net, x: net[0](x)
    )
    assert found["spare"] == Diagnostics(reason="the forward does not use it")
    assert found["0"].activation_std is not None


def test_a_weight_that_never_meets_the_batch_says_so() -> None:
    model = nn.Embedding(3, 2)
    found = diagnosis(
        model, nn.MSELoss(), (torch.randn(3, 2), torch.randn(3, 2)), forward=lambda net, x: net.weight
    )["weight"]
    assert found.activation_std is None
    assert found.weight_gradient_norm > 0
    assert found.reason == "it never meets the batch"


def test_biases_are_diagnosed_when_they_are_asked_for() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    batch = torch.randn(9, 3), torch.randn(9, 2)
    found = diagnosis(model, nn.MSELoss(), batch, layers=["0.bias", "0.weight"])
    weight, bias = found["0"], found["0.bias"]
    assert (bias.activation, bias.activation_std) == ("relu", weight.activation_std)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_whole_zoo_is_diagnosed_and_left_as_found(problem: ZooProblem) -> None:
    model, loss, batch = problem.build()
    if not isinstance(batch, tuple):
        batch = list(batch)
    before = snapshot(model, loss, batch)
    options = {name: value for name, value in problem.options.items() if name in ("layers", "dropout")}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using padding='same'")
        found = diagnosis(model, loss, batch, forward=problem.forward, **options)
    assert differences(before, snapshot(model, loss, batch)) == []
    for name, layer in found.items():
        if layer.reason == "the forward does not use it":
            assert "unused" in name
            continue
        numbers = [value for value in vars(layer).values() if isinstance(value, float)]
        assert len(numbers) >= 6
        assert all(math.isfinite(number) for number in numbers)
        assert layer.activation_std >= 0


def test_nothing_is_kept_alive_afterwards() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        hidden = net[0](x)
        seen.append(weakref.ref(hidden))
        return net[2](hidden.relu())

    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    gc.collect()
    gc.disable()
    try:
        diagnosis(model, nn.MSELoss(), (torch.randn(9, 3), torch.randn(9, 2)), forward=forward)
        assert [hidden() for hidden in seen] == [None] * len(seen)
    finally:
        gc.enable()


def test_the_model_comes_back_when_the_forward_raises() -> None:
    model, calls = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), []

    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        output = net(x)
        calls.append(torch.utils._python_dispatch._len_torch_dispatch_stack())
        if calls[-1]:
            raise ZeroDivisionError("while it is watched")
        return output

    batch = torch.randn(9, 3), torch.randn(9, 2)
    before = snapshot(model, None, batch)
    with pytest.raises(ZeroDivisionError, match="while it is watched"):
        diagnosis(model, nn.MSELoss(), batch, forward=forward)
    assert differences(before, snapshot(model, None, batch)) == []
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


def test_a_model_in_half_precision_is_diagnosed_in_single() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).bfloat16()
    inputs, targets = torch.randn(9, 3), torch.randn(9, 2)
    found = diagnosis(model, nn.MSELoss(), (inputs, targets))["0"]
    dense, head = (nn.Linear(3, 4), nn.Linear(4, 2))
    for single, half in ((dense, model[0]), (head, model[2])):
        single.load_state_dict({name: value.float() for name, value in half.state_dict().items()})
    hidden = dense(inputs).tanh().detach().requires_grad_()
    nn.MSELoss()(head(hidden), targets).backward()
    assert_like(found, hidden.detach(), hidden.grad)
