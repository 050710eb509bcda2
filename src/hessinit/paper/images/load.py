"""The training images of a set by its name: checked, whole, and always the same."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
from numpy.typing import NDArray

from hessinit.digits import load_digits
from hessinit.errors import choose
from hessinit.paper.images.cifar import check_cifar, read_cifar
from hessinit.paper.images.download import fetch, import_pooch
from hessinit.paper.images.folder import find_cifar, find_idx
from hessinit.paper.images.idx import check_idx, read_idx
from hessinit.paper.images.official import OFFICIAL, IdxSet, OfficialFile
from hessinit.paper.places import at_home

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ["mnist", "fashion-mnist", "cifar-10", "digits"]
SYNONYMS = {
    "fashion": "fashion-mnist",
    "fashionmnist": "fashion-mnist",
    "cifar": "cifar-10",
    "cifar10": "cifar-10",
}


@dataclass(frozen=True, eq=False)
class Images:
    """A training set: `pixels` uint8 `(n, channels, height, width)`, `labels` uint8 `(n,)`.

    `top` is the value of a white pixel. `source` says what was read, for a record: names and md5 of the files
    without their compression, so that the same content has the same source wherever it lay.
    """

    name: str
    pixels: NDArray[numpy.uint8] = field(repr=False)
    labels: NDArray[numpy.uint8] = field(repr=False)
    top: int
    source: str

    def inputs(self, flat: bool) -> Tensor:
        """Fresh float32 values in [0, 1]; `flat` gives one row per image. CIFAR-10 takes 0.6 GB."""
        import torch

        values = self.pixels.reshape(len(self.pixels), -1) if flat else self.pixels
        return torch.from_numpy(values.astype(numpy.float32)).div_(self.top)

    def targets(self) -> Tensor:
        """Fresh int64 labels."""
        import torch

        return torch.from_numpy(self.labels.astype(numpy.int64))


def load_images(name: str, data_dir: str | os.PathLike[str] | None = None) -> Images:
    """The training split of `name`, from `data_dir` alone or, without one, from the cache or the network.

    Every byte is checked against the official files; anything else is refused with a `ProblemError` that
    names the file. Plain files take 0.2 s for MNIST and 0.6 s for CIFAR-10. The digits are embedded.

    >>> images = load_images("digits")
    >>> images.pixels.shape, images.top, images.targets()[:3].tolist()
    ((1797, 1, 8, 8), 16, [0, 1, 2])
    """
    choose("data", name, NAMES, SYNONYMS)
    if name == "digits":
        return load_embedded()
    official = OFFICIAL[name]
    folder = fetch(name, official) if data_dir is None else as_folder(data_dir)
    if isinstance(official, IdxSet):
        found = find_idx(folder, official)
        labels = read_idx(found.labels, official.labels, official.title)  # the small one first
        pixels = read_idx(found.images, official.images, official.title)[:, None]
        files: tuple[OfficialFile, ...] = (official.images, official.labels)
    else:
        pixels, labels = read_cifar(find_cifar(folder, official), official)
        files = official.batches
    return Images(name, pixels, labels, 255, "; ".join(f"{file.name} md5 {file.md5}" for file in files))


def check_images(name: str, data_dir: str | os.PathLike[str] | None = None) -> None:
    """Refuse early what `load_images` would refuse: files that are missing, cut off or of another shape.

    Reads headers and lengths, some milliseconds; an archive is read whole. Without a `data_dir` it asks only
    for the means to download.
    """
    choose("data", name, NAMES, SYNONYMS)
    if name == "digits":
        return
    official = OFFICIAL[name]
    if data_dir is None:
        import_pooch(official)
    elif isinstance(official, IdxSet):
        found = find_idx(as_folder(data_dir), official)
        check_idx(found.labels, official.labels, official.title)
        check_idx(found.images, official.images, official.title)
    else:
        check_cifar(find_cifar(as_folder(data_dir), official), official)


def as_folder(data_dir: str | os.PathLike[str]) -> Path:
    return at_home("data_dir", data_dir)


def load_embedded() -> Images:
    images, labels = load_digits()
    pixels, classes = (images * 16).numpy().astype(numpy.uint8), labels.numpy().astype(numpy.uint8)
    md5 = hashlib.md5(pixels.tobytes() + classes.tobytes(), usedforsecurity=False).hexdigest()
    return Images("digits", pixels, classes, 16, f"embedded digits md5 {md5}")
