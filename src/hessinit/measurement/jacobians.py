"""Spectral norms of the Jacobians before and after every layer, example by example.

The autograd graph of one more evaluation, with inputs that can be differentiated by, tells where
each weight is used, which activation follows it, and which numbers belong to which example.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hessinit.curvature import derivative_check, krylov, layer_uses
from hessinit.curvature.engine import LanczosSettings
from hessinit.curvature.evaluation import Evaluation
from hessinit.curvature.krylov import ProbeStream
from hessinit.curvature.lanczos import BatchedMap, SingularValues, largest_singular_values
from hessinit.curvature.layer_uses import Call, Use, find_layouts, known_calls
from hessinit.problem.batches import map_tensors
from hessinit.problem.checks import check_no_reentrant_checkpoints
from hessinit.problem.functional import FunctionalProblem
from hessinit.problem.graph import Consumers, Node, activation_kind, consumers_of, operation_of
from hessinit.results.curvature_report import Estimate, JacobianBounds


@dataclass(frozen=True)
class JacobianCost:
    """The choice of unit vectors or Lanczos, and its tolerance (benchmarks/products_cost.py)."""

    # Unit vectors are shared by all layers; Lanczos takes about this many passes for each of them.
    passes_per_layer: int = 16
    fewest_units: int = 64
    most_units: int = 256
    # The images of the unit vectors are held for all layers at once if they take at most this many
    # bytes; batched products and decompositions take at most this many numbers at once.
    bytes_at_once: int = 2**27
    numbers_at_once: int = 2**22
    # A Gram matrix up to this size is decomposed instead of searched.
    largest_exact: int = 128
    # All examples wait for the slowest: a digit less in the worst of them halves the passes, the
    # others have it.
    tolerance_factor: float = 10.0
    largest_tolerance: float = 0.05


JACOBIAN_COST = JacobianCost()


@dataclass(frozen=True)
class LayerUse:
    """One use of a weight: its call, and the activation that follows, if any, with its `result`.

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
    uses_by_name = layer_uses.find_uses(output, leaves)
    size = output.shape[0] if output.ndim else 1
    consumers = consumers_of(output)
    read = known_calls(uses_by_name, leaves, size) if size > 1 else []
    layouts = zip(read, find_layouts(output, read, seed), strict=True)
    orders = {call.edge.node: layout for call, layout in layouts}
    layers: LayerUses = {}
    reasons: dict[str, str] = {}
    for name, uses in uses_by_name.items():
        examples = size if all(orders.get(use.node) is not None for use in uses) else 1
        calls = [(use, layer_uses.read_call(use, leaves[name])) for use in uses]
        unknown = [use.kind for use, call in calls if call is None]
        if unknown:
            reasons[name] = (
                f"the weight goes into {unknown[0]}, none of the known uses (dense, convolution, "
                "embedding)"
            )
        elif not uses:
            reasons[name] = "the forward does not use this weight"
        else:
            layers[name] = [
                _read_use(use, call, examples, examples > 1 and bool(orders[use.node]), consumers)
                for use, call in calls
                if call is not None
            ]
    return layers, reasons


def _read_use(use: Use, call: Call, size: int, time_first: bool, consumers: Consumers) -> LayerUse:
    def point(node: Node, number: int) -> GraphPoint:
        if hasattr(node, "variable"):
            shape = node.variable.shape
        else:
            shape = node._input_metadata[number].shape
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
        if not operation_of(later).keeps_order and not _adds_a_bias(later, node):
            return None
        node = later
    return None


def _adds_a_bias(addition: Node, node: Node) -> bool:
    """Whether the other summand is a constant or a weight, not computed by the forward."""
    if type(addition).__name__ != "AddBackward0" or addition._saved_alpha != 1:
        return False
    summands = [source for source, _ in addition.next_functions if source is not node]
    return all(source is None or type(source).__name__ == "AccumulateGrad" for source in summands)


def trace_from_inputs(evaluation: Evaluation) -> tuple[Tensor, list[Tensor], str]:
    """The output of one more forward, the inputs with a derivative, or why there are none."""
    tensors: list[Tensor] = []

    def differentiable(tensor: Tensor) -> Tensor:
        tensors.append(tensor.detach().requires_grad_(tensor.is_floating_point()))
        return tensors[-1]

    inputs = map_tensors(differentiable, evaluation.batch.inputs)
    try:
        output = evaluation.problem.output(replace(evaluation.batch, inputs=inputs))
    except Exception as failure:  # the same forward ran before, on inputs without gradients
        reason = f"the forward fails on inputs that require gradients ({type(failure).__name__})"
        return evaluation.output, [], reason
    check_no_reentrant_checkpoints(output)
    floating = [tensor for tensor in tensors if tensor.requires_grad]
    discrete = [t for t in tensors if not t.requires_grad and t.dtype != torch.bool]
    if discrete or not floating:
        reason = "the network's inputs are tokens, or not all real numbers: they have no derivative"
        return output, [], reason
    return output, floating, ""


@dataclass(frozen=True, eq=False)
class GraphPoint:
    """A tensor of the forward, or its edge in the graph, with the numbers of `size` examples.

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


def _numbers_of_example(points: GraphPoints) -> int:
    return sum(point.each for point in points)


def _all_points(layers: dict[str, list[GraphPoint]]) -> list[GraphPoint]:
    return [point for points in layers.values() for point in points]


class Jacobian:
    """Products with the derivative of points (`heads`) by earlier ones (`tails`) of the graph.

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
        cotangents = zip((head.at for head in heads), _scattered(heads, vectors), strict=True)
        inputs = [tail.at for tail in tails]
        return self._gradients(list(cotangents), inputs, tails, vectors.shape[:-2])

    def push(self, tails: GraphPoints, heads: GraphPoints, vectors: Tensor) -> list[Tensor]:
        """The derivative times tangents of some tails, at some heads."""
        adjoint = self._adjoint
        pairs = zip((adjoint[tail] for tail in tails), _scattered(tails, vectors), strict=True)
        tangents = [
            (gradient, tangent)
            for gradient, tangent in pairs
            if gradient is not None and gradient.requires_grad
        ]
        inputs = [adjoint[head] for head in heads]
        return self._gradients(tangents, inputs, heads, vectors.shape[:-2])

    @functools.cached_property
    def _adjoint(self) -> dict[GraphPoint, Tensor | None]:
        """A placeholder for every head's cotangent, and the gradient that results at every tail."""
        placeholders = [self._like.new_zeros(head.shape).requires_grad_() for head in self._heads]
        outputs: Any = [head.at for head in self._heads]
        inputs: Any = [tail.at for tail in self._tails]
        gradients = torch.autograd.grad(
            outputs, inputs, placeholders, create_graph=True, allow_unused=True
        )
        return dict(zip([*self._heads, *self._tails], [*placeholders, *gradients], strict=True))

    def _gradients(
        self,
        sources: Sequence[tuple[Any, Tensor]],
        inputs: Any,
        points: GraphPoints,
        stack: torch.Size,
    ) -> list[Tensor]:
        gradients: Sequence[Tensor | None] = [None] * len(points)
        if sources:
            outputs, vectors = zip(*sources, strict=True)
            gradients = torch.autograd.grad(
                outputs,
                inputs,
                vectors,
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=bool(stack),
            )
        rows = []
        for point, gradient in zip(points, gradients, strict=True):
            if gradient is None:
                rows.append(self._like.new_zeros(*stack, point.size, point.each))
            else:
                rows.append(point.gather(gradient.detach()))
        return rows


def _scattered(points: GraphPoints, rows: Tensor) -> list[Tensor]:
    pieces = rows.split([point.each for point in points], dim=-1)
    return [point.scatter(piece) for point, piece in zip(points, pieces, strict=True)]


def backward_norms(
    output: Tensor, layers: LayerUses, settings: LanczosSettings
) -> dict[str, SingularValues]:
    """From every layer's result to the output."""
    norms: dict[str, SingularValues] = {}
    results = {name: [use.result for use in uses] for name, uses in layers.items()}
    for size in sorted({points[0].size for points in results.values()}):
        end = [GraphPoint(output, tuple(output.shape), size)]
        chosen = {name: points for name, points in results.items() if points[0].size == size}
        norms |= _spectral_norms(end, chosen, True, output.detach(), settings)
    return norms


def forward_norms(
    output: Tensor, inputs: Sequence[Tensor], layers: LayerUses, settings: LanczosSettings
) -> dict[str, tuple[SingularValues, krylov.Array]]:
    """From the network's inputs to every layer's, and the lengths of the inputs, by example.

    Where examples depend on each other before some layer, all layers see the batch as one example.
    """
    norms: dict[str, tuple[SingularValues, krylov.Array]] = {}
    sources = {
        name: [use.source for use in uses if use.source is not None]
        for name, uses in layers.items()
    }
    sources = {name: points for name, points in sources.items() if points}
    separate = {name: points for name, points in sources.items() if points[0].size > 1}
    like = output.detach()
    tails = _independent_inputs(like, inputs, _all_points(separate), settings.seed)
    batch = [GraphPoint(tensor, tuple(tensor.shape), 1) for tensor in inputs]
    joint = {
        name: [replace(point, size=1, steps=0) for point in points]
        for name, points in sources.items()
        if not (tails and name in separate)
    }
    for end, points in ((tails, separate), (batch, joint)):
        if end and points:
            tensors = [
                point.gather(point.at.detach()) for point in end if isinstance(point.at, Tensor)
            ]
            lengths = torch.cat(tensors, dim=1).double().pow(2).sum(dim=1).sqrt().cpu().numpy()
            by_name = _spectral_norms(end, points, False, like, settings)
            norms |= {name: (values, lengths) for name, values in by_name.items()}
    return norms


def _independent_inputs(
    like: Tensor, inputs: Sequence[Tensor], heads: GraphPoints, seed: int
) -> list[GraphPoint]:
    """The inputs, by example, if no example reaches the heads of another; else none."""
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
    numbers = size * (1 + _numbers_of_example(points))
    probe = ProbeStream(numbers, seed=seed, dtype=like.dtype, device=like.device).draw()
    probes = layer_uses.probe_examples(product, probe[size:].view(size, -1), probe[:size])
    return all(
        layer_uses.in_proportion(joint, single, factors)
        for joints, singles, factors in probes
        for joint, single in zip(joints, singles, strict=True)
    )


def _spectral_norms(
    end: GraphPoints,
    layers: dict[str, list[GraphPoint]],
    from_output: bool,
    like: Tensor,
    settings: LanczosSettings,
) -> dict[str, SingularValues]:
    """The norm of the derivative between an end of the network and a layer's points, by example.

    With few numbers at that end the unit vectors go to all layers at once, a pass for each.
    Otherwise every layer takes a Lanczos run of its own, for all examples in lockstep.
    """
    numbers = _numbers_of_example(end)
    every_point = _all_points(layers)
    if from_output:
        jacobian = Jacobian(end, every_point, like)
        out: Product = jacobian.pull
        back: Product = jacobian.push
    else:
        jacobian = Jacobian(every_point, end, like)
        out = jacobian.push
        back = jacobian.pull
    cost = JACOBIAN_COST
    most = min(cost.most_units, max(cost.fewest_units, cost.passes_per_layer * len(layers)))
    if numbers <= most:
        return _norms_by_units(end, layers, out, like)
    tolerance = min(cost.tolerance_factor * settings.tolerance, cost.largest_tolerance)
    loose = replace(settings, tolerance=tolerance)
    norms: dict[str, SingularValues] = {}
    for name, points in layers.items():
        push = _concatenated(out, end, points)
        pull = _concatenated(back, points, end)
        maps = BatchedMap(end[0].size, numbers, _numbers_of_example(points), push, pull)
        norms[name] = iterated_norms(maps, like, loose)
    return norms


def _norms_by_units(
    end: GraphPoints, layers: dict[str, list[GraphPoint]], out: Product, like: Tensor
) -> dict[str, SingularValues]:
    norms: dict[str, SingularValues] = {}
    size = end[0].size
    numbers = _numbers_of_example(_all_points(layers)) * _numbers_of_example(end)
    groups = [layers]
    if numbers * size * like.element_size() > JACOBIAN_COST.bytes_at_once:
        groups = [{name: points} for name, points in layers.items()]
    for group in groups:
        images = iter(_images_of_units(end, _all_points(group), out, like))
        for name, points in group.items():
            columns = torch.cat([next(images) for _ in points], dim=-1)
            norms[name] = exact_norms(columns.transpose(0, 1))
    return norms


def _concatenated(
    product: Product, start: GraphPoints, end: GraphPoints
) -> Callable[[Tensor], Tensor]:
    return lambda vectors: torch.cat(product(start, end, vectors), dim=-1)


def iterated_norms(maps: BatchedMap, like: Tensor, settings: LanczosSettings) -> SingularValues:
    return largest_singular_values(
        maps,
        tolerance=settings.tolerance,
        max_iterations=settings.max_iterations,
        seed=settings.seed,
        dtype=like.dtype,
        device=like.device,
    )


def _images_of_units(
    end: GraphPoints, points: GraphPoints, out: Product, like: Tensor
) -> list[Tensor]:
    """The image of every unit vector at every point: (units, examples, numbers of each)."""
    count = _numbers_of_example(end)
    size = end[0].size
    unit = torch.eye(count, dtype=like.dtype, device=like.device)
    units = unit.unsqueeze(1).expand(count, size, count)  # the same in all examples at once
    # One batched pass where its calls cost more than its arithmetic.
    if _numbers_of_example(points) * count * size <= JACOBIAN_COST.numbers_at_once:
        try:
            with warnings.catch_warnings():
                # A missing batching rule is only a warning, and slow.
                warnings.simplefilter("error")
                return out(end, points, units)
        except (RuntimeError, UserWarning):
            pass
    images = [out(end, points, unit) for unit in units]
    return [torch.stack(pieces) for pieces in zip(*images, strict=True)]


def exact_norms(matrices: Tensor) -> SingularValues:
    """Spectral norms of matrices (examples, …, …), by the smaller Gram matrix in fp64."""
    _, rows, columns = matrices.shape
    tops = []
    for part in matrices.split(max(1, JACOBIAN_COST.numbers_at_once // max(1, rows * columns))):
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


DEPENDENT = "the examples depend on each other, so the batch counts as one"


def jacobian_bounds(
    problem: FunctionalProblem, evaluations: Sequence[Evaluation], settings: LanczosSettings
) -> dict[str, JacobianBounds]:
    """The bounds of every leaf, by its parameter's name; call it within `problem.settings()`.

    Norms are right to ten times `settings.tolerance`, relative, in every example. Costs 6 to 25
    plain measurements (benchmarks/products_cost.py).
    """
    batches = [_batch_bounds(evaluation, settings) for evaluation in evaluations]
    reasons: dict[str, str] = {}
    for _, unknown in batches:
        reasons |= unknown
    return {
        name: JacobianBounds(reason=reasons[name])
        if name in reasons
        else _joined_bounds([bounds[name] for bounds, _ in batches])
        for name in problem.leaves
    }


class _LayerBounds(NamedTuple):
    """One layer on one batch; `forward` and the paper's bound are None with `reason`."""

    forward: SingularValues | None
    backward: SingularValues
    activation: float
    paper: float | None
    rigorous: float | None
    reason: str
    note: str


def _joined_bounds(batches: Sequence[_LayerBounds]) -> JacobianBounds:
    """Bounds add up (they carry their batch's weight already), means are over all examples."""
    forward, backward, activation, paper, rigorous, reasons, notes = zip(*batches, strict=True)
    bounds = JacobianBounds(
        backward=_mean_norm(backward),
        backward_largest=_largest_norm(backward),
        activation=max(activation),
        paper_bound=None if None in paper else sum(paper),
        rigorous_bound=None if None in rigorous else sum(rigorous),
        reason=next(filter(None, reasons), ""),
        note=next(filter(None, notes), ""),
    )
    if None in forward:
        return bounds
    return replace(bounds, forward=_mean_norm(forward), forward_largest=_largest_norm(forward))


def _mean_norm(batches: Sequence[SingularValues]) -> Estimate:
    values = np.concatenate([norms.values for norms in batches])
    errors = np.concatenate([norms.errors for norms in batches])
    loose = [norms for norms in batches if not norms.converged]
    reason = [*loose, *batches][0].reason
    products = sum(norms.products for norms in batches)
    return Estimate(float(values.mean()), float(errors.mean()), not loose, reason, products)


def _largest_norm(batches: Sequence[SingularValues]) -> float:
    return float(np.concatenate([norms.values for norms in batches]).max())


def _batch_bounds(
    evaluation: Evaluation, settings: LanczosSettings
) -> tuple[dict[str, _LayerBounds], dict[str, str]]:
    """The bounds of the layers whose every use is known; for the others, why not."""
    derivative_check.check_outputs(evaluation)
    output, inputs, reason = trace_from_inputs(evaluation)
    layers, reasons = read_layers(output, evaluation.problem.leaves, settings.seed)
    if not layers:
        return {}, reasons
    losses, loss_converged = _loss_norms(evaluation, settings)
    backward = backward_norms(output, layers, settings)
    forward = forward_norms(output, inputs, layers, settings)
    bounds: dict[str, _LayerBounds] = {}
    for name, uses in layers.items():
        after = backward[name]
        slopes = _slopes(uses, output.detach())
        weight_map = weight_map_norms(uses, settings)
        before, lengths = forward.get(name, (None, np.zeros(0)))
        paper = None
        rigorous = None
        missing = reason or "the layer's input does not depend on the network's input"
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            logs = np.log(after.upper * slopes)
            # An unfinished search may be far below: its value is no bound.
            if not (loss_converged and weight_map.converged and after.converged):
                missing = "a norm in the bounds did not converge; raise max_iterations"
            else:
                rigorous = _sum_over_examples(losses, logs + np.log(weight_map.upper))
                if before is not None:
                    # ‖B‖ ‖A‖ √overlap ‖F‖ ‖x‖
                    overlap = max(kernel_overlap(use.call) for use in uses)
                    ahead = math.log(overlap) / 2 + np.log(before.upper) + np.log(lengths)
                    # Examples may depend on each other before the layer, and not behind it.
                    behind = logs if len(ahead) == len(logs) else logs.max(keepdims=True)
                    paper = _sum_over_examples(losses, behind + ahead)
                    missing = ""
        note = ""
        if len(losses) > 1 and uses[0].result.size == 1:
            note = DEPENDENT
        elif len(losses) > 1 and len(lengths) == 1:
            note = f"before this layer {DEPENDENT}"
        steepest = float(slopes.max())
        bounds[name] = _LayerBounds(before, after, steepest, paper, rigorous, missing, note)
    return bounds, reasons


def _sum_over_examples(losses: krylov.Array, logarithms: krylov.Array) -> float:
    """Σ ‖H_z‖ factor² from the logarithms of a factor for each example, or of one for the batch."""
    norms = losses if len(losses) == len(logarithms) else losses.max(keepdims=True)
    return float(np.exp(np.logaddexp.reduce(np.log(norms) + 2 * logarithms)))


def _slopes(uses: Sequence[LayerUse], like: Tensor) -> krylov.Array:
    """‖A‖: the largest |f'| of every example at the layer's outputs; 1 without an activation."""
    slopes = np.zeros(uses[0].result.size)
    for use in uses:
        steepest = np.ones_like(slopes)
        if use.activation is not None:
            # Elementwise, so its derivative times ones is the diagonal.
            head = GradientEdge(use.activation, 0)
            tail = GradientEdge(*use.activation.next_functions[0])
            cotangent = like.new_ones(use.result.shape)
            (derivative,) = torch.autograd.grad([head], [tail], [cotangent], retain_graph=True)
            steepest = use.result.gather(derivative).abs().amax(dim=1).double().cpu().numpy()
        slopes = np.maximum(slopes, steepest)
    return slopes


def kernel_overlap(call: layer_uses.Call) -> int:
    """The most outputs of a channel that an element of the call's input enters: ‖map‖² / ‖x‖²."""
    if not isinstance(call, layer_uses.ConvolutionCall):
        return 1
    kernel = call.weight.shape[2:]
    if call.transposed:
        return math.prod(kernel)  # every element is spread over the whole kernel
    # The kernel entries that can meet an element are those of one remainder modulo the stride.
    sizes = zip(kernel, call.stride, call.dilation, strict=True)
    meeting = [math.ceil(length / (step // math.gcd(step, gap))) for length, step, gap in sizes]
    return min(math.prod(meeting), math.prod(call.output_shape[2:]))


def _loss_norms(evaluation: Evaluation, settings: LanczosSettings) -> tuple[krylov.Array, bool]:
    """‖H_z‖ of every example, or of a batch that the loss couples, plus errors; all converged?"""
    output = evaluation.output.detach()
    size = output.shape[0] if output.ndim else 1
    point = GraphPoint(output, tuple(output.shape), size)

    def multiply(vectors: Tensor) -> Tensor:
        return point.gather(evaluation.output_hessian(point.scatter(vectors)))

    if not examples_independent(
        lambda vectors: [multiply(vectors)], [point], output, settings.seed
    ):
        point = replace(point, size=1)
    maps = BatchedMap(point.size, point.each, point.each, multiply, multiply)
    norms = iterated_norms(maps, output, settings)
    return np.broadcast_to(norms.upper * evaluation.weight, size), norms.converged


def weight_map_norms(uses: Sequence[LayerUse], settings: LanczosSettings) -> SingularValues:
    """The spectral norm of the map from the weight to all its calls' outputs, on the actual inputs.

    A dense layer with one row per example: the length of its input. Dense calls on the same side of
    the weight are stacked; beyond that, the squares of several norms are added up. That is exact
    for an embedding and the head tied to it, or W and Wᵀ (a Kronecker sum), and an upper bound for
    repeated convolutions.
    """
    size = uses[0].result.size
    norms: list[SingularValues] = []
    dense: dict[bool, list[Tensor]] = {}
    for use in uses:
        rows = layer_uses.rows_by_example(use.call.inputs, size, use.time_first)
        if isinstance(use.call, layer_uses.DenseCall):
            features = use.call.inputs.shape[1]
            dense.setdefault(use.call.stored_transposed, []).append(rows.view(size, -1, features))
        elif isinstance(use.call, layer_uses.ConvolutionCall):
            norms.append(_convolution_norms(use.call, rows, settings))
        elif isinstance(use.call, layer_uses.EmbeddingCall):
            norms.append(_embedding_norms(use.call, rows))
    for pieces in dense.values():
        rows = torch.cat(pieces, dim=1)
        if min(rows.shape[1:]) <= JACOBIAN_COST.largest_exact:
            norms.append(exact_norms(rows))
        else:
            norms.append(iterated_norms(BatchedMap.of(rows), rows, settings))
    if len(norms) == 1:
        return norms[0]
    values = np.sqrt(np.sum(np.square([part.values for part in norms]), axis=0))
    upper = np.sqrt(np.sum(np.square([part.upper for part in norms]), axis=0))
    converged = all(part.converged for part in norms)
    products = sum(part.products for part in norms)
    return SingularValues(values, upper - values, converged, norms[0].reason, products)


def _embedding_norms(call: layer_uses.EmbeddingCall, rows: Tensor) -> SingularValues:
    counts = [Counter(token for token in row if token != call.padding) for row in rows.tolist()]
    values = np.sqrt([max(count.values(), default=0) for count in counts])
    return SingularValues(values, np.zeros(len(rows)), True, "exact: tokens were counted", 0)


def _convolution_norms(
    call: layer_uses.ConvolutionCall, rows: Tensor, settings: LanczosSettings
) -> SingularValues:
    """One output channel of each group is enough: the others see the same patches."""
    images = rows.view(len(rows), -1, *call.inputs.shape[1:])
    if call.transposed:
        weight = call.weight[:, :1]
    else:
        weight = call.weight[:: len(call.weight) // call.groups]
    narrow = replace(call, weight=weight)
    shape = (images.shape[1], call.groups, *call.output_shape[2:])

    def push_image(image: Tensor, kernel: Tensor) -> Tensor:
        return narrow.on(image).push(kernel.view(weight.shape))

    def pull_image(image: Tensor, signal: Tensor) -> Tensor:
        return narrow.on(image).pull(signal.view(shape))

    def push(kernels: Tensor) -> Tensor:
        return torch.vmap(push_image)(images, kernels).flatten(1)

    def pull(signals: Tensor) -> Tensor:
        return torch.vmap(pull_image)(images, signals).flatten(1)

    maps = BatchedMap(len(rows), weight.numel(), math.prod(shape), push, pull)
    return iterated_norms(maps, call.inputs, settings)
