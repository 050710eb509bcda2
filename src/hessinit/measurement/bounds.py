"""Theorem 2 measured: bounds on every layer's Gauss-Newton norm from the Jacobians around it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hessinit.curvature import layer_uses
from hessinit.curvature.derivative_check import check_outputs
from hessinit.curvature.evaluation import Evaluation
from hessinit.curvature.gram import rows_by_example
from hessinit.curvature.krylov import Array
from hessinit.curvature.probes import ProbeStream
from hessinit.curvature.singular_values import BatchedMap, SingularValues, largest_singular_values
from hessinit.measurement.jacobians import (
    GraphPoint,
    LayerUse,
    LayerUses,
    TracedOutput,
    backward_maps,
    exact_norms,
    forward_maps,
    read_uses,
    shape_behind,
    spectral_norms,
    trace_from_inputs,
)  # fmt: skip
from hessinit.problem.problem import Problem
from hessinit.results.curvature_report import JacobianBounds
from hessinit.results.estimates import Estimate

if TYPE_CHECKING:
    from hessinit.curvature.engines import LanczosSettings

_DEPENDENT = "the examples depend on each other, so the batch counts as one"
_LARGEST_EXACT = 128


def jacobian_bounds(
    problem: Problem, evaluations: Sequence[Evaluation], settings: LanczosSettings
) -> dict[str, JacobianBounds]:
    """The bounds of every leaf, by its parameter's name; to be called within `problem.settings()`.

    Norms are right to ten times `settings.tolerance`, relative, in every example. Costs one forward; with few
    outputs a backward pass for each, with few inputs a pass for each; with many, some 30 to 100 passes for
    each layer's product. All in all 6 to 25 plain measurements (benchmarks/products_cost.py).
    """
    batches = [_batch_bounds(evaluation, settings) for evaluation in evaluations]
    found, reasons = (
        [one for one, _ in batches],
        {name: why for _, one in batches for name, why in one.items()},
    )
    return {
        name: JacobianBounds(reason=reasons[name])
        if name in reasons
        else _joined([one[name] for one in found])
        for name in problem.leaves
    }


@dataclass(frozen=True)
class _BatchBounds:
    """One layer on one batch; `forward` and the paper's bound are None with `reason`."""

    forward: SingularValues | None
    backward: SingularValues
    activation: float
    paper_bound: float | None
    rigorous_bound: float | None
    reason: str = ""
    note: str = ""


def _joined(batches: Sequence[_BatchBounds]) -> JacobianBounds:
    """Bounds add up (they carry their batch's weight already), means are over all examples."""
    forward = [one.forward for one in batches if one.forward is not None]
    complete = len(forward) == len(batches)
    backward = [one.backward for one in batches]
    return JacobianBounds(
        forward=_mean(forward) if complete else None,
        forward_largest=float(max(one.values.max() for one in forward)) if complete else None,
        backward=_mean(backward),
        backward_largest=float(max(one.values.max() for one in backward)),
        activation=max(one.activation for one in batches),
        paper_bound=_total([one.paper_bound for one in batches]),
        rigorous_bound=_total([one.rigorous_bound for one in batches]),
        reason=next((one.reason for one in batches if one.reason), ""),
        note=next((one.note for one in batches if one.note), ""),
    )


def _mean(pieces: Sequence[SingularValues]) -> Estimate:
    values = np.concatenate([one.values for one in pieces])
    errors = np.concatenate([one.errors for one in pieces])
    loose = [one for one in pieces if not one.converged]
    reason, products = (loose or pieces)[0].reason, sum(one.products for one in pieces)
    return Estimate(float(values.mean()), float(errors.mean()), not loose, reason, products)


def _total(bounds: Sequence[float | None]) -> float | None:
    present = [bound for bound in bounds if bound is not None]
    return sum(present) if len(present) == len(bounds) else None


# --- One batch --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Forward:
    """The norms of the forward product and the lengths of the network's inputs, both by example."""

    norms: SingularValues
    lengths: Array


def _batch_bounds(
    evaluation: Evaluation, settings: LanczosSettings
) -> tuple[dict[str, _BatchBounds], dict[str, str]]:
    """The bounds of the layers whose every use is known; why not, for the others."""
    check_outputs(evaluation)
    traced = trace_from_inputs(evaluation)
    leaves = evaluation.problem.leaves
    layers, reasons = read_uses(
        traced.output, layer_uses.find_uses(traced.output, leaves), leaves, settings.seed
    )
    if not layers:
        return {}, reasons
    losses = loss_norms(evaluation, settings)
    backward: dict[str, SingularValues] = {}
    for maps in backward_maps(traced, layers):
        backward |= spectral_norms(maps, settings)
    forward: dict[str, _Forward] = {}
    for maps in forward_maps(traced, layers, settings.seed) if traced.inputs else ():
        lengths = maps.end_lengths.cpu().numpy()
        forward |= {name: _Forward(norms, lengths) for name, norms in spectral_norms(maps, settings).items()}
    return {
        layer.name: _one_layer(layer, traced, losses, backward[layer.name], forward.get(layer.name), settings)
        for layer in layers
    }, reasons


def _one_layer(
    layer: LayerUses,
    traced: TracedOutput,
    losses: LossNorms,
    backward: SingularValues,
    forward: _Forward | None,
    settings: LanczosSettings,
) -> _BatchBounds:
    slopes = _slopes(layer, traced.output.detach())
    weight_map = weight_map_norms(layer, settings)
    with np.errstate(divide="ignore", invalid="ignore"):
        behind = np.log(backward.upper * slopes)
        rigorous: float | None = losses.bound(behind + np.log(weight_map.upper))
    tokens = _token_counts(layer)
    paper, reason = None, ""
    if not (losses.converged and weight_map.converged and backward.converged):
        # An unfinished search may be far below: its value is no bound.
        rigorous, reason = None, "a norm in the bounds did not converge; raise max_iterations"
    elif forward is None and not tokens.any():
        reason = traced.reason or "the layer's input does not depend on the network's input"
    else:
        paper = losses.bound(_log_paper_factor(layer, behind, forward, tokens))
    note = ""
    if traced.output.ndim and traced.output.shape[0] > 1:
        if layer.size == 1:
            note = _DEPENDENT
        elif forward is not None and len(forward.lengths) == 1:
            note = f"before this layer {_DEPENDENT}"
    norms = _norms_with_tokens(forward, tokens)
    return _BatchBounds(norms, backward, float(slopes.max()), paper, rigorous, reason, note)


def _slopes(layer: LayerUses, like: Tensor) -> Array:
    """‖A‖: the largest |f'| of every example at the layer's outputs; 1 where no activation follows."""
    slopes = np.zeros(layer.size)
    for use in layer.uses:
        found = np.ones(layer.size)
        if use.activation is not None:
            shape = shape_behind(use.activation)
            steps = use.call.rows // layer.size if use.after_time_first else 0
            # Elementwise, so its derivative times ones is the diagonal.
            head, tail = GradientEdge(use.activation, 0), GradientEdge(*use.activation.next_functions[0])
            (derivative,) = torch.autograd.grad([head], [tail], [like.new_ones(shape)], retain_graph=True)
            gathered = GraphPoint(derivative, shape, layer.size, steps).gather(derivative)
            found = gathered.abs().amax(dim=1).double().cpu().numpy()
        slopes = np.maximum(slopes, found)
    return slopes


def _log_paper_factor(layer: LayerUses, behind: Array, forward: _Forward | None, tokens: Array) -> Array:
    """‖B‖ ‖A‖ √overlap ‖F‖ ‖x‖; tokens are one-hot inputs, as long as the root of their number."""
    overlap = max(kernel_overlap(use.call) for use in layer.uses)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        if forward is None:
            return behind + np.log(tokens) / 2
        inputs = math.log(overlap) / 2 + np.log(forward.norms.upper) + np.log(forward.lengths)
        if len(inputs) != len(behind):  # examples that depend on each other before the layer, not behind it
            behind, tokens = behind.max(keepdims=True), tokens.sum(keepdims=True)
        return behind + np.logaddexp(2 * inputs, np.log(tokens)) / 2


def _norms_with_tokens(forward: _Forward | None, tokens: Array) -> SingularValues | None:
    """A token is its own input: beside it the forward product is at least 1."""
    if not tokens.any():
        return None if forward is None else forward.norms
    if forward is None:
        ones, zeros = np.ones(len(tokens)), np.zeros(len(tokens))
        return SingularValues(ones, zeros, True, "tokens are looked up as they are", 0)
    return replace(forward.norms, values=np.maximum(forward.norms.values, 1.0))


def _token_counts(layer: LayerUses) -> Array:
    """How many tokens every example looks up here, padding aside: the squared length of one-hot inputs."""
    total = np.zeros(layer.size)
    for use in layer.uses:
        if isinstance(use.call, layer_uses.EmbeddingCall):
            tokens = rows_by_example(use.call.inputs, layer.size, use.time_first)
            total += (tokens != use.call.padding).sum(dim=1).cpu().numpy()
    return total


def kernel_overlap(call: layer_uses.Call) -> int:
    """The most outputs (of one channel) that any element of the call's input takes part in; 1 unless shared.

    Then the map from the weight to the output is at most √overlap times as long as the input.
    """
    if not isinstance(call, layer_uses.ConvolutionCall):
        return 1
    kernel = call.weight.shape[2:]
    if call.transposed:
        return math.prod(kernel)  # every element is spread over the whole kernel
    return min(window_overlap(kernel, call.stride, call.dilation), math.prod(call.output_shape[2:]))


def window_overlap(kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> int:
    """The most windows of a sliding kernel that any element lies in.

    >>> window_overlap([3, 3], [1, 1], [1, 1]), window_overlap([3, 3], [2, 2], [1, 1])
    (9, 4)
    """
    # The kernel entries that can meet an element are those of one remainder modulo the stride.
    return math.prod(
        math.ceil(length / (step // math.gcd(step, spread)))
        for length, step, spread in zip(kernel, stride, dilation, strict=True)
    )


# --- The norm of the loss's curvature at the output, example by example -----------------------------------


@dataclass(frozen=True)
class LossNorms:
    """‖H_z‖ of every example, plus its error; `each` is None when the loss couples the examples."""

    each: Array | None
    whole: float
    converged: bool = True

    def bound(self, logarithms: Array) -> float:
        """Σ ‖H_z‖ factor² from the logarithms of one factor for each example, or of one for the batch.

        A product of many layers overflows long before its logarithm does.
        """
        norms = np.array([self.whole])
        if self.each is not None and len(logarithms) == len(self.each):
            norms = self.each
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            return float(np.exp(np.logaddexp.reduce(np.log(norms) + 2 * logarithms)))


def loss_norms(evaluation: Evaluation, settings: LanczosSettings) -> LossNorms:
    """By Lanczos on products with H_z, which cost a fraction of a gradient: the model is not involved."""
    output = evaluation.output.detach()
    size = output.shape[0] if output.ndim else 1
    apart = size > 1 and not _couples(evaluation, output, settings.seed)
    place = GraphPoint(output, tuple(output.shape), size if apart else 1)

    def curve(vectors: Tensor) -> Tensor:
        return place.gather(evaluation.output_hessian(place.scatter(vectors)))

    found = _iterate(BatchedMap(place.size, place.each, place.each, curve, curve), output, settings)
    upper = found.upper * evaluation.weight
    return LossNorms(upper if apart else None, float(upper.max()), found.converged)


def _couples(evaluation: Evaluation, output: Tensor, seed: int) -> bool:
    """Whether a change of some examples' outputs changes the loss gradient of others."""
    size = output.shape[0]
    stream = ProbeStream(output.numel() + size, seed=seed, dtype=output.dtype, device=output.device)
    probe = stream.draw()
    probes = layer_uses.probe_examples(
        lambda tangent: [evaluation.output_hessian(tangent)], probe[size:].view_as(output), probe[:size]
    )
    return any(
        not layer_uses.in_proportion(whole.reshape(size, -1), shared.reshape(size, -1), factors)
        for (whole,), (shared,), factors in probes
    )


# --- The map from a weight to the outputs of its own calls, example by example ----------------------------


def weight_map_norms(layer: LayerUses, settings: LanczosSettings) -> SingularValues:
    """The spectral norm of the map from the weight to all its calls' outputs, on the actual inputs.

    A dense layer with one row per example: the length of its input. Uses that act on the same dimension of
    the weight are stacked; where they act on different ones (an embedding and the head tied to it, W and
    Wᵀ), the squared map is a Kronecker sum and its norm the sum of the norms.
    """
    kinds: dict[tuple[object, ...], list[LayerUse]] = {}
    for use in layer.uses:
        kinds.setdefault(_kind(use), []).append(use)
    found = [_stacked(uses, layer.size, settings) for uses in kinds.values()]
    if len(found) == 1:
        return found[0]
    values, upper = (
        np.sqrt(np.sum(np.square(sides), axis=0))
        for sides in ([one.values for one in found], [one.upper for one in found])
    )
    converged, products = all(one.converged for one in found), sum(one.products for one in found)
    return SingularValues(values, upper - values, converged, found[0].reason, products)


def _kind(use: LayerUse) -> tuple[object, ...]:
    call = use.call
    if isinstance(call, layer_uses.DenseCall):
        return ("dense", call.stored_transposed)
    if isinstance(call, layer_uses.ConvolutionCall):
        return ("convolution", call.transposed, call.groups)
    return ("embedding",)


def _stacked(uses: list[LayerUse], size: int, settings: LanczosSettings) -> SingularValues:
    call = uses[0].call
    if isinstance(call, layer_uses.EmbeddingCall):
        return _most_frequent_tokens(uses, size)
    if isinstance(call, layer_uses.DenseCall):
        rows = [rows_by_example(use.call.inputs, size, use.time_first) for use in uses]
        features = [use.call.inputs.shape[1] for use in uses]
        pieces = [one.view(size, -1, count) for one, count in zip(rows, features, strict=True)]
        matrices = torch.cat(pieces, dim=1)
        if min(matrices.shape[1:]) <= _LARGEST_EXACT:
            return exact_norms(matrices)
        return _iterate(BatchedMap.of(matrices), matrices, settings)
    return _convolutions(uses, size, settings)


def _iterate(maps: BatchedMap, like: Tensor, settings: LanczosSettings) -> SingularValues:
    return largest_singular_values(maps, dtype=like.dtype, device=like.device, **settings.options)


def _most_frequent_tokens(uses: list[LayerUse], size: int) -> SingularValues:
    """An embedding: √ of the count of an example's most frequent token; padding does not count."""
    keys = []
    for call, time_first in [(use.call, use.time_first) for use in uses]:
        assert isinstance(call, layer_uses.EmbeddingCall)
        tokens = rows_by_example(call.inputs, size, time_first)
        numbers = torch.arange(size, device=tokens.device).unsqueeze(1).expand_as(tokens)
        keys.append(torch.stack((numbers, tokens))[:, tokens != call.padding])
    found, counts = torch.unique(torch.cat(keys, dim=1), dim=1, return_counts=True)
    most = np.zeros(size)
    np.maximum.at(most, found[0].cpu().numpy(), counts.cpu().numpy())
    return SingularValues(np.sqrt(most), np.zeros(size), True, "exact: tokens were counted", 0)


def _convolutions(uses: list[LayerUse], size: int, settings: LanczosSettings) -> SingularValues:
    """One output channel of each group is enough: the others see the same patches."""
    calls = [(use.call, use.time_first) for use in uses]
    patches = [
        Patches(call, size, later) for call, later in calls if isinstance(call, layer_uses.ConvolutionCall)
    ]
    groups = next(call.groups for call, _ in calls if isinstance(call, layer_uses.ConvolutionCall))
    found = _iterate(_stacked_patches(patches, size * groups), uses[0].call.inputs, settings)
    values = found.values.reshape(size, groups).max(axis=1)
    upper = found.upper.reshape(size, groups).max(axis=1)
    return SingularValues(values, upper - values, found.converged, found.reason, found.products)


class Patches:
    """The images of one convolution, `size` examples side by side as channels of one input.

    Every (example, group) is then a group of its own in one large convolution, with its own kernel: the map
    from a kernel of one output channel to its outputs on each example's images, without unfolding them.
    """

    def __init__(self, call: layer_uses.ConvolutionCall, size: int, time_first: bool) -> None:
        inputs = call.inputs
        self._images, self._pairs = inputs.shape[0] // size, size * call.groups
        if time_first:
            apart = inputs.reshape(self._images, size, *inputs.shape[1:])
        else:
            apart = inputs.reshape(size, self._images, *inputs.shape[1:]).transpose(0, 1)
        self._inputs = apart.reshape(self._images, -1, *inputs.shape[2:]).contiguous()
        kernel, channels = call.weight.shape[2:], inputs.shape[1] // call.groups
        lead = (self._pairs * channels, 1) if call.transposed else (self._pairs, channels)
        self._weight = inputs.new_zeros(*lead, *kernel)
        self._out = tuple(call.output_shape[2:])
        self._settings = (call.stride, call.padding, call.dilation, call.transposed, call.output_padding,
                          self._pairs)  # fmt: skip
        self.outputs = self._images * math.prod(self._out)
        self.kernel_size = self._weight.numel() // self._pairs

    def push(self, kernels: Tensor) -> Tensor:
        """From a kernel for every (example, group) to its outputs at all positions."""
        weight = kernels.reshape(self._weight.shape)
        found: Tensor = torch.ops.aten.convolution(self._inputs, weight, None, *self._settings)
        return found.transpose(0, 1).reshape(self._pairs, -1)

    def pull(self, outputs: Tensor) -> Tensor:
        """The transpose of `push`."""
        signals = outputs.reshape(self._pairs, self._images, *self._out).transpose(0, 1).contiguous()
        found: Tensor = torch.ops.aten.convolution_backward(
            signals, self._inputs, self._weight, None, *self._settings, [False, True, False]
        )[1]
        return found.reshape(self._pairs, -1)


def _stacked_patches(patches: Sequence[Patches], pairs: int) -> BatchedMap:
    """The outputs of several convolutions with the same kernels, one after the other."""
    outputs = [one.outputs for one in patches]

    def push(kernels: Tensor) -> Tensor:
        return torch.cat([one.push(kernels) for one in patches], dim=1)

    def pull(cotangents: Tensor) -> Tensor:
        pieces = cotangents.split(outputs, dim=1)
        return torch.stack([one.pull(part) for one, part in zip(patches, pieces, strict=True)]).sum(0)

    return BatchedMap(pairs, patches[0].kernel_size, sum(outputs), push, pull)
