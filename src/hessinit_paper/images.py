"""The published training images, read from files or downloaded once, and the embedded digits."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hessinit import ProblemError
from hessinit.digits import load_digits
from hessinit_paper.checks import check_choice

IMAGES = "train-images-idx3-ubyte"
LABELS = "train-labels-idx1-ubyte"


class PublishedSet(NamedTuple):
    """Training files by name: md5 (unpacked), bytes of the header, shape of the uint8 values.

    `downloads` are the packed files below `url` by name, with their md5.
    """

    title: str
    files: Mapping[str, tuple[str, int, tuple[int, ...]]]
    url: str
    downloads: Mapping[str, str]


def _idx_set(title: str, url: str, *md5: str) -> PublishedSet:
    """Return a set of 60,000 images of 28×28 in the idx format: md5 of both files, then packed."""
    files = {IMAGES: (md5[0], 16, (60_000, 28, 28)), LABELS: (md5[1], 8, (60_000,))}
    return PublishedSet(title, files, url, {f"{IMAGES}.gz": md5[2], f"{LABELS}.gz": md5[3]})


CIFAR_SUMS = [
    "5dd7e06a14cb22eb9f671a540d1b7c25",
    "5ea93a67294ea407fff1d09f752e9692",
    "942cd6a4bcdd0dd3c604fbe906cb4421",
    "ae636b3ba5c66a11e91e8cb52e771fcb",
    "53f37980c15c3d472c316c40844f3f0d",
]
PUBLISHED = {
    "mnist": _idx_set(
        "MNIST",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "6bbc9ace898e44ae57da46a324031adb",
        "a25bea736e30d166cdddb491f175f624",
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
    ),
    "fashion-mnist": _idx_set(
        "Fashion-MNIST",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "9018921c3c673c538a1fc5bad174d6f9",
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
    ),
    "cifar-10": PublishedSet(
        "CIFAR-10",
        # Every row is a label, then the red, the green and the blue plane.
        {
            f"data_batch_{number}.bin": (md5, 0, (10_000, 3073))
            for number, md5 in enumerate(CIFAR_SUMS, start=1)
        },
        "https://www.cs.toronto.edu/~kriz/",
        {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
    ),
}


class ImageSet:
    """A training set as tensors; pixels stay uint8, so that every worker can hold CIFAR-10.

    `white` is the value of a white pixel. `source` names the files with their md5, for the record.
    """

    def __init__(self, pixels: Tensor, labels: Tensor, white: int, source: str) -> None:
        self.pixels = pixels
        self.labels = labels
        self.white = white
        self.source = source
        self.examples = len(pixels)
        self.shape: tuple[int, int, int] = (pixels.shape[1], pixels.shape[2], pixels.shape[3])

    def batch(self, index: Tensor, flat: bool) -> tuple[Tensor, Tensor]:
        """Return float32 pixels in [0, 1] and int64 labels; with `flat`, one row for each image."""
        pixels = self.pixels[index].float().div_(self.white)
        return (pixels.flatten(1) if flat else pixels), self.labels[index]

    def sample(self, size: int, source: torch.Generator, flat: bool) -> tuple[Tensor, Tensor]:
        """Return a batch of `size` different random images."""
        return self.batch(torch.randperm(self.examples, generator=source)[:size], flat)

    def epoch(self, size: int, source: torch.Generator) -> Sequence[Tensor]:
        """Return the indices of every full mini-batch of an epoch, in a new random order."""
        order = torch.randperm(self.examples, generator=source)
        return order[: self.examples // size * size].split(size)


@lru_cache(maxsize=2)
def load_images(name: str, data_dir: str | None = None) -> ImageSet:
    """Return the training images of `name` from `data_dir`; without one, download them once.

    Every file must have the published md5. The last two sets that were read stay in memory.

    >>> images = load_images("digits")
    >>> images.examples, images.shape, images.batch(torch.arange(32), flat=True)[0].shape
    (1797, (1, 8, 8), torch.Size([32, 64]))
    """
    check_choice("data", name, [*PUBLISHED, "digits"])
    if name == "digits":
        images, labels = load_digits()
        pixels = (images * 16).to(torch.uint8)
        content = pixels.numpy().tobytes() + labels.to(torch.uint8).numpy().tobytes()
        return ImageSet(pixels, labels, 16, f"embedded digits md5 {_md5(content)}")
    published = PUBLISHED[name]
    folder = _download(name, published) if data_dir is None else Path(data_dir).expanduser()
    values = [_read_file(folder, published, file) for file in published.files]
    if name == "cifar-10":
        rows = np.concatenate(values)
        values = [rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]]
    else:
        values[0] = values[0][:, None]
    source = "; ".join(f"{file} md5 {md5}" for file, (md5, _, _) in published.files.items())
    return ImageSet(torch.tensor(values[0]), torch.tensor(values[1]).long(), 255, source)


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _read_file(folder: Path, published: PublishedSet, file: str) -> NDArray[np.uint8]:
    """Return the values of that file, gzipped or not, from the folder or up to two folders below.

    Of several files of that name, the one with the published md5 is read.
    """
    md5, header, shape = published.files[file]
    patterns = (f"{file}*", f"*/{file}*", f"*/*/{file}*")
    paths = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    for path in paths:
        content = path.read_bytes()
        try:
            content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        except (OSError, EOFError, zlib.error):
            continue
        if _md5(content) == md5:
            return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
    wrong = f" ({', '.join(map(str, paths))}: another content)" if paths else ""
    raise ProblemError(
        f"data_dir={str(folder)!r} does not hold {published.title}'s {file}, gzipped or not, with "
        f"md5 {md5}{wrong}. Put the published file there "
        f"({published.url}{next(iter(published.downloads))}; unpack a .tar.gz), leave --data-dir "
        "out to download it, or run on --data digits."
    )


def _download(name: str, published: PublishedSet) -> Path:
    """Return the cache folder with all files of the set, each verified by its checksum."""
    try:
        import pooch
        import requests
    except ImportError as error:
        raise ProblemError(
            f"{published.title} is downloaded with pooch, which is not installed. Run pip install "
            "'hessinit[paper]', pass --data-dir FOLDER, or run on the embedded --data digits."
        ) from error
    folder = Path(pooch.os_cache("hessinit")) / name
    # The checksum is that of the packed file: no server may unpack it on the way.
    downloader = pooch.HTTPDownloader(timeout=(10, 30), headers={"Accept-Encoding": "identity"})
    for file, md5 in published.downloads.items():
        unpack = pooch.Untar() if file.endswith(".tar.gz") else None
        try:
            pooch.retrieve(published.url + file, f"md5:{md5}", file, folder, unpack, downloader)
        except (requests.RequestException, ValueError, OSError) as error:
            # pooch raises ValueError where the checksum differs.
            raise ProblemError(
                f"{published.url}{file} could not be downloaded to {folder} ({error}). Try again "
                "with a connection, pass --data-dir FOLDER, or run on the embedded --data digits."
            ) from error
    return folder
