"""Theorem 2 measured: bounds on every layer's Gauss-Newton norm from the Jacobians around it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hessinit.curvature import derivative_check, gram, krylov, layer_uses
from hessinit.curvature.engines import LanczosSettings
from hessinit.curvature.evaluation import Evaluation
from hessinit.curvature.singular_values import BatchedMap, SingularValues
from hessinit.measurement import jacobians
from hessinit.problem.functional import FunctionalProblem
from hessinit.results.curvature_report import Estimate, JacobianBounds

_DEPENDENT = "the examples depend on each other, so the batch counts as one"
_LARGEST_EXACT = 128


def jacobian_bounds(
    problem: FunctionalProblem, evaluations: Sequence[Evaluation], settings: LanczosSettings
) -> dict[str, JacobianBounds]:
    """The bounds of every leaf, by its parameter's name; to be called within `problem.settings()`.

    Norms are right to ten times `settings.tolerance`, relative, in every example. Costs 6 to 25
    plain measurements (benchmarks/products_cost.py).
    """
    batches = [_batch_bounds(evaluation, settings) for evaluation in evaluations]
    reasons = {name: why for _, some in batches for name, why in some.items()}
    known = [name for name in problem.leaves if name not in reasons]
    bounds = {name: _joined([found[name] for found, _ in batches]) for name in known}
    return {
        name: bounds.get(name) or JacobianBounds(reason=reasons[name]) for name in problem.leaves
    }


class _BatchBounds(NamedTuple):
    """One layer on one batch; `forward` and the paper's bound are None with `reason`."""

    forward: SingularValues | None
    backward: SingularValues
    activation: float
    paper: float | None
    rigorous: float | None
    reason: str
    note: str


def _joined(batches: Sequence[_BatchBounds]) -> JacobianBounds:
    """Bounds add up (they carry their batch's weight already), means are over all examples."""
    forward, backward, activation, paper, rigorous, reasons, notes = zip(*batches, strict=True)
    return JacobianBounds(
        **_mean_and_largest("forward", forward),
        **_mean_and_largest("backward", backward),
        activation=max(activation),
        paper_bound=None if None in paper else sum(paper),
        rigorous_bound=None if None in rigorous else sum(rigorous),
        reason=next(filter(None, reasons), ""),
        note=next(filter(None, notes), ""),
    )


def _mean_and_largest(name: str, pieces: Sequence[SingularValues | None]) -> dict[str, Any]:
    found = [one for one in pieces if one is not None]
    if len(found) < len(pieces):
        return {}
    values = np.concatenate([one.values for one in found])
    errors = np.concatenate([one.errors for one in found])
    loose = [one for one in found if not one.converged]
    reason = (loose or found)[0].reason
    products = sum(one.products for one in found)
    mean = Estimate(float(values.mean()), float(errors.mean()), not loose, reason, products)
    return {name: mean, f"{name}_largest": float(values.max())}


def _batch_bounds(
    evaluation: Evaluation, settings: LanczosSettings
) -> tuple[dict[str, _BatchBounds], dict[str, str]]:
    """The bounds of the layers whose every use is known; why not, for the others."""
    derivative_check.check_outputs(evaluation)
    output, inputs, why_none = jacobians.trace_from_inputs(evaluation)
    layers, reasons = jacobians.read_layers(output, evaluation.problem.leaves, settings.seed)
    if not layers:
        return {}, reasons
    losses, loss_converged = _loss_norms(evaluation, settings)
    backward = jacobians.backward_norms(output, layers, settings)
    forward = jacobians.forward_norms(output, inputs, layers, settings)
    found: dict[str, _BatchBounds] = {}
    for name, uses in layers.items():
        size = uses[0].result.size
        behind = backward[name]
        slopes = _slopes(uses, output.detach())
        weight_map = weight_map_norms(uses, settings)
        before, lengths = forward.get(name, (None, np.zeros(0)))
        paper = None
        reason = why_none or "the layer's input does not depend on the network's input"
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            after = np.log(behind.upper * slopes)
            rigorous: float | None = _sum_over_examples(losses, after + np.log(weight_map.upper))
            if not (loss_converged and weight_map.converged and behind.converged):
                # An unfinished search may be far below: its value is no bound.
                rigorous = None
                reason = "a norm in the bounds did not converge; raise max_iterations"
            elif before is not None:
                # ‖B‖ ‖A‖ √overlap ‖F‖ ‖x‖
                overlap = max(kernel_overlap(use.call) for use in uses)
                ahead = math.log(overlap) / 2 + np.log(before.upper) + np.log(lengths)
                # Examples may depend on each other before the layer, and not behind it.
                after = after if len(ahead) == len(after) else after.max(keepdims=True)
                paper = _sum_over_examples(losses, after + ahead)
                reason = ""
        note = ""
        if len(losses) > 1 and (size == 1 or len(lengths) == 1):
            note = _DEPENDENT if size == 1 else f"before this layer {_DEPENDENT}"
        found[name] = _BatchBounds(
            before, behind, float(slopes.max()), paper, rigorous, reason, note
        )
    return found, reasons


def _sum_over_examples(losses: krylov.Array, logarithms: krylov.Array) -> float:
    """Σ ‖H_z‖ factor² from the logarithms of one factor for each example, or of one for the batch."""
    norms = losses if len(losses) == len(logarithms) else losses.max(keepdims=True)
    return float(np.exp(np.logaddexp.reduce(np.log(norms) + 2 * logarithms)))


def _slopes(uses: Sequence[jacobians.LayerUse], like: Tensor) -> krylov.Array:
    """‖A‖: the largest |f'| of every example at the layer's outputs; 1 where no activation follows."""
    slopes = np.zeros(uses[0].result.size)
    for use in uses:
        found = np.ones_like(slopes)
        if use.activation is not None:
            # Elementwise, so its derivative times ones is the diagonal.
            head = GradientEdge(use.activation, 0)
            tail = GradientEdge(*use.activation.next_functions[0])
            ones = like.new_ones(use.result.shape)
            (derivative,) = torch.autograd.grad([head], [tail], [ones], retain_graph=True)
            found = use.result.gather(derivative).abs().amax(dim=1).double().cpu().numpy()
        slopes = np.maximum(slopes, found)
    return slopes


def kernel_overlap(call: layer_uses.Call) -> int:
    """The most outputs (of one channel) that any element of the call's input takes part in: ‖map‖² / ‖x‖²."""
    if not isinstance(call, layer_uses.ConvolutionCall):
        return 1
    kernel = call.weight.shape[2:]
    if call.transposed:
        return math.prod(kernel)  # every element is spread over the whole kernel
    # The kernel entries that can meet an element are those of one remainder modulo the stride.
    sizes = zip(kernel, call.stride, call.dilation, strict=True)
    met = (math.ceil(length / (step // math.gcd(step, spread))) for length, step, spread in sizes)
    return min(math.prod(met), math.prod(call.output_shape[2:]))


def _loss_norms(evaluation: Evaluation, settings: LanczosSettings) -> tuple[krylov.Array, bool]:
    """‖H_z‖ of every example plus its error (of the batch if the loss couples it); whether all converged."""
    output = evaluation.output.detach()
    size = output.shape[0] if output.ndim else 1
    point = jacobians.GraphPoint(output, tuple(output.shape), size)

    def curve(vectors: Tensor) -> Tensor:
        return point.gather(evaluation.output_hessian(point.scatter(vectors)))

    if not jacobians.examples_independent(lambda one: [curve(one)], [point], output, settings.seed):
        point = replace(point, size=1)
    maps = BatchedMap(point.size, point.each, point.each, curve, curve)
    found = jacobians.iterated_norms(maps, output, settings)
    return np.broadcast_to(found.upper * evaluation.weight, size), found.converged


def weight_map_norms(
    uses: Sequence[jacobians.LayerUse], settings: LanczosSettings
) -> SingularValues:
    """The spectral norm of the map from the weight to all its calls' outputs, on the actual inputs.

    A dense layer with one row per example: the length of its input. Dense calls on the same side of
    the weight are stacked; beyond that, the squares of several norms are added up. That is exact
    for an embedding and the head tied to it, or W and Wᵀ (a Kronecker sum), and an upper bound for
    repeated convolutions.
    """
    size = uses[0].result.size
    found = []
    dense: dict[bool, list[Tensor]] = {}
    for use in uses:
        rows = gram.rows_by_example(use.call.inputs, size, use.time_first)
        if isinstance(use.call, layer_uses.DenseCall):
            features = use.call.inputs.shape[1]
            dense.setdefault(use.call.stored_transposed, []).append(rows.view(size, -1, features))
        elif isinstance(use.call, layer_uses.ConvolutionCall):
            found.append(_convolution(use.call, rows, settings))
        elif isinstance(use.call, layer_uses.EmbeddingCall):
            padding = use.call.padding
            counts = [Counter(token for token in row if token != padding) for row in rows.tolist()]
            most = np.sqrt([max(one.values(), default=0) for one in counts])
            reason = "exact: tokens were counted"
            found.append(SingularValues(most, np.zeros(size), True, reason, 0))
    for pieces in dense.values():
        rows = torch.cat(pieces, dim=1)
        if min(rows.shape[1:]) <= _LARGEST_EXACT:
            found.append(jacobians.exact_norms(rows))
        else:
            found.append(jacobians.iterated_norms(BatchedMap.of(rows), rows, settings))
    if len(found) == 1:
        return found[0]
    values = np.sqrt(np.sum(np.square([one.values for one in found]), axis=0))
    upper = np.sqrt(np.sum(np.square([one.upper for one in found]), axis=0))
    converged = all(one.converged for one in found)
    products = sum(one.products for one in found)
    return SingularValues(values, upper - values, converged, found[0].reason, products)


def _convolution(
    call: layer_uses.ConvolutionCall, rows: Tensor, settings: LanczosSettings
) -> SingularValues:
    """One output channel of each group is enough: the others see the same patches."""
    images = rows.view(len(rows), -1, *call.inputs.shape[1:])
    weight = (
        call.weight[:, :1] if call.transposed else call.weight[:: len(call.weight) // call.groups]
    )
    one = replace(call, weight=weight)
    shape = (images.shape[1], call.groups, *call.output_shape[2:])

    def push(kernels: Tensor) -> Tensor:
        outputs = torch.vmap(lambda x, kernel: one.on(x).push(kernel.view(weight.shape)))(
            images, kernels
        )
        return outputs.flatten(1)

    def pull(outputs: Tensor) -> Tensor:
        return torch.vmap(lambda x, signal: one.on(x).pull(signal.view(shape)))(
            images, outputs
        ).flatten(1)

    maps = BatchedMap(len(rows), weight.numel(), math.prod(shape), push, pull)
    return jacobians.iterated_norms(maps, call.inputs, settings)
