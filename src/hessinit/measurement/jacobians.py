"""Spectral norms of the Jacobians before and after every layer, example by example.

The autograd graph of one more evaluation, with inputs that can be differentiated by, tells where
each weight is used, which activation follows it, and which numbers belong to which example.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hessinit.curvature import krylov, layer_uses
from hessinit.curvature.engine import LanczosSettings
from hessinit.curvature.evaluation import Evaluation
from hessinit.curvature.layer_uses import Call, Node, Use, find_layouts, known_calls
from hessinit.curvature.probes import ProbeStream
from hessinit.curvature.singular_values import BatchedMap, SingularValues, largest_singular_values
from hessinit.problem.batches import map_tensors
from hessinit.problem.determinism import check_no_reentrant_checkpoints

# Unit vectors are shared by all layers, Lanczos takes about this many passes for each of them.
_PASSES_PER_LAYER = 16
_FEW = 64
_MOST = 256
# The images of the unit vectors are held for all layers at once if they take at most this many
# bytes.
_BYTES_AT_ONCE = 2**27
_NUMBERS_AT_ONCE = 2**22
# All examples wait for the slowest: a digit less in the worst of them halves the passes, the others
# have it.
_LOOSER = 10
_LOOSEST = 0.05

# Elementwise nodes of one input, and the names of these activations.
ACTIVATIONS = {
    "CeluBackward0": "celu",
    "EluBackward0": "elu",
    "ErfBackward0": "erf",
    "GeluBackward0": "gelu",
    "HardshrinkBackward0": "hardshrink",
    "HardsigmoidBackward0": "hardsigmoid",
    "HardswishBackward0": "hardswish",
    "HardtanhBackward0": "hardtanh",
    "LeakyReluBackward0": "leaky_relu",
    "LogSigmoidBackward0": "logsigmoid",
    "MishBackward0": "mish",
    "PreluKernelBackward0": "prelu",
    "ReluBackward0": "relu",
    "RreluWithNoiseBackward0": "rrelu",
    "SigmoidBackward0": "sigmoid",
    "SiluBackward0": "silu",
    "SinBackward0": "sin",
    "SoftplusBackward0": "softplus",
    "SoftshrinkBackward0": "softshrink",
    "TanhBackward0": "tanh",
    "ThresholdBackward0": "threshold",
}
# Nodes that keep their input's numbers in order, and those that reorder them.
RESHAPING = {
    "AliasBackward0",
    "CloneBackward0",
    "ContiguousBackward0",
    "ReshapeAliasBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
}
REARRANGING = RESHAPING | {
    "PermuteBackward0",
    "TBackward0",
    "TransposeBackward0",
    "TransposeBackward1",
}

Consumers = dict[Node, list[Node]]


def activation_kind(node: Node) -> str | None:
    """The name of the node of a real activation; None for any other node."""
    # Some in-place activations have nodes of their own: LeakyReluBackward1 beside
    # LeakyReluBackward0.
    name = ACTIVATIONS.get(type(node).__name__.rstrip("0123456789") + "0")
    return None if name and node._input_metadata[0].dtype.is_complex else name


def consumers_of(output: Tensor) -> Consumers:
    """The consumers of each node's result, for all the nodes behind `output`."""
    found: Consumers = {output.grad_fn: []}
    waiting: list[Node] = [output.grad_fn]
    for node in waiting:  # which grows
        for source in (source for source, _ in node.next_functions if source is not None):
            if source not in found:
                waiting.append(source)
            found.setdefault(source, []).append(node)
    return found


@dataclass(frozen=True)
class LayerUse:
    """One use of a weight: its call and the activation that follows; `result` is behind that activation.

    The rows are ordered by example or, with `time_first`, by position. `source`, the call's input,
    is None for tokens and constants.
    """

    call: Call
    time_first: bool
    activation: Node | None
    source: GraphPoint | None
    result: GraphPoint


# The uses of every weight. Their points count the examples that are independent behind it, or 1:
# the batch.
LayerUses = dict[str, list[LayerUse]]


def read_layers(
    output: Tensor, leaves: dict[str, Tensor], seed: int
) -> tuple[LayerUses, dict[str, str]]:
    """The uses of the layers whose every use is a known call; for the others, why not."""
    found = layer_uses.find_uses(output, leaves)
    size = output.shape[0] if output.ndim else 1
    consumers = consumers_of(output)
    known = known_calls(found, leaves, size) if size > 1 else []
    layouts = zip(known, find_layouts(output, known, seed), strict=True)
    orders = {one.edge.node: layout for one, layout in layouts}
    layers: LayerUses = {}
    reasons: dict[str, str] = {}
    for name, uses in found.items():
        examples = size if all(orders.get(use.node) is not None for use in uses) else 1
        calls = [(use, layer_uses.read_call(use, leaves[name])) for use in uses]
        unknown = [use.kind for use, call in calls if call is None]
        if unknown:
            reasons[name] = (
                f"the weight goes into {unknown[0]}, none of the known uses (dense, convolution, embedding)"
            )
        elif not uses:
            reasons[name] = "the forward does not use this weight"
        else:
            layers[name] = [
                _read(use, call, examples, examples > 1 and bool(orders[use.node]), consumers)
                for use, call in calls
                if call is not None
            ]
    return layers, reasons


def _read(use: Use, call: Call, size: int, time_first: bool, consumers: Consumers) -> LayerUse:
    def point(node: Node, number: int) -> GraphPoint:
        shape = (
            node.variable.shape if hasattr(node, "variable") else node._input_metadata[number].shape
        )
        steps = call.rows // size if time_first else 0
        return GraphPoint(GradientEdge(node, number), tuple(shape), size, steps)

    # addmm(bias, inputs, weight), mm(inputs, weight), convolution(inputs, weight, bias),
    # embedding(weight)
    node, number = use.node.next_functions[use.kind == "AddmmBackward0"]
    has_source = node is not None and not isinstance(call, layer_uses.EmbeddingCall)
    source = point(node, number) if has_source else None
    activation = _activation_after(use.node, call, consumers)
    return LayerUse(call, time_first, activation, source, point(activation or use.node, 0))


def _activation_after(node: Node, call: Call, consumers: Consumers) -> Node | None:
    """The elementwise activation that alone consumes the call's result, or None.

    Another shape of the same numbers and an added bias are looked through; anything else ends the
    search.
    """
    while len(consumers[node]) == 1:
        (later,) = consumers[node]
        if math.prod(later._input_metadata[0].shape) != math.prod(call.output_shape):
            return None  # a sum may repeat the numbers
        if activation_kind(later) is not None:
            # PReLU's slope, say, is not its input.
            return later if later.next_functions[0][0] is node else None
        if type(later).__name__ not in RESHAPING and not _adds_a_bias(later, node):
            return None
        node = later
    return None


def _adds_a_bias(addition: Node, node: Node) -> bool:
    """Whether the other summand is a constant or a weight, not something that the forward computed."""
    if type(addition).__name__ != "AddBackward0" or addition._saved_alpha != 1:
        return False
    others = [source for source, _ in addition.next_functions if source is not node]
    return all(source is None or type(source).__name__ == "AccumulateGrad" for source in others)


def trace_from_inputs(evaluation: Evaluation) -> tuple[Tensor, list[Tensor], str]:
    """The output of one more forward, the inputs that it can be differentiated by, or why there are none."""
    inputs: list[Tensor] = []

    def differentiable(tensor: Tensor) -> Tensor:
        inputs.append(tensor.detach().requires_grad_(tensor.is_floating_point()))
        return inputs[-1]

    given = map_tensors(differentiable, evaluation.batch.inputs)
    try:
        output = evaluation.problem.output(replace(evaluation.batch, inputs=given))
    except (
        Exception
    ) as failure:  # the same forward ran before: it cannot take inputs that require gradients
        reason = f"the forward fails on inputs that require gradients ({type(failure).__name__})"
        return evaluation.output, [], reason
    check_no_reentrant_checkpoints(output)
    floating = [tensor for tensor in inputs if tensor.requires_grad]
    if not floating or any(not t.requires_grad and t.dtype != torch.bool for t in inputs):
        return (
            output,
            [],
            "the network's inputs are tokens, or not all real numbers: they have no derivative",
        )
    return output, floating, ""


@dataclass(frozen=True, eq=False)
class GraphPoint:
    """A tensor of the forward, or the edge that stands for it, whose numbers belong to `size` examples.

    They come example by example or, with `steps`, step by step with all examples in each (time
    first). The arguments of `gather` and `scatter` may be stacks, with one more dimension in front.
    """

    at: Tensor | GradientEdge
    shape: tuple[int, ...]
    size: int
    steps: int = 0

    @property
    def each(self) -> int:
        """How many numbers an example has here."""
        return math.prod(self.shape) // self.size

    def gather(self, tensor: Tensor) -> Tensor:
        """(examples, numbers of each)."""
        stack = tensor.shape[: tensor.ndim - len(self.shape)]
        if self.steps:
            tensor = tensor.reshape(*stack, self.steps, self.size, -1).transpose(-3, -2)
        return tensor.reshape((*stack, self.size, self.each))

    def scatter(self, rows: Tensor) -> Tensor:
        """The reverse of `gather`."""
        stack = rows.shape[:-2]
        if self.steps:
            rows = rows.reshape(*stack, self.size, self.steps, -1).transpose(-3, -2)
        return rows.reshape((*stack, *self.shape))  # which may be ()


GraphPoints = Sequence[GraphPoint]
# From some points to others; the vectors are (examples, numbers of each at all the first points).
Product = Callable[[GraphPoints, GraphPoints, Tensor], list[Tensor]]


def _each(points: GraphPoints) -> int:
    return sum(point.each for point in points)


def _flat(layers: dict[str, list[GraphPoint]]) -> list[GraphPoint]:
    return [point for points in layers.values() for point in points]


class Jacobian:
    """Products with the derivative of some points (`heads`) by earlier ones (`tails`) of the same graph.

    Forward products differentiate the backward product by its own argument, in which it is linear:
    that works wherever two derivatives do, and one graph serves all points. Stacks of vectors go in
    one batched pass.
    """

    def __init__(self, heads: GraphPoints, tails: GraphPoints, like: Tensor) -> None:
        self._heads = heads
        self._tails = tails
        self._like = like

    def pull(self, heads: GraphPoints, tails: GraphPoints, vectors: Tensor) -> list[Tensor]:
        """The transpose times cotangents of some heads, at some tails."""
        sent = zip((head.at for head in heads), _scattered(heads, vectors), strict=True)
        return self._gradients(list(sent), [tail.at for tail in tails], tails, vectors.shape[:-2])

    def push(self, tails: GraphPoints, heads: GraphPoints, vectors: Tensor) -> list[Tensor]:
        """The derivative times tangents of some tails, at some heads."""
        adjoint = self._adjoint
        sent = zip((adjoint[tail] for tail in tails), _scattered(tails, vectors), strict=True)
        reached = [(one, tangent) for one, tangent in sent if one is not None and one.requires_grad]
        return self._gradients(
            reached, [adjoint[head] for head in heads], heads, vectors.shape[:-2]
        )

    @functools.cached_property
    def _adjoint(self) -> dict[GraphPoint, Tensor | None]:
        """A placeholder for the cotangent of every head, and the gradient that they give at every tail."""
        placeholders = [self._like.new_zeros(head.shape).requires_grad_() for head in self._heads]
        outputs: Any = [head.at for head in self._heads]
        inputs: Any = [tail.at for tail in self._tails]
        found = torch.autograd.grad(
            outputs, inputs, placeholders, create_graph=True, allow_unused=True
        )
        return dict(zip([*self._heads, *self._tails], [*placeholders, *found], strict=True))

    def _gradients(
        self,
        sent: Sequence[tuple[Any, Tensor]],
        inputs: Any,
        points: GraphPoints,
        stack: torch.Size,
    ) -> list[Tensor]:
        found: Sequence[Tensor | None] = [None] * len(points)
        if sent:
            outputs, vectors = zip(*sent, strict=True)
            found = torch.autograd.grad(
                outputs,
                inputs,
                vectors,
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=bool(stack),
            )
        zeros = functools.partial(self._like.new_zeros, *stack)
        pairs = zip(points, found, strict=True)
        return [
            zeros(at.size, at.each) if one is None else at.gather(one.detach()) for at, one in pairs
        ]


def _scattered(points: GraphPoints, rows: Tensor) -> list[Tensor]:
    pieces = rows.split([point.each for point in points], dim=-1)
    return [point.scatter(piece) for point, piece in zip(points, pieces, strict=True)]


def backward_norms(
    output: Tensor, layers: LayerUses, settings: LanczosSettings
) -> dict[str, SingularValues]:
    """From every layer's result to the output."""
    found: dict[str, SingularValues] = {}
    results = {name: [use.result for use in uses] for name, uses in layers.items()}
    for size in sorted({points[0].size for points in results.values()}):
        end = [GraphPoint(output, tuple(output.shape), size)]
        chosen = {name: points for name, points in results.items() if points[0].size == size}
        found |= _spectral_norms(end, chosen, True, output.detach(), settings)
    return found


def forward_norms(
    output: Tensor, inputs: Sequence[Tensor], layers: LayerUses, settings: LanczosSettings
) -> dict[str, tuple[SingularValues, krylov.Array]]:
    """From the network's inputs to every layer's, and the lengths of the network's inputs, by example.

    Where examples depend on each other before some layer, all layers see the batch as one example.
    """
    found: dict[str, tuple[SingularValues, krylov.Array]] = {}
    sources = {
        name: [use.source for use in uses if use.source is not None]
        for name, uses in layers.items()
    }
    apart = {name: points for name, points in sources.items() if points and points[0].size > 1}
    own = _independent_inputs(output.detach(), inputs, _flat(apart), settings.seed)
    whole = [GraphPoint(tensor, tuple(tensor.shape), 1) for tensor in inputs]
    others = {
        name: points for name, points in sources.items() if points and not (own and name in apart)
    }
    joint = {
        name: [replace(one, size=1, steps=0) for one in points] for name, points in others.items()
    }
    for end, points in ((own, apart), (whole, joint)):
        if end and points:
            tensors = [
                point.gather(point.at.detach()) for point in end if isinstance(point.at, Tensor)
            ]
            lengths = torch.cat(tensors, dim=1).double().pow(2).sum(dim=1).sqrt().cpu().numpy()
            norms = _spectral_norms(end, points, False, output.detach(), settings)
            found |= {name: (one, lengths) for name, one in norms.items()}
    return found


def _independent_inputs(
    like: Tensor, inputs: Sequence[Tensor], heads: GraphPoints, seed: int
) -> list[GraphPoint]:
    """The inputs, examples in the first dimension, if none reaches another's rows at the heads; else none."""
    if not heads or not inputs or any(tensor.numel() % heads[0].size for tensor in inputs):
        return []
    tails = [GraphPoint(tensor, tuple(tensor.shape), heads[0].size) for tensor in inputs]
    pull = functools.partial(Jacobian(heads, tails, like).pull, heads, tails)
    return tails if examples_independent(pull, heads, like, seed) else []


def examples_independent(
    product: Callable[[Tensor], list[Tensor]], points: GraphPoints, like: Tensor, seed: int
) -> bool:
    """Whether a linear product sends what each example has at the points to that example alone."""
    size = points[0].size
    probe = ProbeStream(
        size * (1 + _each(points)), seed=seed, dtype=like.dtype, device=like.device
    ).draw()
    probes = layer_uses.probe_examples(product, probe[size:].view(size, -1), probe[:size])
    return all(
        layer_uses.in_proportion(whole, shared, factors)
        for wholes, some, factors in probes
        for whole, shared in zip(wholes, some, strict=True)
    )


def _spectral_norms(
    end: GraphPoints,
    layers: dict[str, list[GraphPoint]],
    from_output: bool,
    like: Tensor,
    settings: LanczosSettings,
) -> dict[str, SingularValues]:
    """The norm of the derivative between an end of the network and a layer's points, by layer and example.

    With few numbers at that end the unit vectors go to all layers at once, a pass for each.
    Otherwise every layer takes a Lanczos run of its own, for all examples in lockstep.
    """
    found: dict[str, SingularValues] = {}
    size = end[0].size
    numbers = _each(end)
    points = _flat(layers)
    jacobian = Jacobian(end, points, like) if from_output else Jacobian(points, end, like)
    out, back = (jacobian.pull, jacobian.push) if from_output else (jacobian.push, jacobian.pull)
    if numbers <= min(_MOST, max(_FEW, _PASSES_PER_LAYER * len(layers))):
        held = _each(points) * numbers * size * like.element_size()
        for group in (
            [layers] if held <= _BYTES_AT_ONCE else [{name: layers[name]} for name in layers]
        ):
            images = iter(_images_of_units(end, _flat(group), out, like))
            for name in group:
                columns = torch.cat([next(images) for _ in group[name]], dim=-1)
                found[name] = exact_norms(columns.transpose(0, 1))
        return found
    looser = replace(settings, tolerance=min(_LOOSER * settings.tolerance, _LOOSEST))
    for name, points in layers.items():
        push = _joined(out, end, points)
        pull = _joined(back, points, end)
        found[name] = iterated_norms(
            BatchedMap(size, numbers, _each(points), push, pull), like, looser
        )
    return found


def _joined(product: Product, start: GraphPoints, end: GraphPoints) -> Callable[[Tensor], Tensor]:
    return lambda vectors: torch.cat(product(start, end, vectors), dim=-1)


def iterated_norms(maps: BatchedMap, like: Tensor, settings: LanczosSettings) -> SingularValues:
    return largest_singular_values(maps, **settings.options, dtype=like.dtype, device=like.device)


def _images_of_units(
    end: GraphPoints, points: GraphPoints, out: Product, like: Tensor
) -> list[Tensor]:
    """The image of every unit vector at every point: (units, examples, numbers of each)."""
    count = _each(end)
    size = end[0].size
    unit = torch.eye(count, dtype=like.dtype, device=like.device)
    units = unit.unsqueeze(1).expand(count, size, count)  # the same one in all examples at once
    # One batched pass where its calls cost more than its arithmetic.
    if _each(points) * count * size <= _NUMBERS_AT_ONCE:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "error"
                )  # a missing batching rule is only a warning, and slow
                return out(end, points, units)
        except (RuntimeError, UserWarning):
            pass
    sent = [out(end, points, unit) for unit in units]
    return [torch.stack(pieces) for pieces in zip(*sent, strict=True)]


def exact_norms(matrices: Tensor) -> SingularValues:
    """Spectral norms of matrices (examples, …, …), by the smaller of their two Gram matrices in fp64."""
    _, rows, columns = matrices.shape
    tops = []
    for part in matrices.split(max(1, _NUMBERS_AT_ONCE // max(1, rows * columns))):
        # Scaled, so that squares stay within the range of doubles.
        scales = part.double().abs().amax(dim=(1, 2), keepdim=True)
        usable = scales.isfinite() & (scales > 0)
        scaled = torch.where(usable, part.double() / scales, 0.0)
        gram = scaled @ scaled.mT if rows <= columns else scaled.mT @ scaled
        top = torch.linalg.eigvalsh(gram)[:, -1].clamp(min=0).sqrt()
        tops.append(torch.where(scales.isfinite()[:, 0, 0], top * scales[:, 0, 0], math.inf))
    values = torch.cat(tops).cpu().numpy()
    finite = bool(np.isfinite(values).all())
    reason = "exact up to rounding" if finite else krylov.NOT_FINITE
    errors = 8 * float(torch.finfo(matrices.dtype).eps) * values
    return SingularValues(values, errors, finite, reason, min(rows, columns))
