"""Where the weights are used, read off the autograd graph: calls, and the example of each row."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hessinit.curvature.krylov import ProbeStream
from hessinit.problem.graph import Node, leaf_of, nodes_behind

Uses = dict[str, list["Use"]]  # of every leaf, by its name


@dataclass(frozen=True)
class Use:
    """One node that consumes a leaf, or, as `F.linear` does, its transpose (`transposed`)."""

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
        """The row of an embedding that gets no gradient, whatever the derivative by it is."""
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
    """The gradients for many cotangents from one backward pass; None if torch cannot batch it."""
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
        rows = self._without_padding(cotangent).reshape(-1, self.weight_shape[1])
        return gradient.index_add_(0, self.inputs.reshape(-1), rows)

    def _without_padding(self, rows: Tensor) -> Tensor:
        return rows if self.padding < 0 else rows * (self.inputs != self.padding).unsqueeze(-1)


def read_call(use: Use, leaf: Tensor) -> Call | None:
    """The call behind a node of the graph, or None if its derivative is not a known one."""
    if use.kind in ("AddmmBackward0", "MmBackward0"):
        return _read_dense(use, leaf)
    if use.kind == "ConvolutionBackward0" and use.position == 1 and not use.transposed:
        node = use.node
        return ConvolutionCall(
            inputs=node._saved_input.detach(),
            output_shape=tuple(node._input_metadata[0].shape),
            weight=leaf.detach(),
            stride=node._saved_stride,
            padding=node._saved_padding,
            dilation=node._saved_dilation,
            transposed=node._saved_transposed,
            output_padding=node._saved_output_padding,
            groups=node._saved_groups,
        )
    if use.kind == "EmbeddingBackward0" and not use.transposed:
        return _read_embedding(use, leaf)
    return None


def _read_dense(use: Use, leaf: Tensor) -> DenseCall | None:
    node = use.node
    with_bias = use.kind == "AddmmBackward0"
    if use.position != (2 if with_bias else 1) or (with_bias and node._saved_alpha != 1):
        return None
    inputs = node._saved_mat1 if with_bias else node._saved_self
    if inputs is None:
        return None
    shape = (len(inputs), int(leaf.shape[0 if use.transposed else 1]))
    return DenseCall(inputs.detach(), shape, stored_transposed=not use.transposed)


def _read_embedding(use: Use, leaf: Tensor) -> EmbeddingCall | None:
    words = use.node._saved_indices
    if use.node._saved_scale_grad_by_freq or not words.ndim:  # one word has no rows to count
        return None
    shape = (*words.shape, int(leaf.shape[1]))
    padding = -1 if use.padding is None else use.padding
    return EmbeddingCall(words, shape, tuple(leaf.shape), padding)


@dataclass(frozen=True)
class LayerCall:
    """A leaf, one of its calls, and the edge that the gradient of the call's output takes."""

    name: str
    call: Call
    edge: GradientEdge
    time_first: bool = False  # rows by position, not by example, as inside `nn.MultiheadAttention`


def known_calls(uses: Uses, leaves: dict[str, Tensor], size: int) -> list[LayerCall]:
    """The calls of leaves whose every use is known, and has as many rows for each example."""
    calls_of_leaves: list[LayerCall] = []
    for name, uses_of_leaf in uses.items():
        calls = [read_call(use, leaves[name]) for use in uses_of_leaf]
        if all(call is not None and call.rows % size == 0 for call in calls):
            calls_of_leaves += [
                LayerCall(name, call, GradientEdge(use.node, 0))
                for use, call in zip(uses_of_leaf, calls, strict=True)
                if call is not None
            ]
    return calls_of_leaves


def rows_by_example(rows: Tensor, examples: int, time_first: bool) -> Tensor:
    """A call's output as (examples, outputs per example)."""
    if time_first:
        rows = rows.view(rows.shape[0] // examples, examples, *rows.shape[1:]).transpose(0, 1)
    return rows.reshape(examples, -1)


def gradients_at_calls(
    output: Tensor, calls: Sequence[LayerCall], cotangent: Tensor
) -> list[Tensor]:
    """The gradient at the output of every call; zero where none arrives."""
    gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
        output,
        [layer_call.edge for layer_call in calls],
        cotangent,
        retain_graph=True,
        allow_unused=True,
    )
    return [
        cotangent.new_zeros(layer_call.call.output_shape) if gradient is None else gradient
        for layer_call, gradient in zip(calls, gradients, strict=True)
    ]


def find_layouts(output: Tensor, calls: Sequence[LayerCall], seed: int) -> list[bool | None]:
    """For each call: rows by example (False), by position (True), or mixed (None)."""
    if not calls:
        return []
    size = output.shape[0]
    layouts = [
        [False, True] if layer_call.call.rows > size > 1 else [False] for layer_call in calls
    ]
    probe = ProbeStream(
        output.numel() + size, seed=seed, dtype=output.dtype, device=output.device
    ).draw()
    answers = probe_examples(
        lambda cotangent: gradients_at_calls(output, calls, cotangent),
        probe[size:].view_as(output),
        probe[:size],
    )
    for gradients, scaled_gradients, factors in answers:
        for layer_call, possible, gradient, scaled in zip(
            calls, layouts, gradients, scaled_gradients, strict=True
        ):
            rows = gradient.reshape(layer_call.call.rows, -1)
            scaled_rows = scaled.reshape(layer_call.call.rows, -1)
            for time_first in list(possible):
                by_example = rows_by_example(rows, size, time_first)
                scaled_by_example = rows_by_example(scaled_rows, size, time_first)
                if not in_proportion(by_example, scaled_by_example, factors):
                    possible.remove(time_first)
    return [possible[0] if possible else None for possible in layouts]


FEW_EXAMPLES = 16  # are told apart by two probes for each binary digit of their number, each 0 or 1


def probe_examples(
    pull: Callable[[Tensor], list[Tensor]], cotangent: Tensor, random: Tensor
) -> Iterator[tuple[list[Tensor], list[Tensor], Tensor]]:
    """Two answers of a linear `pull`, and the factor of each example in the second cotangent.

    Where examples do not see each other, whatever belongs to one grows by its own factor. More than
    a few examples get random factors.
    """
    size = len(random)
    answer = pull(cotangent)
    if size > FEW_EXAMPLES:
        choices = [1 + random.abs()]
    else:
        numbers = torch.arange(size, device=random.device)
        digits = range((size - 1).bit_length())
        choices = [
            ((numbers >> digit) % 2 == value).to(random) for digit in digits for value in (0, 1)
        ]
    for factors in choices:
        yield answer, pull(cotangent * factors.view(-1, *[1] * (cotangent.ndim - 1))), factors


def in_proportion(whole: Tensor, shared: Tensor, factors: Tensor) -> bool:
    """Whether a row of `shared` is that of `whole` times its factor, up to rounding; 0 is exact."""
    difference = torch.addcmul(shared, whole, factors.unsqueeze(1), value=-1).abs().amax(1)
    rounding = torch.finfo(whole.dtype).eps ** 0.5
    return bool((difference <= rounding * factors * whole.abs().amax(1)).all())
