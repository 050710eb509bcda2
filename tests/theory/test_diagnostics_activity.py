"""Dead units and saturated entries, where their number is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from diagnosing import diagnosis
from torch import Tensor, nn

from hessinit.diagnostics.activity import SATURATED_BELOW

LOSS = nn.MSELoss()


def kill(module: nn.Module, units: int) -> nn.Module:
    with torch.no_grad():
        module.bias.zero_()
        module.bias[:units] = -1000.0
        module.bias[units:] = 2.0
    return module


RELU_LIKE: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "hardtanh": lambda: nn.Hardtanh(0.0, 2.5),
    "threshold": lambda: nn.Threshold(0.5, 0.0),
}


@pytest.mark.parametrize("name", RELU_LIKE)
@pytest.mark.parametrize("inplace", [False, True])
def test_dead_units_are_counted(name: str, inplace: bool) -> None:
    activation = RELU_LIKE[name]()
    activation.inplace = inplace
    model = nn.Sequential(kill(nn.Linear(4, 8), 3), activation, nn.Linear(8, 2))
    found = diagnosis(model, LOSS, (torch.randn(20, 4), torch.randn(20, 2)))
    assert found["0"].activation == name
    assert found["0"].dead == 3 / 8
    assert found["2"].dead is None


def test_a_unit_that_one_example_wakes_is_alive() -> None:
    inputs = -torch.ones(9, 1)
    inputs[4] = 1.0
    dense = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        dense.weight[:] = torch.tensor([[1.0], [0.0]])
    model = nn.Sequential(dense, nn.ReLU(), nn.Linear(2, 1))
    found = diagnosis(model, LOSS, (inputs, torch.ones(9, 1)))
    assert found["0"].dead == 0.5
    batches = [(inputs[:4], torch.ones(4, 1)), (inputs[4:], torch.ones(5, 1))]
    assert diagnosis(model, LOSS, batches)["0"].dead == 0.5
    assert diagnosis(model, LOSS, batches[:1])["0"].dead == 1.0


def test_a_convolutions_units_are_its_channels() -> None:
    model = nn.Sequential(kill(nn.Conv2d(2, 5, 3), 2), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 9, 2))
    assert diagnosis(model, LOSS, (torch.randn(4, 2, 5, 5), torch.randn(4, 2)))["0"].dead == 2 / 5


def test_a_sequences_units_are_its_features() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.head = kill(nn.Linear(4, 6), 1), nn.Linear(7, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.dense(x).transpose(1, 2).relu().mean(dim=1))

    model = Turned()
    assert diagnosis(model, LOSS, (torch.randn(3, 7, 4), torch.randn(3, 2)))["dense"].dead == 1 / 6


BOUNDED: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor]]] = {
    "tanh": (nn.Tanh, torch.tanh),
    "sigmoid": (nn.Sigmoid, torch.sigmoid),
    "hardtanh": (lambda: nn.Hardtanh(-0.7, 1.3), lambda u: u.clamp(-0.7, 1.3)),
    "hardsigmoid": (nn.Hardsigmoid, nn.functional.hardsigmoid),
}


class Erf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.erf(x)


BOUNDED["erf"] = (Erf, torch.erf)


@pytest.mark.parametrize("name", BOUNDED)
def test_saturated_entries_are_those_of_small_slope(name: str) -> None:
    build, function = BOUNDED[name]
    dense = nn.Linear(3, 50)
    with torch.no_grad():
        dense.weight.mul_(5)
    inputs = torch.randn(40, 3)
    own = dense(inputs).detach()
    model = nn.Sequential(dense, build(), nn.Linear(50, 2))
    found = diagnosis(model, LOSS, (inputs, torch.randn(40, 2)))["0"]

    def slope(u: Tensor) -> Tensor:
        u = u.clone().requires_grad_()
        return torch.autograd.grad(function(u).sum(), u)[0]

    largest = slope(torch.linspace(-1, 1, 2001)).max()
    expected = (slope(own) < SATURATED_BELOW * largest).double().mean()
    assert found.activation == name
    assert 0.05 < expected < 0.95
    assert found.saturated == pytest.approx(float(expected), abs=1e-3)
    assert found.dead is None


def test_the_low_end_of_relu6_is_silence_not_saturation() -> None:
    dense = nn.Linear(1, 1, bias=False)
    nn.init.ones_(dense.weight)
    inputs = torch.tensor([[-9.0], [-1.0], [1.0], [5.9], [6.0], [9.0], [70.0], [2.0]])
    found = diagnosis(nn.Sequential(dense, nn.ReLU6(), nn.Linear(1, 1)), LOSS, (inputs, inputs))["0"]
    assert (found.saturated, found.dead) == (3 / 8, 0.0)


@pytest.mark.parametrize(
    ("name", "activation"),
    [("leaky_relu", nn.LeakyReLU(0.1)), ("gelu", nn.GELU()), ("selu", nn.SELU()), ("elu", nn.ELU())],
)
@pytest.mark.parametrize("inplace", [False, True])
def test_others_have_neither(name: str, activation: nn.Module, inplace: bool) -> None:
    activation.inplace = inplace
    model = nn.Sequential(kill(nn.Linear(4, 8), 3), activation, nn.Linear(8, 2))
    found = diagnosis(model, LOSS, (torch.randn(9, 4), torch.randn(9, 2)))["0"]
    assert (found.activation, found.dead, found.saturated) == (name, None, None)


def test_an_activation_that_others_share_its_input_with_is_not_the_layers() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            own = self.dense(x)
            return own * own.sigmoid()

    assert diagnosis(Gated(), LOSS, (torch.randn(9, 4), torch.randn(9, 2)))["dense"].activation == ""


@pytest.mark.parametrize("training", [True, False])
def test_units_behind_a_normalization_are_judged_by_what_the_activation_gets(training: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    ).train(training)
    with torch.no_grad():
        model[0].bias.fill_(-50.0)  # dead without the normalization, which revives them
        model[1].running_mean.fill_(-50.0)
        model[1].bias[:2] = -50.0  # dead because of it
    batch = torch.randn(9, 1, 6, 6), torch.randint(3, (9,))
    assert diagnosis(model, nn.CrossEntropyLoss(), batch)["0"].dead == 0.5


def test_saturation_behind_a_normalization() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))
    with torch.no_grad():
        model[1].weight.fill_(100.0)
        model[0].weight.mul_(1e-3)
    batch = torch.randn(50, 5), torch.randint(3, (50,))
    assert diagnosis(model, nn.CrossEntropyLoss(), batch)["0"].saturated > 0.9
