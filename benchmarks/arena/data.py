"""The arena's data: MNIST, Fashion-MNIST, CIFAR-10 and Wikipedia text from a folder, in their official files
(or the same with .gz), cut to what a short training sees.

The folder holds `mnist/` and `fashion-mnist/` with `train-images-idx3-ubyte`, `train-labels-idx1-ubyte` and
for MNIST the two `t10k` files, `cifar-10-batches-bin/` with `data_batch_1.bin` and `test_batch.bin`, and
`*.txt` or `*.txt.xz` with Wikipedia articles.

    HESSINIT_DATA=folder python benchmarks/arena/data.py TARGET    the part that the arena reads, in 45 MB
"""

from __future__ import annotations

import collections
import functools
import gzip
import itertools
import lzma
import os
import re
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

VARIABLE = "HESSINIT_DATA"
IMAGES = 10_000
CLOTHES = 22_000  # 20,000 to train on
HELD_OUT = 2_000
CHARACTERS = 1_000_000
HELD_OUT_CHARACTERS = 100_000
VOCABULARY = 64  # the most frequent characters; the rest are one more

Examples = tuple[Tensor, Tensor]
FILES = {  # how many bytes of each are read
    "mnist/train-images-idx3-ubyte": 16 + IMAGES * 784,
    "mnist/train-labels-idx1-ubyte": 8 + IMAGES,
    "mnist/t10k-images-idx3-ubyte": 16 + HELD_OUT * 784,
    "mnist/t10k-labels-idx1-ubyte": 8 + HELD_OUT,
    "fashion-mnist/train-images-idx3-ubyte": 16 + CLOTHES * 784,
    "fashion-mnist/train-labels-idx1-ubyte": 8 + CLOTHES,
    "cifar-10-batches-bin/data_batch_1.bin": IMAGES * 3073,
    "cifar-10-batches-bin/test_batch.bin": HELD_OUT * 3073,
}


def folder() -> Path:
    """Where the data lies."""
    where = os.environ.get(VARIABLE)
    if not where:
        raise SystemExit(
            f"Set {VARIABLE} to a folder with mnist/, fashion-mnist/, cifar-10-batches-bin/ and a *.txt."
        )
    return Path(where)


@functools.cache
def mnist(held_out: bool = False) -> Examples:
    """10,000 images as rows of 784 standardized pixels; 2,000 of the official test images."""
    images, labels = _images("mnist/train", IMAGES)
    axes = (0, 1)
    mean, std = images.mean(axes, keepdims=True), images.std(axes, keepdims=True)
    if held_out:
        images, labels = _images("mnist/t10k", HELD_OUT)
    return torch.from_numpy((images - mean) / std), labels


@functools.cache
def fashion(examples: int = CLOTHES - HELD_OUT, held_out: bool = False) -> Examples:
    """Images of 1 × 28 × 28, standardized: the first of 20,000, or the 2,000 that follow those."""
    images, labels = _images("fashion-mnist/train", CLOTHES)
    pixels = torch.from_numpy((images - images.mean()) / images.std()).view(-1, 1, 28, 28)
    part = slice(CLOTHES - HELD_OUT, None) if held_out else slice(examples)
    return pixels[part], labels[part]


@functools.cache
def cifar(held_out: bool = False) -> Examples:
    """10,000 images of 3 × 32 × 32, each channel standardized; 2,000 of the official test images."""
    images, labels = _colours("data_batch_1.bin")
    axes = (0, 2, 3)
    mean, std = images.mean(axes, keepdims=True), images.std(axes, keepdims=True)
    if held_out:
        images, labels = _colours("test_batch.bin")
    return torch.from_numpy((images - mean) / std), labels


def cifar_split(held_out: bool = False) -> Examples:
    """The 10,000 images of `cifar`: 9,000 to train on, and the last 1,000."""
    images, labels = cifar()
    part = slice(9_000, None) if held_out else slice(9_000)
    return images[part], labels[part]


@functools.cache
def characters(length: int, held_out: bool = False) -> Examples:
    """Windows of Wikipedia text as character numbers, and the same moved on by one; or of the text after."""
    text = text_of(CHARACTERS)
    frequent = [letter for letter, _ in collections.Counter(text).most_common(VOCABULARY - 1)]
    number = {letter: place + 1 for place, letter in enumerate(frequent)}
    if held_out:
        text = text_of(CHARACTERS + HELD_OUT_CHARACTERS)[len(text) :]
    codes = torch.tensor([number.get(letter, 0) for letter in text])
    windows = codes[: (len(codes) - 1) // length * length].view(-1, length)
    following = codes[1 : windows.numel() + 1].view(-1, length)
    return windows, following


def _images(name: str, count: int) -> tuple[np.ndarray, Tensor]:
    images = _bytes(f"{name}-images-idx3-ubyte")[16:].reshape(count, 784)
    return images.astype(np.float32) / 255, torch.from_numpy(_bytes(f"{name}-labels-idx1-ubyte")[8:]).long()


def _colours(name: str) -> tuple[np.ndarray, Tensor]:
    rows = _bytes(f"cifar-10-batches-bin/{name}").reshape(-1, 3073)
    images = rows[:, 1:].reshape(-1, 3, 32, 32)
    return images.astype(np.float32) / 255, torch.from_numpy(rows[:, 0].copy()).long()


def _bytes(name: str) -> np.ndarray:
    path = folder() / name
    opener = open if path.exists() else gzip.open
    with opener(path if path.exists() else f"{path}.gz", "rb") as file:  # type: ignore[operator]
        return np.frombuffer(bytearray(file.read(FILES[name])), np.uint8)


def text_of(size: int) -> str:
    """So many characters of the articles, without the marks between them."""
    root = folder()
    files = sorted([*root.glob("*.txt"), *root.glob("*.txt.xz")])
    if not files:
        raise SystemExit(f"{root} holds no *.txt or *.txt.xz with Wikipedia text.")
    opener = lzma.open if files[0].suffix == ".xz" else open
    with opener(files[0], "rt", encoding="utf-8") as lines:  # type: ignore[operator]
        wanted = (line for line in lines if not re.match(r"</?doc", line))
        enough = itertools.accumulate(
            wanted, lambda sizes, line: (sizes[0] + len(line), line), initial=(0, "")
        )
        kept = itertools.takewhile(lambda pair: pair[0] < size, enough)
        return "".join(line for _, line in kept)


def pack(target: Path) -> None:
    """Write a folder with the part of every file that is read, for a machine with little disk."""
    for name in FILES:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / f"{name}.gz").write_bytes(gzip.compress(_bytes(name).tobytes()))
    text = text_of(CHARACTERS + 2 * HELD_OUT_CHARACTERS)
    (target / "wikipedia.txt.xz").write_bytes(lzma.compress(text.encode()))


if __name__ == "__main__":
    pack(Path(sys.argv[1]))
