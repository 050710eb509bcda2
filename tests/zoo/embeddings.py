"""Embeddings, embedding bags and weights that serve twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from zoo.problem import Family, Parts, labels

family = Family()


def per_token_cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


class MeanOverTime(nn.Module):
    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        return sequence.mean(dim=1)


@family.add()
def embedding() -> Parts:
    model = nn.Sequential(
        nn.Embedding(9, 4), nn.Tanh(), nn.Linear(4, 5), nn.GELU(), nn.Flatten(), nn.Linear(15, 3)
    )
    return model, nn.CrossEntropyLoss(), (labels(9, 5, 3), labels(3, 5))


# torch.func.hessian would differentiate along the padding row: forward mode does not know padding_idx.
@family.add(hessian_by="loops")
def embedding_with_padding() -> Parts:
    model = nn.Sequential(nn.Embedding(8, 4, padding_idx=0), MeanOverTime(), nn.Tanh(), nn.Linear(4, 3))
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


def bag_by_hand(model: Any) -> nn.Module:
    model[0] = BagByHand(model[0])
    return model


@family.add(stand_in=bag_by_hand)
def embedding_bag_mean() -> Parts:
    model = nn.Sequential(nn.EmbeddingBag(8, 4, mode="mean"), nn.Tanh(), nn.Linear(4, 3))
    return model, nn.CrossEntropyLoss(), (labels(8, 6, 3), labels(3, 6))


def call_with_offsets(model: Any, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return model[1:](model[0](*inputs))


@family.add(stand_in=bag_by_hand, forward=call_with_offsets)
def embedding_bag_sum_with_offsets() -> Parts:
    model = nn.Sequential(nn.EmbeddingBag(8, 4, mode="sum"), nn.Tanh(), nn.Linear(4, 3))
    return model, nn.CrossEntropyLoss(), ((labels(8, 9), torch.tensor([0, 2, 5, 6])), labels(3, 4))


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


@family.add()
def tied_embedding_and_head() -> Parts:
    return TiedLanguageModel(), per_token_cross_entropy, (labels(7, 3, 3), labels(7, 3, 3))


class FunctionallyTied(nn.Module):
    """The head reads the embedding's weight without being a module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.mix = nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.relu(self.mix(self.embed(tokens))), self.embed.weight)


@family.add()
def embedding_weight_read_by_a_function() -> Parts:
    return FunctionallyTied(), per_token_cross_entropy, (labels(6, 3, 3), labels(6, 3, 3))


class TiedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(5, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(self.encode(features)), self.encode.weight.t())


@family.add()
def tied_autoencoder() -> Parts:
    features = torch.randn(6, 5)
    return TiedAutoencoder(), nn.MSELoss(), (features, features.clone())


class UsedTwice(nn.Module):
    def __init__(self, shared: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.shared, self.head = shared, head

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.shared(torch.relu(self.shared(features)))))


@family.add()
def linear_used_twice() -> Parts:
    return (
        UsedTwice(nn.Linear(5, 5), nn.Linear(5, 3)),
        nn.CrossEntropyLoss(),
        (torch.randn(6, 5), labels(3, 6)),
    )


@family.add()
def convolution_used_twice() -> Parts:
    head = nn.Sequential(nn.Flatten(), nn.Linear(32, 3))
    model = UsedTwice(nn.Conv2d(2, 2, 3, padding=1), head)
    return model, nn.CrossEntropyLoss(), (torch.randn(4, 2, 4, 4), labels(3, 4))
