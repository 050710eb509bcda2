"""Theorem 2 measured: bounds on every layer's Gauss-Newton norm from the Jacobians around it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hessinit.curvature import derivative_check, krylov, layer_uses
from hessinit.curvature.engine import LanczosSettings
from hessinit.curvature.evaluation import Evaluation
from hessinit.curvature.singular_values import BatchedMap, SingularValues
from hessinit.measurement import jacobians
from hessinit.measurement.jacobians import JACOBIAN_COST, GraphPoint, LayerUse
from hessinit.problem.functional import FunctionalProblem
from hessinit.results.curvature_report import Estimate, JacobianBounds

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
    output, inputs, reason = jacobians.trace_from_inputs(evaluation)
    layers, reasons = jacobians.read_layers(output, evaluation.problem.leaves, settings.seed)
    if not layers:
        return {}, reasons
    losses, loss_converged = _loss_norms(evaluation, settings)
    backward = jacobians.backward_norms(output, layers, settings)
    forward = jacobians.forward_norms(output, inputs, layers, settings)
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

    if not jacobians.examples_independent(
        lambda vectors: [multiply(vectors)], [point], output, settings.seed
    ):
        point = replace(point, size=1)
    maps = BatchedMap(point.size, point.each, point.each, multiply, multiply)
    norms = jacobians.iterated_norms(maps, output, settings)
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
            norms.append(jacobians.exact_norms(rows))
        else:
            norms.append(jacobians.iterated_norms(BatchedMap.of(rows), rows, settings))
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
    return jacobians.iterated_norms(maps, call.inputs, settings)
