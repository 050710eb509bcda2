"""The tasks of `finetuning.py`: small base models, pretrained here, and what they are fine-tuned on.

Text and images are those of the arena (`HESSINIT_DATA`). Without that folder the project's documents stand in
for Wikipedia and the embedded digits for images. `DEVELOPMENT` was chosen by base model, text and classes
before any training; the other half was set aside.
"""

from __future__ import annotations

import functools
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from advice_problems import clean_and_noisy, read_text
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from arena.data import VARIABLE, cifar, cifar_split, fashion, text_of
from hessinit.training.loop import seed_everything

LENGTH, HELD_OUT_WINDOWS = 48, 400
PRETRAINING_CHARACTERS, CHARACTERS = 900_000, 200_000
# Printable ASCII and the end of a line; whatever else is one more character.
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
VOCABULARY = len(ALPHABET) + 1
IMAGES, HELD_OUT_IMAGES = 3_000, 1_000
CLASSES = 5


@dataclass(frozen=True)
class Examples:
    """What a training sees, and what its loss is measured on."""

    inputs: Tensor
    targets: Tensor
    held_out_inputs: Tensor
    held_out_targets: Tensor

    def minibatches(self, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield mini-batches without end; every epoch shuffles anew."""
        source = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self.inputs), generator=source)
            for rows in order.split(size)[: len(order) // size]:
                yield self.inputs[rows], self.targets[rows]


# --- Data -------------------------------------------------------------------------------------------------


def wikipedia(count: int) -> str:
    if VARIABLE not in os.environ:
        return read_text(None)[:count]
    return text_of(count + 10_000)[:count]


def code(count: int) -> str:
    """The beginning of Python's standard library, of `code.py` in the data folder where there is one."""
    copy = Path(os.environ.get(VARIABLE, "")) / "code.py"
    files = [copy] if copy.exists() else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return "".join(file.read_text(encoding="utf-8") for file in files)[:count]


def text_examples(read: Callable[[int], str], count: int) -> Examples:
    """Windows of `count` characters; those held out follow them."""
    number = {letter: place for place, letter in enumerate(ALPHABET)}
    text = read(count + 2 * HELD_OUT_WINDOWS * LENGTH)
    codes = torch.tensor([number.get(letter, len(ALPHABET)) for letter in text])
    windows = codes[: (len(codes) - 1) // LENGTH * LENGTH].view(-1, LENGTH)
    following = codes[1 : windows.numel() + 1].view(-1, LENGTH)
    training = slice(-HELD_OUT_WINDOWS)
    held_out = slice(-HELD_OUT_WINDOWS, None)
    return Examples(windows[training], following[training], windows[held_out], following[held_out])


def image_examples(name: str, classes: range, count: int | None) -> Examples:
    """The first `count` images of these classes; labels count from 0."""
    if VARIABLE not in os.environ:
        _, images, labels = clean_and_noisy()
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        halves = [(images[rows], labels[rows]) for rows in order.chunk(2)]
    elif name == "fashion":
        halves = [fashion(), fashion(held_out=True)]
    else:
        halves = [cifar_split(), cifar(held_out=True)]
    parts: list[Tensor] = []
    for (pixels, targets), most in zip(halves, (count, HELD_OUT_IMAGES), strict=True):
        rows = ((targets >= classes.start) & (targets < classes.stop)).nonzero()[:most, 0]
        parts += [pixels[rows], targets[rows] - classes.start]
    return Examples(*parts)


# --- Networks ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A pre-LN transformer layer of linear layers, as adapters expect them."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, state: Tensor) -> Tensor:
        joined = self.query_key_value(self.norm1(state))
        parts = joined.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=self.causal)
        state = state + self.projection(mixed.transpose(1, 2).flatten(2))
        return state + self.down(nn.functional.gelu(self.up(self.norm2(state))))


class CharacterGPT(nn.Module):
    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, 4, causal=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        state = self.embed(tokens) + self.position.weight
        for block in self.blocks:
            state = block(state)
        return self.head(self.norm(state)).transpose(1, 2)


class ViT(nn.Module):
    """A vision transformer over 4 × 4 patches."""

    def __init__(self, channels: int, size: int, width: int = 48, layers: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, size // 4, size // 4)
        self.position = nn.Parameter(0.02 * torch.randn(1, 16, width))
        self.blocks = nn.ModuleList(Block(width, 4, causal=False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        state = self.patches(images).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            state = block(state)
        return self.head(self.norm(state).mean(1))


class CNN(nn.Module):
    """Four convolutions with BatchNorm, and a classifier of mean channels."""

    def __init__(self, channels: int, width: int = 16) -> None:
        super().__init__()
        widths = [channels, width, 2 * width, 2 * width, 4 * width]
        strides = [1, 2, 1, 2]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride, 1)
            for before, after, stride in zip(widths[:-1], widths[1:], strides, strict=True)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(after) for after in widths[1:])
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        state = images
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            state = torch.relu(norm(convolution(state)))
        return self.head(state.mean((2, 3)))


# --- Tasks ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A base model, the data it is pretrained on, and those it is fine-tuned on.

    An image classifier gets a new head for the new classes; a language model keeps its own.
    """

    build: Callable[[], nn.Module]
    before: Callable[[], Examples]
    after: Callable[[], Examples]
    adapted: tuple[str, ...]
    new_head: bool
    batch_size: int

    def base(self, name: str, seed: int, folder: Path) -> nn.Module:
        """Return the pretrained model, from the folder if it is there."""
        file = folder / f"{name}, seed {seed}.safetensors".replace(" ", "-").replace(",", "")
        seed_everything(seed, "base")
        model = self.build()
        if not file.exists():
            pretrain(model, self.before(), self.batch_size, seed)
            folder.mkdir(parents=True, exist_ok=True)
            save_file(model.state_dict(), file)
        model.load_state_dict(load_file(file))
        return model


def pretrain(model: nn.Module, examples: Examples, batch_size: int, seed: int) -> None:
    """Train with AdamW at 3e-3, falling linearly to 0."""
    steps = 1_500
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    batches = examples.minibatches(2 * batch_size, seed)
    for _ in range(steps):
        inputs, targets = next(batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        schedule.step()


@dataclass(frozen=True)
class Adapter:
    """LoRA or DoRA of a rank, α = 16 at every rank as in QLoRA; full fine-tuning with rank 0."""

    rank: int = 0
    dora: bool = False

    def apply(self, model: nn.Module, task: Task) -> nn.Module:
        """Return the model to train: with a new head where the task has one, and with adapters."""
        if task.new_head:
            model.head = nn.Linear(model.head.in_features, CLASSES)  # type: ignore[arg-type, union-attr]
        if not self.rank:
            return model
        config = LoraConfig(
            r=self.rank,
            lora_alpha=16,
            use_dora=self.dora,
            target_modules=list(task.adapted),
            modules_to_save=["head"] if task.new_head else None,
        )
        return get_peft_model(model, config)  # type: ignore[arg-type]


METHODS = {
    "full": Adapter(),
    "LoRA r = 4": Adapter(4),
    "LoRA r = 16": Adapter(16),
    "DoRA r = 8": Adapter(8, dora=True),
}

LINEAR = ("query_key_value", "projection", "up", "down")
CONVOLUTIONS = ("convolutions.1", "convolutions.2", "convolutions.3")
FIRST, LAST = range(CLASSES), range(CLASSES, 2 * CLASSES)


def text_task(before: Callable[[int], str], after: Callable[[int], str]) -> Task:
    return Task(
        CharacterGPT,
        functools.partial(text_examples, before, PRETRAINING_CHARACTERS),
        functools.partial(text_examples, after, CHARACTERS),
        LINEAR,
        new_head=False,
        batch_size=16,
    )


def image_task(kind: str, data: str, before: range, after: range) -> Task:
    channels, size = (3, 32) if data == "cifar" else (1, 28)
    if VARIABLE not in os.environ:
        channels, size = 1, 8
    build = functools.partial(CNN, channels) if kind == "CNN" else functools.partial(ViT, channels, size)
    return Task(
        build,
        functools.partial(image_examples, data, before, None),
        functools.partial(image_examples, data, after, IMAGES),
        CONVOLUTIONS if kind == "CNN" else LINEAR,
        new_head=True,
        batch_size=32,
    )


DEVELOPMENT = {
    "GPT, Wikipedia to code": text_task(wikipedia, code),
    "CNN, Fashion 0-4 to 5-9": image_task("CNN", "fashion", FIRST, LAST),
    "ViT, CIFAR 5-9 to 0-4": image_task("ViT", "cifar", LAST, FIRST),
}
HELD_OUT = {
    "GPT, code to Wikipedia": text_task(code, wikipedia),
    "CNN, CIFAR 0-4 to 5-9": image_task("CNN", "cifar", FIRST, LAST),
    "ViT, Fashion 5-9 to 0-4": image_task("ViT", "fashion", LAST, FIRST),
}
TASKS = {**DEVELOPMENT, **HELD_OUT}
