"""Attention on torch's default kernels, which have no second derivative of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from zoo.embeddings import per_token_cross_entropy
from zoo.problem import Family, Parts, labels

family = Family()


class SelfAttention(nn.Module):
    def __init__(self, attention: nn.MultiheadAttention, weights: bool) -> None:
        super().__init__()
        self.attention, self.head, self.weights = attention, nn.Linear(4, 3), weights

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        mixed, _ = self.attention(sequence, sequence, sequence, need_weights=self.weights)
        return self.head(mixed.mean(dim=1))


@family.add()
def multihead_attention() -> Parts:
    model = SelfAttention(nn.MultiheadAttention(4, 2, batch_first=True), weights=False)
    return model, nn.CrossEntropyLoss(), (torch.randn(4, 3, 4), labels(3, 4))


@family.add()
def multihead_attention_with_weights() -> Parts:
    model = SelfAttention(nn.MultiheadAttention(4, 2, batch_first=True), weights=True)
    return model, nn.CrossEntropyLoss(), (torch.randn(4, 3, 4), labels(3, 4))


class CrossAttention(nn.Module):
    """Keys and values of other widths: three projection weights instead of one."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=2, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(query, key, value, need_weights=False)[0])


def call_with_parts(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return model(*inputs)


@family.add(forward=call_with_parts)
def cross_attention() -> Parts:
    inputs = (torch.randn(3, 2, 4), torch.randn(3, 3, 3), torch.randn(3, 3, 2))
    return CrossAttention(), per_token_cross_entropy, (inputs, labels(2, 3, 2))


def encoder(**settings: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(4, 2, dim_feedforward=6, batch_first=True, **settings)


@family.add()
def encoder_layer_post_norm() -> Parts:
    model = nn.Sequential(encoder(dropout=0.0), nn.Linear(4, 3))
    return model, per_token_cross_entropy, (torch.randn(3, 3, 4), labels(3, 3, 3))


@family.add()
def encoder_layer_pre_norm() -> Parts:
    model = nn.Sequential(encoder(dropout=0.0, norm_first=True, activation="gelu"), nn.Linear(4, 3))
    return model, per_token_cross_entropy, (torch.randn(3, 3, 4), labels(3, 3, 3))


@family.add()
def encoder_layer_in_eval_mode() -> Parts:
    model = nn.Sequential(encoder(dropout=0.1), nn.Linear(4, 3))
    return model.eval(), per_token_cross_entropy, (torch.randn(3, 3, 4), labels(3, 3, 3))


class CausalBlock(nn.Module):
    """A small GPT: fused qkv, causal `scaled_dot_product_attention`, residuals, learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(6, 4), nn.Parameter(0.1 * torch.randn(3, 4))
        self.norm, self.qkv, self.out = nn.LayerNorm(4), nn.Linear(4, 12), nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        stream = self.tokens(tokens) + self.positions
        query, key, value = (
            part.unflatten(-1, (2, 2)).transpose(1, 2)
            for part in self.qkv(self.norm(stream)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(stream + self.out(mixed.transpose(1, 2).flatten(2)))


@family.add()
def causal_language_model() -> Parts:
    return CausalBlock(), per_token_cross_entropy, (labels(6, 2, 3), labels(6, 2, 3))
