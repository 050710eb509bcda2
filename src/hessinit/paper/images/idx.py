"""The idx format of MNIST: two zero bytes, a type, the number of dimensions, their sizes, the values."""

from __future__ import annotations

import math
from pathlib import Path

import numpy
from numpy.typing import NDArray

from hessinit.paper.images.contents import (
    check_content,
    check_labels,
    check_length,
    last_length,
    opened,
    refuse,
)
from hessinit.paper.images.official import OfficialFile

TYPES = {0x08: "uint8", 0x09: "int8", 0x0B: "int16", 0x0C: "int32", 0x0D: "float32", 0x0E: "float64"}


def parse_header(label: object, content: bytes) -> tuple[int, ...]:
    """The sizes that an idx file of uint8 values announces.

    >>> parse_header("labels", bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 7, 7]))
    (3,)
    """
    if len(content) < 4:
        raise refuse(label, f"is cut off: {len(content)} bytes, and an idx header alone has 8 or more")
    if content[:2] != b"\0\0" or content[2] not in TYPES:
        raise refuse(label, f"is no idx file: it begins with {content[:4].hex(' ')}, not with 00 00 08")
    if content[2] != 0x08:
        raise refuse(
            label, f"holds {TYPES[content[2]]} values (type {content[2]:#04x}); uint8 is needed (0x08)"
        )
    length = header_length(content[3])
    if len(content) < length:
        raise refuse(label, f"is cut off: {len(content)} bytes, and its header alone has {length}")
    return tuple(numpy.frombuffer(content[4:length], ">u4").tolist())


def header_length(dimensions: int) -> int:
    return 4 + 4 * dimensions


def check_shape(label: object, shape: tuple[int, ...], official: OfficialFile, title: str) -> None:
    if shape != official.shape:
        found, needed = (" × ".join(map(str, sizes)) or "no" for sizes in (shape, official.shape))
        if len(shape) > 4:
            raise refuse(label, f"has {len(shape)} dimensions; {title}'s {official.name} has {needed} values")
        raise refuse(label, f"holds {found} values; {title}'s {official.name} holds {needed}")


def content_length(official: OfficialFile) -> int:
    return header_length(len(official.shape)) + math.prod(official.shape)


def read_idx(path: Path, official: OfficialFile, title: str) -> NDArray[numpy.uint8]:
    """The values of `path`, once they are known to be those of the `official` file of the set `title`."""
    length = content_length(official)
    with opened(path) as file:
        # One byte more than there should be: the end is reached, and with it gzip's own checksum.
        content = file.read(length + 1)
    check_shape(path, parse_header(path, content), official, title)
    check_length(path, len(content), length)
    values = memoryview(content)[header_length(len(official.shape)) :]
    if len(official.shape) == 1:
        check_labels(path, bytes(values))
    check_content(path, content, official, title)
    return numpy.frombuffer(values, numpy.uint8).reshape(official.shape).copy()  # a copy may be written to


def check_idx(path: Path, official: OfficialFile, title: str) -> None:
    """What can be told of a file from its header and its length. Takes a millisecond."""
    with opened(path) as file:
        header = file.read(header_length(len(official.shape)))
    check_shape(path, parse_header(path, header), official, title)
    if last_length(path) != content_length(official):
        read_idx(path, official, title)  # says what is wrong, and lets a file of several gzip parts pass
