"""What the correlations of Table 1 should be, from symmetry and from single-variable averages.

Over initializations the K classes are exchangeable, and so are the hidden units: averages are taken over all
of them, so that a formula's noise is far below that of the correlation it predicts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hessinit.paper.correlations import Samples


def between_logit_gradients(samples: Samples) -> float:
    """∂L/∂z₀ with ∂L/∂z₁: the p sum to 1, so cov(p₀, p₁) = −var(p)/(K − 1); labels exclude each other.

    With one image for all samples the label is no variable, and r = −1/(K − 1) exactly.
    """
    first, second = _shares(samples)
    spread, classes = _spread(samples), samples.probabilities.shape[1]
    covariance = -spread / (classes - 1) - first * second
    return covariance / math.sqrt((spread + first * (1 - first)) * (spread + second * (1 - second)))


def with_last_weight(samples: Samples, sigma: float) -> float:
    """∂L/∂z₀ with ∂z₀/∂h₀ = w: Stein's identity, E[p₀ w] = σ² E[∂p₀/∂w] = σ² E[p(1 − p) h].

    Exact for normal weights; uniform ones are small enough for the difference not to matter.
    """
    probabilities, hidden = samples.probabilities.double(), samples.hidden.double()
    slope = float(((probabilities * (1 - probabilities)).mean(1) * hidden.mean(1)).mean())
    share, _ = _shares(samples)
    return sigma * slope / math.sqrt(_spread(samples) + share * (1 - share))


def between_probability_gradients(samples: Samples) -> float:
    """∂L/∂p₀ = −y₀/p₀ with −y₁/p₁: never both, so the covariance is minus the product of their means."""
    first, second = (_inverse_moments(samples, label) for label in (0, 1))
    return -first.mean * second.mean / math.sqrt(first.variance * second.variance)


def with_softmax_derivative(samples: Samples) -> float:
    """−y₀/p₀ with ∂p₀/∂z₀ = p₀(1 − p₀): with the label 0 both rise with p₀, without it the first is 0."""
    inverse, probabilities = _inverse_moments(samples, 0), samples.probabilities.double()
    derivative = probabilities * (1 - probabilities)
    of_label = probabilities[samples.targets[:, 0] == 1]
    share, _ = _shares(samples)
    covariance = inverse.mean * float(derivative.mean()) - share * float((1 - of_label).mean())
    return covariance / math.sqrt(inverse.variance * float(derivative.var(unbiased=False)))


@dataclass(frozen=True)
class Moments:
    """Of y/p."""

    mean: float
    variance: float


def _inverse_moments(samples: Samples, label: int) -> Moments:
    """Of y/p for one class, whose images alone count: brighter ones have probabilities further apart."""
    inverse = 1 / samples.probabilities[samples.targets[:, label] == 1].double()
    share = _shares(samples)[label]
    mean = share * float(inverse.mean())
    return Moments(mean, share * float(inverse.square().mean()) - mean**2)


def _shares(samples: Samples) -> tuple[float, float]:
    """How often the label is 0, and 1."""
    first, second = samples.targets[:, :2].double().mean(0).tolist()
    return first, second


def _spread(samples: Samples) -> float:
    """The variance of a probability; its mean is 1/K."""
    probabilities = samples.probabilities.double()
    return float((probabilities - 1 / probabilities.shape[1]).square().mean())
