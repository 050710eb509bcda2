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
from calls import measure
from dense import dense_curvature, ends
from tiny import LOSS, Calling, Net, batch, inputs, labels, network


def check_refused(message: str, model: Any, loss: Any = LOSS, data: Any = None, **options: Any) -> None:
    with pytest.raises(hessinit.ProblemError, match=message):
        measure(model, loss, data or batch(), dropout="refuse", **options)


ATTENDING = Net(
    lambda m, x: m.attention(x, x, x, need_weights=False)[0].mean(1),
    attention=nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True),
)
RECURRENT = Net(lambda m, x: m.lstm(x)[0][-1], lstm=nn.LSTM(4, 3, num_layers=2, dropout=0.3))
DROPPING: list[tuple[nn.Module, str]] = [
    (nn.Sequential(nn.Dropout(), network(), nn.AlphaDropout()), "0 (Dropout), 2 (AlphaDropout)"),
    (ATTENDING, "attention (MultiheadAttention)"),
    (RECURRENT, "lstm (LSTM)"),
]


@pytest.mark.parametrize(("model", "named"), DROPPING, ids=[named for _, named in DROPPING])
def test_active_dropout_is_refused_by_name_and_at_rest_it_is_measured(model: nn.Module, named: str) -> None:
    shapes = {ATTENDING: (6, 2, 4), RECURRENT: (2, 6, 4)}
    data = inputs(*shapes.get(model, (6, 4))), labels()
    active = re.escape(f"dropout is active (train mode) in {named}: ")
    check_refused(active + ".*model.eval\\(\\), or pass dropout='freeze'", model.train(), data=data)
    assert hessinit.measure(model.eval(), LOSS, data).network.norm > 0


RANDOM: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "functional dropout": lambda net, x: F.dropout(net(x), 0.5),
    "noise": lambda net, x: net(x) + torch.randn(3),
    "noise from Python": lambda net, x: net(x) * random.random(),
    "noise from numpy": lambda net, x: net(x) * float(numpy.random.rand()),  # noqa: NPY002
    "a layer dropped at random": lambda net, x: net(x) * (1 if torch.rand(()) < 0.7 else 2),
}


@pytest.mark.parametrize("kind", RANDOM)
def test_any_other_random_forward_is_found_by_repeating_it_and_measured_alike_when_frozen(kind: str) -> None:
    model, message = Calling(RANDOM[kind]), "output changes from call to call.*model.eval\\(\\).*.freeze."
    for examples in (1, 6):
        check_refused(message, model, data=batch(examples))
    first, second = (measure(model, LOSS, batch(), dropout="freeze", seed=5) for _ in range(2))
    assert first.network == second.network
    assert any("frozen to one draw (seed 5)" in note for note in first.notes)


def test_a_random_loss_and_a_generator_that_nobody_knows_are_found() -> None:
    def noisy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output + torch.randn(3), target)

    check_refused("the loss changes from call to call on the same output", network(), noisy)
    assert measure(network(), noisy, batch(), dropout="freeze").network.norm > 0
    own = torch.Generator().manual_seed(0)
    check_refused("changes from call to call", Calling(lambda net, x: net(x) + torch.randn(3, generator=own)))


OWN: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(4),
    "numpy": lambda: numpy.random.default_rng(4),
    "old numpy": lambda: numpy.random.RandomState(4),
    "Python": lambda: random.Random(4),
}


def draw(source: Any) -> float:
    return torch.rand(1, generator=source).item() if hasattr(source, "device") else source.random()


@pytest.mark.parametrize("kind", OWN)
def test_generators_of_a_models_own_are_found_frozen_and_left_where_they_are(kind: str) -> None:
    source = OWN[kind]()
    model = Net(
        lambda m, x: m.inner(x * draw(m.source)) * draw(m.sources[0]),
        inner=network(), source=source, sources=[source],
    )  # fmt: skip
    check_refused("output changes from call to call", model)
    report = measure(model, LOSS, batch(), dropout="freeze", seed=4)
    assert model.source is model.sources[0] is source
    factors = [draw(source), draw(source)]  # the first two: nobody drew before
    fixed = Calling(lambda net, x: net(x * factors[0]) * factors[1])
    assert report.network.norm == pytest.approx(hessinit.measure(fixed, LOSS, batch()).network.norm, rel=1e-5)


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_frozen_dropout_is_right_for_the_mask_it_drew(curvature: str) -> None:
    told: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()  # a list would be put back

    def drop(net: Any, x: torch.Tensor) -> torch.Tensor:
        mask = F.dropout(torch.ones(6, 5, dtype=x.dtype), 0.5)
        told.put(mask)
        return net[2](net[1](net[0](x)) * mask)

    options: dict[str, Any] = {"dropout": "freeze", "dtype": torch.float64, "tolerance": 1e-8}
    report = measure(Calling(drop), LOSS, batch(), curvature=curvature, **options)
    seen = [told.get() for _ in range(told.qsize())]
    masked = Calling(lambda net, x: net[2](net[1](net[0](x)) * seen[0]))
    truth = dense_curvature(masked, LOSS, batch(), curvature)
    assert report.network.norm == pytest.approx(ends(truth.network).norm, rel=1e-6)
    assert any(not torch.equal(mask, torch.ones_like(mask)) for mask in seen)
