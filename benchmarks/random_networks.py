"""Random ordinary networks: dense, convolutional, recurrent, attentive and gated, with a dozen losses."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations


@dataclass
class Parts:
    """A model, a loss and a batch (or a list of batches)."""

    model: nn.Module
    loss: Callable[..., Tensor]
    batch: Any
    forward: Callable[[nn.Module, Any], Tensor] | None = None
    layers: str | None = None  # to measure, where the truth of all would take too long

    @property
    def batches(self) -> list[Any]:
        return self.batch if isinstance(self.batch, list) else [self.batch]

    def double(self) -> Parts:
        """The same numbers in fp64; the loss may hold a model's weight, so it is converted in place, too."""
        self.model.double()
        if isinstance(self.loss, nn.Module):
            self.loss.double()
        batch = _map(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, self.batch)
        return replace(self, batch=batch)


def _map(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    return type(value)(_map(function, one) for one in value)


ACTIVATIONS: list[Callable[[], nn.Module]] = [
    nn.ReLU, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.ELU, nn.LeakyReLU, nn.Hardswish,
    nn.Mish, nn.SELU, nn.PReLU, nn.Identity, nn.Softsign, nn.ReLU6, nn.Hardtanh, nn.CELU,
]  # fmt: skip


def activation(chance: random.Random) -> nn.Module:
    return chance.choice(ACTIVATIONS)()


def norm(chance: random.Random, width: int) -> nn.Module:
    # Without an eps of its own, RMSNorm takes that of the dtype, so that fp64 would be another function.
    root_mean_square = partial(nn.RMSNorm, eps=1e-6)
    return chance.choice([nn.BatchNorm1d, nn.LayerNorm, root_mean_square, nn.Identity, nn.Identity])(width)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.inner, self.scale = inner, scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.inner(x)


def dense_stack(chance: random.Random, inputs: int, outputs: int) -> nn.Sequential:
    width = chance.randint(2, 14)
    layers: list[nn.Module] = [nn.Linear(inputs, width, bias=chance.random() < 0.7)]
    layers += [norm(chance, width), activation(chance)]
    for _ in range(chance.randint(0, 3)):
        inner = nn.Sequential(nn.Linear(width, width), norm(chance, width), activation(chance))
        small = chance.choice([1.0, 1.0, 0.1, 1e-3])
        layers.append(Residual(inner, small) if chance.random() < 0.3 else inner)
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def rescale(chance: random.Random, model: nn.Module) -> nn.Module:
    """Start from something else than PyTorch's default; one time in ten with a zero or a tiny head."""
    factor = chance.choice([0.2, 0.5, 1.0, 1.0, 1.5, 3.0])
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    with torch.no_grad():
        for weight in weights:
            weight.mul_(factor)
        if chance.random() < 0.1:
            weights[-1].mul_(chance.choice([0.0, 1e-3, 1e-6]))
    return model


def features(chance: random.Random, *shape: int) -> Tensor:
    """Standardized as a rule; some large, some far from zero, some with equal or empty examples."""
    x = torch.randn(*shape)
    kind = chance.random()
    if kind < 0.05:
        x = 300 + chance.choice([0.1, 10.0]) * x
    elif kind < 0.1:
        x = x * chance.choice([1e-3, 30.0])
    elif kind < 0.15:
        x[-1] = x[0]
    elif kind < 0.2:
        x[0] = 0
    return x


def criterion(chance: random.Random, outputs: int) -> tuple[Callable[..., Tensor], Callable[[int], Tensor]]:
    """A loss of (N, outputs), and what draws N targets for it."""
    reduction = chance.choice(["mean", "mean", "sum"])
    labels = lambda count: torch.randint(outputs, (count,))  # noqa: E731
    numbers = lambda count: torch.randn(count, outputs)  # noqa: E731
    zeros_and_ones = lambda count: torch.rand(count, outputs).round()  # noqa: E731

    def focal(output: Tensor, target: Tensor) -> Tensor:
        probability = output.softmax(1).gather(1, target[:, None])
        return ((1 - probability) ** 2 * -probability.log()).mean()

    def hinge(output: Tensor, target: Tensor) -> Tensor:
        return torch.relu(1 - output.gather(1, target[:, None]) + output).pow(2).sum(1).mean()

    def contrastive(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.normalize(output) @ F.normalize(target).T / 0.3, torch.arange(len(output)))

    def gaussian(output: Tensor, target: Tensor) -> Tensor:
        spread = output[:, :1]
        return (0.5 * spread + 0.5 * (target - output) ** 2 * torch.exp(-spread)).mean()

    weights = torch.linspace(0.3, 2.0, outputs)
    found: list[tuple[Callable[..., Tensor], Callable[[int], Tensor]]] = [
        (nn.CrossEntropyLoss(reduction=reduction), labels),
        (nn.CrossEntropyLoss(reduction=reduction), labels),
        (nn.CrossEntropyLoss(weight=weights, reduction=reduction), labels),
        (nn.CrossEntropyLoss(label_smoothing=0.1), labels),
        (F.cross_entropy, labels),
        (nn.MSELoss(reduction=reduction), numbers),
        (F.mse_loss, numbers),
        (nn.HuberLoss(delta=0.8, reduction=reduction), numbers),
        (nn.BCEWithLogitsLoss(reduction=reduction), zeros_and_ones),
        (nn.PoissonNLLLoss(), zeros_and_ones),
        (lambda output, target: (1 - F.cosine_similarity(output, target, dim=1)).mean(), numbers),
        (lambda output, target: torch.log1p((output - target) ** 2).sum(1).mean(), numbers),
        (focal, labels),
        (hinge, labels),
        (contrastive, numbers),
        (gaussian, numbers),
    ]
    return chance.choice(found)


def batched(chance: random.Random, sample: Callable[[int], Tensor], target: Callable[[int], Tensor]) -> Any:
    """One batch, or two of different sizes."""
    sizes = (
        [chance.randint(3, 32)] if chance.random() < 0.8 else [chance.randint(3, 8), chance.randint(4, 16)]
    )
    batches = [(sample(size), target(size)) for size in sizes]
    return batches[0] if len(batches) == 1 else batches


def mlp(chance: random.Random) -> Parts:
    inputs, outputs = chance.randint(2, 20), chance.randint(2, 6)
    model = rescale(chance, dense_stack(chance, inputs, outputs))
    loss, target = criterion(chance, outputs)
    return Parts(model, loss, batched(chance, lambda count: features(chance, count, inputs), target))


def convolutional(chance: random.Random) -> Parts:
    channels, outputs = chance.choice([2, 4, 8]), chance.randint(2, 3)
    normalizer = chance.choice([nn.BatchNorm2d, lambda c: nn.GroupNorm(2, c), nn.InstanceNorm2d, nn.Identity])
    second = nn.Conv2d(channels, channels, 2, groups=chance.choice([1, 2]), padding=chance.choice([0, 1]))
    if chance.random() < 0.2:
        second = nn.ConvTranspose2d(channels, channels, 2, stride=2)  # type: ignore[assignment]
    pool = chance.choice([nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d])(1)
    model = nn.Sequential(
        nn.Conv2d(1, channels, 3, stride=chance.choice([1, 2])), normalizer(channels), activation(chance),
        second, activation(chance), pool, nn.Flatten(), nn.Linear(channels, outputs),
    )  # fmt: skip
    loss, target = criterion(chance, outputs)
    return Parts(
        rescale(chance, model), loss, batched(chance, lambda count: features(chance, count, 1, 6, 6), target)
    )


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.cell, self.head = kind(inputs, width, batch_first=True), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


def recurrent(chance: random.Random) -> Parts:
    inputs, outputs = chance.randint(1, 3), chance.randint(2, 3)
    model = Recurrent(chance.choice([nn.RNN, nn.LSTM, nn.GRU]), inputs, chance.randint(2, 6), outputs)
    loss, target = criterion(chance, outputs)
    return Parts(
        rescale(chance, model),
        loss,
        batched(chance, lambda count: features(chance, count, 3, inputs), target),
    )


class Attentive(nn.Module):
    def __init__(self, width: int, outputs: int, norm_first: bool, act: str) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(
            width, 2, 4, dropout=0.0, activation=act, batch_first=True, norm_first=norm_first
        )
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x).mean(1))


def attentive(chance: random.Random) -> Parts:
    outputs = chance.randint(2, 3)
    width = chance.choice([4, 8])
    model = Attentive(width, outputs, chance.random() < 0.5, chance.choice(["relu", "gelu"]))
    loss, target = criterion(chance, outputs)
    return Parts(
        rescale(chance, model), loss, batched(chance, lambda count: features(chance, count, 3, width), target)
    )


class Words(nn.Module):
    def __init__(self, words: int, width: int, outputs: int, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.middle = nn.Linear(width, width)
        self.head = nn.Linear(width, words if tied else outputs, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(tokens).mean(1))))


def words(chance: random.Random) -> Parts:
    tied, count = chance.random() < 0.4, chance.randint(4, 20)
    outputs = count if tied else chance.randint(2, 3)
    model = Words(count, chance.randint(2, 8), outputs, tied)
    loss, target = criterion(chance, outputs)
    return Parts(
        rescale(chance, model), loss, batched(chance, lambda size: torch.randint(count, (size, 3)), target)
    )


class TwoHeads(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.trunk = nn.Linear(inputs, width)
        self.first, self.second = nn.Linear(width, 2), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.trunk(x))
        return torch.cat([self.first(h), self.second(h)], 1)


def two_heads(chance: random.Random) -> Parts:
    """A regression and a classification, the second with a share of the loss that may be tiny."""
    share, inputs = chance.choice([1.0, 0.1, 1e-3, 1e-6]), chance.randint(2, 12)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        first = F.mse_loss(output[:, :2], target[:, :2])
        return first + share * F.cross_entropy(output[:, 2:], target[:, 2].abs().long() % 3)

    batch = batched(chance, lambda n: features(chance, n, inputs), lambda n: 2 * torch.randn(n, 3))
    return Parts(rescale(chance, TwoHeads(inputs, chance.randint(2, 12))), loss, batch)


class Gated(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(inputs, width), nn.Linear(inputs, width)
        self.down = parametrizations.weight_norm(nn.Linear(width, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.value(x) * F.silu(self.gate(x)))


def gated(chance: random.Random) -> Parts:
    inputs, outputs = chance.randint(2, 10), chance.randint(2, 3)
    loss, target = criterion(chance, outputs)
    batch = batched(chance, lambda count: features(chance, count, inputs), target)
    return Parts(Gated(inputs, chance.randint(2, 10), outputs), loss, batch)


class Spectral(nn.Module):
    """Layers between a Fourier transform and its inverse, or features of a spectrum."""

    def __init__(self, width: int, outputs: int, kind: str) -> None:
        super().__init__()
        self.first, self.kind, features = nn.Linear(4, width), kind, width // 2 + 1
        self.mixing = nn.Parameter(torch.randn(features, 2))
        self.last = nn.Linear(width if kind == "convolution" else features, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        spectrum = torch.fft.rfft(h) * torch.view_as_complex(self.mixing)
        if self.kind == "convolution":
            return self.last(h + torch.fft.irfft(spectrum, n=h.shape[-1]))
        return self.last(spectrum.abs() if self.kind == "magnitude" else torch.log1p(spectrum.abs().square()))


def spectral(chance: random.Random) -> Parts:
    outputs = chance.randint(2, 4)
    model = Spectral(
        chance.choice([4, 6, 8]), outputs, chance.choice(["convolution", "convolution", "magnitude", "power"])
    )
    loss, target = criterion(chance, outputs)
    return Parts(model, loss, batched(chance, lambda count: features(chance, count, 4), target))


def vocabulary(chance: random.Random) -> Parts:
    """More than 8,192 logits, of a cross-entropy, whose Hessian has a closed form."""
    words, size = chance.choice([700, 1200, 2000]), chance.randint(12, 16)
    width = chance.randint(3, 6)
    model = nn.Sequential(nn.Linear(4, width), activation(chance), nn.Linear(width, words, bias=False))
    with torch.no_grad():  # words share a component after some training
        model[2].weight.mul_(chance.choice([1.0, 5.0])).add_(chance.choice([0.0, 0.0, 1.0, 6.0]))
    weights = torch.linspace(0.3, 2.0, words)
    loss = chance.choice([
        F.cross_entropy,
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(weight=weights),
        nn.CrossEntropyLoss(ignore_index=0),
    ])  # fmt: skip
    batch = torch.randn(size, 4), torch.randint(words, (size,)) * torch.randint(1, 5, (size,)).clamp(max=1)
    return Parts(model, loss, batch, layers="0")


ORDINARY: dict[str, Callable[[random.Random], Parts]] = {
    "mlp": mlp,
    "convolutional": convolutional,
    "recurrent": recurrent,
    "attentive": attentive,
    "words": words,
    "two heads": two_heads,
    "gated": gated,
    "spectral": spectral,
    "vocabulary": vocabulary,
}
