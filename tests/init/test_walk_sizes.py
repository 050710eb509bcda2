"""What changes the size of a signal on the way: scales by a shape, sums, weights that stay as they are."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from walking import skip_what_torch_cannot_trace

from hessinit.init.trace import BY_SHAPE
from hessinit.init.weight_uses import find_weight_uses

BOTH = pytest.mark.parametrize("with_sample", [True, False], ids=["run", "traced"])


class Between(nn.Module):
    """Two layers with a function between them."""

    def __init__(self, function: Callable[[Tensor], Tensor], inner: int = 6) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 6), nn.Linear(inner, 3), function

    def forward(self, features: Tensor) -> Tensor:
        return self.last(self.function(self.first(features)))


def test_a_scale_by_a_shape_is_known_with_a_sample_and_trouble_without() -> None:
    model = Between(lambda x: F.relu(x) / math.sqrt(x.shape[-1]))
    run, traced = find_weight_uses(model, torch.randn(5, 4)).uses, find_weight_uses(model).uses
    assert run[1].upstream.moment == pytest.approx(0.5 / 6)
    assert run[1].upstream.trouble == run[0].downstream.trouble == ""
    assert traced[1].upstream.trouble == traced[0].downstream.trouble == BY_SHAPE
    assert traced[0].upstream.trouble == ""


def test_a_scale_by_a_shape_in_a_gate_is_trouble_too() -> None:
    model = Between(lambda x: torch.sigmoid(x) * (x.roll(1, 0) * x.shape[-1]))
    assert find_weight_uses(model).uses[1].upstream.trouble == BY_SHAPE
    assert find_weight_uses(model, torch.randn(5, 4)).uses[1].upstream.trouble == ""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, stream: Tensor) -> Tensor:
        key = self.key(stream)
        scores = self.query(stream) @ key.transpose(-2, -1) / math.sqrt(key.size(-1))
        return self.out(F.softmax(scores, -1) @ stream)


def test_a_scale_by_a_shape_on_the_scores_of_attention_is_no_trouble() -> None:
    for site in find_weight_uses(Attention()).uses:
        assert site.upstream.trouble == site.downstream.trouble == ""


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.table = nn.Linear(4, 6), nn.Linear(6, 3), torch.randn(9, 6)

    def forward(self, sequence: Tensor) -> Tensor:
        return self.last(self.first(sequence) + self.table[torch.arange(sequence.size(1))])


@BOTH
def test_a_table_of_positions_cut_to_length_is_a_sum(with_sample: bool) -> None:
    skip_what_torch_cannot_trace(with_sample)
    before = find_weight_uses(Positions(), torch.randn(2, 5, 4) if with_sample else None).uses[1].upstream
    assert (before.end, before.trouble) == ("sum", "")


class Accumulated(nn.Module):
    """Starts from zeros, and is written to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features)
        total = torch.zeros_like(hidden)
        total += torch.relu(hidden)
        return self.last(total)


@BOTH
def test_zeros_that_something_is_added_to_change_nothing(with_sample: bool) -> None:
    before = find_weight_uses(Accumulated(), torch.randn(5, 4) if with_sample else None).uses[1].upstream
    assert (before.end, before.trouble) == ("weight", "")
    assert before.moment == pytest.approx(0.5)


@BOTH
def test_what_is_multiplied_by_zeros_is_masked_and_not_gone(with_sample: bool) -> None:
    model = Between(lambda x: torch.relu(x) * torch.zeros_like(x))
    before = find_weight_uses(model, torch.randn(5, 4) if with_sample else None).uses[1].upstream
    assert before.moment == pytest.approx(0.5)


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(1),
    "norm": lambda x: x.norm(dim=1),
    "prod": lambda x: x.prod(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "cumsum": lambda x: x.cumsum(1),
    "sum_and_relu": lambda x: torch.relu(x.sum(1)),
}


@BOTH
@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_that_changes_the_size_is_noted(name: str, with_sample: bool) -> None:
    walk = find_weight_uses(Between(REDUCTIONS[name]), torch.randn(2, 5, 4) if with_sample else None)
    assert walk.uses[1].upstream.end == walk.uses[0].downstream.end == "unknown"
    assert "input of last comes from an unknown function" in walk.notes[0]
    assert walk.uses[1].upstream.moment == pytest.approx(0.5 if name == "sum_and_relu" else 1.0)


@BOTH
@pytest.mark.parametrize("function", [lambda x: x.mean(1), lambda x: x.amax(1), lambda x: x.max(1)[0]])
def test_means_and_extremes_are_looked_through(
    function: Callable[[Tensor], Tensor], with_sample: bool
) -> None:
    walk = find_weight_uses(Between(function), torch.randn(2, 5, 4) if with_sample else None)
    assert walk.uses[1].upstream.end == "weight"
    assert walk.notes == ()


@BOTH
def test_a_sum_of_what_a_softmax_has_weighed_is_a_mean(with_sample: bool) -> None:
    model = Between(lambda x: (F.softmax(x, 1) * x.roll(1, 0)).sum(1))
    walk = find_weight_uses(model, torch.randn(2, 5, 4) if with_sample else None)
    assert walk.uses[1].upstream.end == "mix"
    assert walk.notes == ()


@BOTH
@pytest.mark.parametrize(("mode", "end"), [("sum", "unknown"), ("mean", "weight"), ("max", "weight")])
def test_a_bag_of_embeddings_that_sums_is_noted(mode: str, end: str, with_sample: bool) -> None:
    model = nn.Sequential(nn.EmbeddingBag(9, 6, mode=mode), nn.Linear(6, 2))
    walk = find_weight_uses(model, torch.randint(9, (2, 5)) if with_sample else None)
    assert [site.kind for site in walk.uses] == ["embedding", "dense"]
    assert walk.uses[1].upstream.end == end
    assert bool(walk.notes) == (mode == "sum")


def frozen_stack() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(128, 200), nn.Tanh(), nn.Linear(200, 160), nn.Dropout(0.5), nn.Tanh(), nn.Linear(160, 96)
    )
    for layer, spread in ((model[0], 0.02), (model[2], 0.3)):
        nn.init.normal_(layer.weight, std=spread)
        nn.init.zeros_(layer.bias)
        layer.requires_grad_(False)
    return model


@BOTH
def test_a_frozen_weight_that_does_not_keep_the_size_is_told(with_sample: bool) -> None:
    model, data = frozen_stack(), torch.randn(4000, 128)
    walk = find_weight_uses(model, data if with_sample else None)
    (note,) = walk.notes
    assert note.startswith("2 is frozen")
    with torch.no_grad():
        truth = float(model[:3](data).square().mean())
    told = float(note.partition("about ")[2].partition(";")[0])
    assert told == pytest.approx(truth, rel=1)  # tanh bends a small signal less than one of size 1
    assert walk.uses[2].upstream.moment == pytest.approx(find_weight_uses(model).uses[2].upstream.moment)


def test_a_weight_is_taken_to_keep_the_size_because_it_will_be_drawn_so() -> None:
    model = frozen_stack().requires_grad_(True)
    assert find_weight_uses(model).uses[1].upstream.moment == pytest.approx(0.394294, rel=1e-5)
    assert find_weight_uses(model).notes == ()
