"""Where the weights are used, read off the autograd graph of one evaluation."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hessinit.problem.graph import Node, leaf_of, nodes_behind

Uses = dict[str, list["Use"]]  # of every leaf, by its name


@dataclass(frozen=True)
class Use:
    """One node that consumes a leaf; `transposed` when it consumes its transpose, as `F.linear` does."""

    node: Node
    position: int
    transposed: bool

    @property
    def kind(self) -> str:
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


def find_uses(output: Tensor, leaves: dict[str, Tensor]) -> Uses:
    """For every leaf, all nodes that consume it or its transpose, in the order they ran."""
    names = {id(leaf): name for name, leaf in leaves.items()}
    uses: Uses = {name: [] for name in leaves}
    for node in nodes_behind(output.grad_fn):
        if type(node).__name__ == "TBackward0" and node is not output.grad_fn:
            continue  # a part of the use that consumes it
        for position, (source, _) in enumerate(node.next_functions):
            transposed = False
            while type(source).__name__ == "TBackward0":
                source = source.next_functions[0][0]
                transposed = not transposed
            name = names.get(id(leaf_of(source)))
            if name is not None:
                uses[name].append(Use(node, position, transposed))
    for uses_of_leaf in uses.values():
        uses_of_leaf.sort(key=lambda use: use.moment)
    return uses


def batched_grad(
    output: Tensor, inputs: Sequence[Tensor] | Sequence[GradientEdge], cotangents: Tensor
) -> tuple[Tensor | None, ...] | None:
    """The gradients for many cotangents from one backward pass; None where torch cannot batch it."""
    try:
        with warnings.catch_warnings():
            # A missing batching rule is only a warning, and slower than a loop.
            warnings.simplefilter("error")
            return torch.autograd.grad(
                output,
                inputs,
                cotangents,
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=True,
            )
    except (RuntimeError, UserWarning):
        return None


@dataclass(frozen=True)
class Call(ABC):
    """One use of a weight on `inputs`, whose first dimension is that of the output."""

    inputs: Tensor
    output_shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        return int(self.inputs.shape[0])

    @abstractmethod
    def push(self, weight: Tensor) -> Tensor:
        """The output this weight would give: linear in the weight."""

    @abstractmethod
    def pull(self, cotangent: Tensor) -> Tensor:
        """The gradient of `<cotangent, push(weight)>` by the weight."""

    def on(self, inputs: Tensor) -> Call:
        return replace(self, inputs=inputs, output_shape=(len(inputs), *self.output_shape[1:]))


@dataclass(frozen=True)
class DenseCall(Call):
    """`inputs @ weight.T`, or `inputs @ weight` when the weight is stored as (in, out)."""

    stored_transposed: bool

    def push(self, weight: Tensor) -> Tensor:
        return self.inputs @ (weight if self.stored_transposed else weight.T)

    def pull(self, cotangent: Tensor) -> Tensor:
        return self.inputs.T @ cotangent if self.stored_transposed else cotangent.T @ self.inputs


@dataclass(frozen=True)
class ConvolutionCall(Call):
    """A convolution of any dimension, stride, padding, dilation and grouping, transposed or not."""

    weight: Tensor
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    def push(self, weight: Tensor) -> Tensor:
        return torch.ops.aten.convolution(
            self.inputs,
            weight,
            None,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
        )

    def pull(self, cotangent: Tensor) -> Tensor:
        return torch.ops.aten.convolution_backward(
            cotangent,
            self.inputs,
            self.weight,
            None,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
            [False, True, False],
        )[1]


@dataclass(frozen=True)
class EmbeddingCall(Call):
    """`weight[inputs]`, the inputs being indices; the row `padding` gets no gradient."""

    weight_shape: tuple[int, ...]
    padding: int

    def push(self, weight: Tensor) -> Tensor:
        return self._without_padding(weight[self.inputs])

    def pull(self, cotangent: Tensor) -> Tensor:
        gradient = cotangent.new_zeros(self.weight_shape)
        kept = self._without_padding(cotangent).reshape(-1, self.weight_shape[1])
        return gradient.index_add_(0, self.inputs.reshape(-1), kept)

    def _without_padding(self, rows: Tensor) -> Tensor:
        return rows if self.padding < 0 else rows * (self.inputs != self.padding).unsqueeze(-1)


def read_call(use: Use, leaf: Tensor) -> Call | None:
    """The call behind a node of the graph, or None when its derivative is not one of the known ones."""
    node = use.node
    dense = None
    if use.kind == "AddmmBackward0" and use.position == 2 and node._saved_alpha == 1:
        dense = node._saved_mat1
    elif use.kind == "MmBackward0" and use.position == 1:
        dense = node._saved_self
    if dense is not None:
        shape = (len(dense), int(leaf.shape[0 if use.transposed else 1]))
        return DenseCall(dense.detach(), shape, stored_transposed=not use.transposed)
    if use.kind == "ConvolutionBackward0" and use.position == 1 and not use.transposed:
        inputs = node._saved_input.detach()
        shape = tuple(node._input_metadata[0].shape)
        settings = (
            node._saved_stride,
            node._saved_padding,
            node._saved_dilation,
            node._saved_transposed,
            node._saved_output_padding,
            node._saved_groups,
        )
        return ConvolutionCall(inputs, shape, leaf.detach(), *settings)
    if (
        use.kind == "EmbeddingBackward0"
        and not use.transposed
        and not node._saved_scale_grad_by_freq
    ):
        words = node._saved_indices
        if words.ndim:  # one word has no rows to count
            padding = -1 if use.padding is None else use.padding
            return EmbeddingCall(
                words, (*words.shape, int(leaf.shape[1])), tuple(leaf.shape), padding
            )
    return None


# So few are told apart by two probes of 0 and 1 for each binary digit of their number; more by a
# random one.
FEW_EXAMPLES = 16


def probe_examples(
    pull: Callable[[Tensor], list[Tensor]], cotangent: Tensor, random: Tensor
) -> Iterator[tuple[list[Tensor], list[Tensor], Tensor]]:
    """Two answers of a linear `pull`, the second to a cotangent with a factor for each example; the factors.

    Where examples do not see each other, whatever belongs to one grows by its own factor.
    """
    size = len(random)
    whole = pull(cotangent)
    if size > FEW_EXAMPLES:
        choices = [1 + random.abs()]
    else:
        numbers = torch.arange(size, device=random.device)
        digits = range((size - 1).bit_length())
        choices = [
            ((numbers >> digit) % 2 == value).to(random) for digit in digits for value in (0, 1)
        ]
    for factors in choices:
        yield whole, pull(cotangent * factors.view(-1, *[1] * (cotangent.ndim - 1))), factors


def in_proportion(whole: Tensor, shared: Tensor, factors: Tensor) -> bool:
    """Whether every row of `shared` is that of `whole` times its factor, but for rounding; 0 is exact."""
    difference = (shared - whole * factors.unsqueeze(1)).abs().amax(1)
    rounding = torch.finfo(whole.dtype).eps ** 0.5
    return bool((difference <= rounding * factors * whole.abs().amax(1)).all())
