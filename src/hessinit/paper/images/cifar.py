"""The batches of CIFAR-10, binary or pickled, in files or in an archive: rows of a label and 3,072 pixels."""

from __future__ import annotations

import io
import math
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path, PurePosixPath

import numpy
from numpy.typing import NDArray

from hessinit.errors import ProblemError
from hessinit.paper.images.contents import (
    check_content,
    check_labels,
    check_length,
    last_length,
    opened,
    refuse,
)
from hessinit.paper.images.folder import CifarFiles
from hessinit.paper.images.inert_pickle import as_array, read_inert
from hessinit.paper.images.official import CIFAR_ROW, CifarSet, OfficialFile
from hessinit.present.words import printable

Rows = NDArray[numpy.uint8]

# A pickled batch holds its rows and, beside them, the names of the pictures: about 25 bytes a row.
PICKLE_ROOM = 1_000_000
# Beside its five batches an archive holds that of the test, and small files.
ARCHIVE_ROOM = 2


def read_cifar(files: CifarFiles, official: CifarSet) -> tuple[Rows, Rows]:
    """Pixels `(n, 3, 32, 32)` and labels `(n,)` of all batches in order, each known to be official."""
    starts = [0, *accumulate(batch.shape[0] for batch in official.batches)]
    pixels = numpy.empty((starts[-1], CIFAR_ROW - 1), numpy.uint8)
    labels = numpy.empty(starts[-1], numpy.uint8)
    for number, label, content in read_batches(files, official):
        batch = official.batches[number]
        check_length(label, len(content), *lengths(batch, files.pickled))
        rows = rows_of_pickle(label, content) if files.pickled else rows_of_binary(content)
        if rows.shape != batch.shape:
            raise refuse(label, f"holds {len(rows)} images; {batch.name} holds {batch.shape[0]}")
        check_labels(label, rows[:, 0].tobytes())
        check_content(label, rows.data, batch, official.title)
        here = slice(starts[number], starts[number + 1])
        labels[here], pixels[here] = rows[:, 0], rows[:, 1:]
    return pixels.reshape(-1, 3, 32, 32), labels


def lengths(batch: OfficialFile, pickled: bool) -> tuple[int, int]:
    """The fewest and the most bytes that a file of the batch may have."""
    rows = math.prod(batch.shape)
    return rows, rows + PICKLE_ROOM if pickled else rows


def read_batches(files: CifarFiles, official: CifarSet) -> Iterator[tuple[int, str, bytes]]:
    """Number, name for errors and content of every batch, one at a time; never much more than it may have."""
    limits = [lengths(batch, files.pickled)[1] for batch in official.batches]
    if files.archive:
        yield from read_archive(files, limits)
        return
    for number, (path, limit) in enumerate(zip(files.paths, limits, strict=True)):
        with opened(path) as file:
            content = file.read(limit + 1)
        yield number, str(path), content


def read_archive(files: CifarFiles, limits: list[int]) -> Iterator[tuple[int, str, bytes]]:
    """The batches in an archive, in its order and straight from it: nothing is written to the disk."""
    (path,) = files.paths
    wanted = {name: number for number, name in enumerate(files.members)}
    most = ARCHIVE_ROOM * sum(limits)
    with opened(path) as file, opened_archive(path, file, most) as archive:
        for member in archive:
            if not 0 <= member.size <= most:  # to pass over it would take for ever
                raise refuse(path, f"has a {printable(member.name)} of {member.size:,} bytes")
            number = wanted.pop(str(PurePosixPath(member.name)), None)
            if number is None:
                continue
            content = archive.extractfile(member) if member.isfile() else None
            if content is None:
                raise refuse(path, f"has a {printable(member.name)} that is no file")
            yield number, f"{path}, {member.name},", content.read(limits[number] + 1)
            if not wanted:
                return
    raise refuse(path, f"lacks {', '.join(wanted)}")


@contextmanager
def opened_archive(path: Path, file: io.BufferedIOBase, most: int) -> Iterator[tarfile.TarFile]:
    """The archive in `file`, of which no more than `most` bytes are unpacked.

    A name in it may be gigabytes long, and tarfile holds it in memory.
    """
    try:
        with tarfile.open(fileobj=ShortStream(path, file, most), mode="r|", bufsize=1 << 20) as archive:
            yield archive
    except (ProblemError, tarfile.TarError, OSError, EOFError, zlib.error):
        raise  # said better elsewhere
    except Exception as error:  # a header made to mislead may fail in any way
        raise refuse(path, f"is not a whole tar archive ({type(error).__name__}: {error})") from error


class ShortStream(io.RawIOBase):
    """A file that may not have more than `most` bytes."""

    def __init__(self, path: Path, file: io.BufferedIOBase, most: int) -> None:
        self.path, self.file, self.most = path, file, most
        self.given = 0

    def read(self, size: int = -1) -> bytes:
        content = self.file.read(size)
        self.given += len(content)
        if self.given > self.most:
            raise refuse(self.path, f"is too long: unpacked, it has more than {self.most:,} bytes")
        return content


def rows_of_binary(content: bytes) -> Rows:
    return numpy.frombuffer(content, numpy.uint8).reshape(-1, CIFAR_ROW)


def rows_of_pickle(label: str, content: bytes) -> Rows:
    """The rows of the binary form from a python batch: its `labels` before its `data`."""
    batch = read_inert(label, content)
    for key in ("labels", "data"):
        if key not in batch:
            raise refuse(label, f"has no {key!r}; a batch of CIFAR-10 has 'labels' and 'data'")
    try:
        pixels = as_array(batch["data"])
    except ValueError as error:
        raise refuse(label, f"has as 'data' {error}; a uint8 array is needed") from error
    labels = batch["labels"]
    if not isinstance(labels, list) or not all(type(value) is int and 0 <= value < 256 for value in labels):
        raise refuse(label, "has 'labels' that are no list of the numbers 0 to 9")
    if pixels.shape != (len(labels), CIFAR_ROW - 1):
        found = f"data of the shape {pixels.shape} for {len(labels)} labels"
        raise refuse(label, f"has {found}; {CIFAR_ROW - 1} values for each label are needed")
    return numpy.concatenate([numpy.array(labels, numpy.uint8)[:, None], pixels], axis=1)


def check_cifar(files: CifarFiles, official: CifarSet) -> None:
    """What can be told without variant the batches; an archive is read, to know that it is whole."""
    if files.archive:
        read_cifar(files, official)
        return
    for path, batch in zip(files.paths, official.batches, strict=True):
        check_length(path, last_length(path), *lengths(batch, files.pickled))
        with opened(path) as file:
            start = file.read(1)
        if files.pickled and start != b"\x80":
            raise refuse(path, f"is no pickle: it begins with {start.hex()}, not with 80")
