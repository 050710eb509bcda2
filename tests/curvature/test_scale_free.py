"""Curvature has no natural size: tiny and huge losses and weights are measured as well as ordinary ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hessinit
from dense import dense_curvature, ends
from zoo.problem import labels, seeded

CURVATURES = ("gauss-newton", "hessian")


def relu_perceptron() -> Any:
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    return model, nn.CrossEntropyLoss(), (torch.randn(7, 5), labels(3, 7))


def tanh_convolutions() -> Any:
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Conv2d(3, 4, 2, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)
    )
    return model, nn.CrossEntropyLoss(), (torch.randn(5, 1, 6, 6), labels(3, 5))


NETWORKS = {build.__name__: seeded(build.__name__, build) for build in (relu_perceptron, tanh_convolutions)}
each_network = pytest.mark.parametrize("network", NETWORKS)
each_curvature = pytest.mark.parametrize("curvature", CURVATURES)


def norms(report: Any) -> dict[str, float]:
    return {"the network": report.network.norm} | {layer.name: layer.norm for layer in report.layers}


def true_norms(model: nn.Module, loss: Any, batch: Any, curvature: str) -> dict[str, float]:
    truth = dense_curvature(model, loss, batch, curvature)
    return {
        name: ends(matrix).norm for name, matrix in {"the network": truth.network, **truth.layers}.items()
    }


def times(scale: float, loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda output, target: scale * loss(output, target)


@functools.cache
def unscaled(network: str, curvature: str) -> dict[str, float]:
    return norms(_measure_double(network, curvature, 1.0))


def _measure_double(network: str, curvature: str, scale: float) -> Any:
    model, loss, batch = NETWORKS[network]()
    return hessinit.measure(
        model, times(scale, loss), batch, curvature=curvature, dtype=torch.float64, tolerance=1e-8
    )


@each_network
@each_curvature
def test_the_unscaled_loss_is_measured_right(network: str, curvature: str) -> None:
    assert unscaled(network, curvature) == pytest.approx(
        true_norms(*NETWORKS[network](), curvature), rel=1e-6
    )


@each_network
@each_curvature
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-10, 1e-3, 1e3, 1e10, 1e20, 1e30])
def test_scaling_the_loss_scales_every_norm(network: str, curvature: str, scale: float) -> None:
    expected = {name: scale * norm for name, norm in unscaled(network, curvature).items()}
    assert norms(_measure_double(network, curvature, scale)) == pytest.approx(expected, rel=1e-6, abs=0)


@each_network
@each_curvature
@pytest.mark.parametrize("scale", [1e-3, 10.0])
def test_scaled_weights_are_measured_right_in_single_precision(
    network: str, curvature: str, scale: float
) -> None:
    model, loss, batch = NETWORKS[network]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= scale
    truth = true_norms(model, loss, batch, curvature)
    report = hessinit.measure(model, loss, batch, curvature=curvature)
    assert norms(report) == pytest.approx(truth, rel=5e-3, abs=0)


@each_network
@each_curvature
@pytest.mark.parametrize(("scale", "verdict"), [(1e-30, "vanishing"), (1e30, "exploding")])
def test_an_extreme_loss_is_called_what_it_is(
    network: str, curvature: str, scale: float, verdict: str
) -> None:
    report = _measure_double(network, curvature, scale)
    assert {row.verdict for row in (*report.layers, report.network)} == {verdict}
