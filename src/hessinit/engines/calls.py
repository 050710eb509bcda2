"""Linear uses of a weight whose derivative is known in closed form: dense, convolution, embedding.

Each call maps a change of the weight to the change of its own output (`push`), and a cotangent of its
output to the weight's gradient (`pull`, the adjoint). Rows are the first dimension of the output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from hessinit.problem.graph import Use


class Call(Protocol):
    """One use of a weight."""

    @property
    def inputs(self) -> Tensor:
        """What the weight acts on; its first dimension is that of the output."""
        ...

    @property
    def rows(self) -> int:
        """The first dimension of the output."""
        ...

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of the output."""
        ...

    def push(self, weight: Tensor) -> Tensor:
        """The output this weight would give: linear in the weight."""
        ...

    def pull(self, cotangent: Tensor) -> Tensor:
        """The gradient of `<cotangent, push(weight)>` by the weight."""
        ...

    def on(self, inputs: Tensor) -> Call:
        """The same call on other inputs."""
        ...


@dataclass(frozen=True)
class DenseCall:
    """`inputs @ weight.T`, or `inputs @ weight` when the weight is stored as (in, out)."""

    inputs: Tensor
    stored_transposed: bool
    outputs: int

    @property
    def rows(self) -> int:
        return int(self.inputs.shape[0])

    @cached_property
    def output_shape(self) -> tuple[int, ...]:
        return (self.rows, self.outputs)

    def push(self, weight: Tensor) -> Tensor:
        return self.inputs @ (weight if self.stored_transposed else weight.T)

    def pull(self, cotangent: Tensor) -> Tensor:
        return self.inputs.T @ cotangent if self.stored_transposed else cotangent.T @ self.inputs

    def on(self, inputs: Tensor) -> DenseCall:
        return dataclasses.replace(self, inputs=inputs)


@dataclass(frozen=True)
class ConvolutionCall:
    """A convolution of any dimension, stride, padding, dilation and grouping, transposed or not."""

    inputs: Tensor
    weight: Tensor
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int
    output_shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        return int(self.inputs.shape[0])

    def push(self, weight: Tensor) -> Tensor:
        return torch.ops.aten.convolution(
            self.inputs, weight, None, self.stride, self.padding, self.dilation, self.transposed,
            self.output_padding, self.groups,
        )  # fmt: skip

    def pull(self, cotangent: Tensor) -> Tensor:
        return torch.ops.aten.convolution_backward(
            cotangent, self.inputs, self.weight, None, self.stride, self.padding, self.dilation,
            self.transposed, self.output_padding, self.groups, [False, True, False],
        )[1]  # fmt: skip

    def on(self, inputs: Tensor) -> ConvolutionCall:
        return dataclasses.replace(self, inputs=inputs, output_shape=(len(inputs), *self.output_shape[1:]))

    def is_plain_image_convolution(self) -> bool:
        """Over images, one group, not transposed: what `F.unfold` can do."""
        return self.inputs.ndim == 4 and not self.transposed and self.groups == 1


@dataclass(frozen=True)
class EmbeddingCall:
    """`weight[inputs]`, the inputs being indices; the row `padding` gets no gradient."""

    inputs: Tensor
    words: int
    size: int
    padding: int

    @property
    def rows(self) -> int:
        return int(self.inputs.shape[0])

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (*self.inputs.shape, self.size)

    def push(self, weight: Tensor) -> Tensor:
        return self._without_padding(weight[self.inputs])

    def pull(self, cotangent: Tensor) -> Tensor:
        gradient = cotangent.new_zeros(self.words, self.size)
        kept = self._without_padding(cotangent).reshape(-1, self.size)
        return gradient.index_add_(0, self.inputs.reshape(-1), kept)

    def on(self, inputs: Tensor) -> EmbeddingCall:
        return dataclasses.replace(self, inputs=inputs)

    def _without_padding(self, rows: Tensor) -> Tensor:
        return rows if self.padding < 0 else rows * (self.inputs != self.padding).unsqueeze(-1)


def read_call(use: Use, leaf: Tensor) -> Call | None:
    """The call behind a node of the graph, or None when its derivative is not one of the known ones."""
    node = use.node
    if use.kind == "AddmmBackward0" and use.position == 2 and node._saved_alpha == 1:
        return DenseCall(
            node._saved_mat1.detach(), not use.transposed, int(leaf.shape[0 if use.transposed else 1])
        )
    if use.kind == "MmBackward0" and use.position == 1:
        return DenseCall(
            node._saved_self.detach(), not use.transposed, int(leaf.shape[0 if use.transposed else 1])
        )
    if use.kind == "ConvolutionBackward0" and use.position == 1 and not use.transposed:
        inputs = node._saved_input.detach()
        settings = (node._saved_stride, node._saved_padding, node._saved_dilation, node._saved_transposed,
                    node._saved_output_padding, node._saved_groups)  # fmt: skip
        return ConvolutionCall(inputs, leaf.detach(), *settings, tuple(node._input_metadata[0].shape))
    if use.kind == "EmbeddingBackward0" and not use.transposed and not node._saved_scale_grad_by_freq:
        if node._saved_indices.ndim == 0:
            return None  # one word, and no rows to count
        padding = -1 if use.padding is None else use.padding
        return EmbeddingCall(node._saved_indices, int(leaf.shape[0]), int(leaf.shape[1]), padding)
    return None
