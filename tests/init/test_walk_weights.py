"""Which weights the walk finds: how they are stored, tied, computed, or why they are left alone."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from hessinit.errors import ProblemError
from hessinit.init.weight_uses import find_weight_uses
from zoo import PROBLEMS
from zoo.problem import Problem
from zoo.snapshot import differences, snapshot

BOTH = pytest.mark.parametrize("with_sample", [True, False], ids=["run", "traced"])


def first_inputs(batch: Any) -> Any:
    return (batch if isinstance(batch, tuple) else next(iter(batch)))[0]


def normal(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


class Functional(nn.Module):
    """Every way to write a dense map, rectangular so that a wrong side shows."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.linear, self.matmul = normal(4, 2, 3), normal(5, 4), normal(5, 6)
        self.turned, self.added, self.summed, self.left = (
            normal(7, 6),
            normal(7, 8),
            normal(9, 8),
            normal(3, 9),
        )

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        features = F.conv1d(sequence, self.kernel, stride=2).mean(-1)
        features = F.linear(features, self.linear)
        features = features @ self.matmul
        features = torch.matmul(features, self.turned.T)
        features = torch.addmm(torch.zeros(8), features, self.added)
        features = torch.einsum("ni,oi->no", features, self.summed)
        return self.left @ features.transpose(0, 1)


@BOTH
def test_the_storage_of_a_weight_is_read_off_its_use(with_sample: bool) -> None:
    sites = find_weight_uses(Functional(), torch.randn(2, 2, 9) if with_sample else None).uses
    assert [(site.parameter, site.outputs_last) for site in sites] == [
        ("kernel", False), ("linear", False), ("matmul", True), ("turned", False), ("added", True),
        ("summed", False), ("left", False),
    ]  # fmt: skip
    assert [site.order for site in sites] == list(range(7))
    assert (sites[0].kind, sites[0].shape, sites[0].stride) == ("convolution", (4, 2, 3), (2,))
    assert sites[3].shape == (7, 6)


@BOTH
def test_groups_strides_and_transposes_of_convolutions(with_sample: bool) -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, stride=(2, 1), groups=4, padding=1), nn.ReLU(),
        nn.ConvTranspose2d(8, 6, 2, stride=2, groups=2), nn.GELU(), nn.Conv2d(6, 2, 3, padding="same"),
    )  # fmt: skip
    depthwise, transposed, last = find_weight_uses(
        model, torch.randn(2, 4, 4, 4) if with_sample else None
    ).uses
    assert (depthwise.kind, depthwise.groups, depthwise.stride) == ("convolution", 4, (2, 1))
    assert (transposed.kind, transposed.groups, transposed.shape) == (
        "transposed convolution",
        2,
        (8, 3, 2, 2),
    )
    assert (last.kind, last.groups, last.stride, last.upstream.words) == ("convolution", 1, (1, 1), "gelu")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mix, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(self.tokens(tokens))))


@BOTH
def test_a_tied_weight_has_two_sites_under_one_name(with_sample: bool) -> None:
    sites = find_weight_uses(Tied(), torch.randint(7, (2, 3)) if with_sample else None).uses
    assert [(site.parameter, site.kind) for site in sites] == [
        ("tokens.weight", "embedding"), ("mix.weight", "dense"), ("tokens.weight", "dense")
    ]  # fmt: skip
    assert (sites[0].upstream.end, sites[2].upstream.words) == ("tokens", "tanh")


@BOTH
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
def test_a_parametrized_weight_goes_by_its_own_name(name: str, training: bool, with_sample: bool) -> None:
    layer = getattr(parametrizations, name)(nn.Linear(4, 6))
    model = nn.Sequential(layer, nn.ReLU(), nn.Linear(6, 3)).train(training)
    sample = torch.randn(3, 4)
    before = snapshot(model, None, sample)
    walk = find_weight_uses(model, sample if with_sample else None)
    assert differences(before, snapshot(model, None, sample)) == []
    assert [(site.parameter, site.shape, site.computed) for site in walk.uses] == [
        ("0.weight", (6, 4), True), ("2.weight", (3, 6), False)
    ]  # fmt: skip
    assert walk.unmet == {}
    assert walk.uses[0].downstream.words == "relu"


@BOTH
def test_old_weight_norm_is_found_and_its_halves_are_explained(with_sample: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it; people still have it
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 6)), nn.Linear(6, 3))
    walk = find_weight_uses(model, torch.randn(3, 4) if with_sample else None)
    assert [site.parameter for site in walk.uses] == ["0.weight", "1.weight"]
    assert set(walk.unmet) == {"0.weight_g", "0.weight_v"}
    assert "parametrizations" in walk.unmet["0.weight_v"]


class LeftAlone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.experts = nn.Linear(4, 4), nn.Linear(4, 4), normal(2, 4, 4)
        self.gate = normal(3, 4)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.used(features) @ self.experts[0] * self.gate


@BOTH
def test_what_is_unchanged_has_a_reason(with_sample: bool) -> None:
    walk = find_weight_uses(LeftAlone(), torch.randn(3, 4) if with_sample else None)
    assert [site.parameter for site in walk.uses] == ["used.weight"]
    assert walk.unmet == {
        "unused.weight": "not used by the forward",
        "experts": "used in slices by matmul",
        "gate": "scales a signal elementwise",
    }


class OutOfSight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.last(torch.linalg.qr(self.first(features))[0])


@BOTH
def test_what_is_not_understood_is_noted(with_sample: bool) -> None:
    walk = find_weight_uses(OutOfSight(), torch.randn(4, 4) if with_sample else None)
    assert len(walk.notes) == 1
    assert "input of last comes from an unknown function" in walk.notes[0]


class DataDecides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.first(features)
        return self.last(torch.relu(hidden) if hidden.sum() > -1e9 else hidden)


def test_a_model_that_cannot_be_traced_asks_for_a_sample() -> None:
    with pytest.raises(ProblemError, match="cannot be traced without data .*control flow.*pass sample="):
        find_weight_uses(DataDecides())
    assert [site.upstream.words for site in find_weight_uses(DataDecides(), torch.randn(2, 4)).uses] == [
        "",
        "relu",
    ]


def test_a_sample_that_does_not_fit_is_shown_with_the_way_out() -> None:
    with pytest.raises(
        ProblemError, match="fails on the sample .*shapes cannot be multiplied.*without targets"
    ):
        find_weight_uses(nn.Linear(4, 2), torch.randn(3, 5))
    with pytest.raises(ProblemError, match="forward= says how the model is called.*pass sample="):
        find_weight_uses(nn.Linear(4, 2), forward=lambda model, x: model(x))


def test_the_sample_is_taken_in_the_dtype_of_the_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).to(torch.bfloat16)
    assert len(find_weight_uses(model, torch.randn(2, 4, dtype=torch.float64)).uses) == 2


def test_a_model_without_parameters_has_no_sites() -> None:
    assert find_weight_uses(nn.ReLU()).uses == ()


# Sums and frozen weights, whose sizes are not followed.
NOTED = (
    "lp_pool2d",
    "embedding_bag_sum_with_offsets",
    "frozen_weight_asked_for_by_name",
)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_every_model_of_the_zoo_is_walked_and_left_as_found(problem: Problem) -> None:
    model, loss, batch = problem.build()
    inputs = first_inputs(batch)
    before = snapshot(model, loss, inputs)
    walk = find_weight_uses(model, inputs, problem.forward)
    assert bool(walk.notes) == (problem.name in NOTED)
    if problem.forward is None:
        # Where tracing works at all, it tells the same.
        try:
            traced = find_weight_uses(model)
        except ProblemError as failure:
            assert "pass sample=" in str(failure)  # noqa: PT017 (whether it fails depends on the model)
        else:
            assert traced == walk
    assert differences(before, snapshot(model, loss, inputs)) == []
    weights = {site.parameter for site in walk.uses} | set(walk.unmet)
    stored = {name for name, parameter in model.named_parameters() if parameter.ndim > 1}
    assert {name for name in stored if "parametrizations" not in name} <= weights
