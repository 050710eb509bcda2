"""Spectral norms of every example's Jacobian at many layers: by few unit vectors, exact, or by Lanczos."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hessinit.curvature.engines import LanczosSettings
from hessinit.curvature.singular_values import BatchedMap, SingularValues, largest_singular_values
from hessinit.products.places import Place, Reach, gather_all

Places = Sequence[Place]

# Unit vectors are shared by all layers, Lanczos takes about this many passes for each of them.
_PASSES_PER_LAYER = 16
_FEW, _MOST = 64, 256
# What the unit vectors become is held for so many layers at a time that it takes about this many bytes.
_BYTES_AT_ONCE = 2**27
_NUMBERS_AT_ONCE = 2**22
# All examples wait for the slowest: a digit less in the worst of them halves the passes, the others have it.
_LOOSER, _LOOSEST = 10, 0.05


def spectral_norms(
    reach: Reach, layers: Mapping[str, Places], effort: LanczosSettings
) -> dict[str, SingularValues]:
    """The norm of the derivative between the end of `reach` and a layer's places, by layer and example.

    With few numbers at that end the unit vectors go to all layers at once, a pass for each. Otherwise every
    layer takes a Lanczos run of its own, for all examples in lockstep. No Jacobian of a large layer and a
    large end is ever formed.
    """
    found: dict[str, SingularValues] = {}
    if reach.each <= min(_MOST, max(_FEW, _PASSES_PER_LAYER * len(layers))):
        for group in _groups(reach, layers):
            for name, columns in zip(group, _columns(reach, [layers[name] for name in group]), strict=True):
                found[name] = exact_norms(columns.transpose(0, 1))
        return found
    looser = dataclasses.replace(effort, tolerance=min(_LOOSER * effort.tolerance, _LOOSEST))
    for name, places in layers.items():
        found[name] = largest_singular_values(
            _as_map(reach, places),
            dtype=reach.jacobian.like.dtype,
            device=reach.jacobian.like.device,
            **looser.options,
        )
    return found


def _as_map(reach: Reach, places: Places) -> BatchedMap:
    def push(vectors: Tensor) -> Tensor:
        return gather_all(places, reach.out(places, vectors))

    def pull(vectors: Tensor) -> Tensor:
        return reach.back(places, vectors)

    return BatchedMap(reach.examples, reach.each, _each(places), push, pull)


def _each(places: Places) -> int:
    return sum(place.each for place in places)


def _groups(reach: Reach, layers: Mapping[str, Places]) -> Iterator[list[str]]:
    per_number = reach.each * reach.examples * reach.jacobian.like.element_size()
    group: list[str] = []
    held = 0
    for name, places in layers.items():
        needed = _each(places) * per_number
        if group and held + needed > _BYTES_AT_ONCE:
            yield group
            group, held = [], 0
        group.append(name)
        held += needed
    if group:
        yield group


def _columns(reach: Reach, layers: Sequence[Places]) -> list[Tensor]:
    """What every unit vector becomes at every layer: (units, examples, numbers of each)."""
    like, count, size = reach.jacobian.like, reach.each, reach.examples
    unit = torch.eye(count, dtype=like.dtype, device=like.device)
    units = unit.unsqueeze(1).expand(count, size, count)  # the same one in all examples at once
    places = [place for one in layers for place in one]
    # One batched pass where its calls cost more than its arithmetic.
    if _each(places) * count * size <= _NUMBERS_AT_ONCE:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # a missing batching rule is only a warning, and slow
                return _by_layer(layers, reach.out(places, units))
        except (RuntimeError, UserWarning):
            pass
    sent = [_by_layer(layers, reach.out(places, unit)) for unit in units]
    return [torch.stack(parts) for parts in zip(*sent, strict=True)]


def _by_layer(layers: Sequence[Places], found: Sequence[Tensor]) -> list[Tensor]:
    parts = iter(found)
    return [gather_all(places, [next(parts) for _ in places]) for places in layers]


def exact_norms(matrices: Tensor) -> SingularValues:
    """Of matrices that are there, (examples, …, …), by the smaller of their two Gram matrices in doubles.

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
    finite_all = bool(np.isfinite(values).all())
    reason = (
        "exact up to rounding" if finite_all else "a product was not finite (inf or nan); use torch.float64"
    )
    errors = 8 * float(torch.finfo(matrices.dtype).eps) * values
    return SingularValues(values, errors, finite_all, reason, min(rows, columns))
