"""The products of every layer on one batch, and the bounds that they give."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hessinit.curvature.derivative_check import check_outputs
from hessinit.curvature.engines import LanczosSettings
from hessinit.curvature.evaluation import Evaluation
from hessinit.curvature.krylov import Array
from hessinit.curvature.layer_uses import find_uses
from hessinit.curvature.singular_values import SingularValues
from hessinit.products.layer_uses import LayerUses, read_uses, shape_behind
from hessinit.products.lipschitz import Chain, read_chain
from hessinit.products.loss_norms import LossNorms, loss_norms
from hessinit.products.places import Place
from hessinit.products.reaches import backward_stretches, forward_stretches, lengths_of
from hessinit.products.spectral_norms import spectral_norms
from hessinit.products.start import Traced, trace_from_start
from hessinit.products.taps import most_taps
from hessinit.products.weight_reach import tokens_of, weight_reach

_TOGETHER = "the examples see each other, so the batch counts as one"


@dataclass(frozen=True)
class BatchProducts:
    """One layer on one batch; `forward` and the paper's bound are None with `reason`."""

    forward: SingularValues | None
    backward: SingularValues
    activation: float
    paper_bound: float | None
    rigorous_bound: float | None
    lipschitz_bound: float | None
    reason: str = ""
    lipschitz_reason: str = ""
    note: str = ""


@dataclass(frozen=True)
class _Forward:
    """The norms of the forward product and the lengths of what it starts from, both by example."""

    norms: SingularValues
    lengths: Array


def batch_products(
    evaluation: Evaluation, effort: LanczosSettings
) -> tuple[dict[str, BatchProducts], dict[str, str]]:
    """The products of the layers whose every use is known; why not, for the others."""
    check_outputs(evaluation)
    traced = trace_from_start(evaluation)
    leaves = evaluation.problem.leaves
    layers, reasons = read_uses(traced.output, find_uses(traced.output, leaves), leaves, effort.seed)
    if not layers:
        return {}, reasons
    losses = loss_norms(evaluation, effort)
    backward: dict[str, SingularValues] = {}
    for stretch in backward_stretches(traced, layers):
        backward |= spectral_norms(stretch.reach, stretch.layers, effort)
    forward, kept = _forward(traced, layers, effort)
    chain = read_chain(traced.output, [traced.starts[index].tensor for index in kept], effort)
    found = {
        layer.name: _one_layer(
            layer, traced, losses, backward[layer.name], forward.get(layer.name), chain, effort
        )
        for layer in layers
    }
    return found, reasons


def _forward(
    traced: Traced, layers: list[LayerUses], effort: LanczosSettings
) -> tuple[dict[str, _Forward], list[int]]:
    """The forward products, and the starts that count: those of the examples' own where there are any."""
    found: dict[str, _Forward] = {}
    kept: list[int] = []
    if not traced.starts:
        return found, kept
    for stretch in forward_stretches(traced, layers, effort.seed):
        lengths = lengths_of(stretch.reach).cpu().numpy()
        for name, norms in spectral_norms(stretch.reach, stretch.layers, effort).items():
            found[name] = _Forward(norms, lengths)
        tensors = [start.tensor for start in traced.starts]
        used = [next(at for at, one in enumerate(tensors) if one is place.at) for place in stretch.reach.end]
        kept = used if not kept or len(used) < len(kept) else kept
    return found, kept or list(range(len(traced.starts)))


def _one_layer(
    layer: LayerUses,
    traced: Traced,
    losses: LossNorms,
    backward: SingularValues,
    forward: _Forward | None,
    chain: Chain | str,
    effort: LanczosSettings,
) -> BatchProducts:
    slopes = _slopes(layer, traced.output.detach())
    reach = weight_reach(layer, effort)
    with np.errstate(divide="ignore", invalid="ignore"):
        behind = np.log(backward.upper * slopes)
        rigorous: float | None = losses.bound(behind + np.log(reach.upper))
    words = tokens_of(layer)
    paper, reason = None, ""
    if not (losses.converged and reach.converged and backward.converged):
        # An unfinished search may be far below: what it gives is no bound.
        rigorous, reason = None, "a norm in the bounds did not converge; raise max_iterations"
    elif forward is None and not words.any():
        reason = traced.reason or "the layer's input does not depend on what the network starts from"
    else:
        paper = losses.bound(_log_paper_factor(layer, behind, forward, words))
    naive = _lipschitz(layer, losses, forward, words, chain)
    note = ""
    if traced.output.ndim and traced.output.shape[0] > 1:
        if layer.size == 1:
            note = _TOGETHER
        elif forward is not None and len(forward.lengths) == 1:
            note = f"before this layer {_TOGETHER}"
    return BatchProducts(
        forward=_norms_with_words(forward, words),
        backward=backward,
        activation=float(slopes.max()),
        paper_bound=paper,
        rigorous_bound=rigorous,
        lipschitz_bound=None if isinstance(naive, str) else naive,
        reason=reason,
        lipschitz_reason=naive if isinstance(naive, str) else "",
        note=note,
    )


def _slopes(layer: LayerUses, like: Tensor) -> Array:
    """‖A‖: the largest |f'| of every example at the layer's outputs; 1 where no activation follows."""
    slopes = np.zeros(layer.size)
    for use in layer.uses:
        found = np.ones(layer.size)
        if use.activation is not None:
            shape = shape_behind(use.activation)
            steps = use.call.rows // layer.size if use.after_time_first else 0
            # Elementwise, so its derivative times ones is the diagonal.
            ends = GradientEdge(use.activation, 0), GradientEdge(*use.activation.next_functions[0])
            (derivative,) = torch.autograd.grad(
                [ends[0]], [ends[1]], [like.new_ones(shape)], retain_graph=True
            )
            by_example = Place(derivative, shape, layer.size, steps).gather(derivative)
            found = by_example.abs().amax(dim=1).double().cpu().numpy()
        slopes = np.maximum(slopes, found)
    return slopes


def _log_paper_factor(layer: LayerUses, behind: Array, forward: _Forward | None, words: Array) -> Array:
    """‖B‖ ‖A‖ √taps ‖F‖ ‖x‖; looked up words are one-hot inputs, as long as the root of their number."""
    taps = max(most_taps(use.call) for use in layer.uses)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        if forward is None:
            return behind + np.log(words) / 2
        inputs = math.log(taps) / 2 + np.log(forward.norms.upper) + np.log(forward.lengths)
        if len(inputs) != len(behind):  # examples that see each other on the way to the layer, not behind it
            behind, words = behind.max(keepdims=True), words.sum(keepdims=True)
        return behind + np.logaddexp(2 * inputs, np.log(words)) / 2


def _norms_with_words(forward: _Forward | None, words: Array) -> SingularValues | None:
    """A looked up word is its own input: beside it the forward product is at least 1."""
    if not words.any():
        return None if forward is None else forward.norms
    if forward is None:
        return SingularValues(
            np.ones(len(words)), np.zeros(len(words)), True, "words are looked up as they are", 0
        )
    norms = forward.norms
    values = np.maximum(norms.values, 1.0)
    return SingularValues(values, norms.errors, norms.converged, norms.reason, norms.products)


def _lipschitz(
    layer: LayerUses, losses: LossNorms, forward: _Forward | None, words: Array, chain: Chain | str
) -> float | str:
    if isinstance(chain, str):
        return chain
    factors = []
    for use in layer.uses:
        others = chain.without(use.node)
        if others is None:
            return "the layer is not on the way from the network's start to its output"
        with np.errstate(divide="ignore"):
            lengths = np.log(words) / 2 if forward is None or use.before is None else np.log(forward.lengths)
        factors.append(others + math.log(most_taps(use.call)) / 2 + lengths)
    if len({len(factor) for factor in factors}) > 1:
        return "the examples see each other on the way to the layer"
    return losses.bound(np.logaddexp.reduce(factors))
