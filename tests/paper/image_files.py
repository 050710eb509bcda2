"""Small files in the official formats, written by hand, and the facts that go with them."""

from __future__ import annotations

import gzip
import hashlib
import io
import struct
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from hessinit.paper.images import official
from hessinit.paper.images.official import CifarSet, IdxSet, OfficialFile

COUNT = 12  # images in a small set of idx files
ROWS = 4  # images in a small batch


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def idx_bytes(values: numpy.ndarray, kind: int = 0x08) -> bytes:
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, kind, values.ndim, *values.shape) + values.tobytes()


def small_images() -> numpy.ndarray:
    return numpy.random.default_rng(0).integers(0, 256, (COUNT, 28, 28), numpy.uint8)


def small_labels() -> numpy.ndarray:
    return (numpy.arange(COUNT) % 10).astype(numpy.uint8)


def small_batches() -> list[numpy.ndarray]:
    """Five batches of rows: a label and 3,072 pixels."""
    rows = numpy.random.default_rng(1).integers(0, 256, (5, ROWS, 3073), numpy.uint8)
    rows[:, :, 0] %= 10
    return list(rows)


def describe_small_mnist(patch: pytest.MonkeyPatch, name: str = "mnist") -> IdxSet:
    """Let the small images be the official ones of `name`."""
    known = official.OFFICIAL[name]
    assert isinstance(known, IdxSet)
    images, labels = small_images(), small_labels()
    small = replace(
        known,
        images=OfficialFile(known.images.name, images.shape, md5(idx_bytes(images))),
        labels=OfficialFile(known.labels.name, labels.shape, md5(idx_bytes(labels))),
    )
    patch.setitem(official.OFFICIAL, name, small)
    return small


def describe_small_cifar(patch: pytest.MonkeyPatch) -> CifarSet:
    known = official.OFFICIAL["cifar-10"]
    assert isinstance(known, CifarSet)
    batches = tuple(
        OfficialFile(f"data_batch_{number}.bin", rows.shape, md5(rows.tobytes()))
        for number, rows in enumerate(small_batches(), start=1)
    )
    small = replace(known, batches=batches)
    patch.setitem(official.OFFICIAL, "cifar-10", small)
    return small


def write_mnist(folder: Path, packed: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in (
        ("train-images-idx3-ubyte", small_images()),
        ("train-labels-idx1-ubyte", small_labels()),
    ):
        content = idx_bytes(values)
        (folder / f"{name}{'.gz' * packed}").write_bytes(gzip.compress(content) if packed else content)


def write_binary_batches(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(small_batches(), start=1):
        (folder / f"data_batch_{number}.bin").write_bytes(rows.tobytes())


def write_python_batches(folder: Path, dump: Callable[[numpy.ndarray], bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(small_batches(), start=1):
        (folder / f"data_batch_{number}").write_bytes(dump(rows))


def pack(folder: Path, archive: Path) -> None:
    """What the official archives are: a gzipped tar of one folder."""
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(folder, folder.name)


def archive_of(members: dict[str, bytes]) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as packed:
        for name, content in members.items():
            information = tarfile.TarInfo(name)
            information.size = len(content)
            packed.addfile(information, io.BytesIO(content))
    return held.getvalue()


def python_2_batch(rows: numpy.ndarray) -> bytes:
    """A batch as Python 2's cPickle wrote the official ones: protocol 2, every string a byte string."""

    def short(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text

    def number(value: int) -> bytes:
        return b"K" + bytes([value]) if value < 256 else b"M" + struct.pack("<H", value)

    pixels = rows[:, 1:].tobytes()
    return b"".join(
        [
            b"\x80\x02}q\x01(",
            short(b"batch_label") + short(b"training batch 1 of 5"),
            short(b"labels") + b"](" + b"".join(number(int(label)) for label in rows[:, 0]) + b"e",
            short(b"data"),
            b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + number(0) + b"\x85" + short(b"b"),
            b"\x87R(" + number(1) + number(len(rows)) + number(3072) + b"\x86",
            b"cnumpy\ndtype\n" + short(b"u1") + number(0) + number(1) + b"\x87R",
            b"(" + number(3) + short(b"|") + b"NNN" + 2 * b"J\xff\xff\xff\xff" + number(0) + b"tb",
            b"\x89T" + struct.pack("<I", len(pixels)) + pixels + b"tb",
            short(b"filenames") + b"](" + len(rows) * short(b"leptodactylus_pentadactylus_s_000004.png"),
            b"eu.",
        ]
    )
