"""The twelve problems of `advice.py`: small networks as a user would build them, on real digits and text.

A step takes 1 to 5 ms on one core. Digits get noise of their own standard deviation, so that no network fits
them exactly in 300 steps and losses can be compared as ratios. `DEVELOPMENT` names the problems on which the
constants of `advise` were chosen; the others were looked at after that, and two changes of the rule follow.
"""

from __future__ import annotations

import collections
import functools
import lzma
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from arena.networks import CharacterLSTM, NormalizedBlock, Transformer
from hessinit.digits import load_digits

Examples = tuple[Tensor, Tensor]
LENGTH, VOCABULARY, CHARACTERS = 32, 64, 260_000
COPIES = 8  # of every digit, each with noise of its own
MASK = VOCABULARY  # a character of its own
IGNORED = -100
DOCUMENTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Problem:
    """A network, its loss, and a function that returns all examples, given the text."""

    build: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    data: Callable[[str], Examples]
    batch_size: int = 64


# --- Data -------------------------------------------------------------------------------------------------


def read_text(path: Path | None) -> str:
    """The characters of a file, plain or .xz; without one, of the project's own documents."""
    if path is None:
        files = [*sorted(DOCUMENTS.glob("docs/**/*.md")), DOCUMENTS / "README.md", DOCUMENTS / "CHANGELOG.md"]
        return "".join(file.read_text(encoding="utf-8") for file in files)[:CHARACTERS]
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as file:  # type: ignore[operator]
        return str(file.read(CHARACTERS))


@functools.cache
def clean_and_noisy() -> tuple[Tensor, Tensor, Tensor]:
    images, labels = (torch.cat([part] * COPIES) for part in load_digits())
    clean = (images - images.mean()) / images.std()
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    return clean, clean + noise, labels


def digits(_: str) -> Examples:
    _, noisy, labels = clean_and_noisy()
    return noisy, labels


def flat_digits(text: str) -> Examples:
    noisy, labels = digits(text)
    return noisy.flatten(1), labels


def denoised_digits(_: str) -> Examples:
    clean, noisy, _ = clean_and_noisy()
    return noisy.flatten(1), clean.flatten(1)


def inked_pixels(_: str) -> Examples:
    clean, noisy, _ = clean_and_noisy()
    return noisy, (clean > 0).float()


@functools.cache
def windows(text: str) -> Examples:
    """Windows of character numbers, and the same moved on by one."""
    frequent = [letter for letter, _ in collections.Counter(text).most_common(VOCABULARY - 1)]
    number = {letter: place + 1 for place, letter in enumerate(frequent)}
    codes = torch.tensor([number.get(letter, 0) for letter in text])
    inputs = codes[: (len(codes) - 1) // LENGTH * LENGTH].view(-1, LENGTH)
    return inputs, codes[1 : inputs.numel() + 1].view(-1, LENGTH)


@functools.cache
def masked(text: str) -> Examples:
    """Windows in which 15 % of the characters are masked, and these characters."""
    tokens, _ = windows(text)
    hidden = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0)) < 0.15
    hidden[:, 0] = True  # at least one in every window
    return tokens.masked_fill(hidden, MASK), tokens.masked_fill(~hidden, IGNORED)


def next_character(scores: Tensor, following: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def masked_character(scores: Tensor, characters: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), characters.flatten(), ignore_index=IGNORED)


# --- Networks ---------------------------------------------------------------------------------------------


def dense(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    parts: list[nn.Module] = []
    for fan_in, fan_out in zip(widths, widths[1:], strict=False):
        parts += [nn.Linear(fan_in, fan_out), activation()]
    return nn.Sequential(*parts[:-1])


def deep_mlp() -> nn.Module:
    """Ten layers with He's weights."""
    model = dense(64, *[64] * 9, 10)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return model


def cnn(norm: Callable[[int], nn.Module]) -> nn.Module:
    parts: list[nn.Module] = []
    channels = 1
    for width, stride in ((12, 1), (24, 2), (24, 1)):
        parts += [nn.Conv2d(channels, width, 3, stride, 1), norm(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(16 * channels, 10))


def resnet() -> nn.Module:
    stem = [nn.Conv2d(1, 12, 3, 1, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU()]
    blocks = [NormalizedBlock(12, 12, 1), NormalizedBlock(12, 24, 2), NormalizedBlock(24, 24, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))


class Encoder(nn.Module):
    """PyTorch's encoder layers over patches of 2 × 2 pixels, pre-LN: a vision transformer."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.position = nn.Parameter(0.02 * torch.randn(1, 16, width))
        layer = functools.partial(
            nn.TransformerEncoderLayer, width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        state = self.patches(images).flatten(2).transpose(1, 2) + self.position
        for layer in self.layers:
            state = layer(state)
        return self.head(self.norm(state).mean(1))


def gpt() -> nn.Module:
    return Transformer(VOCABULARY, LENGTH, norm_first=True, width=48, layers=2)


class Bert(nn.Module):
    """Post-LN encoder layers, weights of standard deviation 0.02, and characters to fill in."""

    def __init__(self, width: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY + 1, width), nn.Embedding(LENGTH, width)
        layer = functools.partial(
            nn.TransformerEncoderLayer, width, 4, 4 * width, 0.0, "gelu", batch_first=True
        )
        self.norm, self.layers = nn.LayerNorm(width), nn.ModuleList(layer() for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        state = self.norm(self.embed(tokens) + self.position.weight)
        for layer in self.layers:
            state = layer(state)
        return self.head(state)


class UNet(nn.Module):
    """Two resolutions and one skip connection, GroupNorm; a score for every pixel."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()

        def pair(fan_in: int, fan_out: int) -> nn.Sequential:
            first, second = nn.Conv2d(fan_in, fan_out, 3, 1, 1), nn.Conv2d(fan_out, fan_out, 3, 1, 1)
            norms = nn.GroupNorm(4, fan_out), nn.GroupNorm(4, fan_out)
            return nn.Sequential(first, norms[0], nn.ReLU(), second, norms[1], nn.ReLU())

        self.down, self.middle, self.up = pair(1, width), pair(width, 2 * width), pair(2 * width, width)
        self.raise_ = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.down(images)
        coarse = self.middle(nn.functional.max_pool2d(fine, 2))
        return self.head(self.up(torch.cat([fine, self.raise_(coarse)], 1)))


class Mixer(nn.Module):
    """An MLP-Mixer over patches of 2 × 2 pixels."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        blocks = [
            nn.ModuleList(
                (nn.LayerNorm(width), dense(16, 32, 16, activation=nn.GELU),
                 nn.LayerNorm(width), dense(width, 2 * width, width, activation=nn.GELU))
            )
            for _ in range(layers)
        ]  # fmt: skip
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        state = self.patches(images).flatten(2).transpose(1, 2)
        for first, tokens, second, channels in self.blocks:  # type: ignore[misc]
            state = state + tokens(first(state).transpose(1, 2)).transpose(1, 2)
            state = state + channels(second(state))
        return self.head(self.norm(state).mean(1))


_CROSS_ENTROPY, _TEXT = nn.functional.cross_entropy, 16
PROBLEMS = {
    "MLP": Problem(functools.partial(dense, 64, 128, 128, 10), _CROSS_ENTROPY, flat_digits),
    "MLP, 10 layers": Problem(deep_mlp, _CROSS_ENTROPY, flat_digits),
    "CNN, BatchNorm": Problem(functools.partial(cnn, nn.BatchNorm2d), _CROSS_ENTROPY, digits),
    "GPT": Problem(gpt, next_character, windows, _TEXT),
    "LSTM": Problem(functools.partial(CharacterLSTM, VOCABULARY, 64), next_character, windows, _TEXT),
    "autoencoder": Problem(
        functools.partial(dense, 64, 64, 32, 8, 32, 64, 64), nn.functional.mse_loss, denoised_digits
    ),
    "CNN": Problem(functools.partial(cnn, nn.Identity), _CROSS_ENTROPY, digits),
    "ResNet": Problem(resnet, _CROSS_ENTROPY, digits),
    "ViT": Problem(Encoder, _CROSS_ENTROPY, digits),
    "BERT": Problem(Bert, masked_character, masked, _TEXT),
    "U-Net": Problem(UNet, nn.functional.binary_cross_entropy_with_logits, inked_pixels),
    "Mixer": Problem(Mixer, _CROSS_ENTROPY, digits),
}
DEVELOPMENT = tuple(PROBLEMS)[:6]
