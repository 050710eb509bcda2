"""rule="network": the norm of the whole network meets κ/lr, or the result says why not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from initialized_networks import (
    LOSS,
    cnn,
    digits,
    lstm,
    mlp,
    normalized,
    residual,
    text,
    text_loss,
    transformer,
)
from torch import nn

from dense import dense_curvature, ends
from hessinit.errors import ConvergenceError, ConvergenceWarning
from hessinit.init.apply_scheme import apply_scheme_
from hessinit.init.defaults import KAPPA, KAPPA_NORMALIZED, KAPPA_QUADRATIC, SMALL_OUTPUT
from hessinit.init.initialize import initialize_
from hessinit.measurement.measure import measure

CASES: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[], Any]]] = {
    "relu 3": (lambda: mlp(3), LOSS, digits),
    "relu 30": (lambda: mlp(30), LOSS, digits),
    "tanh 10": (lambda: mlp(10, nn.Tanh), LOSS, digits),
    "tanh 30": (lambda: mlp(30, nn.Tanh), LOSS, digits),
    "gelu 10": (lambda: mlp(10, nn.GELU), LOSS, digits),
    "sigmoid 3": (lambda: mlp(3, nn.Sigmoid), LOSS, digits),
    "cnn": (lambda: cnn(6), LOSS, digits),
    "batch norm": (normalized, LOSS, digits),
    "batch norm, eval": (lambda: normalized().eval(), LOSS, digits),
    "residual": (lambda: residual(12), LOSS, digits),
    "residual with layer norm": (lambda: residual(6, norm=True), LOSS, digits),
    "transformer, pre": (lambda: transformer(True), text_loss, text),
    "transformer, post": (lambda: transformer(False), text_loss, text),
    "lstm": (lstm, text_loss, text),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scaling", ["all", "last"])
def test_the_network_norm_meets_the_target(name: str, scaling: str) -> None:
    build, loss, data = CASES[name]
    model, batch = build(), data()
    # A last layer's own norm is a floor that it cannot lower.
    target = 4.0 if scaling == "all" or "sigmoid" in name else 30.0 if name == "residual" else 7.0
    result = initialize_(model, loss, batch, target=target, scaling=scaling)
    assert result.converged, result.reason
    assert len(result.measurements) <= 8
    # Measured again, tightly and in double precision, by the verb that the search does not use.
    again = measure(model, loss, batch, tolerance=1e-5, dtype=torch.float64, dropout="freeze", seed=9).network
    assert again.norm == pytest.approx(target, rel=0.051)
    assert result.after is not None
    assert result.after.network.norm == pytest.approx(again.norm, rel=6e-3)


@pytest.mark.parametrize("name", ["relu 3", "relu 30", "cnn", "residual"])
@pytest.mark.parametrize("target", [60.0, 6000.0])
def test_homogeneous_networks_are_sharpened_without_getting_loud(name: str, target: float) -> None:
    build, loss, data = CASES[name]
    model, batch = build(), data()
    result = initialize_(model, loss, batch, target=target)
    assert result.scaling == "small-output"
    assert result.converged, result.reason
    assert len(result.measurements) <= 5
    again = measure(model, loss, batch, tolerance=1e-5, dtype=torch.float64, seed=9).network
    assert again.norm == pytest.approx(target, rel=0.051)
    with torch.no_grad():
        size = float(model(batch[0]).square().mean().sqrt())
    assert size == pytest.approx(SMALL_OUTPUT, rel=0.01)
    assert sum(scale < 1 for scale in result.scales.values()) == 1  # the largest, or the first on the trunk


def test_other_networks_are_sharpened_by_their_last_weight() -> None:
    result = initialize_(mlp(6, nn.Tanh), LOSS, digits(), target=60.0)
    assert result.scaling == "last"
    assert result.converged, result.reason
    assert [name for name, scale in result.scales.items() if scale != 1] == ["11"]


def test_a_start_that_is_too_sharp_gets_one_gain() -> None:
    result = initialize_(mlp(6), LOSS, digits(), lr=10.0)
    assert result.scaling == "all"
    assert result.converged, result.reason
    assert len(set(result.scales.values())) == 1
    assert result.scales["1"] < 1


def test_by_a_rate_normalized_networks_and_those_of_tokens_are_not_sharpened() -> None:
    for model, loss, batch, kappa, why in (
        (transformer(True), text_loss, text(), KAPPA_NORMALIZED, "normalized"),
        (lstm(), text_loss, text(), KAPPA, "tokens"),
    ):
        result = initialize_(model, loss, batch, lr=1e-3)  # without a warning: nothing is wrong with it
        assert (result.scaling, result.kappa, result.converged) == ("none", kappa, False)
        assert why in result.reason
        assert set(result.scales.values()) == {1.0}


def test_the_gain_of_a_normalized_network_is_not_driven_to_nothing() -> None:
    """What normalizations undo is not worth a weight of next to nothing."""
    model = residual(6, norm=True)
    with pytest.warns(ConvergenceWarning, match="undo much of a gain"):
        result = initialize_(model, LOSS, digits(), lr=1e4)
    assert {round(scale, 6) for scale in result.scales.values()} <= {0.5, 1.0}


def test_a_quadratic_loss_has_a_kappa_of_its_own_and_is_not_sharpened() -> None:
    data = digits()[0], digits()[1].float().unsqueeze(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1))
    gentle = initialize_(model, nn.MSELoss(), data, lr=1e-5)
    assert (gentle.kappa, gentle.scaling) == (KAPPA_QUADRATIC, "none")
    assert "quadratic" in gentle.reason
    own = initialize_(model, nn.MSELoss(), data, lr="auto")
    assert own.lr is not None
    assert own.after is not None
    assert own.lr * own.after.network.norm == pytest.approx(1.0, rel=0.05)
    for _ in range(50):  # stable: the loss falls at that rate
        value = nn.functional.mse_loss(model(data[0]), data[1])
        gradients = torch.autograd.grad(value, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= own.lr * gradient
    assert float(value.detach()) < own.after.loss


def test_a_rate_of_our_own_suits_the_start() -> None:
    plain = initialize_(mlp(4, nn.Tanh), LOSS, digits(), lr="auto")
    assert plain.after is not None
    assert plain.lr == pytest.approx(KAPPA / plain.after.network.norm, rel=0.05)
    assert set(plain.scales.values()) == {1.0}
    sharpened = initialize_(mlp(4), LOSS, digits(), lr="auto")
    assert sharpened.lr == pytest.approx(1 / sharpened.measurements[0].norm, rel=1e-6)
    assert sharpened.after is not None
    assert sharpened.after.network.norm * sharpened.lr == pytest.approx(KAPPA, rel=0.05)


def test_momentum_asks_for_a_gentler_start_and_adam_for_none() -> None:
    heavy = initialize_(mlp(4), LOSS, digits(), lr=0.1, optimizer="momentum", momentum=0.8)
    assert heavy.target == pytest.approx(KAPPA * 0.2 / 0.1)
    adam = initialize_(mlp(4), LOSS, digits(), lr=1e-3, optimizer="adam")
    assert (adam.converged, adam.scaling, adam.lr) == (True, "none", 1e-3)
    assert set(adam.scales.values()) == {1.0}
    assert "do not grow with the gradient" in adam.reason


def test_the_norm_is_right_against_a_dense_matrix() -> None:
    model, batch = mlp(3, nn.Tanh, width=6).double(), digits(12)
    batch = (batch[0].double(), batch[1])
    result = initialize_(model, LOSS, batch, lr=0.7)
    truth = ends(dense_curvature(model, LOSS, batch, "gauss-newton").network).norm
    assert result.target == KAPPA / 0.7
    assert result.kappa == KAPPA
    assert truth == pytest.approx(result.target, rel=0.05)


def test_the_exact_hessian_can_be_the_measure() -> None:
    model, batch = mlp(3, nn.Tanh, width=6).double(), digits(12)
    batch = (batch[0].double(), batch[1])
    initialize_(model, LOSS, batch, target=2.0, curvature="hessian")
    truth = ends(dense_curvature(model, LOSS, batch, "hessian").network).norm
    assert truth == pytest.approx(2.0, rel=0.05)


def test_neither_rate_nor_target_means_one() -> None:
    result = initialize_(mlp(3), LOSS, digits())
    assert (result.target, result.lr, result.kappa) == (1.0, None, None)
    assert result.after is not None
    assert result.after.network.norm == pytest.approx(1.0, rel=0.05)


def test_fifty_six_residual_blocks_that_overflow_are_brought_back() -> None:
    """A start that is not finite is too sharp, never flat."""
    model = residual(56)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(25) if "weight" in name else parameter.zero_()
    assert not torch.isfinite(model(digits()[0])).all()
    result = initialize_(model, LOSS, digits(), lr=0.1, scheme="keep")
    assert result.before is None
    assert "not finite" in " ".join(result.notes)
    assert result.converged, result.reason
    assert all(scale < 0.1 for scale in result.scales.values())


def test_fifty_six_plain_residual_blocks_drawn_by_he_train_gently() -> None:
    result = initialize_(residual(56), LOSS, digits(), lr=0.1, scheme="he", residual="plain")
    assert result.converged, result.reason
    assert result.after is not None
    assert result.after.loss < 3


def test_numbers_that_underflow_are_revived() -> None:
    model = mlp(30)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.02)
    result = initialize_(model, LOSS, digits(), target=2.0, scheme="keep", biases="zero")
    assert result.measurements[0].norm == 0
    assert result.converged, result.reason


def test_a_target_beyond_saturation_is_capped_and_said() -> None:
    model = mlp(3, nn.Tanh)
    with pytest.warns(ConvergenceWarning, match="saturate|rises no further"):
        result = initialize_(model, LOSS, digits(), lr=1e-4)
    assert not result.converged
    assert result.after is not None
    assert result.after.loss < 4.01 * math.log(10)  # four times the loss of a silent network
    assert result.after.network.norm > result.measurements[0].norm  # as far as it went


def test_the_cap_can_be_lifted() -> None:
    free = initialize_(mlp(3, nn.Tanh), LOSS, digits(), target=1e6, max_sharpening=math.inf)
    with pytest.warns(ConvergenceWarning, match="1.2× the loss of a zero output"):
        tight = initialize_(mlp(3, nn.Tanh), LOSS, digits(), target=1e6, max_sharpening=1.2)
    assert free.after is not None
    assert tight.after is not None
    assert tight.after.loss <= 1.21 * math.log(10) < free.after.loss


def test_a_saturated_start_takes_the_smallest_root() -> None:
    """From beyond the top of λ the way leads down to the rising branch, not up into saturation."""
    model = mlp(4)
    initialize_(model, LOSS, digits(), target=3.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)
    result = initialize_(model, LOSS, digits(), target=3.0, scheme="keep", scaling="all")
    assert result.converged, result.reason
    for scale in result.scales.values():
        assert scale == pytest.approx(1 / 8, rel=0.02)


def test_a_dead_network_is_said_to_be_dead() -> None:
    model = mlp(3)
    with torch.no_grad():
        model[3].bias.fill_(-1e4)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.warns(ConvergenceWarning, match="no curvature"):
        result = initialize_(model, LOSS, digits(), scheme="keep")
    assert not result.converged
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_what_falls_no_further_is_said() -> None:
    """The last layer's own norm does not depend on its scale: below it, that freedom cannot get."""
    model, data = mlp(6), digits()
    apply_scheme_(model, "lsuv", sample=data[0])
    with pytest.warns(ConvergenceWarning, match="falls no further"):
        result = initialize_(model, LOSS, data, target=1e-3, scaling="last", scheme="keep")
    assert {name for name, scale in result.scales.items() if scale != 1} == {"11"}


def test_strict_raises_and_leaves_the_model_as_found() -> None:
    model = mlp(3, nn.Tanh)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ConvergenceError, match="saturate"):
        initialize_(model, LOSS, digits(), lr=1e-4, strict=True)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_weights_before_a_normalization_keep_the_scale_of_the_scheme() -> None:
    result = initialize_(normalized(), LOSS, digits(), target=2.0)
    assert [scale == 1 for scale in result.scales.values()] == [True, True, True, False]


def test_gentler_for_larger_rates() -> None:
    losses = []
    for rate in (0.1, 1.0, 10.0):
        result = initialize_(mlp(10), LOSS, digits(), lr=rate)
        assert result.converged
        losses.append(max(result.scales.values()))
    assert losses[0] > losses[1] > losses[2]


def test_several_batches_count_together() -> None:
    images, labels = digits()
    batches = [(images[:40], labels[:40]), (images[40:], labels[40:])]
    model = mlp(3)
    result = initialize_(model, LOSS, iter(batches), target=3.0)
    assert result.converged
    assert measure(model, LOSS, (images, labels)).network.norm == pytest.approx(3.0, rel=0.05)
