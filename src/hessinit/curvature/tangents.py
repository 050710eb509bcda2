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
    "Abs Alias Celu Clamp ClampMax ClampMin Clone Cos Elu Erf Exp Expm1 Gelu Hardswish Hardtanh "
    "LeakyRelu Log Log1P LogSigmoid MaskedFill Mish NativeDropout Neg Relu Rsqrt SafeSoftmax "
    "Sigmoid Silu Sin Softmax Softplus Sqrt Tanh Threshold Tril Triu"
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
    dimensions = saved if isinstance(saved, tuple | list) else (saved,)
    return tuple(signed(dimension) for dimension in dimensions) or None


def _shape(node: Node, output: int = 0) -> torch.Size:
    return torch.Size(node._input_metadata[output].shape)


def _sum(terms: Sequence[Tensor | None]) -> Tensor:
    return functools.reduce(torch.add, [term for term in terms if term is not None])


def _times(node: Node) -> Rule:
    factor = node._saved_self
    multiplier = node._saved_other

    def rule(inputs: Inputs) -> Tensor:
        first, second = inputs
        if first is not None and second is not None:
            return torch.addcmul(first * multiplier, factor, second)
        return first * multiplier if first is not None else factor * second

    return rule


def _by_input(*derivatives: Callable[[Tensor], Tensor]) -> Rule:
    """The sum of what each input that changes adds, the last one first."""

    def rule(inputs: Inputs) -> Tensor:
        pairs = list(zip(derivatives, inputs, strict=True))[::-1]
        return _sum([derivative(tangent) for derivative, tangent in pairs if tangent is not None])

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
        total = first if second is None else torch.add(first, second, alpha=alpha)
        return total.expand(shape)

    return rule


def _addmm(node: Node) -> Rule:
    matrix = node._saved_mat1
    multiplier = node._saved_mat2
    shape = _shape(node)
    if node._saved_alpha != 1 or node._saved_beta != 1:
        raise NoTangentError
    return _by_input(
        lambda bias: bias.expand(shape),
        lambda tangent: tangent @ multiplier,
        lambda tangent: matrix @ tangent,
    )


def _product(node: Node) -> Rule:
    matrix = node._saved_self
    multiplier = node._saved_mat2
    return _by_input(lambda tangent: tangent @ multiplier, lambda tangent: matrix @ tangent)


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
        lambda tangent: _aten.convolution(tangent, weight, None, *options),
        lambda tangent: _aten.convolution(images, tangent, None, *options),
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
    if first is None or any(tangent is not None for tangent in inputs[1:]):
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
    # The second is cuDNN's name.
    epsilon = node._saved_eps if hasattr(node, "_saved_eps") else node._saved_epsilon
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
    indices = node._saved_result1.flatten(-dimensions)
    shape = _shape(node)
    return lambda inputs: _alone(inputs).flatten(-dimensions).gather(-1, indices).view(shape)


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
        changing = next(tangent for tangent in inputs if tangent is not None)
        parts = []
        for tangent, (source, number) in zip(inputs, sources, strict=True):
            if tangent is not None:
                parts.append(tangent)
            elif source is None:
                raise NoTangentError  # of an unknown size
            elif type(source).__name__ == "AccumulateGrad":
                parts.append(changing.new_zeros(source.variable.shape))
            else:
                parts.append(changing.new_zeros(_shape(source, number)))
        joined = torch.cat(parts, dimension)
        if joined.shape != shape:
            raise NoTangentError
        return joined

    return rule


def _where(node: Node) -> Rule:
    condition = node._saved_condition
    shape = _shape(node)

    def rule(inputs: Inputs) -> Tensor:
        zero = _sum(inputs).new_zeros(())
        first, second = (zero if tangent is None else tangent for tangent in inputs)
        return torch.where(condition, first, second).expand(shape)

    return rule


def _moves(function: Callable[..., Any], *readers: Callable[[Node], Any]) -> Callable[[Node], Rule]:
    """The rule of a node that rearranges numbers: a function of tangent and options."""

    def find(node: Node) -> Rule:
        arguments = [read(node) for read in readers]
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
        Tensor.permute, lambda node: [signed(number) for number in node._saved_dims]
    ),
    "ConstantPadNdBackward0": _moves(
        F.pad, lambda node: [signed(number) for number in node._saved_pad]
    ),
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
        result = node(tangent)
        return result if isinstance(result, Tensor) else result[0]

    return rule


def _by_itself(node: Node, inputs: Inputs) -> Sequence[Tensor]:
    """The node's backward, differentiated by the gradient that arrives: it is linear in it."""
    with torch.enable_grad():
        arriving = [
            torch.zeros(
                tuple(output.shape), dtype=output.dtype, device=output.device, requires_grad=True
            )
            for output in node._input_metadata
        ]
        result = node(*arriving)
        passed_on = (result,) if isinstance(result, Tensor) else result
        # The derivative of a step function, as of a sign, is none or a constant zero.
        # A gradient that was broadcast is added up by the engine, not by the node.
        pairs = [
            (gradient.sum_to_size(tangent.shape), tangent)
            for gradient, tangent in zip(passed_on, inputs, strict=True)
            if gradient is not None and tangent is not None
        ]
        pairs = [(gradient, tangent) for gradient, tangent in pairs if gradient.requires_grad]
        if not pairs:
            return [torch.zeros_like(gradient) for gradient in arriving]
        outputs, tangents = zip(*pairs, strict=True)
        return torch.autograd.grad(outputs, arriving, tangents, materialize_grads=True)


def find_rule(node: Node) -> Rule:
    """How tangents pass through the node: by its rule, or by differentiating its backward."""
    kind = type(node).__name__
    if hasattr(node, "_forward_cls") or kind == "CopySlices":
        raise NoTangentError(kind)  # a function written in Python, or a node that hides others
    direct: Rule | None = None
    if kind in _SYMMETRIC:
        direct = _symmetric(node)
    elif kind in _RULES:
        direct = _RULES[kind](node)
    is_complex = node._input_metadata[0].dtype.is_complex

    def rule(inputs: Inputs) -> Tensor | Sequence[Tensor]:
        # A real tangent of a complex output has to be widened, as the node's own backward does it.
        widens = is_complex and any(
            tangent is not None and not tangent.is_complex() for tangent in inputs
        )
        if direct is not None and not widens:
            try:  # a context manager would take as long as the launch of a kernel
                return direct(inputs)
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
        """The output's change for these changes of leaves; None if it does not depend on them."""
        by_key: dict[Key, Tensor] = {
            (self._starts[id(leaf)], 0): tangent
            for leaf, tangent in zip(leaves, tangents, strict=True)
            if id(leaf) in self._starts
        }
        for step in self._path(tuple(by_key)):
            result = step.rule([None if key is None else by_key.get(key) for key in step.inputs])
            results = [result] if isinstance(result, Tensor) else result
            by_key |= {(step.node, number): tangent for number, tangent in enumerate(results)}
            for key in step.last:
                by_key.pop(key, None)
        return by_key.get(self._end)

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
