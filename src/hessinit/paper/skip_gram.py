"""Word2vec's skip-gram: a centre word is given, and the words around it are to be told."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.nn.utils import skip_init


class SoftmaxSkipGram(nn.Module):
    """A score for every word of the vocabulary: `context` times the centre word's vector.

    Bilinear in the two weights, so that the Gauss-Newton block of each is its exact Hessian. The weights
    hold anything at all until `normal_` writes them.
    """

    def __init__(self, vocabulary: int, dimension: int) -> None:
        super().__init__()
        self.centre = skip_init(nn.Embedding, vocabulary, dimension)
        self.context = skip_init(nn.Linear, dimension, vocabulary, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.context(self.centre(words))
        return scores

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy, averaged over the pairs."""
        return cross_entropy(scores, targets)


class NegativeSkipGram(nn.Module):
    """Scores for a few words: rows of `words` are a centre, a word near it, and words drawn as noise."""

    def __init__(self, vocabulary: int, dimension: int) -> None:
        super().__init__()
        self.centre = skip_init(nn.Embedding, vocabulary, dimension)
        self.context = skip_init(nn.Embedding, vocabulary, dimension)

    def forward(self, words: Tensor) -> Tensor:
        vectors: Tensor = self.context(words[:, 1:])
        return (vectors @ self.centre(words[:, 0]).unsqueeze(2)).squeeze(2)

    def loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Logistic loss, summed over the near word and the noise, averaged over the pairs."""
        return binary_cross_entropy_with_logits(scores, labels, reduction="sum") / len(scores)


SkipGram = SoftmaxSkipGram | NegativeSkipGram
MODELS: dict[str, type[SoftmaxSkipGram] | type[NegativeSkipGram]] = {
    "softmax": SoftmaxSkipGram,
    "negative": NegativeSkipGram,
}


@torch.no_grad()
def normal_(model: SkipGram, std: float, generator: torch.Generator) -> None:
    """Draw both weights from N(0, std²)."""
    for weight in (model.centre.weight, model.context.weight):
        weight.normal_(0.0, std, generator=generator)
