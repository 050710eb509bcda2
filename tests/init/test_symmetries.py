"""`find_symmetries` against a truth of its own: what changes the output, by finite differences in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from networks import LOSS, branch, lstm, mlp, seeded, text, text_loss, transformer
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from hessinit.init.symmetries import Symmetries, find_blocks, find_symmetries
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.problem import Problem
from tiny import Net, inputs, labels

BATCH = inputs(40, 6).double(), labels(40)
IMAGES = inputs(48, 1, 8, 8).double(), labels(48)
TEXT = text()


def run(model: nn.Module, batch: Any) -> Tensor:
    """The output, with one mask of the dropout."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model(batch[0]).flatten().clone()


def moved(model: nn.Module, batch: Any, logs: dict[str, float]) -> float:
    """The relative change of the output where each parameter is multiplied by e^log."""
    before, kept = run(model, batch), {name: one.detach().clone() for name, one in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(math.exp(logs.get(name, 0.0)))
        after = run(model, batch)
        for name, parameter in model.named_parameters():
            parameter.copy_(kept[name])
    return float((after - before).norm() / before.norm())


def true_space(model: nn.Module, batch: Any, step: float = 1e-7) -> np.ndarray:
    """A basis, in rows, of the exponents that do not move the output, by central differences."""
    columns = []
    for parameter in model.parameters():
        kept, outputs = parameter.detach().clone(), []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.copy_(kept * math.exp(sign * step))
                outputs.append(run(model, batch))
                parameter.copy_(kept)
        columns.append((outputs[0] - outputs[1]) / (2 * step))
    _, values, right = np.linalg.svd(torch.stack(columns, 1).numpy())
    return right[int((values > 1e-6 * values[0]).sum()) :]


def prepared(model: nn.Module) -> nn.Module:
    """In float64, with gains and biases that are not 1 and 0, and an eps that cannot be seen."""
    model, source = model.double(), seeded(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter += 0.3 * torch.randn(parameter.shape, generator=source, dtype=torch.float64)
        for module in model.modules():
            if getattr(module, "eps", None) is not None:
                module.eps = min(module.eps, 1e-13)
            if isinstance(module, nn.BatchNorm1d):
                module.running_mean += 0.3
    return model


def find(model: nn.Module, batch: Any, fixed: Sequence[str] = ()) -> Symmetries:
    loss = text_loss if batch is TEXT else LOSS
    problem = FunctionalProblem(Problem(model, loss, batch, check=False))
    with problem.settings():
        return find_symmetries(problem, fixed)


def weights_of(model: nn.Module) -> list[str]:
    return [name for name, one in model.named_parameters() if one.ndim > 1]


def rms(width: int) -> Net:
    run = lambda net, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + net.eps) * net.scale  # noqa: E731
    return Net(run, scale=nn.Parameter(torch.ones(width)), eps=1e-6)


def chain(norm: Callable[[int], nn.Module], bias: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8, bias=bias), norm(8), nn.ReLU(), nn.Linear(8, 3))


def convolutions(norm: Callable[[int], nn.Module], *between: nn.Module) -> nn.Sequential:
    """Two convolutions; `between` stands before the second normalization."""
    first = nn.Conv2d(1, 4, 3, bias=False), norm(4), nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False)
    last = nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    return nn.Sequential(*first, *between, norm(4), *last)


def block(inner: int, outer: int) -> Net:
    parts: dict[str, Any] = {"first": nn.Conv2d(inner, outer, 3, padding=1, bias=False)}
    parts |= {"second": nn.Conv2d(outer, outer, 3, padding=1, bias=False)}
    parts |= {"norm1": nn.BatchNorm2d(outer), "norm2": nn.BatchNorm2d(outer), "short": nn.Identity()}
    if inner != outer:
        parts["short"] = nn.Sequential(nn.Conv2d(inner, outer, 1, bias=False), nn.BatchNorm2d(outer))

    def forward(net: Any, x: Tensor) -> Tensor:
        inside = net.second(F.relu(net.norm1(net.first(x))))
        return F.relu(net.norm2(inside) + net.short(x))

    return Net(forward, **parts)


def resnet() -> nn.Sequential:
    stem = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)
    return nn.Sequential(*stem, block(4, 4), block(4, 6), *head)


def attention() -> Net:
    """One pre-norm layer with weights for queries, keys and values apart, and learned position biases."""

    def forward(net: Any, tokens: Tensor) -> Tensor:
        x = net.embed(tokens)
        parts = (each(net.norm(x)).unflatten(-1, (2, -1)).transpose(1, 2) for each in (net.q, net.k, net.v))
        mixed = F.scaled_dot_product_attention(*parts, attn_mask=net.position)
        return net.head(net.last(x + net.o(mixed.transpose(1, 2).flatten(2))))

    parts: dict[str, Any] = {name: nn.Linear(8, 8, bias=name != "k") for name in "qkvo"}
    parts |= {"embed": nn.Embedding(12, 8), "norm": nn.LayerNorm(8), "last": nn.LayerNorm(8)}
    return Net(forward, **parts, head=nn.Linear(8, 12), position=nn.Parameter(torch.randn(2, 8, 8)))


def weight_normed() -> nn.Sequential:
    inner = parametrizations.weight_norm(nn.Linear(8, 8))
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), inner, nn.Tanh(), nn.Linear(8, 3))


def reshaped() -> nn.Sequential:
    inside = nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2), nn.Flatten()
    return nn.Sequential(nn.Linear(6, 8, bias=False), *inside, nn.ReLU(), nn.Linear(8, 3))


def in_a_row() -> nn.Sequential:
    inner = nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()
    return nn.Sequential(nn.Linear(6, 8), *inner, nn.Linear(8, 3))


def with_bias(norm: Callable[[int], nn.Module]) -> nn.Sequential:
    return chain(norm, bias=True)


CLOSING = ("self_attn.out_proj", "linear2")
STREAM = ["embed", *(f"body.0.layers.{at}.{part}" for at in (0, 1) for part in CLOSING)]
DROPPED = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, 3))
BRANCHES = branch(8, norm=True), branch(8, norm=True)
RESIDUAL = nn.Sequential(nn.Linear(6, 8, bias=False), *BRANCHES, nn.LayerNorm(8))
ALL_OF_RESNET = ["0", "3.first", "3.second", "4.first", "4.second", "4.short.0"]

# The batch, the groups of scale-free weights, and the dimension of the whole space, found and true.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Any, list[list[str]], int]] = {
    "batch norm": (lambda: convolutions(nn.BatchNorm2d, nn.AvgPool2d(2)), IMAGES, [["0"], ["3"]], 4),
    "batch norm, fixed": (lambda: chain(nn.BatchNorm1d).eval(), BATCH, [], 1),
    "group norm": (lambda: convolutions(lambda c: nn.GroupNorm(2, c)), IMAGES, [["0"], ["3"]], 4),
    "instance norm": (
        lambda: convolutions(lambda c: nn.InstanceNorm2d(c, affine=True), nn.Dropout2d(0.2)).eval(),
        IMAGES, [["0"], ["3"]], 4,
    ),
    "reshaped": (reshaped, BATCH, [["0"]], 2),
    "layer norm": (lambda: with_bias(nn.LayerNorm), BATCH, [["0"]], 2),
    "two weights before a norm": (in_a_row, BATCH, [["0"], ["2"]], 3),
    "RMS norm": (lambda: with_bias(lambda width: nn.RMSNorm(width, eps=1e-6)), BATCH, [["0"]], 2),
    "RMS norm by hand": (lambda: with_bias(rms), BATCH, [["0"]], 2),
    "dropout": (lambda: DROPPED, BATCH, [["0"]], 2),
    "residual, pre-norm": (lambda: RESIDUAL, BATCH, [["0", "1.second", "2.second"]], 5),
    "residual, post-activation": (resnet, IMAGES, [[name] for name in ALL_OF_RESNET], 10),
    "transformer, pre-norm": (lambda: transformer(True), TEXT, [STREAM], 8),
    "transformer, post-norm": (lambda: transformer(False), TEXT, [], 8),
    "tied head": (lambda: transformer(True, tied=True), TEXT, [], 7),
    "attention": (attention, TEXT, [["o", "embed"]], 5),
    "weight norm": (weight_normed, BATCH, [["2.parametrizations.weight.original1"]], 2),
    "relu chain": (lambda: nn.Sequential(*mlp(4, width=6), nn.Linear(10, 3)), IMAGES, [], 4),
    "tanh chain": (lambda: mlp(4, nn.Tanh, width=6), IMAGES, [], 0),
    "lstm": (lstm, TEXT, [], 1),  # the embedding against the weights that read it
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_the_symmetries_are_those_that_do_not_move_the_output(name: str) -> None:
    build, batch, groups, dimension = NETWORKS[name]
    torch.manual_seed(0)
    model = prepared(build())
    found, truth = find(model, batch), true_space(model, batch)
    # The smallest exponents with 1 for one parameter span the space.
    each = [found.solve({parameter: 1.0}) for parameter in found.parameters]
    span = np.zeros((len(each), len(each)))
    for row, exponents in zip(span, each, strict=True):
        row[:] = [(exponents or {}).get(parameter, 0.0) for parameter, _ in model.named_parameters()]
    assert (np.linalg.matrix_rank(span, tol=1e-6), len(truth)) == (dimension, dimension)
    assert span @ truth.T @ truth == pytest.approx(span, abs=1e-5)  # nothing outside of the truth
    weights = weights_of(model)
    told = [[one.removesuffix(".weight") for one in each] for each in found.groups(weights, found.gains)]
    assert told == groups
    source = np.random.default_rng(0)
    mixture = dict(zip(dict(model.named_parameters()), source.normal(size=len(each)) @ span, strict=True))
    assert moved(model, batch, mixture) < 1e-6  # by large factors, too
    free = found.scale_free(weights)
    assert (free is None) == (not groups)
    for without in free or {}:
        assert free is not None
        parts = {name: math.log(3) * exponent for name, exponent in free.items() if name != without}
        # Whole groups may stay behind, parts of one may not.
        assert [without.removesuffix(".weight")] in groups or moved(model, batch, parts) > 1e-3


def test_pairs_are_told_by_what_they_share() -> None:
    torch.manual_seed(0)
    model = prepared(attention())
    found = find(model, TEXT)
    other = [name for name in found.parameters if name[0] not in "qkvo" or name[1] != "."]
    for first, second, beside in (("q", "k", {"q.bias": 1.0}), ("v", "o", {"v.bias": 1.0, "o.bias": 0.0})):
        pair = found.solve(dict.fromkeys(other, 0.0) | {f"{first}.weight": 1.0, f"{second}.weight": -1.0})
        assert pair is not None
        assert {name: pair.get(name, 0.0) for name in beside} == pytest.approx(beside)
        assert moved(model, TEXT, {name: 2 * one for name, one in pair.items()}) < 1e-7
        assert moved(model, TEXT, {f"{first}.weight": 2.0}) > 1e-3
    assert found.solve({"q.weight": 1.0, "k.weight": 0.0, "norm.weight": 0.0}) is None  # a temperature
    assert found.solve({"position": 1.0}) is None
    frozen = find(model, TEXT, fixed=["o.weight", "v.weight", "norm.bias"])
    assert frozen.solve({"o.weight": 1.0}) is None
    assert frozen.solve({"norm.weight": 1.0}) is None
    assert frozen.groups(weights_of(model), frozen.gains) == []


def test_gains_go_against_the_weights_that_read_them() -> None:
    torch.manual_seed(0)
    model = prepared(resnet())
    found, weights = find(model, IMAGES), weights_of(model)
    free = [f"{name}.weight" for name in ALL_OF_RESNET]
    (pair,) = found.against_gains(weights, free)  # the whole stream of the second stage, and the head
    expected = {f"4.{name}.{part}": -1.0 for name in ("norm2", "short.1") for part in ("weight", "bias")}
    assert pair == pytest.approx(expected | {"7.weight": 1.0})
    assert moved(model, IMAGES, pair) < 1e-8
    assert moved(model, IMAGES, pair | {"4.short.1.bias": 0.0}) > 1e-2


ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "a constant in the denominator": lambda x: x / (x.std(-1, keepdim=True) + 1.0),
    "detached statistics and a constant": lambda x: x / (x.detach().std(-1, keepdim=True) + 1.0),
    "large eps": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 5.0),
    "softmax": lambda x: torch.softmax(x / 0.5, -1),
    "sigmoid gate": lambda x: x * torch.sigmoid(x),
    "glu": lambda x: F.glu(torch.cat([x, x], -1)),
    "hard threshold": lambda x: x * (x > 0.5),
    "filled": lambda x: x.masked_fill(x > 0.3, 0.0),
    "relu6": lambda x: F.relu6(4 * x),
    "lower bound": lambda x: x.clamp(min=-0.2),
    "two degrees": lambda x: torch.cat([x[:, :4], x[:, 4:] ** 2], -1),
    "a constant added": lambda x: x / x.norm() + x,
    "logsumexp": lambda x: x - torch.logsumexp(x, -1, keepdim=True),
    "rounded": lambda x: torch.div(x, 0.5, rounding_mode="floor"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_found_never_moves_the_output(name: str) -> None:
    torch.manual_seed(0)
    parts = {"first": nn.Linear(6, 8), "last": nn.Linear(8, 3)}
    model = prepared(Net(lambda net, x: net.last(ODD[name](net.first(x))), **parts))
    found = find(model, BATCH)
    scaled = {"first.weight": math.log(3), "first.bias": math.log(3)}
    assert moved(model, BATCH, scaled) > 1e-2 < moved(model, BATCH, scaled | {"last.weight": -math.log(3)})
    for parameter in found.parameters:
        exponents = found.solve({parameter: 1.0}) or {}
        assert moved(model, BATCH, {name: 1.5 * one for name, one in exponents.items()}) < 1e-8
    assert found.groups(weights_of(model), found.gains) == []


def blocks(model: nn.Module, layers: list[str] | None = None) -> list[tuple[set[str], bool]]:
    """The blocks that `initialize_` scales, without the word weight, and if they keep the function."""
    problem = FunctionalProblem(Problem(model, LOSS, BATCH, layers=layers, check=False))
    names = [name for name in weights_of(model) if model.get_parameter(name).requires_grad]
    allowed = [name for name in names if layers is None or name.removesuffix(".weight") in layers]
    found = find_blocks(problem, allowed, biases_only=layers is not None)
    each = [] if found is None else found.scalable
    return [({name.removesuffix(".weight") for name in one.weights}, one.exact) for one in each]


def test_a_symmetry_is_used_only_if_forwards_confirm_it() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(8, 3)).double()
    assert blocks(model) == [({"0", "3"}, True), ({"6"}, False)]  # a GELU does not scale
    layers[4].eps = 20.0
    assert blocks(model) == [({"0"}, True), ({"3"}, True), ({"6"}, False)]
    layers[1].eps = 20.0
    assert blocks(model) == []
    model = chain(nn.BatchNorm1d, bias=True).double()
    assert blocks(model) == [({"0"}, True), ({"3"}, True)]
    assert blocks(model.eval()) == []

    def through_a_view(net: Any, x: Tensor) -> Tensor:  # its degree is not seen
        x = net.first(net.body(x)).clone()
        x[:, :4].mul_(x[:, 4:].clone())
        return net.last(F.layer_norm(x, (8,)))

    parts = {"first": nn.Linear(3, 8), "last": nn.Linear(8, 3), "body": chain(nn.LayerNorm)}
    model = Net(through_a_view, **parts).double()
    assert "first.weight" in (find(model, BATCH).scale_free(weights_of(model)) or {})
    assert blocks(model)[0] == ({"body.0"}, True)


def test_frozen_and_unnamed_parameters_and_those_not_seen_are_in_no_block() -> None:
    torch.manual_seed(0)
    model = chain(nn.LayerNorm, bias=True).double()
    assert blocks(model, ["0"]) == [({"0"}, True)]
    assert blocks(model, ["0", "3"]) == [({"0"}, True)]  # the gains are not named
    assert blocks(model, ["3"]) == []
    model[1].requires_grad_(False)
    assert blocks(model) == [({"0"}, True)]
    model[0].bias.requires_grad_(False)
    assert blocks(model) == []
    both = [({"body.0"}, True), ({"body.3"}, True)]
    for body, found in ((chain(nn.LayerNorm), both), (nn.Linear(6, 3), [])):
        unseen = Net(lambda net, x: (net.other(x), net.body(x))[1], other=nn.Linear(6, 4), body=body)
        assert blocks(unseen.double()) == found
