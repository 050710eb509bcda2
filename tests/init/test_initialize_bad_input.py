"""What cannot be done is refused before any work: the value, the rule, the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from initialized_networks import LOSS, digits, mlp, state
from torch import nn

from hessinit.errors import ProblemError
from hessinit.init.initialize import initialize_

BAD: list[tuple[dict[str, Any], str]] = [
    ({"lr": 0.1, "target": 2.0}, r"lr=0.1 and target=2.0 both set the norm .* pass one of them"),
    ({"lr": 0.0}, "lr=0.0 must be a positive, finite number"),
    ({"lr": float("nan")}, "lr=nan must be a positive"),
    ({"lr": "0.1"}, "lr='0.1' must be a positive"),
    ({"lr": True}, "lr=True must be a positive"),
    ({"target": -1}, "target=-1 must be a positive"),
    ({"rule": "layer"}, "rule='layer' is unknown; .* Did you mean 'layers'"),
    ({"scheme": "kaiming"}, "scheme='kaiming' is unknown; .* Did you mean 'he'"),
    ({"scaling": "gain"}, "scaling='gain' is unknown; choose from 'auto', 'all', 'last'"),
    ({"scaling": "last", "rule": "layers"}, "scaling='last' has no meaning for rule='layers'"),
    ({"curvature": "both"}, "curvature='both' is unknown"),
    ({"biases": "none"}, "biases='none' is unknown"),
    ({"residual": "scale"}, "residual='scale' is unknown; .* Did you mean 'scaled'"),
    ({"dropout": "off"}, "dropout='off' is unknown"),
    ({"tolerance": 0}, "tolerance=0 must be a relative error"),
    ({"max_measurements": 0}, "max_measurements=0 must be a whole number, 1 or more"),
    ({"max_sharpening": 0.5}, "max_sharpening=0.5 must be 1 or more"),
    ({"seed": -1}, "seed=-1 must be a whole number"),
    ({"dry_run": 1}, "dry_run=1 must be True or False"),
    ({"strict": "yes"}, "strict='yes' must be True or False"),
    ({"layers": "fc9"}, "layers='fc9' fits no parameter"),
    ({"layers": "1.bias"}, "no weight of two or more dimensions can be set"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    model = mlp(3)
    before = state(model)
    with pytest.raises(ProblemError, match=message):
        initialize_(model, LOSS, digits(), **options)
    assert state(model) == before


def test_a_frozen_model_is_refused() -> None:
    with pytest.raises(ProblemError, match="no weight of two or more dimensions can be set .*frozen"):
        initialize_(mlp(3).requires_grad_(False), LOSS, digits())


def test_a_linear_loss_is_refused_and_the_model_left_as_found() -> None:
    model = nn.Sequential(*mlp(3), nn.LogSoftmax(1))
    before = state(model)
    with pytest.raises(ProblemError, match="move log_softmax into the loss"):
        initialize_(model, nn.NLLLoss(), digits())
    assert state(model) == before


def test_a_forward_that_is_never_finite_is_refused() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + torch.log(torch.zeros(()))

    model = Broken()
    before = state(model)
    with pytest.raises(ProblemError, match="NaN or inf"):
        initialize_(model, LOSS, digits())
    assert state(model) == before


def test_active_dropout_can_be_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, 10))
    with pytest.raises(ProblemError, match="active .train mode."):
        initialize_(model, LOSS, digits(), dropout="refuse")
