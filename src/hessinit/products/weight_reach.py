"""How far a unit change of a weight can move the outputs of its own calls, example by example."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hessinit.curvature.engines import LanczosSettings
from hessinit.curvature.gram import by_example
from hessinit.curvature.krylov import Array
from hessinit.curvature.layer_uses import ConvolutionCall, DenseCall, EmbeddingCall
from hessinit.curvature.singular_values import BatchedMap, SingularValues, largest_singular_values
from hessinit.products.layer_uses import LayerUse, LayerUses
from hessinit.products.patches import Patches, stacked
from hessinit.products.spectral_norms import exact_norms

_LARGEST_EXACT = 128


def weight_reach(layer: LayerUses, effort: LanczosSettings) -> SingularValues:
    """The spectral norm of the map from the weight to all its calls' outputs, on the actual inputs.

    A dense layer with one row per example: the length of its input. Uses that act on the same dimension of
    the weight are stacked; where they act on different ones (an embedding and the head tied to it, W and
    Wᵀ), the squared map is a Kronecker sum and its norm the sum of the norms.
    """
    kinds: dict[tuple[object, ...], list[LayerUse]] = {}
    for use in layer.uses:
        kinds.setdefault(_kind(use), []).append(use)
    found = [_stacked(uses, layer.size, effort) for uses in kinds.values()]
    if len(found) == 1:
        return found[0]
    values, upper = _hypotenuse([one.values for one in found]), _hypotenuse([one.upper for one in found])
    converged, products = all(one.converged for one in found), sum(one.products for one in found)
    return SingularValues(values, upper - values, converged, found[0].reason, products)


def _hypotenuse(sides: list[Array]) -> Array:
    total: Array = np.sqrt(np.sum(np.square(sides), axis=0))
    return total


def _kind(use: LayerUse) -> tuple[object, ...]:
    call = use.call
    if isinstance(call, DenseCall):
        return ("dense", call.stored_transposed)
    if isinstance(call, ConvolutionCall):
        return ("convolution", call.transposed, call.groups)
    return ("embedding",)


def _stacked(uses: list[LayerUse], size: int, effort: LanczosSettings) -> SingularValues:
    call = uses[0].call
    if isinstance(call, EmbeddingCall):
        return _counts(uses, size)
    if isinstance(call, DenseCall):
        matrices = torch.cat([_rows(use, size) for use in uses], dim=1)
        if min(matrices.shape[1:]) <= _LARGEST_EXACT:
            return exact_norms(matrices)
        return _iterate(BatchedMap.of(matrices), matrices, effort)
    return _convolutions(uses, size, effort)


def _rows(use: LayerUse, size: int) -> Tensor:
    """A dense call's inputs, (examples, rows of each, features)."""
    return by_example(use.call.inputs, size, use.time_first).view(size, -1, use.call.inputs.shape[1])


def _iterate(maps: BatchedMap, like: Tensor, effort: LanczosSettings) -> SingularValues:
    return largest_singular_values(maps, dtype=like.dtype, device=like.device, **effort.options)


def _counts(uses: list[LayerUse], size: int) -> SingularValues:
    """An embedding: √ of how often an example holds its most frequent word; padding does not count."""
    keys = []
    calls = [(use.call, use.time_first) for use in uses]
    for call, time_first in calls:
        assert isinstance(call, EmbeddingCall)
        words = by_example(call.inputs, size, time_first)
        numbers = torch.arange(size, device=words.device).unsqueeze(1).expand_as(words)
        keys.append(torch.stack((numbers, words))[:, words != call.padding])
    found, counts = torch.unique(torch.cat(keys, dim=1), dim=1, return_counts=True)
    most = np.zeros(size)
    np.maximum.at(most, found[0].cpu().numpy(), counts.cpu().numpy())
    return SingularValues(np.sqrt(most), np.zeros(size), True, "exact: words were counted", 0)


def _convolutions(uses: list[LayerUse], size: int, effort: LanczosSettings) -> SingularValues:
    """One output channel of each group tells all: the others see the same patches."""
    calls = [(use.call, use.time_first) for use in uses]
    patches = [Patches(call, size, later) for call, later in calls if isinstance(call, ConvolutionCall)]
    groups = next(call.groups for call, _ in calls if isinstance(call, ConvolutionCall))
    found = _iterate(stacked(patches, size * groups), uses[0].call.inputs, effort)
    values = found.values.reshape(size, groups).max(axis=1)
    upper = found.upper.reshape(size, groups).max(axis=1)
    return SingularValues(values, upper - values, found.converged, found.reason, found.products)


def tokens_of(layer: LayerUses) -> Array:
    """How many words every example looks up here, padding aside: the squared length of one-hot inputs."""
    total = np.zeros(layer.size)
    for use in layer.uses:
        if isinstance(use.call, EmbeddingCall):
            words = by_example(use.call.inputs, layer.size, use.time_first)
            total += (words != use.call.padding).sum(dim=1).cpu().numpy()
    return total
