"""A forward or a loss that draws random numbers has no single Hessian; frozen to one draw, it has."""

from __future__ import annotations

import queue
import random
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hessinit
from dense import dense_curvature, ends
from tiny import LOSS, Calling, batch, inputs, labels, network


def check_refused(message: str, model: Any, loss: Any = LOSS, data: Any = None, **options: Any) -> None:
    with pytest.raises(hessinit.ProblemError, match=message):
        hessinit.measure(model, loss, data or batch(), **options)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0].mean(1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0][:, -1]


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (nn.Sequential(network(), nn.Dropout(0.1)), "layer 1 (Dropout) is active"),
        (
            nn.Sequential(nn.Dropout(), network(), nn.AlphaDropout()),
            "layer 0 (Dropout), layer 2 (AlphaDropout) are active",
        ),
        (
            nn.Sequential(*[nn.Dropout() for _ in range(6)], network()),
            "layer 3 (Dropout) and 2 more are active",
        ),
        (Attending(), "the dropout of attention is active"),
        (Recurrent(), "the dropout of lstm is active"),
    ],
)
def test_active_dropout_is_refused_by_name(model: nn.Module, named: str) -> None:
    data = (inputs(6, 2, 4), labels())
    check_refused(
        f'{re.escape(named)} \\(train mode\\): .*model.eval\\(\\), or pass dropout="freeze"', model, data=data
    )


@pytest.mark.parametrize("model", [Attending(), Recurrent()])
def test_dropout_at_rest_is_no_reason_to_refuse(model: nn.Module) -> None:
    assert hessinit.measure(model.eval(), LOSS, (inputs(6, 2, 4), labels())).network.norm > 0


RANDOM: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "functional dropout": lambda net, x: F.dropout(net(x), 0.5),
    "noise": lambda net, x: net(x) + torch.randn(3),
    "noise from Python": lambda net, x: net(x) * random.random(),
    "noise from numpy": lambda net, x: net(x) * float(numpy.random.rand()),  # noqa: NPY002
    "a layer dropped at random": lambda net, x: net(x) * (1 if torch.rand(()) < 0.7 else 2),
}


@pytest.mark.parametrize("examples", [1, 6])
@pytest.mark.parametrize("kind", RANDOM)
def test_any_other_random_forward_is_found_by_repeating_it(kind: str, examples: int) -> None:
    model = Calling(RANDOM[kind])
    check_refused(
        'output changes from call to call.*model.eval\\(\\).*dropout="freeze"', model, data=batch(examples)
    )


def test_a_random_forward_without_any_known_generator_is_found_too() -> None:
    own = torch.Generator().manual_seed(0)
    check_refused("changes from call to call", Calling(lambda net, x: net(x) + torch.randn(3, generator=own)))


def test_a_random_loss_is_found() -> None:
    def noisy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output + torch.randn(3), target)

    check_refused("the loss changes from call to call on the same output", network(), noisy)
    assert hessinit.measure(network(), noisy, batch(), dropout="freeze").network.norm > 0


@pytest.mark.parametrize("kind", RANDOM)
def test_a_frozen_draw_is_measured_alike_every_time(kind: str) -> None:
    first, second = (
        hessinit.measure(Calling(RANDOM[kind]), LOSS, batch(), dropout="freeze", seed=5) for _ in range(2)
    )
    assert first.network == second.network
    assert any("frozen to one draw (seed 5)" in note for note in first.notes)


OWN: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(4),
    "numpy": lambda: numpy.random.default_rng(4),
    "old numpy": lambda: numpy.random.RandomState(4),
    "Python": lambda: random.Random(4),
}


class Noisy(nn.Module):
    """Draws from a generator of its own, in an attribute and in a list."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.inner, self.source, self.sources = network(), source, [source]

    def draw(self, source: Any) -> float:
        return torch.rand(1, generator=source).item() if hasattr(source, "device") else source.random()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.draw(self.source)) * self.draw(self.sources[0])


@pytest.mark.parametrize("kind", OWN)
def test_generators_of_a_models_own_are_found_frozen_and_left_where_they_are(kind: str) -> None:
    model = Noisy(OWN[kind]())
    check_refused("output changes from call to call", model)
    report = hessinit.measure(model, LOSS, batch(), dropout="freeze", seed=4)
    assert model.source is model.sources[0]
    factors = [model.draw(model.source), model.draw(model.source)]  # the first two: nobody drew before
    fixed = Calling(lambda net, x: net(x * factors[0]) * factors[1])
    assert report.network.norm == pytest.approx(hessinit.measure(fixed, LOSS, batch()).network.norm, rel=1e-5)


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_frozen_dropout_is_right_for_the_mask_it_drew(curvature: str) -> None:
    told: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()  # a list would be put back

    def drop(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        mask = F.dropout(torch.ones(6, 5, dtype=x.dtype), 0.5)
        told.put(mask)
        return net[2](net[1](net[0](x)) * mask)  # type: ignore[index]

    options: dict[str, Any] = {"dropout": "freeze", "dtype": torch.float64, "tolerance": 1e-8}
    report = hessinit.measure(Calling(drop), LOSS, batch(), curvature=curvature, **options)
    seen = [told.get() for _ in range(told.qsize())]
    masked = Calling(lambda net, x: net[2](net[1](net[0](x)) * seen[0]))
    truth = dense_curvature(masked, LOSS, batch(), curvature)
    assert report.network.norm == pytest.approx(ends(truth.network).norm, rel=1e-6)
    assert any(not torch.equal(mask, torch.ones_like(mask)) for mask in seen)
