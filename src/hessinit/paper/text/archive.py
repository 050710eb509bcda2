"""The text of one file, plain or compressed, in blocks: told by its content, not by its name."""

from __future__ import annotations

import codecs
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from hessinit.errors import ProblemError

BLOCK = 1 << 18
PACKED = {
    "xz": re.compile(rb"\xfd7zXZ\x00"),
    "bz2": re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)"),
    "gz": re.compile(rb"\x1f\x8b"),
}
FOREIGN = {
    b"PK\x03\x04": "a zip archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"\x28\xb5\x2f\xfd": "a zstandard archive",
    b"Rar!": "a rar archive",
    b"%PDF": "a PDF document",
}
TEXT_RULE = "a corpus is UTF-8 text, plain or packed as xz, bz2 or gz"


def read_blocks(path: Path) -> Iterator[str]:
    """The decompressed text of `path`, a block at a time: a fixed amount of memory, whatever its size."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    for block in _read_bytes(path):
        _refuse_binary(path, block, offset)
        fresh = block.removeprefix(codecs.BOM_UTF8) if offset == 0 else block
        yield _decode(path, decoder, fresh, offset + len(block) - len(fresh))
        offset += len(block)
    if offset == 0:
        raise ProblemError(f"{path} is empty; {TEXT_RULE}. Make or copy the file again.")
    _decode(path, decoder, b"", offset, final=True)


def _read_bytes(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as raw:
            head = raw.read(16)
            raw.seek(0)
            packing = next((name for name, magic in PACKED.items() if magic.match(head)), None)
            stream, corrupt = _unpack(path, raw, packing)
            with stream:
                try:
                    while block := stream.read(BLOCK):
                        yield block
                except EOFError as failure:
                    raise ProblemError(
                        f"{path} is cut off: its {packing} data have no end. Copy or download it again."
                    ) from failure
                except corrupt as failure:
                    raise ProblemError(
                        f"{path} holds corrupt {packing} data: {failure}. Copy or download it again."
                    ) from failure
    except OSError as failure:
        raise ProblemError(
            f"{path} cannot be read: {failure.strerror or failure}. Pass a file that can."
        ) from failure


def _unpack(
    path: Path, raw: io.BufferedReader, packing: str | None
) -> tuple[io.BufferedReader | io.BufferedIOBase, tuple[type[Exception], ...]]:
    """A stream of the unpacked bytes, and what it raises when they are corrupt."""
    # Some builds of Python go without bz2 or lzma.
    try:
        if packing == "xz":
            import lzma

            return lzma.LZMAFile(raw), (lzma.LZMAError,)
        if packing == "bz2":
            import bz2

            return bz2.BZ2File(raw), (OSError, ValueError)
    except ImportError as failure:
        raise ProblemError(
            f"{path} is packed as {packing}, and this Python was built without it; unpack the file first."
        ) from failure
    if packing == "gz":
        return gzip.GzipFile(fileobj=raw), (gzip.BadGzipFile, zlib.error)
    return raw, ()


def _refuse_binary(path: Path, block: bytes, offset: int) -> None:
    if offset == 0:
        if block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise ProblemError(
                f"{path} is UTF-16; {TEXT_RULE}. Convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW.txt"
            )
        for magic, kind in FOREIGN.items():
            if block.startswith(magic):
                raise ProblemError(f"{path} is {kind}; {TEXT_RULE}. Unpack or convert it first.")
    if (place := block.find(b"\0")) >= 0:
        raise ProblemError(
            f"{path} is binary: byte {offset + place} of its content is zero; {TEXT_RULE}. Pass a text file."
        )


def _decode(
    path: Path, decoder: codecs.IncrementalDecoder, block: bytes, offset: int, final: bool = False
) -> str:
    waiting = len(decoder.getstate()[0])
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as failure:
        bad = failure.object[failure.start : failure.end]
        raise ProblemError(
            f"{path} is not UTF-8: byte {offset - waiting + failure.start} of its content is {bad!r}; "
            f"{TEXT_RULE}. Convert it (iconv -f LATIN1 -t UTF-8 FILE > NEW.txt), or copy it again if cut off."
        ) from failure
