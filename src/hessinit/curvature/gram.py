"""The Gram engine: every layer's Gauss-Newton curvature from a few shared backward passes.

With `H_z = S Sᵀ` in every example, a layer's Gauss-Newton matrix is `VᵀV`, where a row of `V` is
the gradient of one column of S in one example: the layer's input times the gradient at its output,
which one backward pass per column brings to all layers. The Gram matrix `V Vᵀ` (examples × outputs)
has the same nonzero eigenvalues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hessinit.curvature import layer_uses, operators, probes
from hessinit.curvature.evaluation import Evaluation, LossFactor
from hessinit.problem.determinism import agree

_LARGEST_MATRIX = 384
# Unfolded patches are formed for so many numbers at a time, about what fits into a cache.
_NUMBERS_AT_ONCE = 2**20
_MOST_WRITTEN = 2**16


def rows_by_example(rows: Tensor, examples: int, time_first: bool) -> Tensor:
    """A call's output as (examples, outputs per example)."""
    if time_first:
        rows = rows.view(rows.shape[0] // examples, examples, *rows.shape[1:]).transpose(0, 1)
    return rows.reshape(examples, -1)


class LayerGram(operators.LinearOperator):
    """`V Vᵀ` of one layer, by its products; `pull` after `push` is `VᵀV`, the Gauss-Newton block."""

    def __init__(
        self, traced: Sequence[CallSignals], weight_shape: tuple[int, ...], scale: float
    ) -> None:
        self.traced = list(traced)
        self.weight_shape = weight_shape
        self.scale = scale
        first = self.traced[0].signals
        self.examples = first.shape[0]
        self.columns = first.shape[1]
        self.shape = (self.examples * self.columns,) * 2
        self.dtype = first.dtype
        self.device = first.device
        self.weights = int(torch.Size(weight_shape).numel())
        self.matrix: Tensor | None = None
        self._inner: Tensor | None = None
        call = self.traced[0].call if len(self.traced) == 1 else None
        if (
            isinstance(call, layer_uses.DenseCall)
            and call.rows == self.examples <= 2 * call.inputs.shape[1]
        ):
            self._inner = call.inputs @ call.inputs.T  # cheaper than the weight
        if self._inner is not None and self.shape[0] <= _LARGEST_MATRIX:
            # So small that the calls of a product cost more than the arithmetic: `V Vᵀ` itself.
            flat = first.reshape(self.shape[0], -1)
            blocks = (flat @ flat.T).view(self.examples, self.columns, self.examples, self.columns)
            blocks.mul_(self._inner.view(self.examples, 1, self.examples, 1))
            self.matrix = blocks.view(self.shape)

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
        pulled = [one.call.pull(one.rows(torch.bmm(mixed, one.signals))) for one in self.traced]
        return operators.add_up(pulled)

    def push(self, weight: Tensor) -> Tensor:
        found = []
        for one in self.traced:
            rows = rows_by_example(one.call.push(weight), self.examples, one.time_first)
            # A row vector times the transpose: the same sum as signals @ column, by a faster CPU
            # kernel.
            found.append(torch.bmm(rows.unsqueeze(1), one.signals.mT).view(-1))
        return operators.add_up(found)


class WrittenGram(LayerGram):
    """A `LayerGram` that stores `V`: for layers with fewer weights than outputs, as first convolutions."""

    def __init__(
        self, call: layer_uses.ConvolutionCall, size: int, like: Tensor, scale: float
    ) -> None:
        self.weight_shape = tuple(call.weight.shape)
        self.weights = call.weight.numel()
        self.scale = scale
        rows = like.shape[0] * call.weight.shape[0], call.weight[0].numel()
        self._by_example = like.new_empty(size, *rows)
        self.factor = self._by_example.view(-1, self.weights)
        self.matrix = None
        self._arrived: list[Tensor] = []
        self.shape = (len(self.factor),) * 2
        self.dtype = like.dtype
        self.device = like.device

    def receive(self, column: int, part: slice, gradient: Tensor) -> None:
        self._arrived.append(gradient)

    def add(self, call: layer_uses.Call, part: slice) -> None:
        """Patches times signals, for all columns of a few examples at a time."""
        assert isinstance(call, layer_uses.ConvolutionCall)
        gradients = self._arrived
        self._arrived = []
        step = max(1, _NUMBERS_AT_ONCE // (call.weight[0].numel() * gradients[0][0, 0].numel()))
        for first in range(0, call.rows, step):
            some = slice(first, min(first + step, call.rows))
            kernel = tuple(call.weight.shape[2:])
            dilation = tuple(call.dilation)
            patches = F.unfold(
                call.inputs[some], kernel, dilation, tuple(call.padding), tuple(call.stride)
            )
            signals = torch.stack([column[some].flatten(2) for column in gradients], dim=1).flatten(
                1, 2
            )
            place = self._by_example[part.start + some.start : part.start + some.stop]
            torch.bmm(signals, patches.transpose(1, 2), out=place)

    def _product(self, vector: Tensor) -> Tensor:
        return torch.mv(self.factor, torch.mv(self.factor.T, vector))

    def pull(self, vector: Tensor) -> Tensor:
        return torch.mv(self.factor.T, vector).view(self.weight_shape)

    def push(self, weight: Tensor) -> Tensor:
        return torch.mv(self.factor, weight.reshape(-1))


class SumOfGrams(operators.LinearOperator):
    def __init__(self, grams: Sequence[LayerGram]) -> None:
        matrices = [gram.matrix for gram in grams if gram.matrix is not None]
        self._matrix = torch.stack(matrices).sum(0) if matrices else None
        self._others = [gram for gram in grams if gram.matrix is None]
        self.shape = grams[0].shape
        self.dtype = grams[0].dtype
        self.device = grams[0].device

    def _product(self, vector: Tensor) -> Tensor:
        found = [gram._product(vector) for gram in self._others]
        if self._matrix is not None:
            found.append(torch.mv(self._matrix, vector))
        return operators.add_up(found)


@dataclass(frozen=True)
class KnownCall:
    """A leaf, one of its calls, and the edge that the gradient of the call's output takes."""

    name: str
    call: layer_uses.Call
    edge: GradientEdge
    time_first: bool = False  # rows by position, not by example, as inside `nn.MultiheadAttention`


def known_calls(uses: layer_uses.Uses, leaves: dict[str, Tensor], size: int) -> list[KnownCall]:
    """The calls of the leaves whose every use is known, with the same number of rows for each example."""
    calls: list[KnownCall] = []
    for name, found in uses.items():
        known = [(use, layer_uses.read_call(use, leaves[name])) for use in found]
        if all(call is not None and call.rows % size == 0 for _, call in known):
            calls += [
                KnownCall(name, call, GradientEdge(use.node, 0)) for use, call in known if call
            ]
    return calls


def separable_calls(evaluation: Evaluation) -> list[KnownCall]:
    """The known calls of the leaves that no call mixes the examples for, with the layouts of their rows."""
    problem = evaluation.problem
    output = evaluation.output
    calls = known_calls(evaluation.uses, problem.leaves, output.shape[0])
    pairs = list(zip(calls, find_layouts(output, calls, problem.seed), strict=True))
    mixed = {one.name for one, layout in pairs if layout is None}
    return [replace(one, time_first=bool(layout)) for one, layout in pairs if one.name not in mixed]


def find_layouts(output: Tensor, calls: Sequence[KnownCall], seed: int) -> list[bool | None]:
    """Per call: rows by example (False), by position (True), or mixed (None)."""
    if not calls:
        return []
    size = output.shape[0]
    fitting = [[False, True] if one.call.rows > size > 1 else [False] for one in calls]
    stream = probes.ProbeStream(
        output.numel() + size, seed=seed, dtype=output.dtype, device=output.device
    )
    probe = stream.draw()
    for whole, shared, factors in layer_uses.probe_examples(
        lambda cotangent: backward(output, calls, cotangent),
        probe[size:].view_as(output),
        probe[:size],
    ):
        for one, orders, base, gradient in zip(calls, fitting, whole, shared, strict=True):
            first = base.reshape(one.call.rows, -1)
            second = gradient.reshape(one.call.rows, -1)
            for order in list(orders):
                expected, found = (rows_by_example(rows, size, order) for rows in (first, second))
                if not layer_uses.in_proportion(expected, found, factors):
                    orders.remove(order)
    return [orders[0] if orders else None for orders in fitting]


def backward(output: Tensor, calls: Sequence[KnownCall], cotangent: Tensor) -> list[Tensor]:
    """The gradient at the output of every call; zero where none arrives."""
    found: tuple[Tensor | None, ...] = torch.autograd.grad(
        output, [one.edge for one in calls], cotangent, retain_graph=True, allow_unused=True
    )
    pairs = zip(calls, found, strict=True)
    return [
        cotangent.new_zeros(one.call.output_shape) if grad is None else grad for one, grad in pairs
    ]


class CallSignals:
    """A call and the gradients that reach its output: (examples, columns, outputs per example)."""

    def __init__(self, one: KnownCall, size: int, like: Tensor) -> None:
        outputs = int(torch.Size(one.call.output_shape).numel()) // size
        self.time_first = one.time_first
        self._calls = list[layer_uses.Call]()
        self.signals = like.new_empty(size, like.shape[0], outputs)

    def add(self, call: layer_uses.Call, part: slice) -> None:
        self._calls.append(call)

    def receive(self, column: int, part: slice, gradient: Tensor) -> None:
        """What a column of the root sends to the call's output, in a part of the batch."""
        self.signals[part, column] = rows_by_example(
            gradient, part.stop - part.start, self.time_first
        )

    @cached_property
    def call(self) -> layer_uses.Call:
        calls = self._calls
        self._calls = []
        return calls[0].on(torch.cat([one.inputs for one in calls])) if len(calls) > 1 else calls[0]

    def rows(self, per_example: Tensor) -> Tensor:
        """(examples, 1, outputs per example) as the call's own output."""
        shape = self.call.output_shape
        if not self.time_first:
            return per_example.view(shape)
        return per_example.view(len(per_example), -1, *shape[1:]).transpose(0, 1).reshape(shape)


Collector = CallSignals | WrittenGram


def collector_for(one: KnownCall, size: int, like: Tensor, scale: float, uses: int) -> Collector:
    """Stores weight gradients where they are smaller and fast to compute, else signals."""
    call = one.call
    if isinstance(call, layer_uses.ConvolutionCall):
        outputs = int(torch.Size(call.output_shape).numel()) // size
        small = call.weight.numel() <= min(outputs, _MOST_WRITTEN)
        unfolds = call.inputs.ndim == 4 and not call.transposed and call.groups == 1  # by F.unfold
        if small and unfolds and uses == 1 and not one.time_first and call.rows == size:
            return WrittenGram(call, size, like, scale)
    return CallSignals(one, size, like)


# Signals of so many examples at a time take about this many bytes, or as many as the layers' own
# outputs.
BYTES_AT_ONCE = 2**25


def trace_grams(
    evaluation: Evaluation, root: LossFactor, *, split: bool = True
) -> dict[str, LayerGram]:
    """The Gram operators of all leaves whose every use is a known linear call.

    Costs a backward pass per column of the root. With `split`, large batches go through in pieces.
    """
    problem = evaluation.problem
    size = evaluation.output.shape[0]
    plan = separable_calls(evaluation)
    if not plan:
        return {}
    names = [one.name for one in plan]
    scale = root.scale * evaluation.weight
    collectors = [
        collector_for(one, size, root.columns, scale, names.count(one.name)) for one in plan
    ]
    step = _examples_at_once(plan, root, size)
    # Only rows by example can be split, and no frozen random draw.
    in_order = size == evaluation.batch.size and not any(one.time_first for one in plan)
    if split and step < size and in_order and not evaluation.drew:
        outlines = [_outline(one, size) for one in plan]
        # The graph of the whole batch must not stand beside those of the pieces: nothing may hold
        # on to it.
        del plan
        whole = evaluation.output.detach()
        evaluation.forget()
        pieces = [slice(first, min(first + step, size)) for first in range(0, size, step)]
        # A function for each piece: its graph goes before the next one comes.
        if not all(
            _gather_piece(evaluation, whole, root, one, outlines, collectors) for one in pieces
        ):
            return trace_grams(evaluation, root, split=False)
    else:
        _gather(evaluation.output, plan, root.columns, slice(0, size), collectors)
    grams: dict[str, LayerGram] = {}
    for name in dict.fromkeys(names):
        found = [
            collector for other, collector in zip(names, collectors, strict=True) if other == name
        ]
        signals = [one for one in found if isinstance(one, CallSignals)]
        shape = tuple(problem.leaves[name].shape)
        grams[name] = (
            found[0] if isinstance(found[0], WrittenGram) else LayerGram(signals, shape, scale)
        )
    return grams


def _examples_at_once(plan: Sequence[KnownCall], root: LossFactor, size: int) -> int:
    numbers = sum(int(torch.Size(one.call.output_shape).numel()) for one in plan)
    outputs = root.columns.element_size() * numbers
    device = root.columns.device
    room = max(BYTES_AT_ONCE, outputs)
    if device.type == "cuda":  # small pieces starve a GPU, and it has the room
        room = max(room, torch.cuda.get_device_properties(device).total_memory // 16)
    needed = outputs * root.columns.shape[0]
    return size if needed <= 2 * room else max(1, size * room // needed)


def _outline(one: KnownCall, size: int) -> tuple[tuple[object, ...], Tensor]:
    """Name, kind and shape of a call, and the length of each example's input.

    Outputs alone do not tell: a head of zeros gives the same ones whatever BatchNorm made of its
    input.
    """
    rows, *others = one.call.output_shape
    inputs = one.call.inputs if one.call.inputs.is_floating_point() else one.call.inputs.double()
    lengths = torch.linalg.vector_norm(inputs.reshape(size, -1), dim=1)
    return (one.name, type(one.call), rows // size, *others), lengths


def _gather_piece(
    evaluation: Evaluation,
    whole: Tensor,
    root: LossFactor,
    part: slice,
    outlines: Sequence[tuple[tuple[object, ...], Tensor]],
    collectors: Sequence[Collector],
) -> bool:
    """Gather the signals of a piece; False if the model treats it differently from the whole."""
    problem = evaluation.problem
    size = part.stop - part.start
    names = {kind[0] for kind, _ in outlines}
    try:
        output = problem.output(evaluation.batch.take(torch.arange(part.start, part.stop)))
    except Exception:
        return False  # the model needs the whole batch
    if output.shape != whole[part].shape or not agree(output, whole[part]):
        return False
    calls = known_calls(layer_uses.find_uses(output, problem.leaves), problem.leaves, size)
    plan = [one for one in calls if one.name in names]
    rounding = float(torch.finfo(whole.dtype).eps) ** 0.6  # as in `agree`
    found = [_outline(one, size) for one in plan]
    if [kind for kind, _ in found] != [kind for kind, _ in outlines]:
        return False
    for (_, lengths), (_, all_lengths) in zip(found, outlines, strict=True):
        expected = all_lengths[part]
        if not bool((lengths - expected).abs().max() <= rounding * expected.max()):
            return False
    _gather(output, plan, root.columns[:, part], part, collectors)
    return True


_DENSE = {"AddmmBackward0", "MmBackward0"}


def _gather(
    output: Tensor,
    plan: Sequence[KnownCall],
    columns: Tensor,
    part: slice,
    collectors: Sequence[Collector],
) -> None:
    edges = [one.edge for one in plan]
    kinds = {type(edge.node).__name__ for edge in edges}
    # All columns in one pass are faster for dense networks.
    batched = layer_uses.batched_grad(output, edges, columns) if kinds <= _DENSE else None
    for column, cotangent in enumerate(columns):
        if batched is not None and all(one is not None for one in batched):
            gradients = [one[column] for one in batched if one is not None]
        else:
            gradients = backward(output, plan, cotangent)
        for collector, gradient in zip(collectors, gradients, strict=True):
            collector.receive(column, part, gradient)
    for one, collector in zip(plan, collectors, strict=True):
        collector.add(one.call, part)
