"""The networks, losses and batches of the race: random data, PyTorch's default initialization, one seed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

SEED = 0
CLASSES = 10


@dataclass(frozen=True)
class Problem:
    """A model, a loss and one batch.

    `examples_mix` says that examples see each other (BatchNorm); `only` names the layers that are asked for,
    all by default.
    """

    name: str
    model: nn.Module
    loss: nn.Module
    inputs: torch.Tensor
    targets: torch.Tensor
    examples_mix: bool = False
    only: tuple[str, ...] = ()

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """Every parameter of two or more dimensions, under its name without a trailing `.weight`."""
        named = self.model.named_parameters()
        found = {name.removesuffix(".weight"): weight for name, weight in named if weight.ndim > 1}
        return {name: found[name] for name in self.only or found}

    def in_double(self) -> Problem:
        inputs = self.inputs.double() if self.inputs.is_floating_point() else self.inputs
        return replace(self, model=copy.deepcopy(self.model).double(), inputs=inputs)

    def fingerprint(self) -> list[float]:
        """Numbers that change when weights, data or loss change: a stored truth is for these only."""
        with torch.no_grad():
            double = self.in_double()
            weights = sum(weight.abs().sum().item() for weight in double.weights.values())
            value = double.loss(double.model(double.inputs), double.targets).item()
        return [weights, double.inputs.abs().sum().item(), float(self.targets.sum()), value]


class ScaledCrossEntropy(nn.Module):
    """Cross-entropy times a constant: every norm must come back times the same constant."""

    reduction = "mean"  # curvlinops asks every loss for it

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.factor * nn.functional.cross_entropy(output, target)


def build_mlp(sizes: list[int], activation: type[nn.Module], norm: bool = False) -> nn.Sequential:
    modules: list[nn.Module] = []
    for fan_in, fan_out in zip(sizes[:-2], sizes[1:-1], strict=True):
        modules += [nn.Linear(fan_in, fan_out), *([nn.BatchNorm1d(fan_out)] if norm else []), activation()]
    return nn.Sequential(*modules, nn.Linear(sizes[-2], sizes[-1]))


def build_lenet(activation: type[nn.Module]) -> nn.Sequential:
    convolutions = [nn.Conv2d(3, 6, 5), activation(), nn.MaxPool2d(2)]
    convolutions += [nn.Conv2d(6, 16, 5), activation(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*convolutions, *build_mlp([400, 120, 84, CLASSES], activation))


def build_vgg(activation: type[nn.Module]) -> nn.Sequential:
    """3×3 convolutions 64, 64, M, 128, 128, M, 256, 256, M, then two linear layers: 2.2 million weights."""
    modules: list[nn.Module] = []
    for channels_in, channels in [(3, 64), (64, 128), (128, 256)]:
        modules += [nn.Conv2d(channels_in, channels, 3, padding=1), activation()]
        modules += [nn.Conv2d(channels, channels, 3, padding=1), activation(), nn.MaxPool2d(2)]
    return nn.Sequential(*modules, nn.Flatten(), *build_mlp([4096, 256, CLASSES], activation))


def build_deep_mlp(depth: int, activation: type[nn.Module]) -> nn.Sequential:
    """Width 128, He's or Glorot's weights: PyTorch's own leave no signal 32 layers deep."""
    model = build_mlp([128] * depth + [CLASSES], activation)
    for module in model:
        if isinstance(module, nn.Linear) and activation is nn.ReLU:
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
    return model


def shrink(model: nn.Sequential, factor: float) -> nn.Sequential:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


def shrink_last(model: nn.Sequential, factor: float) -> nn.Sequential:
    shrink(nn.Sequential(model[-1]), factor)
    return model


def _make(
    name: str,
    build: Callable[[], nn.Sequential],
    shape: tuple[int, ...],
    loss: nn.Module | None = None,
    examples_mix: bool = False,
) -> Problem:
    torch.manual_seed(SEED)
    model = build()
    inputs = torch.randn(*shape)
    targets = torch.randint(CLASSES, shape[:1])
    return Problem(name, model, loss or nn.CrossEntropyLoss(), inputs, targets, examples_mix)


_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}
_IMAGE = (3, 32, 32)
RACE = ["mlp-n32", "mlp-n128", "lenet-n32", "lenet-n128", "vgg8-n32"]
ACCURACY = ["gelu", "batchnorm", "small-weights", "small-loss", "symmetric"]
DEPTHS = [2, 4, 8, 16, 32]
BATCHES = [16, 32, 64, 128, 256]


def build_problem(name: str) -> Problem:
    """The problem of that name: `mlp-n32-relu`, `gelu`, `depth-8-relu`, `batch-64-tanh`, `tiny-tanh`.

    >>> list(build_problem("mlp-n32-relu").weights)
    ['0', '2', '4']
    """
    if name == "gelu":
        return _make(name, lambda: build_mlp([64, 32, 32, CLASSES], nn.GELU), (32, 64))
    if name == "batchnorm":
        mixing = lambda: build_mlp([20, 24, 24, CLASSES], nn.ReLU, norm=True)  # noqa: E731
        return _make(name, mixing, (32, 20), examples_mix=True)
    if name == "small-weights":
        return _make(name, lambda: shrink(build_mlp([64, 32, 32, CLASSES], nn.Tanh), 1e-3), (32, 64))
    if name == "small-loss":
        loss = ScaledCrossEntropy(1e-12)
        return _make(name, lambda: build_mlp([64, 32, 32, CLASSES], nn.Tanh), (32, 64), loss)
    if name == "symmetric":
        # Chosen by its spectrum alone: λmin/λmax is −1.01 and −1.02 in the hidden layers.
        return _make(name, lambda: shrink_last(build_mlp([64, 32, 32, CLASSES], nn.SiLU), 0.1), (64, 64))
    kind, detail, *activations = name.split("-")
    activation = _ACTIVATIONS[activations[0] if activations else "relu"]
    if kind == "depth":
        return _make(name, lambda: build_deep_mlp(int(detail), activation), (64, 128))
    if kind == "batch":
        return _make(name, lambda: build_deep_mlp(4, activation), (int(detail), 128))
    if kind == "tiny":
        return _make(name, lambda: build_mlp([6, 5, CLASSES], _ACTIVATIONS[detail]), (4, 6))
    batch = int(detail.removeprefix("n"))
    if kind == "mlp":
        return _make(name, lambda: build_mlp([784, 256, 256, CLASSES], activation), (batch, 784))
    if kind == "lenet":
        return _make(name, lambda: build_lenet(activation), (batch, *_IMAGE))
    if kind == "vgg8":
        return _make(name, lambda: build_vgg(activation), (batch, *_IMAGE))
    raise ValueError(f"problem {name!r} is unknown; choose from {', '.join([*RACE, *ACCURACY])}.")
