"""The true fans of a weight, and its blocks as matrices.

torch reads fans off a tensor's shape, which is wrong for grouped and transposed convolutions, strides, fused
projections and gates. Here they are what the words say: how many inputs an output sums over, and how many
outputs an input feeds, on average.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hessinit.errors import ProblemError
from hessinit.problem.layers import layer_name
from hessinit.schemes.site import Site


@dataclass(frozen=True)
class Fans:
    """How many inputs an output sums over, and how many outputs an input feeds.

    Borders aside. With a stride, or a transposed convolution's, they are means over the positions.
    """

    inputs: float
    outputs: float


def fans_of(site: Site) -> tuple[Fans, ...]:
    """The fans of each part of the weight.

    >>> fans_of(Site("conv.weight", "convolution", (64, 3, 5, 5), 0, stride=(2, 2)))
    (Fans(inputs=75.0, outputs=400.0),)
    >>> fans_of(Site("up.weight", "transposed convolution", (8, 4, 4, 4), 0, stride=(2, 2)))
    (Fans(inputs=32.0, outputs=64.0),)
    >>> fans_of(Site("qkv.weight", "dense", (192, 64), 0, parts=(64, 64, 64)))[0]
    Fans(inputs=64.0, outputs=64.0)
    """
    _check_sizes(site)
    shape = site.shape
    taps, positions = math.prod(shape[2:]), math.prod(site.stride)
    if site.kind == "embedding":
        return (Fans(1.0, float(shape[1])),)  # a lookup: every output is one entry
    if site.kind == "bilinear":
        return (Fans(float(shape[1] * shape[2]), float(shape[0])),)
    if site.kind == "transposed convolution":
        inputs = shape[0] // site.groups * taps / positions
        return (Fans(inputs, float(shape[1] * taps)),)
    if site.kind == "convolution":
        inputs = float(shape[1] * taps)
        return tuple(Fans(inputs, part // site.groups * taps / positions) for part in _parts(site))
    inputs = float(shape[0] if site.outputs_last else shape[1])
    return tuple(Fans(inputs, float(part)) for part in _parts(site))


def blocks_of(site: Site, weight: Tensor) -> list[list[Tensor]]:
    """For each part the matrices that it holds, one a group, as views (outputs, inputs, …taps)."""
    if site.kind == "embedding":
        return [[weight.T]]
    if site.kind == "bilinear":
        return [[weight.flatten(1)]]
    if site.kind == "transposed convolution":
        return [[group.transpose(0, 1) for group in weight.chunk(site.groups)]]
    if site.kind == "convolution":
        parts = weight.split(_parts(site))
        return [list(part.chunk(site.groups)) for part in parts]
    matrix = weight.T if site.outputs_last else weight
    return [[part] for part in matrix.split(_parts(site))]


def widths_change(sites: Sequence[Site]) -> bool:
    """Whether a layer that feeds another has more than twice as many outputs as inputs, or less than half."""
    fans = [fans_of(site)[0] for site in sites if site.kind != "embedding"]
    return any(not 0.5 <= one.outputs / one.inputs <= 2 for one in fans[:-1])


def _parts(site: Site) -> list[int]:
    outputs = site.shape[1] if site.outputs_last else site.shape[0]
    # The groups of a convolution are blocks already; parts across them would cut through.
    if not site.parts or sum(site.parts) != outputs or site.groups > 1:
        return [outputs]
    return list(site.parts)


def _check_sizes(site: Site) -> None:
    if math.prod(site.shape) == 0:
        raise ProblemError(
            f"{layer_name(site.parameter)} has shape {site.shape}: a fan is zero, so no variance can be "
            "right for it. Remove the layer, or leave it out with layers=."
        )
