"""The network's norm by the Gram engine where examples have little to do with each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hessinit.measurement.measure import measure

WORDS, PAIRS, SCORES = 2000, 100, 6


class DotProducts(nn.Module):
    """Skip-gram with negative samples: each row of words has a centre, and some others to score."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.centre, self.context = nn.Embedding(WORDS, dimension), nn.Embedding(WORDS, dimension)

    def forward(self, words: Tensor) -> Tensor:
        return (self.context(words[:, 1:]) @ self.centre(words[:, 0]).unsqueeze(2)).squeeze(2)


def logistic(scores: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(scores, targets, reduction="sum") / len(scores)


def closed_form(model: DotProducts, words: Tensor) -> float:
    """Gradients by a shared word's row have inner products, others none; in fp64, and dense."""
    centres = words[:, :1].expand(PAIRS, SCORES).reshape(-1)
    contexts = words[:, 1:].reshape(-1)
    c, x = (
        layer.weight.detach().double()[index]
        for layer, index in ((model.centre, centres), (model.context, contexts))
    )
    gram = (centres[:, None] == centres) * (x @ x.T) + (contexts[:, None] == contexts) * (c @ c.T)
    share = torch.sigmoid((c * x).sum(1))
    root = (share * (1 - share) / PAIRS).sqrt()
    return float(torch.linalg.eigvalsh(root[:, None] * gram * root)[-1])


@pytest.mark.parametrize("std", [0.03, 1.0])
def test_the_leading_words_of_the_network_need_not_be_those_of_a_layer(std: float) -> None:
    """Starting from the layers' leading vectors gave up to 15 % too little here, in one case of ten."""
    off = []
    for seed in range(20):
        torch.manual_seed(seed)
        model = DotProducts(64)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=std)
        words = torch.randint(WORDS, (PAIRS, 1 + SCORES))
        targets = torch.zeros(PAIRS, SCORES)
        targets[:, 0] = 1
        found = measure(model, logistic, (words, targets), seed=seed).network
        off.append(abs(found.norm / closed_form(model, words) - 1))
    assert max(off) < 0.02
    assert sum(share > 2e-3 for share in off) <= 1  # one start vector may miss; docs/measuring.md counts it
