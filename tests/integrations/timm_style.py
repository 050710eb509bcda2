"""Small networks with timm's calling convention: images in, logits out, features and head apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ImageNetwork(nn.Module):
    """A convolution, one residual block with BatchNorm, pooling and a head, as timm splits its ResNets."""

    def __init__(self, num_classes: int = 3, width: int = 4) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.block = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.fc = nn.Linear(width, num_classes)

    def forward_features(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        return x + self.block(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = x.mean((2, 3))
        return x if pre_logits else self.fc(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def image_network() -> ImageNetwork:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return ImageNetwork()


def images_and_labels(examples: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(examples, 1, 4, 4, generator=generator), torch.arange(examples) % 3
