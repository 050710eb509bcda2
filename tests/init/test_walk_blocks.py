"""The walk on the blocks that people build: residual, attention, recurrent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hessinit.init.trace import WeightUse
from hessinit.init.weight_uses import find_weight_uses

BOTH = pytest.mark.parametrize("with_sample", [True, False], ids=["run", "traced"])


def sites_of(model: nn.Module, sample: Any, with_sample: bool) -> dict[str, WeightUse]:
    return {site.parameter: site for site in find_weight_uses(model, sample if with_sample else None).uses}


def closing(sites: dict[str, WeightUse]) -> list[str]:
    return [name for name, site in sites.items() if site.closes_residual]


class PostActivation(nn.Module):
    """As in ResNet: with a projection where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        branch = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(images)))))
        branch += images if self.shortcut is None else self.shortcut(images)
        return self.relu(branch)


class PreActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)
        self.norm2, self.conv2 = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images + self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(images))))))


@BOTH
def test_post_activation_blocks_are_closed_by_their_second_convolution(with_sample: bool) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), PostActivation(4, 4), PostActivation(4, 8, 2), nn.Flatten(), nn.Linear(72, 2)
    )
    sites = sites_of(model, torch.randn(2, 3, 8, 8), with_sample)
    assert closing(sites) == ["1.conv2.weight", "2.conv2.weight"]
    assert sites["1.conv1.weight"].upstream.end == "weight"
    assert sites["2.conv1.weight"].upstream.moment == pytest.approx(0.5)
    assert sites["2.shortcut.weight"].upstream.moment == pytest.approx(0.5)
    assert sites["2.conv1.weight"].upstream.end == "sum"
    assert sites["1.conv2.weight"].norm_follows
    assert not sites["2.shortcut.weight"].norm_follows
    assert sites["2.conv1.weight"].stride == (2, 2)
    assert sites["4.weight"].upstream.words == "relu"


@BOTH
def test_pre_activation_blocks_have_an_activation_behind_the_norm(with_sample: bool) -> None:
    sites = sites_of(nn.Sequential(PreActivation(), PreActivation()), torch.randn(2, 4, 5, 5), with_sample)
    assert closing(sites) == ["0.conv2.weight", "1.conv2.weight"]
    for site in sites.values():
        assert (site.upstream.words, site.upstream.end) == ("relu", "norm")
        assert site.upstream.moment == pytest.approx(0.5)
    assert sites["0.conv1.weight"].norm_follows
    assert not sites["0.conv2.weight"].norm_follows


@BOTH
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder(norm_first: bool, training: bool, with_sample: bool) -> None:
    layer = nn.TransformerEncoderLayer(
        8, 2, 16, 0.1, activation="gelu", batch_first=True, norm_first=norm_first
    )
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    sites = sites_of(model, torch.randn(2, 3, 8), with_sample)
    assert list(sites)[:4] == [
        "layers.0.self_attn.in_proj_weight",
        "layers.0.self_attn.out_proj.weight",
        "layers.0.linear1.weight",
        "layers.0.linear2.weight",
    ]
    assert closing(sites) == [name for name in sites if name.endswith(("out_proj.weight", "linear2.weight"))]
    attention = sites["layers.1.self_attn.in_proj_weight"]
    assert attention.blocks == (8, 8, 8)
    assert attention.upstream.end == "norm"
    assert sites["layers.0.self_attn.in_proj_weight"].upstream.end == ("norm" if norm_first else "input")
    assert sites["layers.0.self_attn.out_proj.weight"].upstream.end == "mix"
    second = sites["layers.0.linear2.weight"].upstream
    assert (second.words, second.keep, second.dropout_active) == ("gelu, dropout 0.1", 0.9, training)
    assert second.moment == pytest.approx(1 / 1.5335**2, rel=1e-4)


def test_a_decoder_closes_three_branches() -> None:
    model = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)
    found = find_weight_uses(model, torch.randn(2, 3, 8), lambda model, x: model(x, x)).uses
    assert sum(site.closes_residual for site in found) == 3


class SelfAttention(nn.Module):
    """A fused qkv, taken apart in the way that `style` says."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.norm, self.qkv, self.out, self.style = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8), style

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        batch, length, width = stream.shape
        fused = self.qkv(self.norm(stream))
        if self.style in ("chunk", "split"):
            parts = fused.chunk(3, dim=-1) if self.style == "chunk" else fused.split(width, dim=2)
            query, key, value = (
                parts[place].view(batch, length, 2, width // 2).transpose(1, 2) for place in range(3)
            )
        else:
            fused = fused.reshape(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
            query, key, value = fused.unbind(0) if self.style == "unbind" else (fused[0], fused[1], fused[2])
        scores = query @ key.transpose(-2, -1) * (width // 2) ** -0.5
        mixed = F.dropout(scores.softmax(-1), 0.1, self.training) @ value
        return stream + self.out(mixed.transpose(1, 2).reshape(batch, length, width))


@BOTH
@pytest.mark.parametrize("style", ["chunk", "split", "unbind", "index"])
def test_a_fused_qkv_has_three_parts(style: str, with_sample: bool) -> None:
    sites = sites_of(SelfAttention(style), torch.randn(2, 5, 8), with_sample)
    assert sites["qkv.weight"].blocks == (8, 8, 8)
    assert sites["out.weight"].blocks == ()
    assert closing(sites) == ["out.weight"]
    assert (sites["out.weight"].upstream.end, sites["out.weight"].upstream.keep) == ("mix", 1.0)


class MultiQuery(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fused, self.out = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        query, key, value = self.fused(stream).split([8, 4, 4], dim=-1)
        query = query.unflatten(-1, (2, 4)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            query, key.unsqueeze(1).expand_as(query), value.unsqueeze(1).expand_as(query)
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


@BOTH
def test_parts_may_differ_in_size(with_sample: bool) -> None:
    assert sites_of(MultiQuery(), torch.randn(2, 5, 8), with_sample)["fused.weight"].blocks == (8, 4, 4)


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 4, 4)
        self.token, self.positions = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.zeros(1, 5, 8))
        self.block, self.head = SelfAttention("unbind"), nn.Linear(8, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        stream = self.patches(images).flatten(2).transpose(1, 2)
        stream = torch.cat([self.token.expand(stream.shape[0], -1, -1), stream], dim=1) + self.positions
        return self.head(self.block(stream)[:, 0])


@BOTH
def test_a_class_token_and_positions_are_unchanged(with_sample: bool) -> None:
    walk = find_weight_uses(VisionTransformer(), torch.randn(2, 1, 8, 8) if with_sample else None)
    assert walk.unmet == {
        "token": "joined to a signal, not a map of one",
        "positions": "added to a signal, not a map of one",
    }
    assert {site.parameter for site in walk.uses} == {
        "patches.weight", "block.qkv.weight", "block.out.weight", "head.weight"
    }  # fmt: skip
    assert {site.parameter: site.blocks for site in walk.uses}["head.weight"] == ()


class Recurrent(nn.Module):
    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.tokens, self.layer, self.head = nn.Embedding(9, 4), layer, nn.Linear(5, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.layer(torch.tanh(self.tokens(tokens)))
        return self.head(states[:, -1])


@BOTH
@pytest.mark.parametrize(
    ("kind", "parts", "moment"),
    [("LSTM", (5,) * 4, 1.0), ("GRU", (5,) * 3, 1.0), ("RNN", (), 0.394294)],
)
def test_recurrent_layers(kind: str, parts: tuple[int, ...], moment: float, with_sample: bool) -> None:
    layer = getattr(nn, kind)(4, 5, num_layers=2, batch_first=True, dropout=0.3)
    sites = sites_of(Recurrent(layer), torch.randint(9, (2, 3)), with_sample)
    weights = {name.partition("layer.")[2]: site for name, site in sites.items() if "layer" in name}
    assert all(site.blocks == parts and site.inside.startswith(kind.lower()) for site in weights.values())
    assert not any(site.closes_residual for site in weights.values())
    first, second = weights["weight_ih_l0"].upstream, weights["weight_ih_l1"].upstream
    assert (first.words, first.keep, first.end) == ("tanh", 1.0, "weight")
    assert (second.keep, second.dropout_active) == (pytest.approx(0.7), True)
    for before in (weights["weight_hh_l0"].upstream, second, sites["head.weight"].upstream):
        assert before.moment == pytest.approx(moment, rel=1e-5)
    assert weights["weight_hh_l0"].upstream.words.startswith("hidden state")
    assert sites["tokens.weight"].upstream.end == "tokens"


class HandWritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fresh, self.kept, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(2, 6)
        for moment in range(3):
            state = torch.tanh(self.fresh(sequence[:, moment]) + self.kept(state))
        return self.head(state)


@BOTH
def test_a_recurrence_by_hand_is_no_residual_branch_and_its_zero_state_does_not_count(
    with_sample: bool,
) -> None:
    sites = find_weight_uses(HandWritten(), torch.randn(2, 3, 4) if with_sample else None).uses
    assert not any(site.closes_residual for site in sites)
    kept = [site for site in sites if site.parameter == "kept.weight"]
    assert [site.upstream.words for site in kept] == ["tanh", "tanh"]


class StochasticDepth(nn.Module):
    """One mask for each example, drawn by hand; a batch of one may draw nothing but a 0."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        branch = self.outer(torch.relu(self.inner(stream)))
        mask = branch.new_empty(branch.shape[0], 1).bernoulli_(0.01)
        return stream + branch * mask.div_(0.01)


@BOTH
def test_stochastic_depth_is_looked_through(with_sample: bool) -> None:
    sites = sites_of(StochasticDepth(), torch.randn(1, 4), with_sample)
    assert closing(sites) == ["outer.weight"]
    assert sites["outer.weight"].downstream.moment == 1.0


def test_random_numbers_of_the_caller_stay_where_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.RReLU(), nn.Linear(6, 2))
    before = torch.get_rng_state()
    sites = find_weight_uses(model, torch.randn(3, 4, generator=torch.Generator().manual_seed(0))).uses
    assert torch.equal(torch.get_rng_state(), before)
    slope = (1 / 8 + 1 / 3) / 2
    assert sites[1].upstream.moment == pytest.approx((1 + slope**2) / 2, rel=1e-6)


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 6), nn.Linear(3, 4)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        mean, log_variance = self.encode(features).chunk(2, dim=-1)
        return self.decode(mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance))


@BOTH
def test_a_reparametrized_sample_is_a_sum_of_two_parts(with_sample: bool) -> None:
    sites = sites_of(Variational(), torch.randn(3, 4), with_sample)
    assert sites["encode.weight"].blocks == (3, 3)
    assert sites["decode.weight"].upstream.end == "sum"
    assert closing(sites) == []


class Injected(nn.Module):
    """One signal is added in every layer, through a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(4, 6)
        self.main = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.added = nn.ModuleList(nn.Linear(4, 6) for _ in range(3))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        state = self.start(features)
        for main, added in zip(self.main, self.added, strict=True):
            state = torch.relu(main(state) + added(features))
        return state


@BOTH
def test_a_stream_that_one_signal_is_added_to_again_and_again_is_no_residual_branch(
    with_sample: bool,
) -> None:
    sites = sites_of(Injected(), torch.randn(3, 4), with_sample)
    # The first sum is one of a branch of two weights and one of one: nothing tells it from a projection.
    assert closing(sites) == ["main.0.weight"]


@BOTH
def test_the_activation_behind_a_sum_counts_for_what_is_added(with_sample: bool) -> None:
    sites = sites_of(Injected(), torch.randn(3, 4), with_sample)
    for name in ("main.0.weight", "added.1.weight", "main.2.weight"):
        assert (sites[name].downstream.words, sites[name].downstream.moment) == ("relu", 0.5)
    assert sites["start.weight"].downstream.moment == 1.0
    recurrent = sites_of(HandWritten(), torch.randn(2, 3, 4), with_sample)
    assert recurrent["kept.weight"].downstream.words == "tanh"
    assert recurrent["kept.weight"].downstream.moment == pytest.approx(1 / 1.4674**2, rel=1e-4)


class PlainResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        branch = F.dropout(self.outer(torch.relu(self.inner(stream))), 0.2)
        return self.last(F.dropout(torch.tanh(stream + branch), 0.5))


@BOTH
def test_slopes_and_dropouts_on_both_sides_of_a_sum_multiply(with_sample: bool) -> None:
    site = sites_of(PlainResidual(), torch.randn(3, 6), with_sample)["outer.weight"]
    assert site.downstream.words == "dropout 0.2, tanh, dropout 0.5"
    assert site.downstream.keep == pytest.approx(0.8 * 0.5)
    assert site.downstream.moment == pytest.approx(1 / 1.4674**2, rel=1e-4)
    assert site.closes_residual
    assert not site.norm_follows


class FromTheLeft(nn.Module):
    """Examples in columns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(3, 6))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return torch.matmul(self.outer, torch.mm(self.inner, features.T).relu()).T


@BOTH
@pytest.mark.parametrize("batch", [5, 6])
def test_a_weight_may_stand_on_the_left(batch: int, with_sample: bool) -> None:
    sites = sites_of(FromTheLeft(), torch.randn(batch, 4), with_sample)
    assert sites["outer"].upstream.words == "relu"
    assert [(site.blocks, site.outputs_last) for site in sites.values()] == [((), False)] * 2


class Maxout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(8, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        pieces = self.first(features)
        return self.last(torch.maximum(pieces[:, :8], pieces[:, 8:]))


@BOTH
def test_a_maxout_has_two_parts(with_sample: bool) -> None:
    assert sites_of(Maxout(), torch.randn(3, 4), with_sample)["first.weight"].blocks == (8, 8)


class ExtraKey(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, add_bias_kv=True, batch_first=True)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        return self.attention(stream, stream, stream)[0]


@BOTH
def test_the_extra_key_and_value_of_attention_have_their_reason(with_sample: bool) -> None:
    walk = find_weight_uses(ExtraKey(), torch.randn(2, 3, 8) if with_sample else None)
    assert walk.unmet == {
        "attention.bias_k": "added as a key by multi_head_attention_forward",
        "attention.bias_v": "added as a value by multi_head_attention_forward",
    }
