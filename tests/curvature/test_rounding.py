"""The stated error covers the rounding; what rounding hides is not called converged."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hessinit
from calls import measure
from hessinit.curvature.rounding_error import Difference
from tiny import LOSS, Calling, Net, batch, inputs, labels, network

DOUBLE: dict[str, Any] = {"dtype": torch.float64, "tolerance": 1e-8}


def kelvin(spread: float = 0.1) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """BatchNorm takes 300 away, and with it the digits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    return model, (300 + spread * torch.randn(32, 4), labels(32))


@pytest.mark.filterwarnings("ignore::hessinit.errors.ConvergenceWarning")
@pytest.mark.parametrize("spread", [0.1, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_cancellation_in_the_forward_is_in_the_error(curvature: str, spread: float) -> None:
    model, data = kelvin(spread)
    truth = measure(model, LOSS, data, curvature=curvature, **DOUBLE)
    report = hessinit.measure(model, LOSS, data, curvature=curvature)
    for row, true in zip((*report, report.network), (*truth, truth.network), strict=True):
        assert abs(row.norm - true.norm) <= row.error
        assert row.error < 7e-3 * row.norm if row.converged else row.error > 6e-3 * row.norm
    if spread != 1.0:  # there it depends on the machine
        assert report.network.converged == (spread > 1)


def test_what_rounding_hides_is_not_converged_and_the_way_out_leads_out() -> None:
    model, data = kelvin()
    with pytest.warns(hessinit.ConvergenceWarning, match="rounding in float32.*pass dtype=torch.float64"):
        hessinit.measure(model, LOSS, data, curvature="hessian")
    assert measure(model, LOSS, data, dtype=torch.float64, curvature="hessian").converged
    ordinary = hessinit.measure(network(), LOSS, batch(), curvature="both", tolerance=1e-4)
    assert ordinary.converged
    assert all(row.error < 1e-4 * row.norm for row in (*ordinary, ordinary.network))


@pytest.mark.parametrize(
    ("margin", "estimator"), [(10, "gram"), (16, "gram"), (10, "lanczos"), (16, "lanczos"), (30, "auto")]
)
def test_a_confident_softmax_is_right_in_float32(margin: float, estimator: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(margin * torch.eye(3) + 0.1 * torch.randn(3, 3))
    target = labels(8)
    data = torch.eye(3)[target] + 0.05 * torch.randn(8, 3), target
    truth = measure(model, LOSS, data, **DOUBLE)
    report = hessinit.measure(model, LOSS, data, estimator=estimator)
    assert report.network.norm == pytest.approx(truth.network.norm, rel=1e-3)
    assert "couples" not in report.engine_reason  # rounding is no coupling


def two_heads() -> nn.Module:
    torch.manual_seed(0)
    parts = {"large": nn.Linear(4, 2), "small": nn.Linear(4, 6)}
    return Net(lambda m, x: torch.cat([m.large(x), m.small(x)], 1), **parts)


SMALL_HEADS: dict[str, Any] = {
    "convex": lambda z: z.square().mean(),
    "not convex": lambda z: torch.cos(2 * z).sum(1).mean(),
    "couples the examples": lambda z: z.mean(0).square().sum(),
}


@pytest.mark.parametrize("share", [1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("kind", SMALL_HEADS)
def test_a_head_with_a_tiny_share_of_the_loss_is_judged_against_itself(kind: str, share: float) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(z[:, :2], y) + share * SMALL_HEADS[kind](z[:, 2:])

    data = inputs(8), inputs(8, 2)
    truth = measure(two_heads(), loss, data, estimator="lanczos", **DOUBLE)
    report = hessinit.measure(two_heads(), loss, data)
    for name in ("large", "small"):
        assert report[name].norm == pytest.approx(truth[name].norm, rel=1e-3)
        assert abs(report[name].norm - truth[name].norm) <= report[name].error
    assert (report["small"].engine == "gram") == (kind == "convex")


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_no_curvature_reads_zero_with_the_error_of_rounding(curvature: str) -> None:
    """A bias before BatchNorm changes nothing; float32 has noise there."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    report = measure(model, LOSS, (inputs(20), labels(20)), layers="**", curvature=curvature)
    row = report["0.bias"]
    assert row.norm == 0.0 < row.error < 1e-4
    assert row.converged
    assert "zero, up to the rounding of float32" in row.reason
    assert report["3.bias"].norm > 0.01


@pytest.mark.parametrize("estimator", ["auto", "lanczos"])
@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_a_model_that_returns_float_has_an_error_of_float_in_double(curvature: str, estimator: str) -> None:
    options = {"curvature": curvature, "estimator": estimator if curvature == "gauss-newton" else "auto"}
    truth = measure(network(), LOSS, batch(), **options, **DOUBLE)
    report = measure(Calling(lambda net, x: net(x).float()), LOSS, batch(), dtype=torch.float64, **options)
    assert 1e-8 < report.network.error < 1e-5
    assert abs(report.network.norm - truth.network.norm) <= report.network.error


def difference(single: Tensor, double: Tensor) -> Difference:
    return Difference.of_each({"": single}, {"": double})[""]


def test_errors_of_many_weights_cancel_in_an_eigenvalue_and_those_of_few_do_not() -> None:
    """ReLUs that switch at other weights in float64 make long errors that hardly move an eigenvalue."""
    chance = torch.Generator().manual_seed(0)
    product = torch.randn(500, 400, generator=chance, dtype=torch.float64)
    independent = 1e-3 * torch.randn(500, 400, generator=chance, dtype=torch.float64)
    assert difference(product, product + independent).judge().relative < 1e-4
    assert difference(product, product * 1.001).judge().relative == pytest.approx(1e-3, rel=0.01)
    corner = difference(product[:5, :5], (product + independent)[:5, :5])
    assert corner.judge().relative == pytest.approx(1e-3, rel=0.3)
    by_row = product * (1 + 1e-3 * torch.randn(500, 1, generator=chance, dtype=torch.float64))
    assert 3e-5 < difference(product, by_row).judge().relative < 2e-4  # 1e-3/√500 is 4.5e-5
    # Products beyond every range are no error of zero.
    ones = torch.ones(3, 3, dtype=torch.float64)
    assert difference(ones * math.inf, ones).judge().relative == math.inf
    assert difference(ones * 1e200, ones * 1e200).judge().relative == math.inf
    assert difference(ones, ones * 1e-3).judge().is_all
    assert difference(0 * ones, 0 * ones).judge().relative == 0


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_frozen_noise_is_not_taken_for_rounding(curvature: str) -> None:
    noisy = Calling(lambda net, x: net[2](torch.tanh((hidden := net[0](x)) + torch.randn_like(hidden))))
    options: dict[str, Any] = {"curvature": curvature, "dropout": "freeze"}
    report = measure(noisy, LOSS, batch(), **options)
    assert report.converged
    assert any("frozen to one draw" in note for note in report.notes)
    noise = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).double()
    same = Calling(lambda net, x: net[2](torch.tanh(net[0](x) + noise)))
    truth = measure(same, LOSS, batch(), **options, **DOUBLE)
    assert not any("frozen to one draw" in note for note in truth.notes)
    for row, true in zip((*report, report.network), (*truth, truth.network), strict=True):
        assert abs(row.norm - true.norm) <= row.error < 2e-3 * row.norm
