"""Small networks of every kind that an initialization must handle, on the embedded digits and on tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hessinit.digits import load_digits
from tiny import Net

LOSS = nn.CrossEntropyLoss()
BOTH = pytest.mark.parametrize("with_sample", [True, False], ids=["sample", "made_up"])


def between(function: Callable[[Tensor], Tensor]) -> Net:
    """Two layers with a function between them."""
    parts = {"first": nn.Linear(4, 6), "last": nn.Linear(6, 3), "function": function}
    return Net(lambda net, x: net.last(net.function(net.first(x))), **parts)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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


def branch(width: int, norm: bool = False) -> Net:
    parts = {"norm": nn.LayerNorm(width) if norm else nn.Identity()}
    parts |= {"first": nn.Linear(width, width), "second": nn.Linear(width, width)}
    return Net(lambda net, x: x + net.second(F.relu(net.first(net.norm(x)))), **parts)


def residual(blocks: int, norm: bool = False, width: int = 24) -> nn.Sequential:
    body = [branch(width, norm) for _ in range(blocks)]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), *body, nn.Linear(width, 10))


def text_model(body: nn.Module, tied: bool = False) -> Net:
    """Embedding, a body over (examples, positions, width), and a head that may be tied to the embedding."""

    def run(net: Any, tokens: Tensor) -> Tensor:
        found = net.body(net.embed(tokens))
        return net.head(found[0] if isinstance(found, tuple) else found)

    model = Net(run, embed=nn.Embedding(12, 16), body=body, head=nn.Linear(16, 12, bias=False))
    if tied:
        model.head.weight = model.embed.weight
    return model


def transformer(pre: bool = True, tied: bool = False) -> Net:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=pre)
    body = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.LayerNorm(16))
    return text_model(body, tied)


def lstm() -> Net:
    return text_model(nn.LSTM(16, 16, batch_first=True))


def text() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(12, (6, 9), generator=seeded(3))
    return tokens[:, :-1], tokens[:, 1:]


def text_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def state(model: nn.Module) -> dict[str, Any]:
    """Bits and identities, to compare with `==`."""
    return {
        name: (id(parameter), parameter.detach().clone().numpy().tobytes())
        for name, parameter in model.named_parameters(remove_duplicate=False)
    } | {name: buffer.clone().numpy().tobytes() for name, buffer in model.named_buffers()}
