"""Training images: MNIST, Fashion-MNIST and CIFAR-10 from their published files, and the embedded digits."""

from __future__ import annotations

import gzip
import hashlib
import math
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hessinit.digits import load_digits
from hessinit.errors import ProblemError, choose

CIFAR_FOLDER, CIFAR_ARCHIVE = "cifar-10-batches-bin", "cifar-10-binary.tar.gz"
CIFAR_ROW = 1 + 3 * 32 * 32  # a label, then the red, the green and the blue plane
SYNONYMS = {"fashion": "fashion-mnist", "cifar": "cifar-10", "cifar10": "cifar-10"}
WAYS_OUT = "Put the published file in its place, give another --data-dir, or run on --data digits."


@dataclass(frozen=True)
class PublishedFile:
    """A file without its compression: `header` bytes, then uint8 values of `shape`; `md5` is that of all."""

    name: str
    shape: tuple[int, ...]
    md5: str
    header: int = 0

    @property
    def length(self) -> int:
        return self.header + math.prod(self.shape)


@dataclass(frozen=True)
class PublishedSet:
    """The training files of a set, the folders where they may lie, and packed files to download by md5."""

    title: str
    folders: tuple[str, ...]
    files: tuple[PublishedFile, ...]
    downloads: dict[str, str]
    mirrors: tuple[str, ...]


def _idx_set(title: str, folder: str, sums: list[str], packed: list[str], *mirrors: str) -> PublishedSet:
    files = (
        PublishedFile("train-images-idx3-ubyte", (60_000, 28, 28), sums[0], header=16),
        PublishedFile("train-labels-idx1-ubyte", (60_000,), sums[1], header=8),
    )
    downloads = {f"{file.name}.gz": md5 for file, md5 in zip(files, packed, strict=True)}
    torchvision = f"{title.replace('-', '')}/raw"
    return PublishedSet(title, (folder, torchvision, ""), files, downloads, mirrors)


PUBLISHED = {
    "mnist": _idx_set(
        "MNIST",
        "mnist",
        ["6bbc9ace898e44ae57da46a324031adb", "a25bea736e30d166cdddb491f175f624"],
        ["f68b3c2dcbeaaa9fbdd348bbdeb94873", "d53e105ee54ea40749a09fcbcd1e9432"],
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    "fashion-mnist": _idx_set(
        "Fashion-MNIST",
        "fashion-mnist",
        ["f4a8712d7a061bf5bd6d2ca38dc4d50a", "9018921c3c673c538a1fc5bad174d6f9"],
        ["8d4fb7e6c68d591d4c3dfef9ec88bf0d", "25c81989df183df01b3e8a0aad5dffbe"],
        # Without TLS: the checksum, not the connection, says that the file is the right one.
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
    "cifar-10": PublishedSet(
        "CIFAR-10",
        (CIFAR_FOLDER, f"cifar-10/{CIFAR_FOLDER}", ""),
        (
            PublishedFile("data_batch_1.bin", (10_000, CIFAR_ROW), "5dd7e06a14cb22eb9f671a540d1b7c25"),
            PublishedFile("data_batch_2.bin", (10_000, CIFAR_ROW), "5ea93a67294ea407fff1d09f752e9692"),
            PublishedFile("data_batch_3.bin", (10_000, CIFAR_ROW), "942cd6a4bcdd0dd3c604fbe906cb4421"),
            PublishedFile("data_batch_4.bin", (10_000, CIFAR_ROW), "ae636b3ba5c66a11e91e8cb52e771fcb"),
            PublishedFile("data_batch_5.bin", (10_000, CIFAR_ROW), "53f37980c15c3d472c316c40844f3f0d"),
        ),
        {CIFAR_ARCHIVE: "c32a1d4ab5d03f1284b67883e8d87530"},
        ("https://www.cs.toronto.edu/~kriz/",),
    ),
}


class ImageSet:
    """A training set as tensors; pixels stay uint8, so that every worker can hold CIFAR-10 (0.15 GB).

    `top` is the value of a white pixel. `source` names the files with their md5, for the record.
    """

    def __init__(self, pixels: Tensor, labels: Tensor, top: int, source: str) -> None:
        self.pixels, self.labels, self.top, self.source = pixels, labels, top, source
        self.examples = len(pixels)
        self.shape: tuple[int, int, int] = (pixels.shape[1], pixels.shape[2], pixels.shape[3])

    def batch(self, index: Tensor, flat: bool) -> tuple[Tensor, Tensor]:
        """New float32 pixels in [0, 1] and int64 labels of those images; `flat` gives one row for each."""
        pixels = self.pixels[index].float().div_(self.top)
        return (pixels.flatten(1) if flat else pixels), self.labels[index]

    def draw(self, size: int, generator: torch.Generator) -> Tensor:
        """The index of `size` different images."""
        return torch.randperm(self.examples, generator=generator)[:size]

    def epoch(self, size: int, generator: torch.Generator) -> Iterator[Tensor]:
        """The indices of every mini-batch of an epoch, in a new order; an incomplete last one is left out."""
        order = torch.randperm(self.examples, generator=generator)
        for start in range(0, self.examples - size + 1, size):
            yield order[start : start + size]


@lru_cache(maxsize=2)
def load_images(name: str, data_dir: str | None = None) -> ImageSet:
    """Return the training images of `name`, from `data_dir` or, without one, downloaded once into the cache.

    Every file must have the published md5; anything else is refused. The last two sets stay in memory.

    >>> images = load_images("digits")
    >>> images.examples, images.shape, images.batch(torch.arange(32), flat=True)[0].shape
    (1797, (1, 8, 8), torch.Size([32, 64]))
    """
    choose("data", name, [*PUBLISHED, "digits"], SYNONYMS)
    if name == "digits":
        images, labels = load_digits()
        pixels = (images * 16).to(torch.uint8)
        content = pixels.numpy().tobytes() + labels.to(torch.uint8).numpy().tobytes()
        md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
        return ImageSet(pixels, labels, 16, f"embedded digits md5 {md5}")
    published = PUBLISHED[name]
    folder = _download(name, published) if data_dir is None else Path(data_dir).expanduser()
    values = _read_files(folder, published)
    if name == "cifar-10":
        rows = np.concatenate(values)
        values = [rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]]
    else:
        values[0] = values[0][:, None]
    source = "; ".join(f"{file.name} md5 {file.md5}" for file in published.files)
    return ImageSet(torch.tensor(values[0]), torch.tensor(values[1]).long(), 255, source)


def _read_files(folder: Path, published: PublishedSet) -> list[NDArray[np.uint8]]:
    """The values of all files, from the first folder that has them, or from CIFAR-10's archive."""
    why = "" if folder.is_dir() else " (it is not a folder)"
    for place in (folder / name for name in published.folders):
        paths = [
            next((path for path in (place / file.name, place / f"{file.name}.gz") if path.is_file()), None)
            for file in published.files
        ]
        found = [path for path in paths if path]
        if len(found) == len(paths):
            return [_read(path, file, published) for path, file in zip(found, published.files, strict=True)]
        if found:
            why = why or f" ({place} lacks {published.files[paths.index(None)].name})"
    if CIFAR_ARCHIVE in published.downloads:
        for archive in (folder / CIFAR_ARCHIVE, folder / "cifar-10" / CIFAR_ARCHIVE):
            if archive.is_file():
                return _read_archive(archive, published)
        if any(folder.glob("cifar-10-*py*")):
            why = " (the Python version that is there is pickled, and pickles can run code)"
    raise ProblemError(
        f"data_dir={str(folder)!r} does not hold {published.title}'s training files{why}. Add "
        f"{_wanted(published)}, leave --data-dir out to download them, or run on --data digits."
    )


def _wanted(published: PublishedSet) -> str:
    if CIFAR_ARCHIVE in published.downloads:
        return f"{CIFAR_ARCHIVE}, or the folder {CIFAR_FOLDER} that it holds"
    names = " and ".join(file.name for file in published.files)
    return f"{names} (.gz or not) to it or to a folder {published.folders[0]} in it"


def _read(path: Path, file: PublishedFile, published: PublishedSet) -> NDArray[np.uint8]:
    try:
        with open(path, "rb") as stream:
            # By the first bytes: browsers unpack a download and leave it its `.gz`.
            packed = stream.peek(2)[:2] == b"\x1f\x8b"
            return _decode(gzip.open(stream) if packed else stream, str(path), file, published)
    except (OSError, EOFError, zlib.error) as error:
        raise ProblemError(f"{path} cannot be read ({error}). {WAYS_OUT}") from error


def _read_archive(path: Path, published: PublishedSet) -> list[NDArray[np.uint8]]:
    values = []
    try:
        with tarfile.open(path) as archive:
            for file in published.files:
                member = f"{CIFAR_FOLDER}/{file.name}"
                stream = archive.extractfile(member)
                if stream is None:
                    raise KeyError(f"{member} is not a file")
                values.append(_decode(stream, f"{path}, {member},", file, published))
    except (tarfile.TarError, KeyError, OSError, EOFError, zlib.error) as error:
        raise ProblemError(f"{path} cannot be read ({error}). {WAYS_OUT}") from error
    return values


def _decode(stream: Any, label: str, file: PublishedFile, published: PublishedSet) -> NDArray[np.uint8]:
    """The values of a file, once its md5 is known to be the published one."""
    content = stream.read(file.length + 1)  # one byte more, so that gzip's own checksum is read
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if md5 != file.md5:
        length = f"more than {file.length:,}" if len(content) > file.length else f"{len(content):,}"
        raise ProblemError(
            f"{label} is not {published.title}'s {file.name}: it has {length} bytes and md5 {md5}, and the "
            f"published file {file.length:,} bytes and md5 {file.md5}. {WAYS_OUT}"
        )
    return np.frombuffer(content, np.uint8, offset=file.header).reshape(file.shape)


def _download(name: str, published: PublishedSet) -> Path:
    """The cache folder with all files of the set, each with its checksum."""
    ways = f"pass --data-dir FOLDER with {_wanted(published)}, or run on the embedded --data digits."
    try:
        import pooch
        import requests
    except ImportError as error:
        raise ProblemError(
            f"{published.title} is downloaded with pooch, which is not installed. Run pip install "
            f"'hessinit[paper]', or {ways}"
        ) from error
    folder = Path(pooch.os_cache("hessinit")) / name
    # The packed file itself is asked for, as the checksum has it.
    downloader = pooch.HTTPDownloader(timeout=(10, 30), headers={"Accept-Encoding": "identity"})
    for file, md5 in published.downloads.items():
        failures = []
        for mirror in published.mirrors:
            try:
                pooch.retrieve(mirror + file, f"md5:{md5}", file, folder, downloader=downloader)
                break
            except (requests.RequestException, ValueError) as error:  # ValueError: another checksum
                failures.append(f"{mirror}{file} ({type(error).__name__})")
            except OSError as error:
                raise ProblemError(f"the cache {folder} cannot be used ({error}). Else {ways}") from error
        else:
            raise ProblemError(
                f"{published.title} could not be downloaded; tried {', '.join(failures)}. Try again with a "
                f"connection, or {ways}"
            )
    return folder
