"""The Gram engine's mathematics: every layer's Gauss-Newton curvature from shared backward passes.

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

from hessinit.curvature import layer_uses, operators
from hessinit.curvature.evaluation import Evaluation
from hessinit.curvature.layer_uses import LayerCall, rows_by_example
from hessinit.curvature.loss_hessian import LossFactor
from hessinit.problem.checks import agree


@dataclass(frozen=True)
class GramSizes:
    """How many numbers the Gram engine forms, stores or sends through at a time."""

    matrix: int = 384  # rows of a Gram matrix up to which it is formed: calls cost more than sums
    patches: int = 2**20  # unfolded at a time where they are large, about what fits into a cache
    written: int = 2**16  # weights up to which `V` itself is stored
    columns: int = 3  # of `V` that are written together, so that patches are read less often
    # Bytes of the signals of so many examples as are sent through at a time, or as many as the
    # outputs of the layers take.
    signal_bytes: int = 2**25


SIZES = GramSizes()


class LayerGram(operators.LinearOperator):
    """`V Vᵀ` of one layer by its products; `pull` after `push` is `VᵀV`, the Gauss-Newton block."""

    def __init__(
        self, signals: Sequence[CallSignals], weight_shape: tuple[int, ...], scale: float
    ) -> None:
        self.calls = list(signals)
        self.weight_shape = weight_shape
        self.scale = scale
        first = self.calls[0].signals
        self.examples = first.shape[0]
        self.columns = first.shape[1]
        super().__init__((self.examples * self.columns,) * 2, first)
        self.weights = int(torch.Size(weight_shape).numel())
        self.matrix: Tensor | None = None
        self._inner: Tensor | None = None
        call = self.calls[0].call if len(self.calls) == 1 else None
        if (
            isinstance(call, layer_uses.DenseCall)
            and call.rows == self.examples <= 2 * call.inputs.shape[1]
        ):
            self._inner = call.inputs @ call.inputs.T  # cheaper than the weight
        if self._inner is not None and self.shape[0] <= SIZES.matrix:
            flat = first.reshape(self.shape[0], -1)
            blocks = (flat @ flat.T).view(self.examples, self.columns, self.examples, self.columns)
            blocks.mul_(self._inner.view(self.examples, 1, self.examples, 1))
            self.matrix = blocks.view(self.shape)

    def _product(self, vector: Tensor) -> Tensor:
        if self.matrix is not None:
            return torch.mv(self.matrix, vector)
        if self._inner is None:
            return self.push(self.pull(vector))
        (call,) = self.calls
        mixed = torch.bmm(vector.view(self.examples, 1, self.columns), call.signals)
        moved = torch.mm(self._inner, mixed.squeeze(1))
        return torch.bmm(moved.unsqueeze(1), call.signals.mT).view(-1)

    def pull(self, vector: Tensor) -> Tensor:
        """`Vᵀ vector`: a change of the weight."""
        mixed = vector.view(self.examples, 1, self.columns)
        pulled = [call.call.pull(call.rows(torch.bmm(mixed, call.signals))) for call in self.calls]
        return operators.add_up(pulled)

    def push(self, weight: Tensor) -> Tensor:
        """`V weight`: the change of every example's outputs, in the columns of S."""
        pushed = []
        for call in self.calls:
            rows = rows_by_example(call.call.push(weight), self.examples, call.time_first)
            # A row vector times the transpose: the same sum as signals @ column, by a faster CPU
            # kernel.
            pushed.append(torch.bmm(rows.unsqueeze(1), call.signals.mT).view(-1))
        return operators.add_up(pushed)


class WrittenGram(LayerGram):
    """A `LayerGram` that stores `V`: for layers with fewer weights than outputs per example."""

    def __init__(
        self, call: layer_uses.ConvolutionCall, size: int, like: Tensor, scale: float
    ) -> None:
        self.weight_shape = tuple(call.weight.shape)
        self.weights = call.weight.numel()
        self.scale = scale
        self._columns = like.shape[0]
        rows = self._columns * call.weight.shape[0], call.weight[0].numel()
        self._by_example = like.new_empty(size, *rows)
        self.factor = self._by_example.view(-1, self.weights)
        self.matrix = None
        operators.LinearOperator.__init__(self, (len(self.factor),) * 2, like)

    def add(self, call: layer_uses.Call, part: slice) -> None:
        """Take the inputs of a part of the batch, of which all columns are received next."""
        assert isinstance(call, layer_uses.ConvolutionCall)
        self._call = call
        # The patches are kept for all columns where they take less than the columns' gradients.
        keeps = call.weight[0].numel() <= self._columns * call.weight.shape[0]
        numbers = call.weight[0].numel() * int(torch.Size(call.output_shape[2:]).numel())
        step = max(1, SIZES.patches // numbers)
        self._pieces = [slice(first, first + step) for first in range(0, call.rows, step)]
        self._patches = self._unfold(slice(0, call.rows)) if keeps else None
        self._received = list[Tensor]()

    def _unfold(self, piece: slice) -> Tensor:
        call = self._call
        return F.unfold(
            call.inputs[piece],
            tuple(call.weight.shape[2:]),
            tuple(call.dilation),
            tuple(call.padding),
            tuple(call.stride),
        ).transpose(1, 2)

    def receive(self, column: int, part: slice, gradient: Tensor) -> None:
        """Patches times signals: the rows of `V` for a few columns, in a part of the batch."""
        self._received.append(gradient.flatten(2))
        is_last = column + 1 == self._columns
        if len(self._received) < SIZES.columns and not is_last:
            return
        end = (column + 1) * gradient.shape[1]
        rows = slice(end - len(self._received) * gradient.shape[1], end)
        for piece in self._pieces:
            patches = self._unfold(piece) if self._patches is None else self._patches[piece]
            gradients = torch.cat([received[piece] for received in self._received], dim=1)
            self._by_example[part][piece, rows] = torch.bmm(gradients, patches)
        self._received.clear()
        if is_last:
            self._patches = None

    def _product(self, vector: Tensor) -> Tensor:
        return torch.mv(self.factor, torch.mv(self.factor.T, vector))

    def pull(self, vector: Tensor) -> Tensor:
        return torch.mv(self.factor.T, vector).view(self.weight_shape)

    def push(self, weight: Tensor) -> Tensor:
        return torch.mv(self.factor, weight.reshape(-1))


class SumOfGrams(operators.LinearOperator):
    """The sum of several layers' Gram matrices: that of all of them together."""

    def __init__(self, grams: Sequence[LayerGram]) -> None:
        super().__init__(grams[0].shape, grams[0])
        matrices = [gram.matrix for gram in grams if gram.matrix is not None]
        self._matrix = torch.stack(matrices).sum(0) if matrices else None
        self._unformed = [gram for gram in grams if gram.matrix is None]

    def _product(self, vector: Tensor) -> Tensor:
        products = [gram._product(vector) for gram in self._unformed]
        if self._matrix is not None:
            products.append(torch.mv(self._matrix, vector))
        return operators.add_up(products)


class GramCurvature(operators.LinearOperator):
    """`VᵀV` on the weights of layers together, summed over batches: the Gauss-Newton block."""

    def __init__(self, per_batch: Sequence[Sequence[LayerGram]]) -> None:
        self.per_batch = per_batch
        first = per_batch[0]
        self.shapes = [gram.weight_shape for gram in first]
        size = sum(int(torch.Size(shape).numel()) for shape in self.shapes)
        super().__init__((size, size), first[0])

    def _product(self, vector: Tensor) -> Tensor:
        weights = operators.split(vector, self.shapes)
        products = []
        for grams in self.per_batch:
            pushed = [gram.push(weight) for gram, weight in zip(grams, weights, strict=True)]
            moved = operators.add_up(pushed) * grams[0].scale
            products.append(operators.join([gram.pull(moved) for gram in grams]))
        return sum(products[1:], products[0])


def separable_calls(evaluation: Evaluation) -> list[LayerCall]:
    """The known calls of the leaves for which no call mixes the examples."""
    problem = evaluation.problem
    output = evaluation.output
    calls = layer_uses.known_calls(evaluation.uses, problem.leaves, output.shape[0])
    layouts = layer_uses.find_layouts(output, calls, problem.seed)
    mixed = {
        layer_call.name for layer_call, layout in zip(calls, layouts, strict=True) if layout is None
    }
    return [
        replace(layer_call, time_first=bool(layout))
        for layer_call, layout in zip(calls, layouts, strict=True)
        if layer_call.name not in mixed
    ]


class CallSignals:
    """A call and the gradients at its output: (examples, columns, outputs per example)."""

    def __init__(self, layer_call: LayerCall, size: int, like: Tensor) -> None:
        outputs = int(torch.Size(layer_call.call.output_shape).numel()) // size
        self.time_first = layer_call.time_first
        self._calls = list[layer_uses.Call]()
        self.signals = like.new_empty(size, like.shape[0], outputs)

    def add(self, call: layer_uses.Call, part: slice) -> None:
        self._calls.append(call)

    def receive(self, column: int, part: slice, gradient: Tensor) -> None:
        """What a column of the root sends to the call's output, in a part of the batch."""
        examples = part.stop - part.start
        self.signals[part, column] = rows_by_example(gradient, examples, self.time_first)

    @cached_property
    def call(self) -> layer_uses.Call:
        """The call on the whole batch."""
        calls = self._calls
        self._calls = []
        return (
            calls[0].on(torch.cat([part.inputs for part in calls])) if len(calls) > 1 else calls[0]
        )

    def rows(self, per_example: Tensor) -> Tensor:
        """(examples, 1, outputs per example) as the call's own output."""
        shape = self.call.output_shape
        if not self.time_first:
            return per_example.view(shape)
        return per_example.view(len(per_example), -1, *shape[1:]).transpose(0, 1).reshape(shape)


Collector = CallSignals | WrittenGram


def collector_for(
    layer_call: LayerCall, size: int, like: Tensor, scale: float, uses: int
) -> Collector:
    """Stores weight gradients where they are smaller and fast to compute, else signals."""
    call = layer_call.call
    if isinstance(call, layer_uses.ConvolutionCall):
        outputs = int(torch.Size(call.output_shape).numel()) // size
        small = call.weight.numel() <= min(outputs, SIZES.written)
        unfolds = call.inputs.ndim == 4 and not call.transposed and call.groups == 1  # by F.unfold
        if small and unfolds and uses == 1 and not layer_call.time_first and call.rows == size:
            return WrittenGram(call, size, like, scale)
    return CallSignals(layer_call, size, like)


def trace_grams(
    evaluation: Evaluation, root: LossFactor, *, split: bool = True
) -> dict[str, LayerGram]:
    """The Gram operators of all leaves whose every use is a known linear call.

    Costs a backward pass per column of the root. With `split`, large batches go through in pieces.
    """
    size = evaluation.output.shape[0]
    calls = separable_calls(evaluation)
    if not calls:
        return {}
    names = [layer_call.name for layer_call in calls]
    scale = root.scale * evaluation.weight
    collectors = [
        collector_for(layer_call, size, root.columns, scale, names.count(layer_call.name))
        for layer_call in calls
    ]
    step = _examples_at_once(calls, root, size)
    # Only rows by example can be split, and no frozen random draw.
    in_order = size == evaluation.batch.size and not any(call.time_first for call in calls)
    if split and step < size and in_order and not evaluation.drew:
        outlines = [_outline(layer_call, size) for layer_call in calls]
        # The graph of the whole batch must not stand beside those of the pieces: nothing may hold
        # on to it.
        del calls
        if not _gather_in_pieces(evaluation, root, step, outlines, collectors):
            return trace_grams(evaluation, root, split=False)
    else:
        _gather(evaluation.output, calls, root.columns, slice(0, size), collectors)
    return {
        name: _gram_of(
            [collector for leaf, collector in zip(names, collectors, strict=True) if leaf == name],
            tuple(evaluation.problem.leaves[name].shape),
            scale,
        )
        for name in dict.fromkeys(names)
    }


def _gram_of(
    collectors: Sequence[Collector], weight_shape: tuple[int, ...], scale: float
) -> LayerGram:
    if isinstance(collectors[0], WrittenGram):
        return collectors[0]
    signals = [collector for collector in collectors if isinstance(collector, CallSignals)]
    return LayerGram(signals, weight_shape, scale)


def _examples_at_once(calls: Sequence[LayerCall], root: LossFactor, size: int) -> int:
    numbers = sum(int(torch.Size(layer_call.call.output_shape).numel()) for layer_call in calls)
    outputs = root.columns.element_size() * numbers
    device = root.columns.device
    room = max(SIZES.signal_bytes, outputs)
    if device.type == "cuda":  # small pieces starve a GPU, and it has the room
        room = max(room, torch.cuda.get_device_properties(device).total_memory // 16)
    needed = outputs * root.columns.shape[0]
    return size if needed <= 2 * room else max(1, size * room // needed)


@dataclass(frozen=True)
class Outline:
    """What two evaluations of a call have in common if they do the same.

    Outputs alone do not tell: a head of zeros gives the same ones whatever BatchNorm made of its
    input.
    """

    kind: tuple[object, ...]  # name, type and shape without the examples
    lengths: Tensor  # of each example's input


def _outline(layer_call: LayerCall, size: int) -> Outline:
    call = layer_call.call
    rows, *shape = call.output_shape
    inputs = call.inputs if call.inputs.is_floating_point() else call.inputs.double()
    lengths = torch.linalg.vector_norm(inputs.reshape(size, -1), dim=1)
    return Outline((layer_call.name, type(call), rows // size, *shape), lengths)


def _gather_in_pieces(
    evaluation: Evaluation,
    root: LossFactor,
    step: int,
    outlines: Sequence[Outline],
    collectors: Sequence[Collector],
) -> bool:
    """Gather the signals of a few examples at a time; False if the model needs the whole batch."""
    output = evaluation.output.detach()
    size = output.shape[0]
    with evaluation.graphs(anew=True):
        # A function for each piece: its graph goes before the next one comes.
        return all(
            _gather_piece(
                evaluation,
                output,
                root,
                slice(first, min(first + step, size)),
                outlines,
                collectors,
            )
            for first in range(0, size, step)
        )


def _gather_piece(
    evaluation: Evaluation,
    whole: Tensor,
    root: LossFactor,
    part: slice,
    outlines: Sequence[Outline],
    collectors: Sequence[Collector],
) -> bool:
    """Gather the signals of a piece; False if the model treats it differently from the whole."""
    problem = evaluation.problem
    size = part.stop - part.start
    names = {outline.kind[0] for outline in outlines}
    try:
        output = problem.output(evaluation.batch.take(torch.arange(part.start, part.stop)))
    except Exception:
        return False  # the model needs the whole batch
    if output.shape != whole[part].shape or not agree(output, whole[part]):
        return False
    uses = layer_uses.find_uses(output, problem.leaves)
    calls = layer_uses.known_calls(uses, problem.leaves, size)
    calls = [layer_call for layer_call in calls if layer_call.name in names]
    rounding = float(torch.finfo(whole.dtype).eps) ** 0.6  # as in `agree`
    outlines_of_piece = [_outline(layer_call, size) for layer_call in calls]
    if [outline.kind for outline in outlines_of_piece] != [outline.kind for outline in outlines]:
        return False
    for outline, of_whole in zip(outlines_of_piece, outlines, strict=True):
        expected = of_whole.lengths[part]
        if not bool((outline.lengths - expected).abs().max() <= rounding * expected.max()):
            return False
    _gather(output, calls, root.columns[:, part], part, collectors)
    return True


_DENSE = {"AddmmBackward0", "MmBackward0"}


def _gather(
    output: Tensor,
    calls: Sequence[LayerCall],
    columns: Tensor,
    part: slice,
    collectors: Sequence[Collector],
) -> None:
    """Send every column back through the graph, and each call's gradients to its collector."""
    edges = [layer_call.edge for layer_call in calls]
    kinds = {type(edge.node).__name__ for edge in edges}
    # All columns in one pass are faster for dense networks.
    batched = layer_uses.batched_grad(output, edges, columns) if kinds <= _DENSE else None
    for layer_call, collector in zip(calls, collectors, strict=True):
        collector.add(layer_call.call, part)
    for column, cotangent in enumerate(columns):
        if batched is not None and all(gradients is not None for gradients in batched):
            at_calls = [gradients[column] for gradients in batched if gradients is not None]
        else:
            at_calls = layer_uses.gradients_at_calls(output, calls, cotangent)
        for collector, gradient in zip(collectors, at_calls, strict=True):
            collector.receive(column, part, gradient)
