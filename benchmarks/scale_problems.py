"""The problems of `scale.py`: ordinary networks up to GPT-2-XL, and the series that grow in one respect."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from problems import SEED, Problem, build_mlp, build_problem
from torch import Tensor, nn


def _plain(channels: int) -> nn.Module:
    return nn.Identity()


class Block(nn.Module):
    """Two 3×3 convolutions and a shortcut.

    Without normalization the branch is scaled by 1/√blocks, so that activations stay of one size.
    """

    def __init__(self, channels_in: int, channels: int, stride: int, norm: type | Callable) -> None:
        super().__init__()
        bias = norm is _plain
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=bias)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=bias)
        self.norm1, self.norm2 = norm(channels), norm(channels)
        self.scale = 8**-0.5 if norm is _plain else 1.0
        same = channels_in == channels and stride == 1
        narrow = nn.Conv2d(channels_in, channels, 1, stride, bias=bias) if not same else nn.Identity()
        self.shortcut = nn.Identity() if same else nn.Sequential(narrow, norm(channels))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(self.shortcut(x) + self.scale * inner)


def build_resnet18(classes: int, norm: type | Callable = _plain, small_images: bool = False) -> nn.Module:
    """ResNet-18 with He's weights; 21 layers. The stem for small images is one 3×3 convolution."""
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=norm is _plain), norm(64), nn.ReLU()]
    if not small_images:
        stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=norm is _plain), norm(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks: list[nn.Module] = []
    for channels_in, channels, stride in [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]:
        blocks += [Block(channels_in, channels, stride, norm), Block(channels, channels, 1, norm)]
    model = nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes)
    )  # fmt: skip
    return with_he_weights(model)


def with_he_weights(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model


def build_bn_cnn() -> nn.Module:
    """A first CNN: three times convolution, BatchNorm, ReLU and max-pooling, then a linear layer."""
    modules: list[nn.Module] = []
    for channels_in, channels in [(3, 32), (32, 64), (64, 128)]:
        modules += [nn.Conv2d(channels_in, channels, 3, padding=1), nn.BatchNorm2d(channels)]
        modules += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*modules, nn.Flatten(), nn.Linear(128 * 4 * 4, 10))


class NextToken(nn.Module):
    """Mean cross-entropy of the next tokens; outputs are (examples, positions, words)."""

    reduction = "mean"  # curvlinops asks every loss for it

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def build_gpt2(**sizes: int) -> nn.Module:
    """GPT-2 from its configuration, random weights, eval mode; its forward returns the logits alone.

    Head and embedding share their weight: 50 matrices in GPT-2 (124 M).
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    class LogitsOfGPT2(GPT2LMHeadModel):
        def forward(self, input_ids: Tensor) -> Tensor:
            return super().forward(input_ids=input_ids, use_cache=False).logits

    return LogitsOfGPT2(GPT2Config(**sizes)).eval()


def images(count: int, size: int, classes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, size, size), torch.randint(classes, (count,))


def tokens(count: int, length: int, words: int = 50_257) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(words, (count, length + 1))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


@dataclass(frozen=True)
class Limit:
    """The most gradients that a measurement may cost: the layers alone, and with the network's norm."""

    layers: float = math.inf
    network: float = math.inf


@dataclass(frozen=True)
class Case:
    """A problem, what it may cost at each tolerance, and the race on some of its layers.

    The truth of the raced layers is computed in float64, except where that would take minutes
    (`rough_truth`): then in float32, to a residual that leaves rounding alone.
    """

    name: str
    title: str
    build: Callable[[], Problem]
    device: str
    limits: dict[float, Limit]
    raced: int | None = None  # so many layers, spread over the depth; None: all
    piecewise_linear: bool = False  # then each layer's Hessian is its Gauss-Newton block
    rough_truth: bool = False
    progress: bool = False

    def problem(self, device: str) -> Problem:
        torch.manual_seed(SEED)
        return on_device(self.build(), device)


def on_device(problem: Problem, device: str) -> Problem:
    inputs, targets = problem.inputs.to(device), problem.targets.to(device)
    return replace(problem, model=problem.model.to(device), inputs=inputs, targets=targets)


def raced_layers(problem: Problem, count: int | None) -> tuple[str, ...]:
    """So many layers at equal distances of depth, without embeddings."""
    embeddings = {name for name, one in problem.model.named_modules() if isinstance(one, nn.Embedding)}
    names = [name for name in problem.weights if name not in embeddings]
    if count is None or count >= len(names):
        return tuple(names)
    return tuple(names[round(place * (len(names) - 1) / (count - 1))] for place in range(count))


def _classifier(name: str, build: Callable[[], nn.Module], *shape: int, mixing: bool = False) -> Problem:
    return Problem(name, build(), nn.CrossEntropyLoss(), *images(*shape), examples_mix=mixing)


def _race(name: str) -> Callable[[], Problem]:
    return lambda: build_problem(f"{name}-relu")


CASES = [
    Case(
        "bn-cnn", "CNN with BatchNorm, 64 × 32²",
        lambda: _classifier("bn-cnn", build_bn_cnn, 64, 32, 10, mixing=True),
        "cpu", {1e-3: Limit(40, 60), 1e-1: Limit(20)},
    ),
    Case(
        "resnet18-1000", "ResNet-18, 1,000 classes, 64 × 224²",
        lambda: _classifier("resnet18-1000", lambda: build_resnet18(1000), 64, 224, 1000),
        "cuda", {1e-3: Limit(200), 1e-1: Limit(100)}, raced=5, piecewise_linear=True, rough_truth=True,
    ),
    Case(
        "resnet18-bn", "ResNet-18 with BatchNorm, 128 × 32²",
        lambda: _classifier(
            "resnet18-bn", lambda: build_resnet18(10, nn.BatchNorm2d), 128, 32, 10, mixing=True
        ),
        "cuda", {1e-3: Limit(120)}, raced=5, rough_truth=True,
    ),
    Case(
        "resnet18-10", "ResNet-18, 10 classes, 128 × 32²",
        lambda: _classifier("resnet18-10", lambda: build_resnet18(10), 128, 32, 10),
        "cuda", {1e-3: Limit(20, 35)}, raced=5, piecewise_linear=True, rough_truth=True,
    ),
    Case(
        "resnet18-bn-cifar", "the same with BatchNorm and a 3 × 3 stem without pooling",
        lambda: _classifier(
            "resnet18-bn-cifar", lambda: build_resnet18(10, nn.BatchNorm2d, True), 128, 32, 10, mixing=True
        ),
        "cuda", {1e-3: Limit()}, raced=5, rough_truth=True,
    ),
    Case(
        "gpt2", "GPT-2, 124 M, 4 × 512 tokens",
        lambda: Problem("gpt2", build_gpt2(), NextToken(), *tokens(4, 512)),
        "cuda", {1e-3: Limit(450), 1e-2: Limit(320), 1e-1: Limit(200)}, raced=10,
    ),
    Case(
        "gpt2-xl", "GPT-2-XL, 1.6 B, 1 × 1,024 tokens",
        lambda: Problem(
            "gpt2-xl", build_gpt2(n_embd=1600, n_layer=48, n_head=25), NextToken(), *tokens(1, 1024)
        ),
        "cuda", {1e-1: Limit()}, raced=2, rough_truth=True, progress=True,
    ),
    *(
        Case(name, title, _race(problem), "cpu", {1e-3: Limit(limit)}, piecewise_linear=True)
        for name, title, problem, limit in [
            # What they cost before (`curvature_cost.json`); the VGG has to become cheaper.
            ("mlp-32", "MLP, 32 examples", "mlp-n32", 46.8),
            ("mlp-128", "MLP, 128 examples", "mlp-n128", 30.8),
            ("lenet-32", "LeNet, 32 examples", "lenet-n32", 19.2),
            ("lenet-128", "LeNet, 128 examples", "lenet-n128", 15.4),
            ("vgg8", "VGG-8, 32 examples", "vgg8-n32", 11),
        ]
    ),
]  # fmt: skip


# --- Series that grow in one respect ------------------------------------------------------------------------
# Sizes are such that a gradient takes ten milliseconds or more: below that, the time is Python's and the
# kernels' start, and an exponent says nothing about the work.


@dataclass(frozen=True)
class Series:
    """Problems that grow in one respect. `most` is the largest exponent of the cost in gradients allowed."""

    name: str
    label: str
    sizes: dict[str, tuple[int, ...]]
    build: Callable[[int, bool], Problem]  # the size, and whether it is for a GPU
    most: float = math.inf
    with_peer: bool = True

    def problem(self, size: int, device: str) -> Problem:
        torch.manual_seed(SEED)
        return on_device(self.build(size, device == "cuda"), device)


def _perceptron(depth: int, width: int, batch: int, classes: int) -> Problem:
    model = with_he_weights(build_mlp([width] * depth + [classes], nn.ReLU))
    inputs, targets = torch.randn(batch, width), torch.randint(classes, (batch,))
    return Problem("growth", model, nn.CrossEntropyLoss(), inputs, targets)


def _convolutions(channels: int, depth: int, batch: int) -> Problem:
    modules: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1), nn.ReLU()]
    for _ in range(depth - 1):
        modules += [nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, 10)]
    model = with_he_weights(nn.Sequential(*modules, *head))
    return Problem("growth", model, nn.CrossEntropyLoss(), *images(batch, 32, 10))


SERIES = [
    Series(
        "layers", "layers (10 classes)", {"cpu": (2, 4, 8, 16, 32), "cuda": (2, 4, 8, 16, 32)},
        lambda size, large: _perceptron(size, 8192 if large else 1024, 512, 10), most=1.1,
    ),
    Series(
        "layers-1000", "layers (1,000 classes)", {"cpu": (2, 4, 8, 16), "cuda": (2, 4, 8, 16, 32)},
        lambda size, large: _perceptron(size, 8192 if large else 1024, 512 if large else 256, 1000), most=1.1,
        with_peer=False,
    ),
    Series(
        "outputs", "outputs", {"cpu": (10, 30, 100, 300, 1000), "cuda": (10, 100, 1000, 10_000)},
        lambda size, large: _perceptron(4, 8192 if large else 1024, 256, size),
    ),
    Series(
        "batch", "batch", {"cpu": (16, 32, 64, 128, 256), "cuda": (16, 64, 256, 1024)},
        lambda size, large: _convolutions(320 if large else 24, 6 if large else 3, size), most=0.1,
    ),
    Series(
        "width", "width", {"cpu": (1024, 2048, 4096), "cuda": (4096, 8192, 16_384)},
        lambda size, large: _perceptron(4, size, 512 if large else 256, 10), most=0.1,
    ),
]  # fmt: skip
