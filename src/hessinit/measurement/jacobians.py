"""Spectral norms of the Jacobians before and after every layer, example by example.

The autograd graph of one more evaluation, with inputs that can be differentiated by, tells where each weight
is used, which activation follows it, and which numbers belong to which example.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from hessinit.curvature import layer_uses
from hessinit.curvature.evaluation import Evaluation
from hessinit.curvature.gram import KnownCall, find_layouts
from hessinit.curvature.probes import ProbeStream
from hessinit.curvature.singular_values import BatchedMap, SingularValues, largest_singular_values
from hessinit.problem.batches import map_tensors
from hessinit.problem.determinism import check_no_reentrant_checkpoints

if TYPE_CHECKING:
    from hessinit.curvature.engines import LanczosSettings

# Unit vectors are shared by all layers, Lanczos takes about this many passes for each of them.
_PASSES_PER_LAYER = 16
_FEW, _MOST = 64, 256
# The images of the unit vectors are held for so many layers at a time that they take about this many bytes.
_BYTES_AT_ONCE = 2**27
_NUMBERS_AT_ONCE = 2**22
# All examples wait for the slowest: a digit less in the worst of them halves the passes, the others have it.
_LOOSER, _LOOSEST = 10, 0.05

# Elementwise nodes of one input, and the names of these activations.
ACTIVATIONS = {
    "CeluBackward0": "celu", "EluBackward0": "elu", "ErfBackward0": "erf", "GeluBackward0": "gelu",
    "HardshrinkBackward0": "hardshrink", "HardsigmoidBackward0": "hardsigmoid",
    "HardswishBackward0": "hardswish", "HardtanhBackward0": "hardtanh", "LeakyReluBackward0": "leaky_relu",
    "LogSigmoidBackward0": "logsigmoid", "MishBackward0": "mish", "PreluKernelBackward0": "prelu",
    "ReluBackward0": "relu", "RreluWithNoiseBackward0": "rrelu", "SigmoidBackward0": "sigmoid",
    "SiluBackward0": "silu", "SinBackward0": "sin", "SoftplusBackward0": "softplus",
    "SoftshrinkBackward0": "softshrink", "TanhBackward0": "tanh", "ThresholdBackward0": "threshold",
}  # fmt: skip
# Nodes that only rearrange their input.
REARRANGING = {
    "AliasBackward0", "CloneBackward0", "ContiguousBackward0", "PermuteBackward0", "ReshapeAliasBackward0",
    "SqueezeBackward0", "SqueezeBackward1", "TBackward0", "TransposeBackward0", "TransposeBackward1",
    "UnsafeViewBackward0", "UnsqueezeBackward0", "ViewBackward0",
}  # fmt: skip


# --- Where the forward uses each weight, and what follows -------------------------------------------------


def activation_kind(node: layer_uses.Node) -> str | None:
    """The name of an activation's node; None for any other node.

    Some in-place activations have nodes of their own: `LeakyReluBackward1` beside `LeakyReluBackward0`.
    """
    return ACTIVATIONS.get(type(node).__name__.rstrip("0123456789") + "0")


class Consumers:
    """The consumers of each node's result, over all the nodes behind `output`."""

    def __init__(self, output: Tensor) -> None:
        self.of: dict[layer_uses.Node, list[layer_uses.Node]] = {}
        waiting: list[layer_uses.Node] = [output.grad_fn]
        seen = {output.grad_fn}
        while waiting:
            node = waiting.pop()
            for source, _ in node.next_functions:
                if source is None:
                    continue
                self.of.setdefault(source, []).append(node)
                if source not in seen:
                    seen.add(source)
                    waiting.append(source)

    def activation_after(self, node: layer_uses.Node) -> layer_uses.Node | None:
        """The elementwise activation that alone consumes the node's result, or None.

        Rearranging and the addition of a bias are looked through; anything else in between ends the search.
        """
        while True:
            found = self.of.get(node, [])
            if len(found) != 1:
                return None
            if activation_kind(found[0]) is not None:
                # PReLU's slope, say, is not its input.
                return found[0] if found[0].next_functions[0][0] is node else None
            kind = type(found[0]).__name__
            if kind not in REARRANGING and not (kind == "AddBackward0" and _adds_a_bias(found[0], node)):
                return None
            node = found[0]


def _adds_a_bias(addition: layer_uses.Node, node: layer_uses.Node) -> bool:
    """Whether the other summand is a constant or a weight, not something that the forward computed."""
    others = [source for source, _ in addition.next_functions if source is not node]
    if addition._saved_alpha != 1:
        return False
    return all(source is None or type(source).__name__ == "AccumulateGrad" for source in others)


@dataclass(frozen=True)
class NetworkInput:
    """A tensor that the network starts from: a floating input, or an embedding's result for its tokens."""

    tensor: Tensor
    looked_up: bool


@dataclass(frozen=True)
class TracedOutput:
    """The output with its graph, and the network's inputs in it; `reason` says why there are none."""

    output: Tensor
    inputs: tuple[NetworkInput, ...]
    reason: str = ""


def trace_from_inputs(evaluation: Evaluation) -> TracedOutput:
    """Evaluate once more with inputs that can be differentiated by; costs one forward."""
    leaves: list[NetworkInput] = []

    def open_(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        leaf = tensor.detach().requires_grad_()
        leaves.append(NetworkInput(leaf, looked_up=False))
        return leaf

    batch = dataclasses.replace(evaluation.batch, inputs=map_tensors(open_, evaluation.batch.inputs))
    lookups = _Lookups()
    try:
        with lookups:
            output = evaluation.problem.output(batch)
    except Exception as failure:  # the same forward ran before: it cannot take inputs that require gradients
        reason = f"the forward fails on inputs that require gradients ({type(failure).__name__})"
        return TracedOutput(evaluation.output, (), reason)
    check_no_reentrant_checkpoints(output)
    inputs = (*leaves, *(NetworkInput(tensor, looked_up=True) for tensor in lookups.found))
    reason = "" if inputs else "the network has neither floating inputs nor embeddings to start from"
    return TracedOutput(output, inputs, reason)


class _Lookups(TorchFunctionMode):
    """Keeps the result of every embedding, also of one whose weight is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not F.embedding:
            return result
        self.found.append(result if result.requires_grad else result.detach().requires_grad_())
        return self.found[-1].clone()  # the forward may go on in place


@dataclass(frozen=True)
class LayerUse:
    """One use of a weight: `after` is the edge behind the activation, or behind the call where none follows.

    `source` is the edge of the call's input (None for tokens and constants). `time_first` and
    `after_time_first` say how the rows of the call, and of the activation's result, belong to the examples.
    """

    call: layer_uses.Call
    source: GradientEdge | None
    node: layer_uses.Node
    activation: layer_uses.Node | None
    after: GradientEdge
    time_first: bool = False
    after_time_first: bool = False


@dataclass(frozen=True)
class LayerUses:
    """All uses of a weight, for `size` examples that are independent behind it (1: the whole batch)."""

    name: str
    uses: tuple[LayerUse, ...]
    size: int


def read_uses(
    output: Tensor, uses: dict[str, list[layer_uses.Use]], leaves: dict[str, Tensor], seed: int
) -> tuple[list[LayerUses], dict[str, str]]:
    """The layers whose every use is a known call; for the others, why not."""
    consumers, size = Consumers(output), output.shape[0] if output.ndim else 1
    reasons: dict[str, str] = {}
    found: dict[str, list[LayerUse]] = {}
    for name, ones in uses.items():
        calls = [layer_uses.read_call(use, leaves[name]) for use in ones]
        unknown = [use.kind for use, call in zip(ones, calls, strict=True) if call is None]
        if not ones:
            reasons[name] = "the forward does not use this weight"
        elif unknown:
            reasons[name] = (
                f"the weight goes into {unknown[0]}, none of the known uses (dense, convolution, embedding)"
            )
        else:
            known = [(use, call) for use, call in zip(ones, calls, strict=True) if call is not None]
            found[name] = [_read(use, call, consumers) for use, call in known]
    return _with_rows(output, found, size, seed), reasons


def _read(use: layer_uses.Use, call: layer_uses.Call, consumers: Consumers) -> LayerUse:
    source = None
    if not isinstance(call, layer_uses.EmbeddingCall):
        # addmm(bias, inputs, weight), mm(inputs, weight), convolution(inputs, weight, bias)
        node, number = use.node.next_functions[1 if use.kind == "AddmmBackward0" else 0]
        source = None if node is None else GradientEdge(node, number)
    activation = consumers.activation_after(use.node)
    if activation is not None and not _keeps_lengths(use.node, activation, call):
        activation = None
    return LayerUse(call, source, use.node, activation, GradientEdge(activation or use.node, 0))


def _keeps_lengths(node: layer_uses.Node, activation: layer_uses.Node, call: layer_uses.Call) -> bool:
    """Whether the activation gets the call's own numbers: a sum on the way may repeat or scale them."""
    if math.prod(shape_behind(activation)) != math.prod(call.output_shape):
        return False
    between = activation.next_functions[0][0]
    while between is not node:
        if getattr(between, "_saved_alpha", 1) != 1:
            return False
        sources = [source for source, _ in between.next_functions if source is not None]
        between = next(source for source in sources if type(source).__name__ != "AccumulateGrad")
    return True


def shape_behind(node: layer_uses.Node, number: int = 0) -> tuple[int, ...]:
    """The shape of a node's result in the forward."""
    if type(node).__name__ == "AccumulateGrad":
        return tuple(node.variable.shape)
    return tuple(node._input_metadata[number].shape)


def _with_rows(output: Tensor, found: dict[str, list[LayerUse]], size: int, seed: int) -> list[LayerUses]:
    """Which rows belong to which example, at the call and behind its activation."""
    apart = {
        name: size > 1 and all(use.call.rows % size == 0 for use in uses) for name, uses in found.items()
    }
    flat = [(name, use) for name, uses in found.items() if apart[name] for use in uses]
    calls = [KnownCall(name, use.call, GradientEdge(use.node, 0)) for name, use in flat]
    behind = [KnownCall(name, use.call, use.after) for name, use in flat]
    orders = find_layouts(output, [*calls, *behind], seed) if calls else []
    layers: dict[str, list[LayerUse]] = {name: [] for name in found}
    for (name, use), order, after in zip(flat, orders[: len(flat)], orders[len(flat) :], strict=True):
        if order is None or after is None:
            apart[name] = False
        else:
            layers[name].append(dataclasses.replace(use, time_first=order, after_time_first=after))
    return [
        LayerUses(name, tuple(layers[name]), size) if apart[name] else LayerUses(name, tuple(uses), 1)
        for name, uses in found.items()
    ]


# --- Derivatives between places of the graph, example by example ------------------------------------------


@dataclass(frozen=True, eq=False)
class GraphPoint:
    """A tensor of the forward, or the edge that stands for it, whose numbers belong to `size` examples.

    They come example by example or, with `steps`, step by step with all examples in each (time first). The
    arguments of `gather` and `scatter` may be stacks, with one more dimension in front.
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


def gather_all(places: GraphPoints, tensors: Sequence[Tensor]) -> Tensor:
    """The numbers at several places, side by side: (examples, numbers of each)."""
    pieces = [place.gather(tensor) for place, tensor in zip(places, tensors, strict=True)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)


def scatter_all(places: GraphPoints, rows: Tensor) -> list[Tensor]:
    """The reverse of `gather_all`."""
    pieces = rows.split([place.each for place in places], dim=-1)
    return [place.scatter(part) for place, part in zip(places, pieces, strict=True)]


class Jacobian:
    """Products with the derivative of some places (`heads`) by earlier ones (`tails`) of the same graph.

    Forward products differentiate the backward product by its own argument, in which it is linear: that works
    wherever two derivatives do, and one graph serves all places. Vectors are by example; stacks of them go
    in one batched pass.
    """

    def __init__(self, heads: GraphPoints, tails: GraphPoints, like: Tensor) -> None:
        self.like = like
        self._heads, self._tails = list(heads), list(tails)
        self._adjoint: tuple[list[Tensor], list[Tensor | None]] | None = None

    def pull(self, heads: GraphPoints, tails: GraphPoints, vectors: Tensor) -> list[Tensor]:
        """The transpose times cotangents of some heads, at some tails."""
        outputs, inputs = [head.at for head in heads], [tail.at for tail in tails]
        found = _gradients(outputs, inputs, scatter_all(heads, vectors), vectors.ndim > 2)
        return self._filled(found, tails, vectors)

    def push(self, tails: GraphPoints, heads: GraphPoints, vectors: Tensor) -> list[Tensor]:
        """The derivative times tangents of some tails, at some heads."""
        placeholders, adjoint = self._linear_adjoint()
        pairs = [
            (adjoint[self._tails.index(tail)], tangent)
            for tail, tangent in zip(tails, scatter_all(tails, vectors), strict=True)
        ]
        reached = [(one, tangent) for one, tangent in pairs if one is not None and one.requires_grad]
        found: list[Tensor | None] = [None] * len(heads)
        if reached:
            outputs, tangents = zip(*reached, strict=True)
            inputs = [placeholders[self._heads.index(head)] for head in heads]
            found = _gradients(outputs, inputs, tangents, vectors.ndim > 2)
        return self._filled(found, heads, vectors)

    def _filled(self, found: Sequence[Tensor | None], places: GraphPoints, vectors: Tensor) -> list[Tensor]:
        """Zero where nothing arrives."""
        stack = vectors.shape[:-2]
        return [
            self.like.new_zeros((*stack, *place.shape)) if one is None else one.detach()
            for place, one in zip(places, found, strict=True)
        ]

    def _linear_adjoint(self) -> tuple[list[Tensor], list[Tensor | None]]:
        if self._adjoint is None:
            placeholders = [self.like.new_zeros(head.shape).requires_grad_() for head in self._heads]
            outputs, inputs = [head.at for head in self._heads], [tail.at for tail in self._tails]
            found = _gradients(outputs, inputs, placeholders, False, create_graph=True)
            self._adjoint = placeholders, found
        return self._adjoint


def _gradients(
    outputs: Any, inputs: Any, vectors: Sequence[Tensor], batched: bool, create_graph: bool = False
) -> list[Tensor | None]:
    options: dict[str, bool] = {"retain_graph": True, "create_graph": create_graph, "allow_unused": True}
    return list(torch.autograd.grad(outputs, inputs, vectors, is_grads_batched=batched, **options))


@dataclass(frozen=True)
class JacobianMap:
    """From one end of the network (its output, or its inputs) to the places of `layers`, and back."""

    jacobian: Jacobian
    end: tuple[GraphPoint, ...]
    from_output: bool
    layers: dict[str, tuple[GraphPoint, ...]]

    @property
    def examples(self) -> int:
        return self.end[0].size

    @property
    def each(self) -> int:
        """How many numbers an example has at the end."""
        return _each(self.end)

    @property
    def end_lengths(self) -> Tensor:
        """‖x‖ of every example at the network's inputs, for a map from there."""
        pieces = [place.gather(place.at.detach()) for place in self.end if isinstance(place.at, Tensor)]
        squares = sum(part.double().pow(2).sum(dim=1) for part in pieces)
        assert isinstance(squares, Tensor)
        return squares.sqrt()

    def out(self, places: GraphPoints, vectors: Tensor) -> list[Tensor]:
        """From the end to the places."""
        send = self.jacobian.pull if self.from_output else self.jacobian.push
        return send(self.end, places, vectors)

    def back(self, places: GraphPoints, vectors: Tensor) -> Tensor:
        """From the places to the end: the transpose of `out`."""
        send = self.jacobian.push if self.from_output else self.jacobian.pull
        return gather_all(self.end, send(places, self.end, vectors))


def backward_maps(traced: TracedOutput, layers: Sequence[LayerUses]) -> list[JacobianMap]:
    """From the output to each layer's result: one map for independent examples, one for whole batches."""
    output, maps = traced.output, []
    for size in sorted({layer.size for layer in layers}):
        end = GraphPoint(output, tuple(output.shape), size)
        places = {layer.name: _output_points(layer) for layer in layers if layer.size == size}
        tails = [place for chosen in places.values() for place in chosen]
        maps.append(JacobianMap(Jacobian([end], tails, output.detach()), (end,), True, places))
    return maps


def _output_points(layer: LayerUses) -> tuple[GraphPoint, ...]:
    orders = [use.call.rows // layer.size if use.after_time_first else 0 for use in layer.uses]
    return tuple(
        GraphPoint(use.after, shape_behind(use.after.node), layer.size, steps)
        for use, steps in zip(layer.uses, orders, strict=True)
    )


def _input_points(layer: LayerUses, size: int) -> tuple[GraphPoint, ...]:
    found = []
    for use in layer.uses:
        if use.source is not None:
            steps = use.call.rows // size if use.time_first and size > 1 else 0
            shape = shape_behind(use.source.node, use.source.output_nr)
            found.append(GraphPoint(use.source, shape, size, steps))
    return tuple(found)


def forward_maps(traced: TracedOutput, layers: Sequence[LayerUses], seed: int) -> list[JacobianMap]:
    """From the network's inputs to each layer's; layers that get only tokens or constants are left out.

    Layers that see the inputs in the same way share a map. An input that is the same for all examples, as a
    table of positions, counts as a bias: the derivative is by the examples' own inputs.
    """
    served: dict[tuple[tuple[int, int], ...], list[LayerUses]] = {}
    for layer, orders in zip(layers, _orders(traced, layers, seed), strict=True):
        if _input_points(layer, 1):
            served.setdefault(orders, []).append(layer)
    maps = []
    for orders, chosen in served.items():
        size = chosen[0].size if orders else 1
        end = tuple(
            GraphPoint(traced.inputs[index].tensor, tuple(traced.inputs[index].tensor.shape), size, steps)
            for index, steps in orders or [(index, 0) for index in range(len(traced.inputs))]
        )
        places = {layer.name: _input_points(layer, size) for layer in chosen}
        heads = [place for ones in places.values() for place in ones]
        maps.append(JacobianMap(Jacobian(heads, end, traced.output.detach()), end, False, places))
    return maps


def _orders(
    traced: TracedOutput, layers: Sequence[LayerUses], seed: int
) -> list[tuple[tuple[int, int], ...]]:
    """For every layer, the inputs that count and their steps; () where the batch is one example."""
    apart = [layer for layer in layers if layer.size > 1]
    found: dict[str, tuple[tuple[int, int], ...]] = {layer.name: () for layer in layers}
    # All layers in the same passes; each on its own only where that finds examples that depend on others.
    joint = _fitting(traced, apart, seed)
    whole = all(joint)
    for layer in apart:
        fitting = joint if whole else _fitting(traced, [layer], seed)
        needed = [orders for orders, one in zip(fitting, traced.inputs, strict=True) if not one.looked_up]
        if all(needed):
            found[layer.name] = tuple((index, orders[0]) for index, orders in enumerate(fitting) if orders)
    return [found[layer.name] for layer in layers]


def _fitting(traced: TracedOutput, layers: Sequence[LayerUses], seed: int) -> list[list[int]]:
    """For every input, the orders of its numbers in which no example depends on another one's."""
    places = [place for layer in layers for place in _input_points(layer, layer.size)]
    if not places:
        return [[0] for _ in traced.inputs]
    size, like = layers[0].size, traced.output.detach()
    tensors = [one.tensor for one in traced.inputs]
    fitting = [_possible(tensor, size) for tensor in tensors]
    whole = [GraphPoint(tensor, tuple(tensor.shape), 1) for tensor in tensors]
    jacobian = Jacobian(places, whole, like)
    numbers = size * sum(place.each for place in places)
    probe = ProbeStream(size + numbers, seed=seed, dtype=like.dtype, device=like.device).draw()
    for bases, gradients, factors in layer_uses.probe_examples(
        lambda cotangents: jacobian.pull(places, whole, cotangents), probe[size:].view(size, -1), probe[:size]
    ):
        for orders, tensor, base, gradient in zip(fitting, tensors, bases, gradients, strict=True):
            gathers = {steps: GraphPoint(tensor, tuple(tensor.shape), size, steps).gather for steps in orders}
            orders[:] = [
                steps
                for steps, gather in gathers.items()
                if layer_uses.in_proportion(gather(base), gather(gradient), factors)
            ]
    return fitting


def _possible(tensor: Tensor, size: int) -> list[int]:
    """Steps of the orders that the shape allows: 0 for example by example."""
    shape = tensor.shape
    orders = [0] if tensor.numel() % size == 0 else []
    if tensor.ndim > 1 and shape[1] == size and shape[0] > 1:
        orders.append(int(shape[0]))
    elif tensor.ndim and shape[0] > size and shape[0] % size == 0:
        orders.append(int(shape[0]) // size)
    return orders


# --- Norms: by few unit vectors, exact, or by Lanczos -----------------------------------------------------


def spectral_norms(maps: JacobianMap, settings: LanczosSettings) -> dict[str, SingularValues]:
    """The norm of the derivative between the end of the map and a layer's places, by layer and example.

    With few numbers at that end the unit vectors go to all layers at once, a pass for each. Otherwise every
    layer takes a Lanczos run of its own, for all examples in lockstep. No Jacobian of a large layer and a
    large end is ever formed.
    """
    found: dict[str, SingularValues] = {}
    layers = maps.layers
    if maps.each <= min(_MOST, max(_FEW, _PASSES_PER_LAYER * len(layers))):
        for group in _groups(maps):
            for name, columns in zip(group, _columns(maps, [layers[name] for name in group]), strict=True):
                found[name] = exact_norms(columns.transpose(0, 1))
        return found
    like = maps.jacobian.like
    looser = dataclasses.replace(settings, tolerance=min(_LOOSER * settings.tolerance, _LOOSEST))
    for name, places in layers.items():

        def push(vectors: Tensor, places: GraphPoints = places) -> Tensor:
            return gather_all(places, maps.out(places, vectors))

        batched = BatchedMap(
            maps.examples, maps.each, _each(places), push, functools.partial(maps.back, places)
        )
        found[name] = largest_singular_values(batched, dtype=like.dtype, device=like.device, **looser.options)
    return found


def _each(places: GraphPoints) -> int:
    return sum(place.each for place in places)


def _groups(maps: JacobianMap) -> Iterator[list[str]]:
    per_number = maps.each * maps.examples * maps.jacobian.like.element_size()
    group: list[str] = []
    held = 0
    for name, places in maps.layers.items():
        needed = _each(places) * per_number
        if group and held + needed > _BYTES_AT_ONCE:
            yield group
            group, held = [], 0
        group.append(name)
        held += needed
    if group:
        yield group


def _columns(maps: JacobianMap, layers: Sequence[GraphPoints]) -> list[Tensor]:
    """The image of every unit vector at every layer: (units, examples, numbers of each)."""
    like, count, size = maps.jacobian.like, maps.each, maps.examples
    unit = torch.eye(count, dtype=like.dtype, device=like.device)
    units = unit.unsqueeze(1).expand(count, size, count)  # the same one in all examples at once
    places = [place for one in layers for place in one]
    # One batched pass where its calls cost more than its arithmetic.
    if _each(places) * count * size <= _NUMBERS_AT_ONCE:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # a missing batching rule is only a warning, and slow
                return _by_layer(layers, maps.out(places, units))
        except (RuntimeError, UserWarning):
            pass
    sent = [_by_layer(layers, maps.out(places, unit)) for unit in units]
    return [torch.stack(pieces) for pieces in zip(*sent, strict=True)]


def _by_layer(layers: Sequence[GraphPoints], found: Sequence[Tensor]) -> list[Tensor]:
    pieces = iter(found)
    return [gather_all(places, [next(pieces) for _ in places]) for places in layers]


def exact_norms(matrices: Tensor) -> SingularValues:
    """Spectral norms of matrices (examples, …, …), by the smaller of their two Gram matrices in fp64.

    >>> [round(float(value), 12) for value in exact_norms(torch.tensor([[[3.0, 4.0]], [[0.0, 0.0]]])).values]
    [5.0, 0.0]
    """
    size, rows, columns = matrices.shape
    values = np.empty(size)
    step = max(1, _NUMBERS_AT_ONCE // max(1, rows * columns))
    for first in range(0, size, step):
        part = matrices[first : first + step].double()
        # Scaled, so that squares stay within the range of doubles.
        scales = part.abs().amax(dim=(1, 2), keepdim=True)
        finite = torch.isfinite(scales)
        part = torch.where(finite & (scales > 0), part / scales, torch.zeros_like(part))
        gram = part @ part.mT if rows <= columns else part.mT @ part
        top = torch.linalg.eigvalsh(gram)[:, -1].clamp(min=0).sqrt()
        found = torch.where(finite, top[:, None, None] * scales, torch.full_like(scales, math.inf))
        values[first : first + step] = found[:, 0, 0].cpu().numpy()
    all_finite = bool(np.isfinite(values).all())
    overflow = "a product was not finite (inf or nan); use torch.float64"
    reason = "exact up to rounding" if all_finite else overflow
    errors = 8 * float(torch.finfo(matrices.dtype).eps) * values
    return SingularValues(values, errors, all_finite, reason, min(rows, columns))
