"""The arena's networks, built as a user would build them: PyTorch's modules and PyTorch's default weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def mlp(activation: type[nn.Module], depth: int, *, width: int = 128, dropout: float = 0.0) -> nn.Sequential:
    """`depth` weights: 784 → width → … → 10."""
    layers: list[nn.Module] = []
    fan_in = 784
    for _ in range(depth - 1):
        layers += [nn.Linear(fan_in, width), activation()]
        if dropout:
            layers.append(nn.Dropout(dropout))
        fan_in = width
    return nn.Sequential(*layers, nn.Linear(fan_in, 10))


class ResidualMLP(nn.Module):
    """Blocks x + W₂ relu(W₁ x), without normalization."""

    def __init__(self, blocks: int = 20, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Linear(784, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(blocks)
        )
        self.classifier = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        state = self.embed(images)
        for block in self.blocks:
            state = state + block(state)
        return self.classifier(state)

    def residual_branches(self) -> list[list[nn.Module]]:
        return [[block[0], block[2]] for block in self.blocks]


def lenet() -> nn.Sequential:
    """LeNet-5 for colour images."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def plain_cnn() -> nn.Sequential:
    """Nine weights: eight 3 × 3 convolutions without normalization, and a classifier."""
    layers: list[nn.Module] = []
    channels = 3
    for width, stride in ((16, 1), (16, 2), (32, 1), (32, 2), (64, 1), (64, 2), (64, 1), (64, 1)):
        layers += [nn.Conv2d(channels, width, 3, stride=stride, padding=1), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def cnn(norm: Callable[[int], nn.Module], activation: type[nn.Module]) -> nn.Sequential:
    """Three 3 × 3 convolutions for 1 × 28 × 28 images, each with a norm of its channels, and a classifier."""
    layers: list[nn.Module] = []
    channels = 1
    for width in (32, 64, 64):
        convolution = nn.Conv2d(channels, width, 3, padding=1)
        layers += [convolution, norm(width), activation(), nn.MaxPool2d(2)]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(9 * channels, 10))


def eight_groups(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(8, channels)


def layer_norm_mlp(width: int = 256, depth: int = 5) -> nn.Sequential:
    """`depth` weights with tanh, LayerNorm after each but the last."""
    layers: list[nn.Module] = [nn.Flatten()]
    fan_in = 784
    for _ in range(depth - 1):
        layers += [nn.Linear(fan_in, width), nn.LayerNorm(width), nn.Tanh()]
        fan_in = width
    return nn.Sequential(*layers, nn.Linear(fan_in, 10))


class CharacterLSTM(nn.Module):
    """Embedding, LSTM, a score for every next character."""

    def __init__(self, vocabulary: int, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width // 2)
        self.lstm = nn.LSTM(width // 2, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


class Transformer(nn.Module):
    """A causal language model of PyTorch's own encoder layers, post-LN or pre-LN."""

    def __init__(
        self,
        vocabulary: int,
        length: int,
        *,
        norm_first: bool,
        width: int = 48,
        layers: int = 4,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                heads,
                4 * width,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=norm_first,
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width) if norm_first else nn.Identity()
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        state = self.embed(tokens) + self.position(places)
        for layer in self.layers:
            state = layer(state, src_mask=self.mask)
        return self.head(self.norm(state))


def vgg16(activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """The 13 convolutions of VGG-16 for 32 × 32 images and its three dense layers, without normalization."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        if not width:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(channels, width, 3, padding=1), activation()]
        channels = width
    dense = [nn.Linear(512, 512), activation(), nn.Linear(512, 512), activation(), nn.Linear(512, 10)]
    return nn.Sequential(*layers, nn.Flatten(), *dense)


def tanh_cnn(depth: int = 19, width: int = 64) -> nn.Sequential:
    """`depth` weights: 3 × 3 convolutions with tanh, the resolution halved three times, and a classifier."""
    layers: list[nn.Module] = []
    channels = 3
    for place in range(depth - 1):
        stride = 2 if place in (5, 10, 15) else 1
        layers += [nn.Conv2d(channels, width, 3, stride=stride, padding=1), nn.Tanh()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class Block(nn.Module):
    """Two 3 × 3 convolutions beside a shortcut that is the identity or an average pooling with padding."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.pool = nn.AvgPool2d(stride) if stride > 1 else nn.Identity()
        self.more = width - channels

    def forward(self, state: Tensor) -> Tensor:
        branch = self.conv2(torch.relu(self.conv1(state)))
        shortcut = nn.functional.pad(self.pool(state), (0, 0, 0, 0, 0, self.more))
        return torch.relu(shortcut + branch)


class ResNet(nn.Module):
    """He et al.'s ResNet for CIFAR-10 (depth 6n + 2) with every normalization left out."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        each = (depth - 2) // 6
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        blocks: list[Block] = []
        channels = 16
        for width in (16, 32, 64):
            for place in range(each):
                blocks.append(Block(channels, width, 2 if place == 0 and width > 16 else 1))
                channels = width
        self.blocks = nn.ModuleList(blocks)
        self.classifier = nn.Linear(channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        state = torch.relu(self.stem(images))
        for block in self.blocks:
            state = block(state)
        return self.classifier(state.mean((2, 3)))

    def residual_branches(self) -> list[list[nn.Module]]:
        return [[block.conv1, block.conv2] for block in self.blocks]  # type: ignore[union-attr]


class NormalizedBlock(nn.Module):
    """Two 3 × 3 convolutions with BatchNorm beside the identity or a 1 × 1 convolution with BatchNorm."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != width:
            shorter = nn.Conv2d(channels, width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(shorter, nn.BatchNorm2d(width))

    def forward(self, state: Tensor) -> Tensor:
        branch = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(state)))))
        return torch.relu(self.shortcut(state) + branch)


def normalized_resnet(depth: int) -> nn.Sequential:
    """He et al.'s ResNet for CIFAR-10 (depth 6n + 2) with BatchNorm."""
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks: list[nn.Module] = []
    channels = 16
    for width in (16, 32, 64):
        for place in range((depth - 2) // 6):
            blocks.append(NormalizedBlock(channels, width, 2 if place == 0 and width > 16 else 1))
            channels = width
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


class VisionTransformer(nn.Module):
    """ViT-Ti for 32 × 32 images: patches of 4 × 4, width 192, 12 pre-LN layers, 3 heads, mean at the end."""

    def __init__(self, width: int = 192, layers: int = 12, heads: int = 3, patch: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, (32 // patch) ** 2, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        state = self.patches(images).flatten(2).transpose(1, 2) + self.position
        for layer in self.layers:
            state = layer(state)
        return self.head(self.norm(state).mean(1))
