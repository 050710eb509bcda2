"""The same seed gives the same bits; other seeds and other precisions agree to what is promised."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import hessinit
from dense import dense_curvature, ends
from tiny import LOSS, batch, inputs, labels, network

EXTRAS: dict[str, Any] = {"top": 2, "trace": True, "frobenius": True, "density": True}


def images() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(4)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    )
    return model, LOSS, (torch.randn(8, 1, 8, 8), labels(8))


def sequences() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(5)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return model, nn.MSELoss(), (torch.randn(4, 3, 8), torch.randn(4, 3, 8))


PROBLEMS = {"dense": lambda: (network(), LOSS, batch()), "images": images, "sequences": sequences}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian", "both"])
def test_the_same_seed_gives_the_same_bits(name: str, curvature: str) -> None:
    model, loss, data = PROBLEMS[name]()
    extras = EXTRAS if name == "dense" else {}
    reports = []
    for _ in range(2):
        torch.rand(3)  # the global generator has no part in it
        report = hessinit.measure(model, loss, data, curvature=curvature, seed=7, **extras)
        reports.append(dataclasses.replace(report, seconds=None, gradients=None))
    assert reports[0].to_json() == reports[1].to_json()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_half_precision_models_are_measured_in_single(dtype: torch.dtype, curvature: str) -> None:
    model = network(dtype=dtype)
    data = (inputs().to(dtype), labels())
    report = hessinit.measure(model, LOSS, data, curvature=curvature)
    truth = dense_curvature(model, LOSS, data, curvature)
    assert report.versions["dtype"] == "float32"
    assert report.network.norm == pytest.approx(ends(truth.network).norm, rel=1e-3)
    for layer in report:
        assert layer.norm == pytest.approx(ends(truth.layers[layer.name]).norm, rel=1e-3)
    assert model[0].weight.dtype == dtype
    assert data[0].dtype == dtype


def test_half_precision_targets_and_losses_are_converted_too() -> None:
    model, target = network(dtype=torch.bfloat16), torch.rand(6, 3).round().bfloat16()
    loss = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16))
    report = hessinit.measure(model, loss, (inputs().bfloat16(), target))
    truth = dense_curvature(model, loss, (inputs().bfloat16(), target), "gauss-newton")
    assert report.network.norm == pytest.approx(ends(truth.network).norm, rel=1e-3)
    assert loss.pos_weight.dtype == torch.bfloat16


def test_whole_numbers_stay_whole() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.inner = nn.Embedding(7, 4), network()
            self.register_buffer("shift", torch.tensor(1))

        def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
            assert x["ids"].dtype == torch.int64
            assert x["mask"].dtype == torch.bool
            assert self.shift.dtype == torch.int64
            assert x["weight"].dtype == self.words.weight.dtype
            return self.inner(self.words(x["ids"] + self.shift) * x["mask"][:, None] * x["weight"][:, None])

    data = {"ids": labels(), "mask": labels() > 0, "weight": torch.rand(6).half()}
    report = hessinit.measure(Words().bfloat16(), LOSS, (data, labels()))
    assert report.versions["dtype"] == "float32"


@pytest.mark.parametrize(
    ("model", "asked", "used"),
    [
        (network(), None, "float32"),
        (network(), torch.float64, "float64"),
        (network(dtype=torch.float64), None, "float64"),
        (network(dtype=torch.float64), torch.float32, "float32"),
        (network(dtype=torch.bfloat16), torch.float64, "float64"),
        (nn.Sequential(network(dtype=torch.bfloat16), nn.Linear(3, 3).double()), None, "float64"),
    ],
)
def test_the_precision_is_the_better_of_single_and_the_models_own_or_the_one_asked_for(
    model: nn.Module, asked: torch.dtype | None, used: str
) -> None:
    assert hessinit.measure(model, LOSS, batch(), dtype=asked).versions["dtype"] == used
