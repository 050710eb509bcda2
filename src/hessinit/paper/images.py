"""Training images: MNIST, Fashion-MNIST and CIFAR-10 from their published files, and the embedded digits."""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
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
SYNONYMS = {"fashion": "fashion-mnist", "cifar": "cifar-10", "cifar10": "cifar-10"}
WAYS_OUT = "Put the published file in its place, give another --data-dir, or run on --data digits."


@dataclass(frozen=True)
class PublishedSet:
    """Training files by name: md5 unpacked, bytes of header, and shape of the uint8 values that follow it.

    `places` are folders, or an archive, below --data-dir; `downloads` are packed files by md5.
    """

    title: str
    files: Mapping[str, tuple[str, int, tuple[int, ...]]]
    places: tuple[str, ...]
    downloads: Mapping[str, str]
    mirrors: tuple[str, ...]
    wanted: str


def _idx_set(title: str, sums: tuple[str, str], packed: tuple[str, str], *mirrors: str) -> PublishedSet:
    images, labels = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
    folder = title.lower()
    return PublishedSet(
        title,
        {images: (sums[0], 16, (60_000, 28, 28)), labels: (sums[1], 8, (60_000,))},
        (folder, f"{title.replace('-', '')}/raw", ""),  # the second is torchvision's
        {f"{images}.gz": packed[0], f"{labels}.gz": packed[1]},
        mirrors,
        f"{images} and {labels} (.gz or not) to it or to a folder {folder} in it",
    )


CIFAR_SUMS = [
    "5dd7e06a14cb22eb9f671a540d1b7c25", "5ea93a67294ea407fff1d09f752e9692",
    "942cd6a4bcdd0dd3c604fbe906cb4421", "ae636b3ba5c66a11e91e8cb52e771fcb",
    "53f37980c15c3d472c316c40844f3f0d",
]  # fmt: skip
PUBLISHED = {
    "mnist": _idx_set(
        "MNIST",
        ("6bbc9ace898e44ae57da46a324031adb", "a25bea736e30d166cdddb491f175f624"),
        ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "d53e105ee54ea40749a09fcbcd1e9432"),
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    "fashion-mnist": _idx_set(
        "Fashion-MNIST",
        ("f4a8712d7a061bf5bd6d2ca38dc4d50a", "9018921c3c673c538a1fc5bad174d6f9"),
        ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "25c81989df183df01b3e8a0aad5dffbe"),
        # Without TLS: the checksum, not the connection, says that the file is the right one.
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
    "cifar-10": PublishedSet(
        "CIFAR-10",
        # Every row is a label, then the red, the green and the blue plane.
        {f"data_batch_{at}.bin": (md5, 0, (10_000, 3073)) for at, md5 in enumerate(CIFAR_SUMS, start=1)},
        (CIFAR_FOLDER, f"cifar-10/{CIFAR_FOLDER}", "", CIFAR_ARCHIVE, f"cifar-10/{CIFAR_ARCHIVE}"),
        {CIFAR_ARCHIVE: "c32a1d4ab5d03f1284b67883e8d87530"},
        ("https://www.cs.toronto.edu/~kriz/",),
        f"{CIFAR_ARCHIVE} (not the Python version: it is pickled, and pickles can run code), or the folder "
        f"{CIFAR_FOLDER} that it holds",
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
        return ImageSet(pixels, labels, 16, f"embedded digits md5 {_md5(content)}")
    published = PUBLISHED[name]
    folder = _download(name, published) if data_dir is None else Path(data_dir).expanduser()
    values = _read_files(folder, published)
    if name == "cifar-10":
        rows = np.concatenate(values)
        values = [rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]]
    else:
        values[0] = values[0][:, None]
    source = "; ".join(f"{file} md5 {md5}" for file, (md5, _, _) in published.files.items())
    return ImageSet(torch.tensor(values[0]), torch.tensor(values[1]).long(), 255, source)


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _read_files(folder: Path, published: PublishedSet) -> list[NDArray[np.uint8]]:
    """The values of all files, from the first place that has them."""
    why = "" if folder.is_dir() else " (it is not a folder)"
    for place in (folder / name for name in published.places):
        lacking = [] if place.is_file() else [file for file in published.files if not _find(place, file)]
        if not lacking:
            return list(_read(place, published))
        if len(lacking) < len(published.files):
            why = why or f" ({place} lacks {lacking[0]})"
    raise ProblemError(
        f"data_dir={str(folder)!r} does not hold {published.title}'s training files{why}. Add "
        f"{published.wanted}, leave --data-dir out to download them, or run on --data digits."
    )


def _find(place: Path, file: str) -> Path | None:
    return next((path for path in (place / file, place / f"{file}.gz") if path.is_file()), None)


def _read(place: Path, published: PublishedSet) -> Iterator[NDArray[np.uint8]]:
    """The values of every file of a folder or an archive, once its md5 is known to be the published one."""
    label = str(place)
    try:
        for label, file, stream in _open_files(place, list(published.files)):
            md5, header, shape = published.files[file]
            length = header + math.prod(shape)
            content = stream.read(length + 1)  # one byte more, so that gzip's own checksum is read
            if _md5(content) != md5:
                found = f"more than {length:,}" if len(content) > length else f"{len(content):,}"
                raise ProblemError(
                    f"{label} is not {published.title}'s {file}: it has {found} bytes and md5 {_md5(content)}"
                    f", and the published file {length:,} bytes and md5 {md5}. {WAYS_OUT}"
                )
            yield np.frombuffer(content, np.uint8, offset=header).reshape(shape)
    except (tarfile.TarError, KeyError, OSError, EOFError, zlib.error) as error:
        raise ProblemError(f"{label} cannot be read ({error}). {WAYS_OUT}") from error


def _open_files(place: Path, files: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    if place.is_file():
        with tarfile.open(place) as archive:
            for file in files:
                member = f"{CIFAR_FOLDER}/{file}"
                yield f"{place}, {member},", file, archive.extractfile(member) or io.BytesIO()
        return
    for file in files:
        path = _find(place, file) or place / file
        with open(path, "rb") as stream:
            # By the first bytes: browsers unpack a download and leave it its `.gz`.
            packed = stream.peek(2)[:2] == b"\x1f\x8b"
            yield str(path), file, gzip.GzipFile(fileobj=stream) if packed else stream


def _download(name: str, published: PublishedSet) -> Path:
    """The cache folder with all files of the set, each with its checksum."""
    ways = f"pass --data-dir FOLDER with {published.wanted}, or run on the embedded --data digits."
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
