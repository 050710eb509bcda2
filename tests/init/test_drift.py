"""The drift of examples apart: followed, corrected where it matters, and nowhere else."""

from __future__ import annotations

import statistics

import pytest
import torch
from torch import nn

from hessinit.init.apply_scheme import apply_scheme_
from hessinit.init.gain import gain


def deep(activation: type[nn.Module], dropout: float, width: int, layers: int = 20) -> nn.Sequential:
    stack: list[nn.Module] = [nn.Linear(width, width)]
    for _ in range(layers - 1):
        stack += [activation(), nn.Dropout(dropout), nn.Linear(width, width)]
    return nn.Sequential(*stack)


def end_variances(activation: type[nn.Module], dropout: float, *, corrected: bool) -> list[float]:
    found = []
    for seed in range(4):
        torch.manual_seed(seed)
        model = deep(activation, dropout, 256)
        apply_scheme_(model, "he", gains=None if corrected else {"*": gain(activation), "0": 1.0})
        with torch.no_grad():
            found.append(float(model(torch.randn(512, 256)).square().mean()))
    return found


@pytest.mark.parametrize(
    ("activation", "dropout", "plain"), [(nn.GELU, 0.8, 2.5), (nn.SiLU, 0.4, 5), (nn.SiLU, 0.8, 15)]
)
def test_the_mean_variance_stays_near_one_where_a_gain_alone_lets_it_grow(
    activation: type[nn.Module], dropout: float, plain: float
) -> None:
    assert statistics.median(end_variances(activation, dropout, corrected=False)) > plain
    assert 0.4 < statistics.median(end_variances(activation, dropout, corrected=True)) < 2.5


@pytest.mark.parametrize("activation", [nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.ELU])
def test_activations_that_heal_or_keep_deviations_need_none(activation: type[nn.Module]) -> None:
    plan = apply_scheme_(deep(activation, 0.4, 256), "he", dry_run=True)
    assert {layer.variance_correction for layer in plan} == {1.0}


def test_shallow_and_convolutional_networks_keep_the_formula() -> None:
    shallow = apply_scheme_(deep(nn.GELU, 0.4, 64, layers=3), "he", dry_run=True)
    convolutions = nn.Sequential(*(part for _ in range(20) for part in (nn.Conv2d(8, 8, 3), nn.SiLU())))
    for plan in (shallow, apply_scheme_(convolutions, "he", dry_run=True)):
        assert {layer.variance_correction for layer in plan} == {1.0}


def test_a_normalization_starts_afresh() -> None:
    layers: list[nn.Module] = []
    for _ in range(20):
        layers += [nn.Linear(64, 64), nn.LayerNorm(64), nn.SiLU()]
    plan = apply_scheme_(nn.Sequential(*layers), "he", dry_run=True)
    assert {layer.variance_correction for layer in plan} == {1.0}


def test_the_factor_is_its_own_column_beside_the_true_gain() -> None:
    plan = apply_scheme_(deep(nn.SiLU, 0.4, 256), "he", dry_run=True)
    last = plan[-1]
    assert last.gain == pytest.approx(1.6765, abs=1e-4)
    assert 0.8 < last.variance_correction < 0.95
    assert last.std[0] == pytest.approx(last.gain * last.dropout_factor * last.variance_correction / 16)
