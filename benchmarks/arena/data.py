"""The arena's data: MNIST, CIFAR-10 and Wikipedia text from a folder, in their official files, cut to what a
short training sees.

The folder holds `mnist/train-images-idx3-ubyte` and `mnist/train-labels-idx1-ubyte`,
`cifar-10-batches-bin/data_batch_1.bin`, and `*.txt` or `*.txt.xz` with Wikipedia articles.
"""

from __future__ import annotations

import collections
import functools
import itertools
import lzma
import os
import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

VARIABLE = "HESSINIT_DATA"
IMAGES = 10_000
CHARACTERS = 1_000_000
VOCABULARY = 64  # the most frequent characters; the rest are one more


def folder() -> Path:
    """Where the data lies."""
    where = os.environ.get(VARIABLE)
    if not where:
        raise SystemExit(
            f"Set {VARIABLE} to a folder with mnist/, cifar-10-batches-bin/ and a Wikipedia text."
        )
    return Path(where)


@functools.cache
def mnist() -> tuple[Tensor, Tensor]:
    """10,000 images as rows of 784 standardized pixels."""
    images = np.fromfile(folder() / "mnist/train-images-idx3-ubyte", np.uint8, IMAGES * 784, offset=16)
    labels = np.fromfile(folder() / "mnist/train-labels-idx1-ubyte", np.uint8, IMAGES, offset=8)
    return _standardized(images.reshape(IMAGES, 784), axes=(0, 1)), torch.from_numpy(labels).long()


@functools.cache
def cifar() -> tuple[Tensor, Tensor]:
    """10,000 images of 3 × 32 × 32, each channel standardized."""
    rows = np.fromfile(folder() / "cifar-10-batches-bin/data_batch_1.bin", np.uint8).reshape(-1, 3073)[
        :IMAGES
    ]
    images = rows[:, 1:].reshape(-1, 3, 32, 32)
    return _standardized(images, axes=(0, 2, 3)), torch.from_numpy(rows[:, 0]).long()


@functools.cache
def characters(length: int) -> tuple[Tensor, Tensor]:
    """Windows of Wikipedia text as character numbers, and the same moved on by one."""
    text = _text(CHARACTERS)
    frequent = [letter for letter, _ in collections.Counter(text).most_common(VOCABULARY - 1)]
    number = {letter: place + 1 for place, letter in enumerate(frequent)}
    codes = torch.tensor([number.get(letter, 0) for letter in text])
    windows = codes[: (len(codes) - 1) // length * length].view(-1, length)
    following = codes[1 : windows.numel() + 1].view(-1, length)
    return windows, following


def _text(size: int) -> str:
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


def _standardized(values: np.ndarray, axes: tuple[int, ...]) -> Tensor:
    numbers = values.astype(np.float32) / 255
    centred = numbers - numbers.mean(axes, keepdims=True)
    return torch.from_numpy(centred / numbers.std(axes, keepdims=True))
