"""The Gram engine: every layer's Gauss-Newton curvature from a few shared backward passes.

With `H_z = S Sᵀ` in every example, a layer's Gauss-Newton matrix is `VᵀV` with one row of `V` per (example,
column of S): the gradient of that output direction by the layer's weights. Its nonzero eigenvalues are
those of the Gram matrix `V Vᵀ`, which is small (examples × outputs) and is never formed: a row of `V` is
the product of the layer's input with the gradient at the layer's output, and one backward pass per column
of S brings the latter to all layers at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hessinit.engines.calls import Call, DenseCall
from hessinit.operators.base import LinearOperator

_LARGEST_MATRIX = 384


@dataclass
class TracedCall:
    """A call, the gradients that reached its output, and how its rows belong to the examples.

    `signals` is (examples, columns, outputs per example). Rows are the examples' positions one after the
    other, or, with `time_first`, position by position (as inside `nn.MultiheadAttention`).
    """

    call: Call
    time_first: bool
    signals: Tensor

    def rows(self, per_example: Tensor) -> Tensor:
        """(examples, 1, outputs per example) as the call's own output."""
        shape = self.call.output_shape
        if not self.time_first:
            return per_example.view(shape)
        examples = per_example.shape[0]
        return per_example.view(examples, -1, *shape[1:]).transpose(0, 1).reshape(shape)

    def per_example(self, rows: Tensor, examples: int) -> Tensor:
        """The reverse of `rows`."""
        if not self.time_first:
            return rows.reshape(examples, 1, -1)
        return by_example(rows, examples, True).unsqueeze(1)


def by_example(rows: Tensor, examples: int, time_first: bool) -> Tensor:
    """A call's output as (examples, outputs per example)."""
    if not time_first:
        return rows.reshape(examples, -1)
    return (
        rows.view(rows.shape[0] // examples, examples, *rows.shape[1:]).transpose(0, 1).reshape(examples, -1)
    )


class LayerGram(LinearOperator):
    """`V Vᵀ` of one layer, by its products; `pull` after `push` is `VᵀV`, the Gauss-Newton block itself."""

    def __init__(self, traced: Sequence[TracedCall], weight_shape: tuple[int, ...], scale: float) -> None:
        self.traced = list(traced)
        self.weight_shape = weight_shape
        self.scale = scale
        first = self.traced[0].signals
        self.examples, self.columns = first.shape[0], first.shape[1]
        self.shape = (self.examples * self.columns,) * 2
        self.dtype, self.device = first.dtype, first.device
        self.weights = int(torch.Size(weight_shape).numel())
        self._inner = self._inner_products()
        self.matrix = self._small_matrix()

    def _small_matrix(self) -> Tensor | None:
        """`V Vᵀ` itself, when it is so small that the calls of a product cost more than the arithmetic."""
        if self._inner is None or self.shape[0] > _LARGEST_MATRIX:
            return None
        flat = self.traced[0].signals.reshape(self.shape[0], -1)
        blocks = (flat @ flat.T).view(self.examples, self.columns, self.examples, self.columns)
        return blocks.mul_(self._inner.view(self.examples, 1, self.examples, 1)).view(self.shape)

    def _inner_products(self) -> Tensor | None:
        """The inputs' inner products, when going through them is cheaper than going through the weight."""
        (one, *others) = self.traced
        if others or not isinstance(one.call, DenseCall) or one.call.rows != self.examples:
            return None
        inputs = one.call.inputs
        return inputs @ inputs.T if self.examples <= 2 * inputs.shape[1] else None

    def _product(self, vector: Tensor) -> Tensor:
        if self.matrix is not None:
            return torch.mv(self.matrix, vector)
        if self._inner is None:
            return self.push(self.pull(vector))
        (one,) = self.traced
        mixed = torch.bmm(vector.view(self.examples, 1, self.columns), one.signals)
        moved = torch.mm(self._inner, mixed.squeeze(1))
        return torch.bmm(moved.unsqueeze(1), one.signals.mT).view(-1)

    def pull(self, vector: Tensor) -> Tensor:
        """`Vᵀ vector`: a change of the weight."""
        mixed = vector.view(self.examples, 1, self.columns)
        parts = [one.call.pull(one.rows(torch.bmm(mixed, one.signals))) for one in self.traced]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def push(self, weight: Tensor) -> Tensor:
        """`V weight`."""
        parts = [self._gather(one, one.call.push(weight)) for one in self.traced]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def _gather(self, one: TracedCall, rows: Tensor) -> Tensor:
        # A row vector times the transpose: the same sum as signals @ column, by a faster CPU kernel.
        return torch.bmm(one.per_example(rows, self.examples), one.signals.mT).view(-1)


class WrittenGram(LayerGram):
    """The same with `V` written out: for layers with fewer weights than outputs, like first convolutions."""

    def __init__(self, factor: Tensor, examples: int, weight_shape: tuple[int, ...], scale: float) -> None:
        self.factor = factor
        self.weight_shape, self.scale = weight_shape, scale
        self.examples, self.columns = examples, factor.shape[0] // examples
        self.shape = (factor.shape[0],) * 2
        self.dtype, self.device = factor.dtype, factor.device
        self.weights = factor.shape[1]
        self.matrix = None

    def _product(self, vector: Tensor) -> Tensor:
        return torch.mv(self.factor, torch.mv(self.factor.T, vector))

    def pull(self, vector: Tensor) -> Tensor:
        return torch.mv(self.factor.T, vector).view(self.weight_shape)

    def push(self, weight: Tensor) -> Tensor:
        return torch.mv(self.factor, weight.reshape(-1))


class SumOfGrams(LinearOperator):
    """The whole network's Gram matrix is the sum of the layers'."""

    def __init__(self, grams: Sequence[LayerGram]) -> None:
        matrices = [gram.matrix for gram in grams if gram.matrix is not None]
        self._matrix = torch.stack(matrices).sum(0) if matrices else None
        self._others = [gram for gram in grams if gram.matrix is None]
        self.shape, self.dtype, self.device = grams[0].shape, grams[0].dtype, grams[0].device

    def _product(self, vector: Tensor) -> Tensor:
        parts = [gram._product(vector) for gram in self._others]
        if self._matrix is not None:
            parts.append(torch.mv(self._matrix, vector))
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
