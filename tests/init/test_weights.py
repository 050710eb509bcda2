"""What a trace finds: uses of weights, fans, blocks and context; moments against scipy's integrals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from networks import BOTH, between
from scipy import integrate
from torch import Tensor, nn
from torch.nn import functional as F

from hessinit.errors import ProblemError
from hessinit.init.trace import Context, WeightUse
from hessinit.init.weights import TracedWeights, block_views, fans_of, find_weight_uses
from tiny import Net
from zoo import PROBLEMS
from zoo.problem import Problem
from zoo.snapshot import differences, snapshot


def traced(model: nn.Module, sample: Any, with_sample: bool) -> TracedWeights:
    return find_weight_uses(model, sample if with_sample else None)


def uses_of(model: nn.Module, sample: Any, with_sample: bool) -> dict[str, WeightUse]:
    return {use.parameter.removesuffix(".weight"): use for use in traced(model, sample, with_sample).uses}


def around(function: Callable[[Tensor], Tensor], with_sample: bool = True) -> tuple[Context, Context]:
    """The contexts before the second of two layers and after the first, with a function between them."""
    first, last = traced(between(function), torch.randn(5, 4), with_sample).uses
    return last.upstream, first.downstream


def without_order(found: TracedWeights) -> set[WeightUse]:
    return {replace(use, order=0) for use in found.uses}


def closing(uses: dict[str, WeightUse]) -> list[str]:
    return [name for name, use in uses.items() if use.closes_residual]


def mean(function: Callable[[float], float]) -> float:
    """E f(z), z ~ N(0, 1), with a break at 0 for the kinks."""

    def weighed(z: float) -> float:
        return function(z) * math.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)

    return sum(integrate.quad(weighed, *ends, epsabs=1e-12)[0] for ends in ((-12, 0), (0, 12)))


def mean_square(function: Callable[[float], float]) -> float:
    return mean(lambda z: function(z) ** 2)


def relu(z: float) -> float:
    return max(z, 0.0)


def step(z: float) -> float:
    return float(z > 0)


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def silu(z: float) -> float:
    return z * sigmoid(z)


def silu_slope(z: float) -> float:
    return sigmoid(z) * (1 + z * (1 - sigmoid(z)))


RRELU = (1 / 8 + 1 / 3) / 2  # the mean slope
FUNCTIONS: dict[str, tuple[Callable[[Any], Any], Callable[[float], float], Callable[[float], float]]] = {
    "relu": (F.relu, relu, step),
    "inplace": (lambda x: x.relu_().view(-1, 6), relu, step),
    "constant_zeros": (lambda x: torch.maximum(x, torch.zeros(6)), relu, step),
    "masked_fill": (lambda x: x.masked_fill(x < 0, 0.0), relu, step),
    "step": (lambda x: (x > 0).float() * x, relu, step),
    "silu": (lambda x: x * torch.sigmoid(x), silu, silu_slope),
    "cast": (lambda x: x.clone() * torch.sigmoid(x.float()).to(x.dtype), silu, silu_slope),
    "leaky_by_where": (
        lambda x: torch.where(x > 0, x, 0.1 * x),
        lambda z: z if z > 0 else 0.1 * z, lambda z: 1 if z > 0 else 0.1,
    ),
    "squared": (lambda x: 3 * F.relu(x) ** 2, lambda z: 3 * relu(z) ** 2, lambda z: 6 * relu(z)),
    "two_in_a_row": (
        lambda x: torch.sin(torch.clamp(x, min=0)),
        lambda z: math.sin(relu(z)), lambda z: math.cos(z) * (z > 0),
    ),
    "rrelu": (nn.RReLU(), lambda z: z if z > 0 else RRELU * z, lambda z: 1 if z > 0 else RRELU),
    "shifted": (lambda x: x + 0.5, lambda z: z + 0.5, lambda z: 1.0),
    "maximum": (lambda x: torch.maximum(x, torch.zeros_like(x)), relu, step),
    "max_of_two": (lambda x: torch.max(x, other=torch.zeros(x.shape)), relu, step),
    "viewed": (lambda x: torch.sigmoid(x.view(x.shape)) * x, silu, silu_slope),
    "by_shape": (
        lambda x: F.relu(x) / math.sqrt(x.shape[-1]), lambda z: relu(z) / 6**0.5, lambda z: step(z) / 6**0.5
    ),
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("name", FUNCTIONS)
def test_moments_are_those_of_the_composite_function(name: str, with_sample: bool) -> None:
    function, value, slope = FUNCTIONS[name]
    found = traced(between(function), torch.randn(5, 4), with_sample)
    first, last = found.uses
    assert found.notes == ()
    assert last.upstream.moment == pytest.approx(mean_square(value), rel=1e-6)
    assert first.downstream.moment == pytest.approx(mean_square(slope), rel=1e-6)
    assert last.upstream.end == first.downstream.end == "weight"
    assert (first.upstream.end, last.downstream.end) == ("input", "output")


def write_where_negative(x: Tensor) -> Tensor:
    x = x.clone()
    x[x < 0] = 0.1 * x[x < 0]
    return x


def accumulate(x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    total += torch.relu(x)
    return total


NOT_UNDERSTOOD: dict[str, Callable[[Tensor], Tensor]] = {
    "write": write_where_negative,
    "accumulate": accumulate,
    "qr": lambda x: torch.linalg.qr(x)[0],
    "length": lambda x: x / x.norm(dim=-1, keepdim=True),
    "root": lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True)),
    "softmax": lambda x: x.exp() / x.exp().sum(-1, keepdim=True),
    "gate_twice": lambda x: x.roll(1, 0) * torch.sigmoid(x) * x,
    "sum": lambda x: x.sum(0), "norm": lambda x: x.norm(dim=0), "prod": lambda x: x.prod(0),
    "logsumexp": lambda x: x.logsumexp(0), "cumsum": lambda x: x.cumsum(0),
    "relu_of_sum": lambda x: torch.relu(x.sum(0)),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_UNDERSTOOD)
def test_a_function_that_is_not_understood_is_noted(name: str) -> None:
    found = find_weight_uses(between(NOT_UNDERSTOOD[name]), torch.randn(6, 4))
    assert "input of last comes from an unknown function" in found.notes[0]
    assert found.uses[1].upstream.end == "unknown"
    assert found.uses[1].upstream.moment == pytest.approx(0.5 if name == "relu_of_sum" else 1.0)
    assert not found.uses[0].norm_follows


@BOTH
def test_learnable_slopes_and_scales(with_sample: bool) -> None:
    """A PReLU counts with the mean over its channels, a Swish at slope 1, a learnable scale not at all."""
    prelu = nn.PReLU(6)
    with torch.no_grad():
        prelu.weight.copy_(torch.tensor([-0.5, 0.1, 0.2, 0.3, 0.9, 1.5]))
    slopes = prelu.weight.detach().double().numpy()
    assert around(prelu, with_sample)[0].moment == pytest.approx((1 + numpy.mean(slopes**2)) / 2, rel=1e-6)
    swish = Net(lambda net, x: x * torch.sigmoid(net.slope * x), slope=nn.Parameter(torch.ones(())))
    assert around(swish, with_sample)[0].moment == pytest.approx(mean_square(silu), rel=1e-6)
    scaled = Net(lambda net, x: x * net.scale, scale=nn.Parameter(torch.tensor(1e-5)))
    assert around(scaled, with_sample)[0].moment == 1.0
    assert around(lambda x: x / 2, with_sample)[0].moment == pytest.approx(0.25)
    masked = around(lambda x: torch.relu(x).masked_fill(x.roll(1, 0) == 0, 0.0), with_sample)[0]
    assert (masked.words, masked.end) == ("relu", "weight")  # a mask of other signals is looked through


@BOTH
def test_second_moments_of_a_gate_and_what_it_gates_multiply(with_sample: bool) -> None:
    def gated(net: Any, x: Tensor) -> Tensor:
        value, gate = net.first(x).chunk(2, dim=-1)
        return net.last(value * F.silu(gate))

    square, sample = mean_square(silu), torch.randn(3, 4)
    chunked = uses_of(Net(gated, first=nn.Linear(4, 12), last=nn.Linear(6, 3)), sample, with_sample)
    assert chunked["last"].upstream.moment == pytest.approx(square, rel=1e-6)
    assert chunked["first"].blocks == (6, 6)
    model = Net(
        lambda net, x: net.last(F.dropout(F.silu(net.gate(x)), 0.25) * net.up(x)),
        gate=nn.Linear(4, 6), up=nn.Linear(4, 6), last=nn.Linear(6, 3),
    )  # fmt: skip
    swiglu = uses_of(model, sample, with_sample)
    assert swiglu["last"].upstream.moment == pytest.approx(square, rel=1e-6)
    assert swiglu["last"].upstream.keep == 0.75
    assert swiglu["gate"].downstream.end == swiglu["up"].downstream.end == "product"
    glu = uses_of(nn.Sequential(nn.Linear(4, 12), nn.GLU(), nn.Linear(6, 3)), sample, with_sample)
    assert glu["2"].upstream.moment == pytest.approx(mean_square(sigmoid), rel=1e-6)
    assert glu["0"].blocks == (6, 6)


def test_what_is_joined_counts_by_its_width() -> None:
    def run(net: Any, images: Tensor) -> Tensor:
        fine = F.relu(net.down(images))
        return net.out(torch.cat([fine, F.dropout(net.up(F.max_pool2d(fine, 2)), 0.5)], dim=1))

    down, up = nn.Conv2d(1, 6, 3, padding=1), nn.ConvTranspose2d(6, 2, 2, stride=2)
    model = Net(run, down=down, up=up, out=nn.Conv2d(8, 2, 3, padding="same"))
    uses = uses_of(model, torch.randn(2, 1, 4, 4), True)
    context = uses["out"].upstream
    assert context.end == "cat"
    assert context.moment == pytest.approx((6 * 0.5 + 2 * 1.0) / 8)
    # With dropout the mean square is (6·½ + 2·1/0.5)/8: `keep` says by how much it grew.
    assert context.moment / context.keep == pytest.approx((6 * 0.5 + 2 * 2.0) / 8)
    assert uses["up"].upstream.words == "relu"


@BOTH
def test_a_softmax_before_a_weight_is_trouble_and_attention_is_not(with_sample: bool) -> None:
    assert around(lambda x: F.softmax(x, dim=-1), with_sample)[0].trouble == "softmax"
    mixing = between(lambda x: F.softmax(x @ x.transpose(-2, -1), dim=-1) @ x)
    context = uses_of(mixing, torch.randn(2, 3, 4), with_sample)["last"].upstream
    assert (context.trouble, context.end) == ("", "mix")
    undefined = around(torch.log, False)[0]
    assert undefined.trouble == "log"
    assert math.isnan(undefined.moment)


def standardize(x: Tensor) -> Tensor:
    return F.relu((x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt())


GAIN = nn.Parameter(torch.ones(6))
RMS = Net(lambda net, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * net.gain, gain=GAIN)
NORMS: list[Any] = [nn.BatchNorm1d(6), nn.LayerNorm(6), nn.GroupNorm(2, 6), RMS, standardize]


@BOTH
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_that_follows_is_seen_also_when_written_by_hand(norm: Any, with_sample: bool) -> None:
    uses = uses_of(between(norm), torch.randn(5, 4), with_sample)
    assert uses["first"].norm_follows
    assert not uses["last"].norm_follows
    assert uses["last"].upstream.end == "norm"
    assert uses["last"].upstream.moment == pytest.approx(0.5 if norm is standardize else 1.0)
    if isinstance(norm, nn.Module):
        behind = between(nn.Sequential(nn.Tanh(), norm))
        assert not uses_of(behind, torch.randn(5, 4), with_sample)["first"].norm_follows


BENT = {
    "tanh": (torch.tanh, math.tanh, lambda z: 1 / math.cosh(z) ** 2),
    "sigmoid": (torch.sigmoid, sigmoid, lambda z: sigmoid(z) * (1 - sigmoid(z))),
}


@BOTH
@pytest.mark.parametrize(("name", "p"), [("tanh", 0.4), ("sigmoid", 0.8)])
def test_a_dropout_before_a_bent_function_is_a_part_of_it(name: str, p: float, with_sample: bool) -> None:
    function, value, slope = BENT[name]
    q = 1 - p
    up, down = around(lambda x: function(F.dropout(x, p)), with_sample)
    assert up.moment == pytest.approx(q * mean(lambda z: value(z / q) ** 2) + p * value(0) ** 2, rel=1e-6)
    assert down.moment == pytest.approx(q * mean(lambda z: (slope(z / q) / q) ** 2), rel=1e-6)
    assert up.keep == down.keep == 1.0
    assert up.dropout_active
    assert up.words == down.words == f"dropout {p:g}, {name}"


@BOTH
def test_a_homogeneous_function_lets_the_factor_of_dropout_through(with_sample: bool) -> None:
    for function in (torch.relu, lambda x: F.leaky_relu(x, 0.2), torch.abs):
        plain, _ = around(function, with_sample)
        up, down = around(lambda x, function=function: function(F.dropout(x, 0.4)), with_sample)
        assert up.moment == pytest.approx(plain.moment)
        assert up.keep == down.keep == pytest.approx(0.6)
    model = between(lambda x: F.dropout(torch.tanh(F.dropout(x, 0.5)), 0.2))
    up = uses_of(model, torch.randn(5, 4), with_sample)["last"].upstream
    assert up.keep == pytest.approx(0.8)  # of two around a tanh the first is a part of it
    assert up.moment == pytest.approx(0.5 * mean(lambda z: math.tanh(2 * z) ** 2), rel=1e-6)
    context = find_weight_uses(model, dropout=False).uses[1].upstream
    assert context.moment == pytest.approx(mean(lambda z: math.tanh(z) ** 2), rel=1e-6)
    assert (context.keep, context.words) == (1.0, "dropout 0.5, tanh, dropout 0.2")


@BOTH
@pytest.mark.parametrize("training", [True, False])
def test_dropout_counts_in_either_mode_and_alpha_dropout_does_not(with_sample: bool, training: bool) -> None:
    layers = [nn.Conv2d(2, 4, 3), nn.Dropout2d(0.2), nn.ReLU()]
    layers += [nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, 3)]
    uses = uses_of(nn.Sequential(*layers).train(training), torch.randn(3, 2, 5, 5), with_sample)
    up, down = uses["5"].upstream, uses["0"].downstream
    assert up.words == down.words == "dropout 0.2, relu, dropout 0.5"
    assert up.keep == down.keep == pytest.approx(0.8 * 0.5)
    assert up.dropout_active is down.dropout_active is training
    assert up.moment == pytest.approx(0.5)
    alpha, _ = around(nn.Sequential(nn.SELU(), nn.AlphaDropout(0.3)), with_sample)
    assert (alpha.keep, alpha.words, round(alpha.moment, 5)) == (1.0, "selu, alpha_dropout 0.3", 1.0)


def test_random_masks_by_hand_are_passed_and_noted() -> None:
    def stochastic_depth(net: Any, x: Tensor) -> Tensor:
        out = net.outer(torch.relu(net.inner(x)))
        return x + out * out.new_empty(out.shape[0], 1).bernoulli_(0.01).div_(0.01)

    model = Net(stochastic_depth, inner=nn.Linear(4, 6), outer=nn.Linear(6, 4))
    found = find_weight_uses(model, torch.randn(1, 4))  # one example may draw nothing but a 0
    assert found.uses[1].closes_residual
    assert found.uses[1].downstream.moment == 1.0
    (note,) = found.notes
    assert note == "the forward draws random numbers itself; only nn.Dropout and F.dropout are counted"


@BOTH
def test_means_and_extremes_are_looked_through_and_a_table_is_added(with_sample: bool) -> None:
    functions = (lambda x: x.mean(1), lambda x: x.amax(1), lambda x: x.max(1)[0])
    for function in functions:
        found = traced(between(function), torch.randn(2, 5, 4), with_sample)
        assert (found.uses[1].upstream.end, found.notes) == ("weight", ())
    weighed = between(lambda x: (F.softmax(x, 1) * x.roll(1, 0)).sum(1))
    found = traced(weighed, torch.randn(2, 5, 4), with_sample)
    assert (found.uses[1].upstream.end, found.notes) == ("mix", ())
    model = Net(
        lambda net, x: net.last(net.first(x) + net.table[: x.size(1)]),
        first=nn.Linear(4, 6), last=nn.Linear(6, 3), table=torch.randn(9, 6),
    )  # fmt: skip
    context = uses_of(model, torch.randn(2, 5, 4), with_sample)["last"].upstream
    assert (context.end, context.trouble) == ("sum", "")


def post_activation(inputs: int, outputs: int, stride: int = 1) -> Net:
    """As in ResNet: with a projection where the shape changes."""

    def run(net: Any, images: Tensor) -> Tensor:
        out = net.norm2(net.conv2(net.relu(net.norm1(net.conv1(images)))))
        out += images if net.shortcut is None else net.shortcut(images)
        return net.relu(out)

    return Net(
        run,
        conv1=nn.Conv2d(inputs, outputs, 3, stride, 1), norm1=nn.BatchNorm2d(outputs),
        conv2=nn.Conv2d(outputs, outputs, 3, 1, 1), norm2=nn.BatchNorm2d(outputs), relu=nn.ReLU(inplace=True),
        shortcut=nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else None,
    )  # fmt: skip


@BOTH
def test_residual_blocks_are_closed_by_their_second_convolution(with_sample: bool) -> None:
    blocks = post_activation(4, 4), post_activation(4, 8, 2)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), *blocks, nn.Flatten(), nn.Linear(72, 2))
    uses = uses_of(model, torch.randn(2, 3, 8, 8), with_sample)
    assert closing(uses) == ["1.conv2", "2.conv2"]
    assert uses["1.conv1"].upstream.end == "weight"
    assert uses["2.conv1"].upstream.moment == uses["2.shortcut"].upstream.moment == pytest.approx(0.5)
    assert (uses["2.conv1"].upstream.end, uses["2.conv1"].stride) == ("sum", (2, 2))
    assert uses["1.conv2"].norm_follows
    assert not uses["2.shortcut"].norm_follows
    assert uses["4"].upstream.words == "relu"


@BOTH
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder(norm_first: bool, training: bool, with_sample: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, "gelu", batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    uses = uses_of(model, torch.randn(2, 3, 8), with_sample)
    names = ["self_attn.in_proj_weight", "self_attn.out_proj", "linear1", "linear2"]
    assert list(uses) == [f"layers.{number}.{name}" for number in range(2) for name in names]
    assert closing(uses) == [name for name in uses if name.endswith(("out_proj", "linear2"))]
    attention = uses["layers.1.self_attn.in_proj_weight"]
    assert (attention.blocks, attention.upstream.end) == ((8, 8, 8), "norm")
    assert uses["layers.0.self_attn.in_proj_weight"].upstream.end == ("norm" if norm_first else "input")
    assert uses["layers.0.self_attn.out_proj"].upstream.end == "mix"
    second = uses["layers.0.linear2"].upstream
    assert (second.words, second.keep, second.dropout_active) == ("gelu, dropout 0.1", 0.9, training)
    assert second.moment == pytest.approx(1 / 1.5335**2, rel=1e-4)


def self_attention(style: str) -> Net:
    """A fused qkv, taken apart in the way that `style` says."""

    def run(net: Any, stream: Tensor) -> Tensor:
        batch, length, width = stream.shape
        fused = net.qkv(net.norm(stream))
        if style in ("chunk", "split"):
            parts = fused.chunk(3, dim=-1) if style == "chunk" else fused.split(width, dim=2)
            query, key, value = (one.view(batch, length, 2, width // 2).transpose(1, 2) for one in parts)
        else:
            fused = fused.reshape(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
            query, key, value = fused.unbind(0) if style == "unbind" else (fused[0], fused[1], fused[2])
        scores = query @ key.transpose(-2, -1) * (width // 2) ** -0.5
        mixed = F.dropout(scores.softmax(-1), 0.1, net.training) @ value
        return stream + net.out(mixed.transpose(1, 2).reshape(batch, length, width))

    return Net(run, norm=nn.LayerNorm(8), qkv=nn.Linear(8, 24), out=nn.Linear(8, 8))


@BOTH
@pytest.mark.parametrize("style", ["chunk", "split", "unbind", "index"])
def test_a_fused_qkv_has_three_blocks(style: str, with_sample: bool) -> None:
    uses = uses_of(self_attention(style), torch.randn(2, 5, 8), with_sample)
    assert (uses["qkv"].blocks, uses["out"].blocks) == ((8, 8, 8), ())
    assert closing(uses) == ["out"]
    assert (uses["out"].upstream.end, uses["out"].upstream.keep) == ("mix", 1.0)


@BOTH
def test_blocks_may_differ_in_size_and_come_from_a_maxout(with_sample: bool) -> None:
    def multi_query(net: Any, x: Tensor) -> Tensor:
        query, key, value = net.fused(x).split([8, 4, 4], dim=-1)
        query = query.unflatten(-1, (2, 4)).transpose(1, 2)
        pair = [one.unsqueeze(1).expand_as(query) for one in (key, value)]
        return net.out(F.scaled_dot_product_attention(query, *pair).transpose(1, 2).flatten(2))

    def maxout(net: Any, x: Tensor) -> Tensor:
        pieces = net.fused(x)
        return net.out(torch.maximum(pieces[:, :8], pieces[:, 8:]))

    def reshaped(net: Any, x: Tensor) -> Tensor:
        pieces = net.fused(x).view(x.size(0), x.size(1), 2, 8)
        return net.out(pieces[:, :, 0] + torch.tanh(pieces[:, :, 1]))

    parts = {"fused": nn.Linear(8, 16), "out": nn.Linear(8, 8)}
    assert uses_of(Net(multi_query, **parts), torch.randn(2, 5, 8), with_sample)["fused"].blocks == (8, 4, 4)
    assert uses_of(Net(maxout, **parts), torch.randn(3, 8), with_sample)["fused"].blocks == (8, 8)
    uses = uses_of(Net(reshaped, **parts), torch.randn(2, 5, 8), with_sample)
    assert (uses["fused"].blocks, uses["out"].upstream.end, closing(uses)) == ((8, 8), "sum", [])


def test_tokens_positions_and_the_extra_key_of_attention_are_left_with_a_reason() -> None:
    def vision(net: Any, images: Tensor) -> Tensor:
        stream = net.patches(images).flatten(2).transpose(1, 2)
        stream = torch.cat([net.token.expand(stream.shape[0], -1, -1), stream], dim=1) + net.positions
        return net.head(net.block(stream)[:, 0])

    model = Net(
        vision, patches=nn.Conv2d(1, 8, 4, 4), token=nn.Parameter(torch.zeros(1, 1, 8)),
        positions=nn.Parameter(torch.zeros(1, 5, 8)), block=self_attention("unbind"), head=nn.Linear(8, 2),
    )  # fmt: skip
    found = find_weight_uses(model, torch.randn(2, 1, 8, 8)).unmet
    reason = "to a signal, not a map of one"
    assert found == {"token": f"joined {reason}", "positions": f"added {reason}"}
    attention = nn.MultiheadAttention(8, 2, add_bias_kv=True, batch_first=True)
    extra = Net(lambda net, x: net.attention(x, x, x)[0], attention=attention)
    for sample in (None, torch.randn(2, 3, 8)):
        assert find_weight_uses(extra, sample).unmet == {
            "attention.bias_k": "added as a key by multi_head_attention_forward",
            "attention.bias_v": "added as a value by multi_head_attention_forward",
        }


@BOTH
@pytest.mark.parametrize(
    ("kind", "blocks", "moment"), [("LSTM", (5,) * 4, 1.0), ("GRU", (5,) * 3, 1.0), ("RNN", (), 0.394294)]
)
def test_recurrent_layers(kind: str, blocks: tuple[int, ...], moment: float, with_sample: bool) -> None:
    model = Net(
        lambda net, x: net.head(net.layer(torch.tanh(net.tokens(x)))[0][:, -1]), tokens=nn.Embedding(9, 4),
        layer=getattr(nn, kind)(4, 5, num_layers=2, batch_first=True, dropout=0.3), head=nn.Linear(5, 2),
    )  # fmt: skip
    uses = uses_of(model, torch.randint(9, (2, 3)), with_sample)
    weights = {name.partition("layer.")[2]: use for name, use in uses.items() if "layer" in name}
    assert all(use.blocks == blocks and use.inside.startswith(kind.lower()) for use in weights.values())
    assert not any(use.closes_residual for use in weights.values())
    first, second = weights["weight_ih_l0"].upstream, weights["weight_ih_l1"].upstream
    assert (first.words, first.keep, first.end) == ("tanh", 1.0, "weight")
    assert (second.keep, second.dropout_active) == (pytest.approx(0.7), True)
    for context in (weights["weight_hh_l0"].upstream, second, uses["head"].upstream):
        assert context.moment == pytest.approx(moment, rel=1e-5)
    assert weights["weight_hh_l0"].upstream.words.startswith("hidden state")
    assert uses["tokens"].upstream.end == "tokens"


@BOTH
def test_recurrences_and_injections_by_hand_are_no_residual_branches(with_sample: bool) -> None:
    def recurrence(net: Any, sequence: Tensor) -> Tensor:
        state = torch.zeros(2, 6)
        for moment in range(3):
            state = torch.tanh(net.fresh(sequence[:, moment]) + net.kept(state))
        return net.head(state)

    parts = {"fresh": nn.Linear(4, 6), "kept": nn.Linear(6, 6), "head": nn.Linear(6, 2)}
    found = traced(Net(recurrence, **parts), torch.randn(2, 3, 4), with_sample).uses
    assert not any(use.closes_residual for use in found)
    kept = [use for use in found if use.parameter == "kept.weight"]
    assert [use.upstream.words for use in kept] == ["tanh", "tanh"]  # its use on zeros does not count
    assert kept[0].downstream.moment == pytest.approx(1 / 1.4674**2, rel=1e-4)

    def injected(net: Any, x: Tensor) -> Tensor:
        state = net.start(x)
        for layer in ("first", "second"):
            state = torch.relu(getattr(net, layer)(state) + getattr(net, f"{layer}_added")(x))
        return state

    names = ("start", "first", "first_added", "second", "second_added")
    model = Net(injected, **{name: nn.Linear(6, 6) for name in names})
    uses = uses_of(model, torch.randn(3, 6), with_sample)
    # The first sum is one of a branch of two weights and one of one: nothing tells it from a projection.
    assert closing(uses) == ["first"]
    for name in ("first", "first_added", "second"):  # the activation behind a sum counts for what is added
        assert (uses[name].downstream.words, uses[name].downstream.moment) == ("relu", 0.5)


@BOTH
def test_slopes_and_dropouts_on_both_sides_of_a_sum_multiply(with_sample: bool) -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        out = F.dropout(net.outer(torch.relu(net.inner(x))), 0.2)
        return net.last(F.dropout(torch.tanh(x + out), 0.5))

    model = Net(run, inner=nn.Linear(6, 6), outer=nn.Linear(6, 6), last=nn.Linear(6, 2))
    use = uses_of(model, torch.randn(3, 6), with_sample)["outer"]
    assert use.downstream.words == "dropout 0.2, tanh, dropout 0.5"
    assert use.downstream.keep == pytest.approx(0.8 * 0.5)
    assert use.downstream.moment == pytest.approx(1 / 1.4674**2, rel=1e-4)
    assert use.closes_residual
    assert not use.norm_follows


def normal(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


@BOTH
def test_the_storage_of_a_weight_is_read_off_its_use(with_sample: bool) -> None:
    def run(net: Any, sequence: Tensor) -> Tensor:
        x = F.conv1d(sequence, net.kernel, stride=2).mean(-1)
        x = torch.matmul(F.linear(x, net.linear) @ net.matmul, net.turned.T)
        return net.left @ torch.addmm(torch.zeros(8), x, net.added).transpose(0, 1)

    parts = {"kernel": (4, 2, 3), "linear": (5, 4), "matmul": (5, 6), "turned": (7, 6), "added": (7, 8)}
    parts |= {"left": (3, 8)}
    model = Net(run, **{name: normal(*shape) for name, shape in parts.items()})
    uses = traced(model, torch.randn(2, 2, 9), with_sample).uses
    assert [use.parameter for use in uses] == list(parts)
    assert [use.parameter for use in uses if use.outputs_last] == ["matmul", "added"]
    assert [use.order for use in uses] == list(range(6))
    assert (uses[0].kind, uses[0].shape, uses[0].stride) == ("convolution", (4, 2, 3), (2,))
    assert uses[3].shape == (7, 6)


@BOTH
def test_what_is_unchanged_or_unknown_has_a_reason(with_sample: bool) -> None:
    model = Net(
        lambda net, x: net.table[
            torch.einsum("ni,oi->no", net.used(x) @ net.experts[0] * net.gate, net.summed).argmax(-1)
        ],
        used=nn.Linear(4, 4), unused=nn.Linear(4, 4), experts=normal(2, 4, 4), gate=normal(3, 4),
        summed=normal(4, 4), table=normal(4, 2),
    )  # fmt: skip
    found = traced(model, torch.randn(3, 4), with_sample)
    assert [use.parameter for use in found.uses] == ["used.weight"]
    assert found.unmet == {
        "unused.weight": "not used by the forward",
        "experts": "used in slices by matmul",
        "gate": "scales a signal elementwise",
        "summed": "used by einsum",
        "table": "a table read by hand, not by nn.Embedding",
    }


def test_bad_samples_and_models_that_cannot_be_traced_are_told_the_way_out() -> None:
    decides = between(lambda x: torch.relu(x) if x.sum() > -1e9 else x)
    with pytest.raises(ProblemError, match="be traced without data .*decides by a value.*pass sample="):
        find_weight_uses(decides)
    assert [use.upstream.words for use in find_weight_uses(decides, torch.randn(2, 4)).uses] == ["", "relu"]
    with pytest.raises(ProblemError, match=r"of shape \(3, 5\).*cannot be multiplied.*Change the layer"):
        find_weight_uses(nn.Linear(4, 2), torch.randn(3, 5))
    half = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).to(torch.bfloat16)
    assert len(find_weight_uses(half, torch.randn(2, 4, dtype=torch.float64)).uses) == 2
    assert find_weight_uses(nn.ReLU()).uses == ()


NOTED = ("lp_pool2d", "embedding_bag_sum_with_offsets")  # sums, whose sizes are not followed
SOME = [
    one if at % 4 == 0 or one.name in NOTED else pytest.param(one, marks=pytest.mark.sweep)
    for at, one in enumerate(PROBLEMS)
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("problem", SOME, ids=str)
def test_every_model_of_the_zoo_is_traced_and_left_as_found(problem: Problem) -> None:
    model, loss, batch = problem.build()
    inputs = (batch if isinstance(batch, tuple) else next(iter(batch)))[0]
    before = snapshot(model, loss, inputs)
    found = find_weight_uses(model, inputs, problem.forward)
    assert bool(found.notes) == (problem.name in NOTED)
    if problem.forward is None:
        # Where an input can be made up at all, the same is found.
        try:
            made_up = find_weight_uses(model)
        except ProblemError as failure:
            assert problem.name == "weights_made_per_example"
            assert "pass sample=" in str(failure)  # noqa: PT017 (whether it fails depends on the model)
        else:
            assert without_order(made_up) == without_order(found)  # a sequence may be longer
            assert (made_up.unmet, made_up.notes) == (found.unmet, found.notes)
    assert differences(before, snapshot(model, loss, inputs)) == []
    weights = {use.parameter for use in found.uses} | set(found.unmet)
    stored = {name for name, parameter in model.named_parameters() if parameter.ndim > 1}
    assert {name for name in stored if "parametrizations" not in name} <= weights


def counted(layer: Any, shape: tuple[int, ...]) -> tuple[float, float]:
    """With weights of 1 an output is the number of its inputs, an input's gradient that of its outputs.

    Circular padding is not to be had for every layer, so the middle of a large input is read.
    """
    nn.init.ones_(layer.weight)
    inputs = torch.ones(shape, requires_grad=True)
    outputs = layer(inputs)
    (fed,) = torch.autograd.grad(outputs.sum(), inputs)

    def middle(signal: Tensor) -> float:
        for axis in range(2, signal.ndim):
            length = signal.shape[axis]
            signal = signal.narrow(axis, length // 4, length // 2 // 6 * 6)
        return float(signal.mean())

    return middle(outputs.detach()), middle(fed)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(3, 8, 5, stride=2, padding=2, bias=False), (1, 3, 48, 48)),
        (nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), (1, 8, 24, 24)),
        (nn.Conv2d(8, 12, 3, padding=2, dilation=2, groups=4, bias=False), (1, 8, 48, 48)),
        (nn.Conv1d(4, 6, 4, stride=3, padding=2, bias=False), (1, 4, 144)),
        (nn.ConvTranspose2d(6, 4, 4, stride=2, padding=1, bias=False), (1, 6, 24, 24)),
        (nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, groups=2, bias=False), (1, 6, 48, 48)),
        (nn.ConvTranspose1d(2, 3, 5, stride=3, padding=1, bias=False), (1, 2, 144)),
    ],
    ids=str,
)
def test_fans_of_convolutions_are_what_a_count_finds(layer: Any, shape: tuple[int, ...]) -> None:
    kind = "transposed convolution" if "Transpose" in type(layer).__name__ else "convolution"
    use = WeightUse("w", kind, tuple(layer.weight.shape), groups=layer.groups, stride=layer.stride)
    (fans,) = fans_of(use)
    assert counted(layer, shape) == pytest.approx((fans.inputs, fans.outputs), rel=1e-5)


def test_blocks_cover_every_entry_once_as_outputs_by_inputs() -> None:
    last = WeightUse("w", "dense", (5, 12), blocks=(6, 3, 3), outputs_last=True)
    cases = [
        (WeightUse("w", "dense", (12, 5), blocks=(4, 4, 4)), [[(4, 5)]] * 3),
        (last, [[(6, 5)], [(3, 5)], [(3, 5)]]),
        (WeightUse("w", "convolution", (8, 2, 3, 3), groups=4), [[(2, 2, 3, 3)] * 4]),
        (WeightUse("w", "transposed convolution", (8, 3, 2, 2), groups=2), [[(3, 4, 2, 2)] * 2]),
        (WeightUse("w", "embedding", (7, 3)), [[(3, 7)]]),
        (WeightUse("w", "bilinear", (4, 3, 2)), [[(4, 6)]]),
    ]
    for use, shapes in cases:
        weight = torch.zeros(use.shape)
        views = block_views(use, weight)
        assert [[tuple(block.shape) for block in groups] for groups in views] == shapes
        for groups in views:
            for block in groups:
                block.add_(1)
        assert torch.equal(weight, torch.ones(use.shape)), use
    with pytest.raises(ProblemError, match=r"fc has shape \(5, 0\): a fan is zero.*layers="):
        fans_of(WeightUse("fc.weight", "dense", (5, 0)))
