"""The edge of stability where weights have divisors, rates and decays of their own."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hessinit.advising.adaptive import Adaptive
from hessinit.advising.preconditioned import Preconditioned
from hessinit.advising.reading import Rule
from hessinit.curvature.engines import Effort
from hessinit.curvature.lanczos import lanczos
from hessinit.curvature.operators import LinearOperator
from hessinit.results.estimates import Estimate


def scaled_edge(
    rule: Rule,
    curvature: LinearOperator,
    divisor: Tensor | None,
    slowness: Tensor | None,
    decay: Tensor,
    effort: Effort,
) -> tuple[float, Estimate]:
    """The largest stable rate of the fastest weights, and the top eigenvalue that sets it.

    Weights are divided by `divisor` (Adam's √v + eps), and go `slowness` times slower than the fastest; all
    are flat, as is `decay`. With Q their product, the matrix is `Q^-½ (H + decay) Q^-½`; a decoupled decay
    adds to it, on the diagonal, `(1 + β₁)/(1 − β₁) decay/slowness`: at z = −1, where the steps leave the
    unit circle, both act as one curvature.
    """
    slow = torch.ones_like(decay) if slowness is None else slowness
    scale = slow if divisor is None else slow * divisor
    moves = torch.isfinite(scale)
    if isinstance(rule, Adaptive) and rule.kind == "adamw":
        diagonal = (1 + rule.momentum) / (1 - rule.momentum) * decay / slow
    else:
        diagonal = decay / scale
    inner = Shifted(Preconditioned(curvature, scale), torch.where(moves, diagonal, 0.0))
    # No start from where the last search ended: where the sharpest direction has changed since, such a
    # search often ends at the old one and cannot tell (docs/tracking.md has the numbers).
    top = lanczos(inner, ends="top", **effort.options).top
    return replace(rule, weight_decay=0.0).edge(max(top.value, 0.0)), top


class Shifted(LinearOperator):
    """A matrix with more on its diagonal.

    >>> Shifted(torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.tensor([0.0, 3.0])).to_dense()
    tensor([[2., 1.],
            [1., 5.]])
    """

    def __init__(self, matrix: LinearOperator | Tensor, diagonal: Tensor) -> None:
        self._matrix, self._diagonal = matrix, diagonal
        self.shape = (int(diagonal.numel()), int(diagonal.numel()))
        self.dtype, self.device = diagonal.dtype, diagonal.device

    def _product(self, vector: Tensor) -> Tensor:
        return self._matrix @ vector + self._diagonal * vector
