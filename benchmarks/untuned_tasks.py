"""The fourteen tasks of `untuned.py`: small networks with PyTorch's own weights.

    export HESSINIT_DATA=folder
    python benchmarks/untuned_tasks.py    per task: time of a step, first loss, loss after 300 steps

Seven tasks are for development, and seven are held out: nothing is chosen on those. A training step takes up
to 6 ms on one thread. Noise, a bottleneck or the short training keep every loss well above zero, so that
ratios of held-out losses mean something. The folder is that of `arena/data.py`.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded

import torch
from torch import Tensor, nn

from arena import data
from arena.networks import CharacterLSTM, NormalizedBlock, Transformer

Examples = tuple[Tensor, Tensor]
CHARACTERS = 48  # in a window
WINDOWS = 8_000
HELD_OUT_WINDOWS = 500


@dataclass(frozen=True)
class Task:
    """A network, its loss, examples to train on and others to judge by."""

    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    data: Callable[[], Examples]
    held_out: Callable[[], Examples]
    development: bool
    normalized: bool
    milliseconds: float  # about what a training step takes: for the order of the jobs only
    batch_size: int = 64
    optimizers: tuple[str, ...] = ("adamw",)
    horizons: tuple[int, ...] = (300, 1000)
    accuracy: Callable[[Tensor, Tensor], Tensor] | None = None
    evaluation_batch: int = 500  # the loss of a batch may depend on its size

    def evaluate(self, model: nn.Module) -> tuple[float, float | None]:
        """The held-out loss, and the accuracy where there is one, in eval mode; the mode is put back."""
        inputs, targets = self.held_out()
        device = next(model.parameters()).device
        was_training = model.training
        model.eval()
        losses, accuracies = [], []
        with torch.no_grad():
            for part, wanted in zip(
                inputs.split(self.evaluation_batch), targets.split(self.evaluation_batch), strict=True
            ):
                output = model(part.to(device))
                wanted = wanted.to(device)
                losses.append(len(part) * self.loss(output, wanted).item())
                if self.accuracy is not None:
                    accuracies.append(len(part) * self.accuracy(output, wanted).item())
        model.train(was_training)
        accuracy = sum(accuracies) / len(inputs) if accuracies else None
        return sum(losses) / len(inputs), accuracy


# --- Data -------------------------------------------------------------------------------------------------


def clothes(held_out: bool = False) -> Examples:
    """20,000 images of 1 × 28 × 28, and 2,000."""
    return data.fashion(held_out=held_out)


def small_clothes(held_out: bool) -> Examples:
    return data.fashion(held_out=True) if held_out else data.fashion(8_000)


def windows(held_out: bool = False) -> Examples:
    """Windows of Wikipedia as numbers of characters, and the same moved on by one."""
    inputs, following = data.characters(CHARACTERS, held_out)
    count = HELD_OUT_WINDOWS if held_out else WINDOWS
    return inputs[:count], following[:count]


def digits_to_copy(held_out: bool = False) -> Examples:
    """Standardized digits, which are their own targets."""
    images, _ = data.mnist(held_out)
    return images, images


MEAN_DISTANCE, SPREAD = 4.2, 1.8


@functools.cache
def arm_positions(held_out: bool = False) -> Examples:
    """Eight angles of a planar robot arm, and the noisy distance of its hand from a point.

    The distance has about mean 0 and variance 1, and the noise a variance of 0.25.
    """
    count = 2_000 if held_out else 8_000
    source = _generator("arm", held_out)
    angles = torch.rand(count, 8, generator=source) * 2 - 1
    directions = (angles * math.pi / 2).cumsum(1)
    lengths = torch.linspace(1.2, 0.5, 8)
    hand = torch.stack([(lengths * directions.cos()).sum(1), (lengths * directions.sin()).sum(1)], 1)
    distance = (hand - torch.tensor([1.0, 2.0])).norm(dim=1, keepdim=True)
    noise = 0.5 * torch.randn(count, 1, generator=source)
    return angles * math.sqrt(3), (distance - MEAN_DISTANCE) / SPREAD + noise


@functools.cache
def noisy_clothes(held_out: bool = False) -> Examples:
    """Images with noise of half their standard deviation, and the images."""
    images, _ = small_clothes(held_out)
    noise = 0.5 * torch.randn(images.shape, generator=_generator("noisy clothes", held_out))
    return images + noise, images


DIFFUSIVITY, NOISE = 0.05, 0.2


@functools.cache
def heat_points(held_out: bool = False) -> Examples:
    """Points (x, t) of a rod that cools down, and its temperature there with noise of 0.2."""
    count = 2_000 if held_out else 8_000
    source = _generator("heat", held_out)
    points = torch.rand(count, 2, generator=source)
    place, moment = points.split(1, 1)
    temperature = torch.zeros(count, 1)
    for waves, height in ((1, 1.0), (3, 0.7)):
        decay = torch.exp(-DIFFUSIVITY * (waves * math.pi) ** 2 * moment)
        temperature += height * decay * torch.sin(waves * math.pi * place)
    return points, temperature + NOISE * torch.randn(count, 1, generator=source)


@functools.cache
def pairs_of_views(held_out: bool = False) -> Examples:
    """Two random views of every image, (N, 2, 1, 28, 28), and its number.

    A view is moved by up to 3 pixels, mirrored or not, brighter or darker, covered in part and noisy.
    """
    images, _ = small_clothes(held_out)
    images = images[: len(images) // 64 * 64]  # whole batches: a smaller one has fewer negatives
    source = _generator("views", held_out)
    views = torch.stack([_view(images, source), _view(images, source)], 1)
    return views, torch.arange(len(images))


def _view(images: Tensor, source: torch.Generator) -> Tensor:
    count = len(images)
    columns = torch.arange(28)
    moved_down = torch.randint(7, (count, 1), generator=source) + columns
    moved_right = torch.randint(7, (count, 1), generator=source) + columns
    is_mirrored = torch.rand(count, 1, generator=source) < 0.5
    moved_right = torch.where(is_mirrored, moved_right.flip(1), moved_right)
    padded = nn.functional.pad(images, (3, 3, 3, 3), value=images.min().item())
    numbers = torch.arange(count).view(-1, 1, 1)
    view = padded[numbers, 0, moved_down[:, :, None], moved_right[:, None, :]]
    corner = torch.randint(19, (count, 2, 1), generator=source)
    is_covered = (columns >= corner) & (columns < corner + 10)
    view = view.masked_fill(is_covered[:, 0, :, None] & is_covered[:, 1, None, :], 0.0)
    brightness = 0.6 + 0.8 * torch.rand(count, 1, 1, generator=source)
    noise = 0.3 * torch.randn(view.shape, generator=source)
    return (brightness * view + noise)[:, None]


def _generator(purpose: str, held_out: bool) -> torch.Generator:
    seed = 1 + 2 * ["arm", "noisy clothes", "heat", "views"].index(purpose) + held_out
    return torch.Generator().manual_seed(seed)


# --- Losses -----------------------------------------------------------------------------------------------


def classified(scores: Tensor, classes: Tensor) -> Tensor:
    """The share of examples whose class has the highest score."""
    return (scores.argmax(-1) == classes).float().mean()


def next_character(scores: Tensor, following: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def physics_and_data(output: Tensor, observed: Tensor) -> Tensor:
    """The mean squared residual of the equation, and the mean squared distance from the observations."""
    residual, temperature = output.split(1, 1)
    return 0.1 * residual.square().mean() + (temperature - observed).square().mean()


def info_nce(codes: Tensor, _: Tensor) -> Tensor:
    """SimCLR's loss, with the other pairs of the batch as negatives: codes are (N, 2, width)."""
    first, second = nn.functional.normalize(codes, dim=-1).unbind(1)
    similarity = first @ second.T / 0.2
    own = torch.arange(len(codes), device=codes.device)
    by_rows = nn.functional.cross_entropy(similarity, own)
    return (by_rows + nn.functional.cross_entropy(similarity.T, own)) / 2


def matched(codes: Tensor, _: Tensor) -> Tensor:
    """The share of views that are nearest to the other view of their image."""
    first, second = nn.functional.normalize(codes, dim=-1).unbind(1)
    return classified(first @ second.T, torch.arange(len(codes), device=codes.device))


# --- Networks ---------------------------------------------------------------------------------------------


def dense(*widths: int, activation: type[nn.Module] = nn.ReLU, norm: bool = False) -> nn.Sequential:
    """Dense layers, each but the last followed by LayerNorm, if there is one, and the activation."""
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in itertools.pairwise(widths[:-1]):
        layers += [nn.Linear(fan_in, fan_out), *[nn.LayerNorm(fan_out)] * norm, activation()]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))


def normalized_cnn() -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for width, stride in ((16, 2), (32, 1), (32, 2), (48, 2)):
        layers += [nn.Conv2d(channels, width, 3, stride, 1), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * channels, 10))


def plain_cnn() -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for width, stride in ((12, 1), (24, 2), (32, 2), (48, 2)):
        layers += [nn.Conv2d(channels, width, 3, stride, 1), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * channels, 64), nn.ReLU(), nn.Linear(64, 10))


def resnet() -> nn.Sequential:
    stem = [nn.Conv2d(3, 12, 3, 2, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU()]
    blocks = [NormalizedBlock(12, 12, 1), NormalizedBlock(12, 24, 2), NormalizedBlock(24, 32, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


class VisionTransformer(nn.Module):
    """PyTorch's encoder layers, pre-LN, over patches of 8 × 8 pixels."""

    def __init__(self, width: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.position = nn.Embedding(16, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 2 * width, 0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        state = self.patches(images).flatten(2).transpose(1, 2) + self.position.weight
        for layer in self.layers:
            state = layer(state)
        return self.head(self.norm(state).mean(1))


class UNet(nn.Module):
    """Two resolutions, a skip connection, GroupNorm; a value for every pixel."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.fine = _normalized_pair(1, width)
        self.coarse = _normalized_pair(width, 2 * width)
        self.enlarge = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.joined = _normalized_pair(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.fine(images)
        coarse = self.coarse(nn.functional.max_pool2d(fine, 2))
        return self.head(self.joined(torch.cat([fine, self.enlarge(coarse)], 1)))


def _normalized_pair(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU(),
    )  # fmt: skip


class HeatEquation(nn.Module):
    """A physics-informed network that learns the temperature and the diffusivity of the rod.

    Returns for each point the residual of u_t = k u_xx and the temperature u.
    """

    def __init__(self) -> None:
        super().__init__()
        self.network = dense(2, 32, 32, 32, 1, activation=nn.Tanh)
        self.log_diffusivity = nn.Parameter(torch.zeros(()))

    def forward(self, points: Tensor) -> Tensor:
        with torch.enable_grad():  # also where the held-out loss is computed
            points = points.detach().requires_grad_()
            temperature = self.network(points)
            slope = torch.autograd.grad(temperature.sum(), points, create_graph=True)[0]
            bend = torch.autograd.grad(slope[:, 0].sum(), points, create_graph=True)[0][:, :1]
            residual = slope[:, 1:] - self.log_diffusivity.exp() * bend
            return torch.cat([residual, temperature], 1)


class ContrastiveEncoder(nn.Module):
    """A CNN with BatchNorm and a projection, as in SimCLR: codes of both views of an image."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 1
        for width in (8, 24, 32):
            layers += [nn.Conv2d(channels, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        self.encoder = nn.Sequential(*layers, nn.Flatten())
        self.projection = nn.Sequential(nn.Linear(16 * channels, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, views: Tensor) -> Tensor:
        codes = self.projection(self.encoder(views.flatten(0, 1)))
        return codes.unflatten(0, views.shape[:2])


# --- The tasks --------------------------------------------------------------------------------------------


def _task(
    name: str,
    milliseconds: float,
    examples: Callable[[bool], Examples],
    build: Callable[[], nn.Module],
    loss: Callable[[Tensor, Tensor], Tensor],
    **settings: Any,
) -> Task:
    training = functools.partial(examples, False)
    held_out = functools.partial(examples, True)
    return Task(name, build, loss, training, held_out, milliseconds=milliseconds, **settings)


_CLASSES = {"accuracy": classified}
_BOTH = {"optimizers": ("adamw", "momentum")}
_LONG = {"horizons": (300, 1000, 3000)}
_DEVELOPMENT_PLAIN = {"development": True, "normalized": False}
_DEVELOPMENT_NORMALIZED = {"development": True, "normalized": True}
_HELD_OUT_PLAIN = {"development": False, "normalized": False}
_HELD_OUT_NORMALIZED = {"development": False, "normalized": True}
_CROSS_ENTROPY, _SQUARED = nn.functional.cross_entropy, nn.functional.mse_loss
_TASKS = (
    _task(
        "LayerNorm MLP", 1, clothes, functools.partial(dense, 784, 128, 128, 128, 10, norm=True),
        _CROSS_ENTROPY, **_DEVELOPMENT_NORMALIZED, **_CLASSES, **_BOTH, **_LONG,
    ),
    _task(
        "deep MLP", 1.5, clothes, functools.partial(dense, 784, *[96] * 10, 10), _CROSS_ENTROPY,
        **_DEVELOPMENT_PLAIN, **_CLASSES, **_BOTH,
    ),
    _task(
        "BatchNorm CNN", 4.6, data.cifar, normalized_cnn, _CROSS_ENTROPY,
        **_DEVELOPMENT_NORMALIZED, **_CLASSES, **_BOTH, batch_size=32,
    ),
    _task(
        "GPT", 6.4, windows, functools.partial(
            Transformer, data.VOCABULARY, CHARACTERS, norm_first=True, width=40, layers=2
        ),
        next_character, **_DEVELOPMENT_NORMALIZED, **_CLASSES, batch_size=16,
    ),
    _task(
        "LSTM", 1.6, windows, functools.partial(CharacterLSTM, data.VOCABULARY, 64), next_character,
        **_DEVELOPMENT_PLAIN, **_CLASSES, batch_size=16,
    ),
    _task(
        "autoencoder", 2.5, digits_to_copy, functools.partial(dense, 784, 256, 64, 16, 64, 256, 784),
        _SQUARED, **_DEVELOPMENT_PLAIN,
    ),
    _task(
        "robot arm", 0.3, arm_positions, functools.partial(dense, 8, 64, 64, 1), _SQUARED,
        **_DEVELOPMENT_PLAIN,
    ),
    _task(
        "MLP", 0.9, clothes, functools.partial(dense, 784, 128, 128, 128, 10), _CROSS_ENTROPY,
        **_HELD_OUT_PLAIN, **_CLASSES, **_BOTH, **_LONG,
    ),
    _task(
        "CNN", 5, data.cifar, plain_cnn, _CROSS_ENTROPY, **_HELD_OUT_PLAIN, **_CLASSES, **_BOTH, batch_size=32
    ),
    _task(
        "ResNet", 7.4, data.cifar, resnet, _CROSS_ENTROPY,
        **_HELD_OUT_NORMALIZED, **_CLASSES, **_BOTH, batch_size=32,
    ),
    _task(
        "ViT", 4.6, data.cifar, VisionTransformer, _CROSS_ENTROPY,
        **_HELD_OUT_NORMALIZED, **_CLASSES, batch_size=32,
    ),
    _task("U-Net", 7, noisy_clothes, UNet, _SQUARED, **_HELD_OUT_NORMALIZED, batch_size=16),
    _task("PINN", 0.9, heat_points, HeatEquation, physics_and_data, **_HELD_OUT_PLAIN, **_LONG),
    _task(
        "contrastive", 5.8, pairs_of_views, ContrastiveEncoder, info_nce,
        **_HELD_OUT_NORMALIZED, accuracy=matched, evaluation_batch=64,
    ),
)  # fmt: skip
TASKS = {task.name: task for task in _TASKS}
DEVELOPMENT = tuple(name for name, task in TASKS.items() if task.development)
HELD_OUT = tuple(name for name, task in TASKS.items() if not task.development)


def _check(task: Task, steps: int = 300) -> str:
    """Train with AdamW at 1e-3 and cosine decay: what comes out, in a line."""
    torch.manual_seed(0)
    model = task.build().train()
    first, _ = task.evaluate(model)
    inputs, targets = task.data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    times, losses = [], []
    epochs = 1 + steps * task.batch_size // len(inputs)
    order = torch.cat([torch.randperm(len(inputs)) for _ in range(epochs)])
    for rows in itertools.islice(order.split(task.batch_size), steps):
        started = time.process_time()
        optimizer.zero_grad()
        loss = task.loss(model(inputs[rows]), targets[rows])
        loss.backward()
        optimizer.step()
        schedule.step()
        times.append(time.process_time() - started)
        losses.append(loss.item())
    last, accuracy = task.evaluate(model)
    quality = "" if accuracy is None else f"{accuracy:.1%}"
    weights = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"{task.name:16}{1000 * statistics.median(times):>8.2f}{weights:>9}{len(inputs):>9}{first:>9.3f}"
        f"{statistics.fmean(losses[-30:]):>10.4f}{last:>10.4f}{quality:>10}"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(
        f"{'':16}{'ms/step':>8}{'weights':>9}{'examples':>9}{'first':>9}{'training':>10}{'held out':>10}"
        f"{'accuracy':>10}"
    )
    for one in TASKS.values():
        print(_check(one), flush=True)
