"""Networks of ReLUs are linear in each layer by itself, so the exact Hessian's blocks are Gauss-Newton's."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hessinit

seeds = st.integers(0, 2**31 - 1)
repeatable = settings(derandomize=True, deadline=None, max_examples=25)


def assert_blocks_agree(model: nn.Module, loss: Any, batch: Any) -> None:
    exact, approximate = (
        hessinit.measure(model, loss, batch, curvature=curvature, dtype=torch.float64, tolerance=1e-10)
        for curvature in ("hessian", "gauss-newton")
    )
    assert [layer.name for layer in exact.layers] == [layer.name for layer in approximate.layers]
    for layer, other in zip(exact.layers, approximate.layers, strict=True):
        assert abs(layer.norm - other.norm) <= 1e-9 * max(layer.norm, other.norm), layer.name


@repeatable
@given(
    widths=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    classes=st.integers(2, 6),
    examples=st.integers(1, 12),
    seed=seeds,
)
def test_perceptrons_of_any_shape(widths: list[int], classes: int, examples: int, seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for before, after in zip(widths, widths[1:], strict=False):
            layers += [nn.Linear(before, after), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Linear(widths[-1], classes))
        batch = (torch.randn(examples, widths[0]), torch.randint(classes, (examples,)))
    assert_blocks_agree(model, nn.CrossEntropyLoss(), batch)


@repeatable
@given(
    channels=st.lists(st.integers(1, 4), min_size=2, max_size=3),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.integers(0, 1),
    dilation=st.integers(1, 2),
    pool=st.sampled_from(
        [nn.Identity, lambda: nn.MaxPool2d(2, ceil_mode=True), lambda: nn.AvgPool2d(1, stride=2)]
    ),
    examples=st.integers(1, 6),
    seed=seeds,
)
def test_convolutional_networks_of_any_shape(
    channels: list[int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: int,
    dilation: int,
    pool: Any,
    examples: int,
    seed: int,
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for index, (before, after) in enumerate(zip(channels, channels[1:], strict=False)):
            # Only the first one strides and dilates: the second may be left with a single pixel.
            shape: dict[str, Any] = (
                {"stride": stride, "padding": padding, "dilation": dilation} if index == 0 else {}
            )
            layers += [nn.Conv2d(before, after, kernel if index == 0 else 1, **shape), nn.ReLU(), pool()]
        images = torch.randn(examples, channels[0], 7, 6)
        with torch.no_grad():
            features = nn.Sequential(*layers)(images).flatten(1).shape[1]
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 3))
        batch = (images, torch.randint(3, (examples,)))
    assert_blocks_agree(model, nn.CrossEntropyLoss(), batch)
