"""A weight is measured by every way that the forward takes to it, or refused by its name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense_truth import true_norms
from random_networks import Parts
from torch import Tensor, nn

import hessinit
import tiny
from calls import measure
from tiny import LOSS, Net, batch, inputs, labels, network

EXACT: dict[str, Any] = {"dtype": torch.float64, "tolerance": 1e-8}
SHARED: dict[str, Any] = {}


class Shared:
    """Keeps a weight in an attribute of the class."""

    weight: Tensor | None = None


class Slots:
    """What an object keeps in slots is not looked at."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


# Where a model keeps its weight a second time, and how it is found there.
WAYS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "in a list": (lambda w: [w], lambda kept: kept[0]),
    "in a dict in a tuple": (lambda w: (3, {"tied": w}), lambda kept: kept[1]["tied"]),
    "in a namespace": (lambda w: SimpleNamespace(a=SimpleNamespace(w=w)), lambda kept: kept.a.w),
    "in a closure": (lambda w: lambda: w, lambda kept: kept()),
    "in a default": (lambda w: lambda again=w: again, lambda kept: kept()),
    "in a partial": (lambda w: functools.partial(lambda it: it, it=w), lambda kept: kept()),
    "by a method": (lambda w: None, lambda kept: pytest.fail("not asked")),
    "in a global": (lambda w: SHARED.update(weight=w), lambda kept: SHARED["weight"]),
    "as a buffer": (lambda w: w, lambda kept: kept),
    "in a class": (lambda w: setattr(Shared, "weight", w), lambda kept: Shared.weight),
    "in another module": (lambda w: setattr(tiny, "weight", w), lambda kept: tiny.weight),
}
UNSEEN: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "in slots": (Slots, lambda kept: kept.weight),
    "as an old view": (lambda w: w.view(-1), lambda kept: kept.view(4, 5)),
}


class Tied(nn.Module):
    """The last layer's weight is that of the first one, found where the way has put it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed, self.middle = nn.Linear(5, 4, bias=False), nn.Linear(4, 4)
        keep, find = {**WAYS, **UNSEEN}[way]
        if way == "as a buffer":
            self.register_buffer("kept", self.embed.weight)
        else:
            self.kept = keep(self.embed.weight)
        self.find = self.own_weight if way == "by a method" else lambda: find(self.kept)

    def own_weight(self) -> Tensor:
        return self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.middle(torch.tanh(self.embed(x)))) @ self.find()


def tied_batch() -> tuple[Tensor, Tensor]:
    return inputs(8, 5), labels(8)


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
@pytest.mark.parametrize("way", WAYS)
def test_a_second_way_to_a_weight_counts_and_leads_to_the_models_own_again(way: str, curvature: str) -> None:
    model = Tied(way)
    report = measure(model, LOSS, tied_batch(), curvature=curvature, **EXACT)
    assert model.find() is model.embed.weight
    names = {"embed": ["embed.weight"], "middle": ["middle.weight"]}
    truth = true_norms(Parts(Tied("by a method"), LOSS, tied_batch()), names, curvature)
    assert {row.name: row.norm for row in report} == pytest.approx(truth, rel=1e-6)


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_the_argument_forward_may_hold_a_weight_too(curvature: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    weight = model[0].weight
    forward = lambda net, x: net(x @ weight)  # noqa: E731
    report = measure(model, LOSS, batch(), forward=forward, curvature=curvature, **EXACT)
    truth = true_norms(Parts(model, LOSS, batch(), forward), {"0": ["0.weight"]}, curvature)
    assert report["0"].norm == pytest.approx(truth["0"], rel=1e-6)


@pytest.mark.parametrize("way", UNSEEN)
def test_a_way_that_cannot_be_followed_is_refused_with_the_weights_name(way: str) -> None:
    message = "the forward reaches embed.weight by a way that cannot be foll"
    with pytest.raises(hessinit.ProblemError, match=message):
        hessinit.measure(Tied(way), LOSS, tied_batch(), estimator="lanczos")


def test_a_hidden_way_without_a_gradient_is_refused_too() -> None:
    """A frozen weight leaves no trace in the graph; the finite differences move the user's own parameter."""
    model = Tied("in slots").requires_grad_(False)
    with pytest.raises(hessinit.ProblemError, match="is not that of the function that is trained"):
        measure(model, LOSS, tied_batch(), layers="embed", estimator="lanczos")
    assert not model.embed.weight.requires_grad
    assert measure(model, LOSS, tied_batch(), layers="embed").engine == "plain"  # on the parameter itself
    assert not model.embed.weight.requires_grad


@pytest.mark.parametrize("closed", [True, False])
def test_a_loss_that_uses_a_layer_of_the_model_is_refused(closed: bool) -> None:
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4), nn.Tanh())
    weight = nn.Module()
    weight.layer = model[0]
    weight.forward = lambda hidden, target: F.cross_entropy(hidden @ weight.layer.weight.T, target)
    loss = (lambda hidden, target: weight(hidden, target)) if closed else weight
    message = "the loss depends on 0.weight not only through.*a layer that the"
    with pytest.raises(hessinit.ProblemError, match=message):
        hessinit.measure(model, loss, (torch.arange(6), torch.arange(6)))


def keep_a_part_of_the_loss(m: Any, x: Tensor) -> Tensor:
    """In an attribute, as mixtures of experts do."""
    hidden = torch.tanh(m.first(x))
    m.auxiliary = hidden.square().mean()
    return m.last(hidden)


def auxiliary() -> Any:
    return Net(keep_a_part_of_the_loss, first=nn.Linear(4, 5), last=nn.Linear(5, 3), auxiliary=None)


def test_an_auxiliary_loss_in_an_attribute_is_refused() -> None:
    for before in (None, True, False):  # no forward before, one, one under no_grad
        model = auxiliary()
        if before is not None:
            with torch.set_grad_enabled(before):
                model(inputs())
        loss = lambda z, y, model=model: LOSS(z, y) + 10 * model.auxiliary  # noqa: E731
        message = "first.weight.*an auxiliary loss that the forward keeps in an attr"
        with pytest.raises(hessinit.ProblemError, match=message):
            hessinit.measure(model, loss, batch())


def test_the_way_out_for_an_auxiliary_loss_leads_out() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        output = model(x)
        return torch.cat([output, model.auxiliary.expand(len(x), 1)], 1)

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return LOSS(z[:, :-1], y) + 10 * z[0, -1]

    torch.manual_seed(0)
    model = auxiliary()
    report = measure(model, loss, batch(), forward=forward, curvature="hessian", **EXACT)
    truth = true_norms(Parts(model, loss, batch(), forward), {"first": ["first.weight"]}, "hessian")
    assert report["first"].norm == pytest.approx(truth["first"], rel=1e-6)


def test_a_loss_that_reads_a_mask_from_the_last_forward_is_refused() -> None:
    def keep_mask(m: Any, x: Tensor) -> Tensor:
        m.mask = (x[:, 0] > 0).to(x.dtype)
        return m.inner(x)

    model = Net(keep_mask, inner=network(), mask=torch.ones(6))
    masked = lambda z, y: (model.mask * F.cross_entropy(z, y, reduction="none")).mean()  # noqa: E731
    message = "the loss changes from call to call.*reads what the forward leaves"
    with pytest.raises(hessinit.ProblemError, match=message):
        hessinit.measure(model, masked, batch())


def test_two_parameters_on_one_memory_are_refused() -> None:
    for view in (lambda first: first, lambda first: first.T, lambda first: first[1:]):
        first, last = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        last.weight = nn.Parameter(view(first.weight.data))
        message = "0.weight and 2.weight are two parameters on the same memory"
        with pytest.raises(hessinit.ProblemError, match=message):
            hessinit.measure(nn.Sequential(first, nn.Tanh(), last), LOSS, (inputs(6, 5), labels()))


def test_parameters_side_by_side_in_one_memory_are_measured() -> None:
    first, last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    plain = nn.Sequential(first, nn.Tanh(), last)
    expected = hessinit.measure(plain, LOSS, batch()).network.norm
    memory = torch.cat([first.weight.data, last.weight.data])
    first.weight.data, last.weight.data = memory[:4], memory[4:]
    assert hessinit.measure(plain, LOSS, batch()).network.norm == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("option", [{"scale_grad_by_freq": True}, {"max_norm": 0.5}])
@pytest.mark.parametrize("estimator", ["auto", "lanczos"])
def test_an_embedding_whose_gradient_or_weight_is_rewritten_is_refused(estimator: str, option: Any) -> None:
    words = nn.Embedding(8, 4, **option)
    model = Net(lambda m, x: m.head(torch.tanh(m.words(x).mean(1))), words=words, head=nn.Linear(4, 3))
    tokens, before = torch.arange(18).remainder(5).view(6, 3), words.weight.detach().clone()
    with pytest.raises(hessinit.ProblemError, match="scale_grad_by_freq=.*Measure without these two"):
        hessinit.measure(model, LOSS, (tokens, labels()), estimator=estimator)
    assert torch.equal(words.weight, before)
