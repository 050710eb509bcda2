"""True fans against a count: over how many entries an output sums, and how many outputs an input feeds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hessinit.errors import ProblemError
from hessinit.init.trace import WeightUse
from hessinit.init.weight_uses import block_views, fans_of


def site_of(layer: Any) -> WeightUse:
    transposed = isinstance(layer, (nn.ConvTranspose1d, nn.ConvTranspose2d))
    kind = "transposed convolution" if transposed else "convolution"
    return WeightUse("w", kind, tuple(layer.weight.shape), 0, groups=layer.groups, stride=layer.stride)


def counted(layer: Any, shape: tuple[int, ...]) -> tuple[float, float]:
    """With weights of 1 an output is the number of its inputs, an input's gradient that of its outputs.

    Circular padding is not to be had for every layer, so the middle of a large input is read.
    """
    nn.init.ones_(layer.weight)
    inputs = torch.ones(shape, requires_grad=True)
    outputs = layer(inputs)
    (fed,) = torch.autograd.grad(outputs.sum(), inputs)

    def middle(signal: torch.Tensor) -> float:
        for axis in range(2, signal.ndim):
            length = signal.shape[axis]
            signal = signal.narrow(axis, length // 4, length // 2 // 6 * 6)
        return float(signal.mean())

    return middle(outputs.detach()), middle(fed)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(3, 8, 5, stride=2, padding=2, bias=False), (1, 3, 48, 48)),
        (nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), (1, 8, 24, 24)),
        (nn.Conv2d(8, 12, 3, padding=2, dilation=2, groups=4, bias=False), (1, 8, 48, 48)),
        (nn.Conv1d(4, 6, 4, stride=3, padding=2, bias=False), (1, 4, 144)),
        (nn.ConvTranspose2d(6, 4, 4, stride=2, padding=1, bias=False), (1, 6, 24, 24)),
        (nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, groups=2, bias=False), (1, 6, 48, 48)),
        (nn.ConvTranspose1d(2, 3, 5, stride=3, padding=1, bias=False), (1, 2, 144)),
    ],
    ids=str,
)
def test_fans_of_convolutions_are_what_a_count_finds(layer: Any, shape: tuple[int, ...]) -> None:
    (fans,) = fans_of(site_of(layer))
    assert counted(layer, shape) == pytest.approx((fans.inputs, fans.outputs), rel=1e-5)


def test_blocks_cover_every_entry_once() -> None:
    sites = [
        WeightUse("w", "dense", (12, 5), 0, blocks=(4, 4, 4)),
        WeightUse("w", "dense", (5, 12), 0, blocks=(6, 3, 3), outputs_last=True),
        WeightUse("w", "convolution", (8, 2, 3, 3), 0, groups=4),
        WeightUse("w", "transposed convolution", (8, 3, 2, 2), 0, groups=2, stride=(2, 2)),
        WeightUse("w", "embedding", (7, 3), 0),
        WeightUse("w", "bilinear", (4, 3, 2), 0),
    ]
    for site in sites:
        weight = torch.zeros(site.shape)
        for groups in block_views(site, weight):
            for block in groups:
                block.add_(1)
        assert torch.equal(weight, torch.ones(site.shape)), site


def test_blocks_are_outputs_by_inputs() -> None:
    (groups,) = block_views(
        WeightUse("w", "transposed convolution", (8, 3, 2, 2), 0, groups=2), torch.zeros(8, 3, 2, 2)
    )
    assert [tuple(block.shape) for block in groups] == [(3, 4, 2, 2)] * 2
    (first, second) = block_views(
        WeightUse("w", "dense", (5, 12), 0, blocks=(8, 4), outputs_last=True), torch.zeros(5, 12)
    )
    assert (first[0].shape, second[0].shape) == ((8, 5), (4, 5))


def test_a_zero_fan_is_refused_by_name() -> None:
    with pytest.raises(ProblemError, match=r"fc has shape \(5, 0\): a fan is zero.*layers="):
        fans_of(WeightUse("fc.weight", "dense", (5, 0), 0))
