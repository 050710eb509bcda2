"""rule="layers": every layer's norm meets the target, by a coupled solve in few measurements."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hessinit.initializing.judging import worst_distance
from initialized_networks import LOSS, cnn, digits, mlp, normalized
from torch import nn

from hessinit.errors import ConvergenceWarning
from hessinit.init.initialize import initialize_
from hessinit.measurement.measure import measure

SCHEMES = ["he", "glorot", "lecun", "orthogonal", "lsuv", "forward", "backward", "compromise", "default"]
BUILDERS: dict[str, Callable[[int], nn.Module]] = {"mlp": mlp, "cnn": cnn}


def check(model: nn.Module, target: float, scheme: str) -> None:
    batch = digits(48)
    result = initialize_(model, LOSS, batch, target=target, rule="layers", scheme=scheme)
    assert result.converged, result.reason
    assert len(result.measurements) <= 6
    again = measure(model, LOSS, batch, tolerance=1e-4, dtype=torch.float64, seed=5, network=False)
    assert len(again) == len(result.scales)
    for layer in again:
        assert layer.norm == pytest.approx(target, rel=0.05)


# measure(network=False) bounds the network's norm, and the bound is not converged; no layer warns.
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("target", [0.1, 1.0])
@pytest.mark.parametrize(("kind", "depth"), [("mlp", 3), ("mlp", 10), ("cnn", 3), ("cnn", 10)])
def test_every_layer_meets_the_target(kind: str, depth: int, target: float, scheme: str) -> None:
    check(BUILDERS[kind](depth), target, scheme)


@pytest.mark.parametrize(
    ("kind", "depth", "target", "scheme"),
    [
        ("mlp", 30, 1.0, "he"),
        ("mlp", 30, 0.1, "glorot"),
        ("mlp", 30, 1.0, "default"),
        ("mlp", 30, 10.0, "lsuv"),
        ("cnn", 30, 1.0, "he"),
        ("cnn", 30, 1.0, "default"),
        ("mlp", 10, 10.0, "he"),
        ("cnn", 10, 10.0, "orthogonal"),
    ],
)
def test_deep_networks_and_other_targets(kind: str, depth: int, target: float, scheme: str) -> None:
    check(BUILDERS[kind](depth), target, scheme)


@pytest.mark.parametrize("target", [0.5, 1.0])
def test_tanh_networks_meet_it_too(target: float) -> None:
    model, batch = mlp(3, nn.Tanh), digits()
    result = initialize_(model, LOSS, batch, target=target, rule="layers")
    assert result.converged, result.reason
    for layer in measure(model, LOSS, batch, tolerance=1e-4):
        assert layer.norm == pytest.approx(target, rel=0.05)


@pytest.mark.parametrize("build", [lambda: mlp(3, nn.Sigmoid), lambda: mlp(10, nn.Tanh)])
def test_what_saturates_is_left_no_worse_than_found(build: Callable[[], nn.Module]) -> None:
    model, batch = build(), digits()
    found = measure(model, LOSS, batch)

    def worst(report):
        return max(abs(math.log(row.norm / 20.0)) for row in report)

    with pytest.warns(ConvergenceWarning, match=r"layers are not within 5 % of 20, the farthest"):
        result = initialize_(model, LOSS, batch, target=20.0, rule="layers", max_measurements=5)
    assert not result.converged
    left = measure(model, LOSS, batch)
    assert worst(left) <= worst(found) * 1.01
    assert result.after is not None
    assert [row.norm for row in result.after] == pytest.approx([row.norm for row in left], rel=3e-3)


def test_weights_that_were_closer_are_put_back() -> None:
    model, batch = mlp(3, nn.Sigmoid), digits()
    initialize_(model, LOSS, batch, scheme="lsuv", target=5.0)
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    target = measure(model, LOSS, batch)["3"].norm * 0.9
    with pytest.warns(ConvergenceWarning, match="farther from the target than they were, so the old weights"):
        result = initialize_(
            model, LOSS, batch, target=target, rule="layers", scheme="glorot", max_measurements=1
        )
    assert all(torch.equal(*pair) for pair in zip(kept, model.parameters(), strict=True))
    assert result.after == result.before


def test_norm_preceded_weights_move_the_other_way() -> None:
    """λ(c·W) = λ(W)/c² before a normalization; the last layer's norm hangs on no scale at all."""
    model, batch = normalized(), digits()
    with pytest.warns(ConvergenceWarning, match="1 of 4 layers are not within"):
        result = initialize_(model, LOSS, batch, target=0.3, rule="layers")
    assert result.after is not None
    assert [row.norm for row in result.after][:3] == pytest.approx([0.3] * 3, rel=0.05)
    start = normalized()
    start.load_state_dict(model.state_dict())
    with torch.no_grad():
        start[1].weight.mul_(3.0)
    before, after = (measure(one, LOSS, batch, dropout="freeze")["1"].norm for one in (model, start))
    assert before / after == pytest.approx(9.0, rel=0.01)


def test_a_dead_layer_is_named_a_reason() -> None:
    model = mlp(3)
    with torch.no_grad():
        model[3].bias.fill_(-1e4)
    with pytest.warns(ConvergenceWarning, match="no layer has curvature"):
        result = initialize_(model, LOSS, digits(), scheme="keep", rule="layers")
    assert not result.converged
