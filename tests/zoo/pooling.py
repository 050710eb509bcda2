"""Pooling of all kinds. FractionalMaxPool is left out: it draws new regions at every call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from zoo.problem import Family, Parts, labels

family = Family()

POOLS: dict[str, Callable[[], nn.Module]] = {
    "max_pool2d": lambda: nn.MaxPool2d(2),
    "max_pool2d_overlapping": lambda: nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True),
    "avg_pool2d": lambda: nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False),
    "adaptive_max_pool2d": lambda: nn.AdaptiveMaxPool2d((2, 3)),
    "adaptive_avg_pool2d": lambda: nn.AdaptiveAvgPool2d((3, 2)),
    "lp_pool2d": lambda: nn.LPPool2d(2, 2),
}


def pooled_images(pool: Callable[[], nn.Module]) -> Parts:
    body = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), pool(), nn.Flatten())
    images = torch.randn(5, 1, 6, 6)
    with torch.no_grad():
        features = body(images).shape[1]
    return nn.Sequential(*body, nn.Linear(features, 3)), nn.CrossEntropyLoss(), (images, labels(3, 5))


for _name, _pool in POOLS.items():
    family.add(_name)(lambda pool=_pool: pooled_images(pool))


@family.add()
def max_and_avg_pool1d() -> Parts:
    model = nn.Sequential(
        nn.Conv1d(1, 3, 3), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(3, 4, 2), nn.GELU(), nn.AvgPool1d(2),
        nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip
    return model, nn.CrossEntropyLoss(), (torch.randn(5, 1, 8), labels(3, 5))


@family.add()
def adaptive_pool1d() -> Parts:
    model = nn.Sequential(
        nn.Conv1d(2, 4, 2), nn.SiLU(), nn.AdaptiveMaxPool1d(4), nn.Conv1d(4, 3, 1), nn.SiLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(3, 3),
    )  # fmt: skip
    return model, nn.CrossEntropyLoss(), (torch.randn(5, 2, 7), labels(3, 5))


@family.add()
def max_and_avg_pool3d() -> Parts:
    model = nn.Sequential(
        nn.Conv3d(1, 2, 2),
        nn.Tanh(),
        nn.MaxPool3d((1, 2, 2)),
        nn.AvgPool3d((2, 1, 1)),
        nn.Flatten(),
        nn.Linear(8, 2),
    )
    return model, nn.CrossEntropyLoss(), (torch.randn(4, 1, 3, 5, 5), labels(2, 4))


@family.add()
def adaptive_pool3d() -> Parts:
    model = nn.Sequential(
        nn.Conv3d(1, 3, 2), nn.ReLU(), nn.AdaptiveMaxPool3d((2, 2, 1)), nn.AdaptiveAvgPool3d(1), nn.Flatten(),
        nn.Linear(3, 2),
    )  # fmt: skip
    return model, nn.CrossEntropyLoss(), (torch.randn(4, 1, 3, 3, 3), labels(2, 4))
