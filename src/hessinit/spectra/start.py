"""The first vector of a Lanczos iteration."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hessinit.spectra.probes import ProbeStream
from hessinit.spectra.protocol import Operator, operator_size
from hessinit.spectra.scale import power_of_two_scale

# Large enough to be seen by the stopping rule, small enough to keep most of a good guess.
_RANDOM_SHARE = 0.1


def random_start(operator: Operator, *, seed: int, guess: Tensor | None = None) -> Tensor:
    """A gaussian vector for the operator, or a guess of an eigenvector with a tenth of one mixed in.

    Without that tenth a guess that misses an eigenvector (one layer's vector for a whole network) would
    converge to the wrong eigenvalue, and the residual could not tell.

    >>> random_start(torch.eye(3), seed=0).shape
    torch.Size([3])
    """
    size = operator_size(operator)
    gaussian = ProbeStream(size, seed=seed, dtype=operator.dtype, device=operator.device).draw()
    if guess is None:
        return gaussian
    if tuple(guess.shape) != (size,):
        raise ValueError(
            f"start has shape {tuple(guess.shape)}; this operator takes vectors of shape ({size},). "
            "Pass one such vector, or None for a random start."
        )
    scale = power_of_two_scale(guess)
    if scale == 0 or math.isinf(scale):
        raise ValueError("start is zero or not finite; pass any other vector, or None for a random start.")
    guess = guess.detach().to(gaussian) / scale
    share = _RANDOM_SHARE * torch.linalg.vector_norm(guess) / torch.linalg.vector_norm(gaussian)
    return torch.add(guess, gaussian.mul_(share))
