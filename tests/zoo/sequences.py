"""Embeddings, weights that serve twice, recurrent networks and attention on torch's default kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tiny import Net
from zoo.problem import (
    Parts,
    classify,
    classify_by,
    classify_tokens,
    labels,
    per_token_cross_entropy,
    problems,
)


def label_tokens(model: nn.Module, words: int) -> Parts:
    return model, per_token_cross_entropy, (labels(words, 3, 3), labels(words, 3, 3))


def embedding() -> Parts:
    body = nn.Embedding(9, 4), nn.Tanh(), nn.Linear(4, 5), nn.GELU()
    model = nn.Sequential(*body, nn.Flatten(), nn.Linear(15, 3))
    return model, nn.CrossEntropyLoss(), (labels(9, 5, 3), labels(3, 5))


def embedding_with_padding() -> Parts:
    mean = Net(lambda _, x: x.mean(dim=1))
    model = nn.Sequential(nn.Embedding(8, 4, padding_idx=0), mean, nn.Tanh(), nn.Linear(4, 3))
    with torch.no_grad():
        model[0].weight[0] = 0.3
    tokens = labels(8, 6, 4)
    tokens[:, -1] = 0
    return model, nn.CrossEntropyLoss(), (tokens, labels(3, 6))


class BagByHand(nn.Module):
    """`nn.EmbeddingBag` in operations that torch can differentiate twice."""

    def __init__(self, bag: nn.EmbeddingBag) -> None:
        super().__init__()
        self.weight, self.mode = bag.weight, bag.mode

    def forward(self, tokens: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
        if offsets is None:
            bags = list(tokens)
        else:
            starts = [int(start) for start in offsets]  # torch 2.6 has no `tolist` inside of torch.func
            bags = [tokens[start:end] for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True)]
        reduce = torch.sum if self.mode == "sum" else torch.mean
        return torch.stack([reduce(self.weight[bag], dim=0) for bag in bags])


def bag(mode: str) -> nn.Sequential:
    return nn.Sequential(nn.EmbeddingBag(8, 4, mode=mode), nn.Tanh(), nn.Linear(4, 3))


def tied_language_model() -> Parts:
    parts = {"embed": nn.Embedding(7, 4), "mix": nn.Linear(4, 4), "head": nn.Linear(4, 7, bias=False)}
    model = Net(lambda m, x: m.head(torch.tanh(m.mix(m.embed(x)))), **parts)
    model.head.weight = model.embed.weight
    return label_tokens(model, 7)


def tied_autoencoder() -> Parts:
    features = torch.randn(6, 5)
    model = Net(lambda m, x: F.linear(torch.tanh(m.encode(x)), m.encode.weight.t()), encode=nn.Linear(5, 3))
    return model, nn.MSELoss(), (features, features.clone())


def used_twice(shared: nn.Module, head: nn.Module) -> nn.Module:
    return Net(lambda m, x: m.head(torch.relu(m.shared(torch.relu(m.shared(x))))), shared=shared, head=head)


EMBEDDINGS: dict[str, Callable[[], Parts]] = {
    "embedding": embedding,
    "embedding_with_padding": embedding_with_padding,
    "embedding_bag_mean": lambda: (bag("mean"), nn.CrossEntropyLoss(), (labels(8, 6, 3), labels(3, 6))),
    "embedding_bag_sum_with_offsets": lambda: (
        bag("sum"), nn.CrossEntropyLoss(), ((labels(8, 9), torch.tensor([0, 2, 5, 6])), labels(3, 4))
    ),
    "tied_embedding_and_head": tied_language_model,
    "embedding_weight_read_by_a_function": lambda: label_tokens(
        Net(
            lambda m, x: F.linear(torch.relu(m.mix(m.embed(x))), m.embed.weight),
            embed=nn.Embedding(6, 4), mix=nn.Linear(4, 4),
        ),
        6,
    ),
    "tied_autoencoder": tied_autoencoder,
    "linear_used_twice": lambda: classify(used_twice(nn.Linear(5, 5), nn.Linear(5, 3)), 6, 5),
}  # fmt: skip


def convolution_used_twice() -> Parts:
    head = nn.Sequential(nn.Flatten(), nn.Linear(32, 3))
    return classify(used_twice(nn.Conv2d(2, 2, 3, padding=1), head), 4, 2, 4, 4)


def by_mean_state(recurrent: nn.Module, states: int) -> Parts:
    """Classifies a batch-first sequence by the mean of its states."""
    parts = {"recurrent": recurrent, "head": nn.Linear(states, 3)}
    return classify_by(lambda m, x: m.head(m.recurrent(x)[0].mean(dim=1)), 4, 3, 2, **parts)


def by_every_state(recurrent: nn.Module) -> Parts:
    model = Net(lambda m, x: m.head(m.recurrent(x)[0]), recurrent=recurrent, head=nn.Linear(3, 3))
    return classify_tokens(model, 3, 4, 2)


def unroll(model: Any, sequence: torch.Tensor) -> torch.Tensor:
    state = sequence.new_zeros(len(sequence), 3)
    for step in sequence.unbind(dim=1):
        state = model.cell(step, state)
    return model.head(state)


TWO_WAYS: dict[str, Any] = {"num_layers": 2, "bidirectional": True, "batch_first": True}
RECURRENT: dict[str, Callable[[], Parts]] = {
    "lstm_batch_first": lambda: by_mean_state(nn.LSTM(2, 3, batch_first=True), 3),
    "gru_batch_first": lambda: by_mean_state(nn.GRU(2, 3, batch_first=True), 3),
    "rnn_tanh_batch_first": lambda: by_mean_state(nn.RNN(2, 4, batch_first=True), 4),
    "lstm_two_layers_bidirectional": lambda: by_mean_state(nn.LSTM(2, 2, **TWO_WAYS), 4),
    "gru_two_layers_bidirectional": lambda: by_mean_state(nn.GRU(2, 2, **TWO_WAYS), 4),
    "lstm_with_projection": lambda: by_mean_state(nn.LSTM(2, 3, proj_size=2, batch_first=True), 2),
    "lstm_time_first": lambda: by_every_state(nn.LSTM(2, 3)),
    "gru_time_first": lambda: by_every_state(nn.GRU(2, 3)),
    "gru_cell_unrolled": lambda: classify_by(
        unroll, 4, 3, 2, classes=2, cell=nn.GRUCell(2, 3), head=nn.Linear(3, 2)
    ),
}


def self_attention(weights: bool) -> Parts:
    parts = {"attention": nn.MultiheadAttention(4, 2, batch_first=True), "head": nn.Linear(4, 3)}
    run = lambda m, x: m.head(m.attention(x, x, x, need_weights=weights)[0].mean(dim=1))  # noqa: E731
    return classify_by(run, 4, 3, 4, **parts)


def cross_attention() -> Parts:
    """Keys and values of other widths: three projection weights instead of one."""
    attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=2, batch_first=True)
    parts = {"attention": attention, "head": nn.Linear(4, 2)}
    model = Net(lambda m, x: m.head(m.attention(*x, need_weights=False)[0]), **parts)
    inputs = (torch.randn(3, 2, 4), torch.randn(3, 3, 3), torch.randn(3, 3, 2))
    return model, per_token_cross_entropy, (inputs, labels(2, 3, 2))


def encoder(training: bool = True, **settings: Any) -> Parts:
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=6, batch_first=True, **settings)
    model, *rest = classify_tokens(nn.Sequential(layer, nn.Linear(4, 3)), 3, 3, 4)
    return model.train(training), *rest


def causal_block(m: Any, tokens: torch.Tensor) -> torch.Tensor:
    """A small GPT: fused qkv, causal `scaled_dot_product_attention`, residuals, learned positions."""
    stream = m.tokens(tokens) + m.positions
    parts = m.qkv(m.norm(stream)).chunk(3, dim=-1)
    query, key, value = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in parts)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return m.head(stream + m.out(mixed.transpose(1, 2).flatten(2)))


def causal_language_model() -> Parts:
    model = Net(
        causal_block,
        tokens=nn.Embedding(6, 4), positions=nn.Parameter(0.1 * torch.randn(3, 4)), norm=nn.LayerNorm(4),
        qkv=nn.Linear(4, 12), out=nn.Linear(4, 4), head=nn.Linear(4, 6, bias=False),
    )  # fmt: skip
    return model, per_token_cross_entropy, (labels(6, 2, 3), labels(6, 2, 3))


ATTENTION: dict[str, Callable[[], Parts]] = {
    "multihead_attention": lambda: self_attention(weights=False),
    "multihead_attention_with_weights": lambda: self_attention(weights=True),
    "cross_attention": cross_attention,
    "encoder_layer_post_norm": lambda: encoder(dropout=0.0),
    "encoder_layer_pre_norm": lambda: encoder(dropout=0.0, norm_first=True, activation="gelu"),
    "encoder_layer_in_eval_mode": lambda: encoder(training=False, dropout=0.1),
    "causal_language_model": causal_language_model,
}
LOOPS = {"hessian_by": "loops"}
PROBLEMS = problems(
    {**EMBEDDINGS, "convolution_used_twice": convolution_used_twice, **RECURRENT, **ATTENTION},
    # torch.func.hessian would differentiate along the padding row: forward mode does not know padding_idx.
    embedding_with_padding=LOOPS,
    embedding_bag_mean={"stand_in": lambda m: nn.Sequential(BagByHand(m[0]), *m[1:])},
    embedding_bag_sum_with_offsets={
        "stand_in": lambda m: nn.Sequential(BagByHand(m[0]), *m[1:]),
        "forward": lambda m, x: m[1:](m[0](*x)),
    },
    cross_attention={"forward": lambda model, inputs: model(inputs)},
    **dict.fromkeys(RECURRENT, LOOPS),
)
