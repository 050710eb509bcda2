"""What `apply_scheme_` refuses: with the value, the rule and the way out, before anything is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hessinit.errors import ProblemError
from hessinit.init.apply_scheme import apply_scheme_


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Dropout(0.36), nn.Linear(6, 3))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, signal: Tensor) -> Tensor:
        return self.fc(signal) if signal.sum() > 0 else self.fc(-signal)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.soft = nn.Softmax(dim=-1)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, signal: Tensor) -> Tensor:
        return self.two(self.soft(self.one(signal)))


REFUSED: list[tuple[str, Any]] = [
    ("scheme='orthognal' is unknown.*Did you mean 'orthogonal'", lambda: apply_scheme_(small(), "orthognal")),
    ("scheme='Kaiming' is unknown.*Did you mean 'he'", lambda: apply_scheme_(small(), "Kaiming")),
    ("scheme='kaiming_normal_' is unknown.*mean 'he'", lambda: apply_scheme_(small(), "kaiming_normal_")),
    ("scheme='xavier' is unknown.*Did you mean 'glorot'", lambda: apply_scheme_(small(), "xavier")),
    ("distribution='gauss' is unknown", lambda: apply_scheme_(small(), "he", distribution="gauss")),
    (
        "distribution='uniform' has no meaning for scheme='orthogonal'",
        lambda: apply_scheme_(small(), "orthogonal", distribution="uniform"),
    ),
    (
        "residual='scale' is unknown.*Did you mean 'scaled'",
        lambda: apply_scheme_(small(), "he", residual="scale"),
    ),
    ("biases='zeros' is unknown.*Did you mean 'zero'", lambda: apply_scheme_(small(), "he", biases="zeros")),
    ("generator is a int; pass torch.Generator", lambda: apply_scheme_(small(), "he", generator=3)),  # type: ignore[arg-type]
    ("model is a type.*instance, not the class", lambda: apply_scheme_(nn.Linear, "he")),  # type: ignore[arg-type]
    ("scheme='lsuv' measures.*pass sample=", lambda: apply_scheme_(small(), "lsuv")),
    ("pass sample=", lambda: apply_scheme_(Branching(), "he")),
    ("no weight of two or more dimensions", lambda: apply_scheme_(nn.LayerNorm(3), "he")),
    (
        r"softmax before two is not elementwise.*gains={'two': 1.0}.*lsuv",
        lambda: apply_scheme_(Bare(), "he"),
    ),
    (r"gains names 'fc9', which fits no weight", lambda: apply_scheme_(small(), "he", gains={"fc9": 1.0})),
    (
        r"gains\['3'\] is -1; a gain is a positive number",
        lambda: apply_scheme_(small(), "he", gains={"3": -1}),
    ),
    ("gains is a list; it must map names", lambda: apply_scheme_(small(), "he", gains=[1.0])),  # type: ignore[arg-type]
    ("gains holds the key 3", lambda: apply_scheme_(small(), "he", gains={3: 1.0})),  # type: ignore[dict-item]
    ("gains has no meaning for scheme='lecun'", lambda: apply_scheme_(small(), "lecun", gains={"3": 1.0})),
    ("dropout='no' must be True or False", lambda: apply_scheme_(small(), "he", dropout="no")),  # type: ignore[arg-type]
    ("layers='0.bias' names no weight of two", lambda: apply_scheme_(small(), "he", layers="0.bias")),
    ("layers='fc9' fits no parameter", lambda: apply_scheme_(small(), "he", layers="fc9")),
    ("the forward fails on the sample", lambda: apply_scheme_(small(), "he", sample=torch.ones(2, 5))),
    (
        "a dropout of p = 1 stands next to 1",
        lambda: apply_scheme_(nn.Sequential(nn.Dropout(1.0), nn.Linear(3, 3)), "he"),
    ),
    (
        "the output of 0 on this sample is 0 everywhere.*several examples that differ",
        lambda: apply_scheme_(small(), "lsuv", sample=torch.zeros(4, 8)),
    ),
]


@pytest.mark.parametrize(("message", "call"), REFUSED, ids=[message[:40] for message, _ in REFUSED])
def test_bad_input_is_refused(message: str, call: Any) -> None:
    with pytest.raises(ProblemError, match=f"(?s){message}"):
        call()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_zero_fan_is_refused() -> None:
    with pytest.raises(ProblemError, match=r"0 has shape \(0, 4\): a fan is zero"):
        apply_scheme_(nn.Sequential(nn.Linear(4, 0), nn.Linear(0, 3)), "he", layers=None)


def test_a_softmax_between_layers_is_welcome_with_a_gain_or_a_scheme_that_needs_none() -> None:
    assert apply_scheme_(Bare(), "he", gains={"two": 2.0})["two"].gain == 2.0
    assert apply_scheme_(Bare(), "lsuv", sample=torch.randn(16, 4)).applied
    assert apply_scheme_(Bare(), "glorot").applied


def test_a_dropout_of_one_behind_all_weights_is_nobodys_business() -> None:
    assert apply_scheme_(nn.Sequential(nn.Linear(3, 3), nn.Dropout(1.0)), "he").applied
