"""Small networks of every kind that an initialization must handle, on the embedded digits and on tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hessinit.digits import load_digits

LOSS = nn.CrossEntropyLoss()


def digits(examples: int = 64) -> tuple[Tensor, Tensor]:
    images, labels = load_digits()
    return images[:examples], labels[:examples]


def mlp(depth: int, activation: type[nn.Module] = nn.ReLU, width: int = 32) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, width), activation()]
    for _ in range(depth - 2):
        layers += [nn.Linear(width, width), activation()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def cnn(depth: int, channels: int = 6) -> nn.Sequential:
    layers: list[nn.Module] = []
    for index in range(depth - 1):
        layers += [nn.Conv2d(channels if index else 1, channels, 3, padding=1), nn.ReLU()]
        if index == depth // 2:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(channels * 4, 10))


def normalized(depth: int = 4, width: int = 32) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for index in range(depth - 1):
        layers += [nn.Linear(width if index else 64, width), nn.BatchNorm1d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


class Branch(nn.Module):
    def __init__(self, width: int, norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(self.norm(x))))


def residual(blocks: int, norm: bool = False, width: int = 24) -> nn.Sequential:
    body = [Branch(width, norm) for _ in range(blocks)]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), *body, nn.Linear(width, 10))


class Tokens(nn.Module):
    """Embedding, a body over (examples, positions, width), and a head that may be tied to the embedding."""

    def __init__(self, body: nn.Module, width: int = 16, words: int = 12, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.body = body
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.body(self.embed(tokens))
        return self.head(found[0] if isinstance(found, tuple) else found)


def transformer(pre: bool = True, tied: bool = False) -> Tokens:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=pre)
    body = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.LayerNorm(16))
    return Tokens(body, tied=tied)


def lstm() -> Tokens:
    return Tokens(nn.LSTM(16, 16, batch_first=True))


def text() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(12, (6, 9), generator=torch.Generator().manual_seed(3))
    return tokens[:, :-1], tokens[:, 1:]


def text_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def state(model: nn.Module) -> dict[str, Any]:
    """Bits and identities, to compare with `==`."""
    return {
        name: (id(parameter), parameter.detach().clone().numpy().tobytes())
        for name, parameter in model.named_parameters(remove_duplicate=False)
    } | {name: buffer.clone().numpy().tobytes() for name, buffer in model.named_buffers()}
