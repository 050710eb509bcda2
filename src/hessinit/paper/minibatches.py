"""Mini-batches of a set of images: the files are read once in each process, pixels stay bytes until used."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from hessinit.paper.experiment import Setting
from hessinit.paper.images.load import load_images


class ImageSet:
    """A training set as tensors: uint8 pixels, so that every worker can hold CIFAR-10 (0.15 GB)."""

    def __init__(self, pixels: Tensor, labels: Tensor, top: int, source: str) -> None:
        self.pixels, self.labels, self.top, self.source = pixels, labels, top, source
        self.examples = len(pixels)
        self.shape: tuple[int, int, int] = (pixels.shape[1], pixels.shape[2], pixels.shape[3])

    def batch(self, index: Tensor, flat: bool) -> tuple[Tensor, Tensor]:
        """Fresh float32 pixels in [0, 1] and int64 labels of those images; `flat` gives one row for each."""
        pixels = self.pixels[index].float().div_(self.top)
        return (pixels.flatten(1) if flat else pixels), self.labels[index]

    def draw(self, size: int, generator: torch.Generator) -> Tensor:
        """The index of `size` different images."""
        return torch.randperm(self.examples, generator=generator)[:size]

    def epoch(self, size: int, generator: torch.Generator) -> Iterator[Tensor]:
        """The indices of every mini-batch of an epoch, in a new order; a last one not full is left out."""
        order = torch.randperm(self.examples, generator=generator)
        for start in range(0, self.examples - size + 1, size):
            yield order[start : start + size]


def images_of(setting: Setting) -> ImageSet:
    """The images of a setting; read once in a process, for the last two sets asked for.

    >>> images = images_of(Setting("table-4", "digits", "two-hidden", (0,)))
    >>> images.examples, images.shape, images.batch(torch.arange(32), flat=True)[0].shape
    (1797, (1, 8, 8), torch.Size([32, 64]))
    """
    return _read(setting.data, setting.data_dir)


def read_source(setting: Setting) -> str:
    """Reads the images, so that a fault in them is told before any work; gives their source."""
    return images_of(setting).source


@lru_cache(maxsize=2)
def _read(data: str, data_dir: str | None) -> ImageSet:
    images = load_images(data, data_dir)
    # Copies: the arrays of a file may be read-only, and torch has no tensors that are.
    return ImageSet(
        torch.tensor(images.pixels), torch.tensor(images.labels).long(), images.top, images.source
    )
