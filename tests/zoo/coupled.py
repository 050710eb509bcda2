"""Examples that see each other, in the model or in the loss: no factorization by example holds here."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from zoo.problem import Family, Parts, labels

family = Family()


def contrastive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Every other example of the batch is a negative, as in CLIP."""
    similarity = output @ target.t()
    return F.cross_entropy(similarity, torch.arange(len(output), device=output.device))


def self_contrastive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Pairs of outputs meet: the loss's Hessian has blocks off the diagonal, and is indefinite."""
    return F.cross_entropy(output @ output.roll(1, dims=0).t(), target)


def batch_correlation(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    centred = output - output.mean(dim=0)
    return (
        (centred.t() @ centred / len(output) - torch.eye(output.shape[1], device=output.device)).pow(2).sum()
    )


def squared_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).mean(dim=0).pow(2).sum()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@family.add()
def loss_contrastive_against_targets() -> Parts:
    return network(), contrastive, (torch.randn(5, 4), torch.randn(5, 3))


@family.add()
def loss_contrastive_between_outputs() -> Parts:
    return network(), self_contrastive, (torch.randn(5, 4), torch.arange(5))


@family.add()
def loss_of_batch_correlation() -> Parts:
    return network(), batch_correlation, (torch.randn(5, 4), torch.randn(5, 3))


@family.add()
def loss_square_of_the_batch_mean() -> Parts:
    return network(), squared_mean, (torch.randn(5, 4), torch.randn(5, 3))


class CentredOverBatch(nn.Module):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features - features.mean(dim=0)


@family.add()
def model_centres_over_the_batch() -> Parts:
    model = nn.Sequential(nn.Linear(4, 5), CentredOverBatch(), nn.ReLU(), nn.Linear(5, 3))
    return model, nn.CrossEntropyLoss(), (torch.randn(6, 4), labels(3, 6))


class AttentionOverBatch(nn.Module):
    """A transformer layer that was given its batch in the wrong place: the examples attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2), nn.Linear(4, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(features, features, features, need_weights=False)[0])


@family.add()
def model_attends_over_the_batch() -> Parts:
    return AttentionOverBatch(), nn.CrossEntropyLoss(), (torch.randn(5, 4), labels(3, 5))
