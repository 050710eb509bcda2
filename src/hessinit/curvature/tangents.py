"""Products with `J` from the graph that one forward recorded, as `jax.linearize` has them.

The nodes of an autograd graph keep what their derivatives need. So a tangent can pass through them
in the order in which they ran, from a weight to the network's output, without another forward and
without a second graph: a product costs what a vector-Jacobian product costs, and only the part of
the graph after the layer. A symmetric node (an elementwise function, softmax) is its own tangent,
others have a rule below, and of any other node the backward is differentiated by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hessinit.problem.graph import Node, nodes_in_order

Inputs = list[Tensor | None]  # the tangents of a node's inputs; None for one that does not change
Rule = Callable[[Inputs], Tensor | Sequence[Tensor]]  # the tangents of its outputs
Key = tuple[Node, int]  # an output of a node

_aten = torch.ops.aten

# Nodes with one input whose derivative is a symmetric matrix: their backward is their tangent.
_SYMMETRIC_NAMES = (
    "Abs Alias Celu Clamp ClampMax ClampMin Clone Cos Elu Erf Exp Expm1 Gelu Hardswish Hardtanh LeakyRelu "
    "Log Log1P LogSigmoid MaskedFill Mish NativeDropout Neg Relu Rsqrt SafeSoftmax Sigmoid Silu Sin Softmax "
    "Softplus Sqrt Tanh Threshold Tril Triu"
)
_SYMMETRIC = {
    *(f"{name}Backward{number}" for name in _SYMMETRIC_NAMES.split() for number in (0, 1)),
    *(
        "AddBackward1",
        "DivBackward1",
        "MulBackward1",
        "PowBackward0",
        "RsubBackward1",
        "SubBackward1",
    ),
}


class NoTangentError(Exception):
    """A node's derivative cannot be had this way."""


def signed(number: int) -> int:
    """Autograd shows a dimension of -1 as an unsigned number."""
    return number - 2**64 if number >= 2**63 else number


def _dimensions(node: Node) -> tuple[int, ...] | None:
    saved = node._saved_dim
    if saved is None:
        return None
    return (
        tuple(signed(one) for one in (saved if isinstance(saved, tuple | list) else (saved,)))
        or None
    )


def _shape(node: Node, output: int = 0) -> torch.Size:
    return torch.Size(node._input_metadata[output].shape)


def _sum(terms: Sequence[Tensor | None]) -> Tensor:
    return functools.reduce(torch.add, [one for one in terms if one is not None])


def _times(node: Node) -> Rule:
    left = node._saved_self
    right = node._saved_other

    def rule(inputs: Inputs) -> Tensor:
        first, second = inputs
        if first is not None and second is not None:
            return torch.addcmul(first * right, left, second)
        return first * right if first is not None else left * second

    return rule


def _by_input(*ways: Callable[[Tensor], Tensor]) -> Rule:
    """The sum of what each input that changes adds, the last one first."""

    def rule(inputs: Inputs) -> Tensor:
        pairs = list(zip(ways, inputs, strict=True))[::-1]
        return _sum([None if one is None else way(one) for way, one in pairs])

    return rule


def _quotient(node: Node) -> Rule:
    divisor = node._saved_other
    dividend = node._saved_self
    return _by_input(
        lambda first: first / divisor, lambda second: -second * (dividend / divisor**2)
    )


def _add(node: Node, sign: float = 1.0) -> Rule:
    alpha = sign * node._saved_alpha
    shape = _shape(node)

    def rule(inputs: Inputs) -> Tensor:
        first, second = inputs
        if first is None:
            assert second is not None
            return (second if alpha == 1 else second * alpha).expand(shape)
        found = first if second is None else torch.add(first, second, alpha=alpha)
        return found.expand(shape)

    return rule


def _addmm(node: Node) -> Rule:
    left = node._saved_mat1
    right = node._saved_mat2
    shape = _shape(node)
    if node._saved_alpha != 1 or node._saved_beta != 1:
        raise NoTangentError
    return _by_input(
        lambda bias: bias.expand(shape), lambda one: one @ right, lambda one: left @ one
    )


def _product(node: Node) -> Rule:
    left = node._saved_self
    right = node._saved_mat2
    return _by_input(lambda one: one @ right, lambda one: left @ one)


def _convolution(node: Node) -> Rule:
    images = node._saved_input
    weight = node._saved_weight
    options = (
        node._saved_stride,
        node._saved_padding,
        node._saved_dilation,
        node._saved_transposed,
        node._saved_output_padding,
        node._saved_groups,
    )

    def by_bias(tangent: Tensor) -> Tensor:
        raise NoTangentError

    return _by_input(
        lambda one: _aten.convolution(one, weight, None, *options),
        lambda one: _aten.convolution(images, one, None, *options),
        by_bias,
    )


def _embedding(node: Node) -> Rule:
    words = node._saved_indices
    padding = signed(node._saved_padding_idx)

    def rule(inputs: Inputs) -> Tensor:
        rows = F.embedding(words, _alone(inputs))
        # The padding's row gets no gradient, so that its change does not count.
        return rows if padding < 0 else rows * (words != padding).unsqueeze(-1)

    return rule


def _alone(inputs: Inputs) -> Tensor:
    """The tangent of the first input, where no other one may change."""
    first = inputs[0]
    if first is None or (len(inputs) > 1 and any(one is not None for one in inputs[1:])):
        raise NoTangentError
    return first


def _normalization(
    node: Node, backward: Callable[..., Any], *settings: Any, channels: bool = True
) -> Rule:
    """The normalization is symmetric up to the gain, which comes before it in the backward."""
    x = node._saved_input
    gain = node._saved_weight
    if gain is not None and channels:
        gain = gain.view(1, -1, *[1] * (x.ndim - 2))

    def rule(inputs: Inputs) -> Tensor:
        normalized = backward(_alone(inputs).contiguous(), x, *settings, [True, False, False])[0]
        return normalized if gain is None else normalized * gain

    return rule


def _batch_norm(node: Node) -> Rule:
    statistics = (
        node._saved_running_mean,
        node._saved_running_var,
        node._saved_result1,
        node._saved_result2,
    )
    epsilon = (
        node._saved_eps if hasattr(node, "_saved_eps") else node._saved_epsilon
    )  # cuDNN's name
    options = (None, *statistics, node._saved_training, epsilon)
    return _normalization(node, _aten.native_batch_norm_backward, *options)


def _layer_norm(node: Node) -> Rule:
    options = (node._saved_normalized_shape, node._saved_result1, node._saved_result2, None, None)
    return _normalization(node, _aten.native_layer_norm_backward, *options, channels=False)


def _group_norm(node: Node) -> Rule:
    sizes = (node._saved_N, node._saved_C, node._saved_HxW, node._saved_group)
    options = (node._saved_result1, node._saved_result2, None, *sizes)
    return _normalization(node, _aten.native_group_norm_backward, *options)


def _max_pool(node: Node, dimensions: int = 2) -> Rule:
    places = node._saved_result1.flatten(-dimensions)
    shape = _shape(node)
    return lambda inputs: _alone(inputs).flatten(-dimensions).gather(-1, places).view(shape)


def _average_pool(node: Node) -> Rule:
    options = (
        node._saved_kernel_size,
        node._saved_stride,
        node._saved_padding,
        node._saved_ceil_mode,
        node._saved_count_include_pad,
        node._saved_divisor_override,
    )
    return lambda inputs: _aten.avg_pool2d(_alone(inputs), *options)


def _log_softmax(node: Node) -> Rule:
    probabilities = node._saved_result.exp()
    dimension = signed(node._saved_dim)

    def rule(inputs: Inputs) -> Tensor:
        tangent = _alone(inputs)
        return tangent - (probabilities * tangent).sum(dimension, keepdim=True)

    return rule


def _concatenation(node: Node) -> Rule:
    dimension = signed(node._saved_dim)
    shape = _shape(node)
    sources = node.next_functions

    def rule(inputs: Inputs) -> Tensor:
        known = next(one for one in inputs if one is not None)
        parts = []
        for one, (source, number) in zip(inputs, sources, strict=True):
            if one is None and source is None:
                raise NoTangentError  # of an unknown size
            if one is None and type(source).__name__ == "AccumulateGrad":
                one = known.new_zeros(source.variable.shape)
            parts.append(known.new_zeros(_shape(source, number)) if one is None else one)
        found = torch.cat(parts, dimension)
        if found.shape != shape:
            raise NoTangentError
        return found

    return rule


def _where(node: Node) -> Rule:
    condition = node._saved_condition
    shape = _shape(node)

    def rule(inputs: Inputs) -> Tensor:
        zero = _sum(inputs).new_zeros(())
        first, second = (zero if one is None else one for one in inputs)
        return torch.where(condition, first, second).expand(shape)

    return rule


def _moves(function: Callable[..., Any], *read: Callable[[Node], Any]) -> Callable[[Node], Rule]:
    """The rule of a node that moves numbers about: a function of the tangent and of what is read off it."""

    def find(node: Node) -> Rule:
        arguments = [one(node) for one in read]
        return lambda inputs: function(_alone(inputs), *arguments)

    return find


def _dimension(name: str) -> Callable[[Node], int]:
    return lambda node: signed(getattr(node, f"_saved_{name}"))


def _keeps_dimensions(node: Node) -> bool:
    return bool(node._saved_keepdim)


_RULES: dict[str, Callable[[Node], Rule]] = {
    "AddBackward0": _add,
    "SubBackward0": lambda node: _add(node, -1.0),
    "MulBackward0": _times,
    "DivBackward0": _quotient,
    "AddmmBackward0": _addmm,
    "MmBackward0": _product,
    "BmmBackward0": _product,
    "ConvolutionBackward0": _convolution,
    "EmbeddingBackward0": _embedding,
    "NativeBatchNormBackward0": _batch_norm,
    "CudnnBatchNormBackward0": _batch_norm,
    "NativeLayerNormBackward0": _layer_norm,
    "NativeGroupNormBackward0": _group_norm,
    "MaxPool2DWithIndicesBackward0": _max_pool,
    "MaxPool3DWithIndicesBackward0": lambda node: _max_pool(node, 3),
    "AdaptiveMaxPool2DBackward0": _max_pool,
    "AvgPool2DBackward0": _average_pool,
    "AdaptiveAvgPool2DBackward0": _moves(
        _aten._adaptive_avg_pool2d, lambda node: list(_shape(node)[-2:])
    ),
    "LogSoftmaxBackward0": _log_softmax,
    "CatBackward0": _concatenation,
    "WhereBackward0": _where,
    "MeanBackward0": _moves(torch.mean),
    "MeanBackward1": _moves(torch.mean, _dimensions, _keeps_dimensions),
    "SumBackward0": _moves(torch.sum),
    "SumBackward1": _moves(torch.sum, _dimensions, _keeps_dimensions),
    "ToCopyBackward0": _moves(Tensor.to, lambda node: node._input_metadata[0].dtype),
    "ExpandBackward0": _moves(Tensor.expand, _shape),
    "TBackward0": _moves(Tensor.t),
    "TransposeBackward0": _moves(Tensor.transpose, _dimension("dim0"), _dimension("dim1")),
    "PermuteBackward0": _moves(
        Tensor.permute, lambda node: [signed(one) for one in node._saved_dims]
    ),
    "ConstantPadNdBackward0": _moves(F.pad, lambda node: [signed(one) for one in node._saved_pad]),
    "SplitBackward0": _moves(Tensor.split, lambda node: node._saved_split_size, _dimension("dim")),
    "UnbindBackward0": _moves(Tensor.unbind, _dimension("dim")),
    "SelectBackward0": _moves(Tensor.select, _dimension("dim"), _dimension("index")),
    **{
        f"{name}Backward{number}": _moves(Tensor.reshape, _shape)
        for name in ("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze")
        for number in (0, 1, 2)
    },
}


def _symmetric(node: Node) -> Rule:
    def rule(inputs: Inputs) -> Tensor:
        tangent = _alone(inputs)
        if tangent.is_complex():  # the backward has the conjugate derivative
            raise NoTangentError
        found = node(tangent)
        return found if isinstance(found, Tensor) else found[0]

    return rule


def _by_itself(node: Node, inputs: Inputs) -> Sequence[Tensor]:
    """The backward of this node alone, differentiated by the gradient that arrives: it is linear in it."""
    with torch.enable_grad():
        arriving = [
            torch.zeros(tuple(one.shape), dtype=one.dtype, device=one.device, requires_grad=True)
            for one in node._input_metadata
        ]
        found = node(*arriving)
        left = (found,) if isinstance(found, Tensor) else found
        both = [(one, along) for one, along in zip(left, inputs, strict=True) if along is not None]
        # The derivative of a step function, as of a sign, is none or a constant zero.
        # A gradient that was broadcast is added up by the engine, not by the node.
        pairs = [(one.sum_to_size(along.shape), along) for one, along in both if one is not None]
        pairs = [(one, along) for one, along in pairs if one.requires_grad]
        if not pairs:
            return [torch.zeros_like(one) for one in arriving]
        outputs, tangents = zip(*pairs, strict=True)
        return torch.autograd.grad(outputs, arriving, tangents, materialize_grads=True)


def find_rule(node: Node) -> Rule:
    kind = type(node).__name__
    if hasattr(node, "_forward_cls") or kind == "CopySlices":
        raise NoTangentError(kind)  # a function written in Python, or a node that hides others
    known = (
        _symmetric(node) if kind in _SYMMETRIC else _RULES[kind](node) if kind in _RULES else None
    )

    is_complex = node._input_metadata[0].dtype.is_complex

    def rule(inputs: Inputs) -> Tensor | Sequence[Tensor]:
        # A real tangent of a complex output has to be widened, as the node's own backward does it.
        widens = is_complex and any(one is not None and not one.is_complex() for one in inputs)
        if known is not None and not widens:
            try:  # a context manager would take as long as the launch of a kernel
                return known(inputs)
            except NoTangentError:
                pass
        return _by_itself(node, inputs)

    return rule


@dataclass(frozen=True)
class _Step:
    node: Node
    rule: Rule
    inputs: tuple[Key | None, ...]
    last: tuple[Key, ...]  # the tangents that no later step needs


class RecordedGraph:
    """The graph behind an output, through which tangents of leaves pass to it."""

    def __init__(self, output: Tensor) -> None:
        self._end = (output.grad_fn, output.output_nr)
        self._nodes = list(nodes_in_order(output.grad_fn))
        leaves = [node for node in self._nodes if type(node).__name__ == "AccumulateGrad"]
        self._starts = {id(node.variable): node for node in leaves}
        self._rules: dict[Node, Rule] = {}
        self._paths: dict[tuple[Key, ...], list[_Step]] = {}

    def numbers_per_node(self) -> float:
        sizes = [_shape(node).numel() for node in self._nodes if node not in self._starts.values()]
        return sum(sizes) / len(sizes)

    @torch.no_grad()
    def push(self, leaves: Sequence[Tensor], tangents: Sequence[Tensor]) -> Tensor | None:
        """The change of the output for these changes of leaves; None if it does not depend on them."""
        pairs = zip(map(id, leaves), tangents, strict=True)
        known: dict[Key, Tensor] = {
            (self._starts[one], 0): tan for one, tan in pairs if one in self._starts
        }
        for step in self._path(tuple(known)):
            found = step.rule([None if key is None else known.get(key) for key in step.inputs])
            if isinstance(found, Tensor):
                known[step.node, 0] = found
            else:
                known |= {(step.node, number): one for number, one in enumerate(found)}
            for key in step.last:
                known.pop(key, None)
        return known.get(self._end)

    def _path(self, starts: tuple[Key, ...]) -> list[_Step]:
        if starts not in self._paths:
            changing = {node for node, _ in starts}
            needed = {self._end}
            steps = list[_Step]()
            through = list[Node]()
            for node in self._nodes:
                if any(source in changing for source, _ in node.next_functions):
                    changing.add(node)
                    through.append(node)
            for node in reversed(through):
                inputs = tuple(key if key[0] in changing else None for key in node.next_functions)
                last = tuple({key for key in inputs if key is not None} - needed)
                needed.update(last)
                if node not in self._rules:
                    self._rules[node] = find_rule(node)
                steps.append(_Step(node, self._rules[node], inputs, last))
            self._paths[starts] = steps[::-1]
        return self._paths[starts]
