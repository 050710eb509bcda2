"""Where the weights are used, read off the autograd graph of one evaluation.

The graph is the one record of what a model did that is the same for modules, functional calls, tied weights
and weights used several times. Each use of a weight is a node of the graph; the gradient that reaches the
node's output is what the layer's Jacobian is made of.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

Node = Any  # torch.autograd.graph.Node; its saved tensors are not typed


@dataclass(frozen=True)
class Use:
    """One node that consumes a leaf; `transposed` when it consumes its transpose, as `F.linear` does."""

    node: Node
    position: int
    transposed: bool

    @property
    def kind(self) -> str:
        """The node's class, as `AddmmBackward0`."""
        return type(self.node).__name__

    @property
    def moment(self) -> int:
        """Grows in the order in which the forward ran."""
        return int(self.node._sequence_nr())

    @property
    def padding(self) -> int | None:
        """The row of an embedding that gets no gradient, whatever the output's derivative by it is."""
        if self.kind != "EmbeddingBackward0":
            return None
        row = self.node._saved_padding_idx  # unsigned; torch's "none" is -1
        return int(row) if 0 <= row < 2**62 else None


def find_uses(output: Tensor, leaves: dict[str, Tensor]) -> dict[str, list[Use]]:
    """For every leaf, the nodes that consume it, in the order they ran; an unused leaf has none.

    Transposes are looked through, however many. Every path from the output to a leaf ends in one of the uses:
    a use that were missed would make a curvature too small, silently.
    """
    names = {id(leaf): name for name, leaf in leaves.items()}
    uses: dict[str, list[Use]] = {name: [] for name in leaves}
    seen = {output.grad_fn}
    waiting: list[Node] = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        for position, (source, _) in enumerate(node.next_functions):
            transposed = False
            while type(source).__name__ == "TBackward0":
                source, transposed = source.next_functions[0][0], not transposed
            if source is None:
                continue
            name = names.get(id(getattr(source, "variable", None)))
            if name is not None:
                uses[name].append(Use(node, position, transposed))
            elif source not in seen:
                seen.add(source)
                waiting.append(source)
    for found in uses.values():
        found.sort(key=lambda use: use.moment)
    return uses


def batched_grad(
    output: Tensor, inputs: Sequence[Tensor] | Sequence[GradientEdge], cotangents: Tensor
) -> tuple[Tensor | None, ...] | None:
    """The gradients for many cotangents from one backward pass; None where torch cannot batch it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "error"
            )  # a missing batching rule is only a warning, and slower than a loop
            return torch.autograd.grad(
                output, inputs, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
    except (RuntimeError, UserWarning):
        return None


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


# So few examples are told apart to the last bit, by two probes for each binary digit of their number.
FEW_EXAMPLES = 16


def probe_examples(
    pull: Callable[[Tensor], list[Tensor]], cotangent: Tensor, random: Tensor
) -> Iterator[tuple[list[Tensor], list[Tensor], Tensor]]:
    """Two answers of a linear `pull`, the second to a cotangent with a factor for each example; the factors.

    Where examples do not see each other, whatever belongs to one grows by its own factor. For few examples
    the factors are 0 and 1 by each binary digit of their number in turn, so that the zeros are exact; for
    many they are random.
    """
    size = len(random)
    whole = pull(cotangent)
    if size > FEW_EXAMPLES:
        choices = [1 + random.abs()]
    else:
        numbers = torch.arange(size, device=random.device)
        digits = range((size - 1).bit_length())
        choices = [((numbers >> digit) % 2 == value).to(random) for digit in digits for value in (0, 1)]
    for factors in choices:
        yield whole, pull(cotangent * factors.view(-1, *[1] * (cotangent.ndim - 1))), factors


def in_proportion(whole: Tensor, shared: Tensor, factors: Tensor) -> bool:
    """Whether every row of `shared` is that of `whole` times its factor, but for rounding; 0 is exact."""
    difference = (shared - whole * factors.unsqueeze(1)).abs().amax(1)
    rounding = torch.finfo(whole.dtype).eps ** 0.5
    return bool((difference <= rounding * factors * whole.abs().amax(1)).all())
