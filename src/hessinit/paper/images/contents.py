"""The bytes of a data file, gzipped or not, whole or refused by name."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hessinit.errors import ProblemError
from hessinit.paper.images.official import KNOWN, OfficialFile

WAY_OUT = "Put the official file in its place, or give another --data-dir, or run on --data digits."


def refuse(label: object, fault: str) -> ProblemError:
    """The error for the file `label`; `fault` says the value and the rule, the way out is always the same."""
    return ProblemError(f"{label} {fault}. {WAY_OUT}")


def look_up(path: Path) -> os.stat_result | None:
    """What lies at `path`; None when nothing does. Refuses a place that may not be looked at."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise refuse(path, f"cannot be read ({error.strerror})") from error


@contextmanager
def opened(path: Path) -> Iterator[io.BufferedIOBase]:
    """The decompressed bytes of `path`. What fails while they are read is told of the file."""
    found = look_up(path)
    if found is None:
        raise refuse(path, "is not there")
    if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for ever
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "no plain file"
        raise refuse(path, f"is {kind}; a file is needed")
    if found.st_size == 0:
        raise refuse(path, "is empty")
    try:
        with open(path, "rb") as file:
            yield gzip.GzipFile(fileobj=file) if is_gzip(file) else file
    except EOFError as error:
        raise refuse(path, "is cut off: its gzip data ends before the end mark") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise refuse(path, f"is corrupt: {error}") from error
    except tarfile.TarError as error:
        raise refuse(path, f"is not a whole tar archive: {error}") from error
    except OSError as error:
        raise refuse(path, f"cannot be read ({error.strerror or error})") from error


def is_gzip(file: io.BufferedReader) -> bool:
    """By the first bytes and not by the name: browsers unpack a download and leave it its `.gz`."""
    return file.peek(2)[:2] == b"\x1f\x8b"


def last_length(path: Path) -> int:
    """The length of the content: a gzip file says it in its last four bytes. Reads nothing else."""
    with opened(path) as content:
        if not isinstance(content, gzip.GzipFile):
            return path.stat().st_size
    if path.stat().st_size < 18:  # an empty gzip file has 10 bytes before and 8 after
        return 0
    with open(path, "rb") as file:
        file.seek(-4, os.SEEK_END)
        return int.from_bytes(file.read(4), "little")


def check_length(label: object, found: int, shortest: int, longest: int | None = None) -> None:
    """Refuse content of another length than `shortest`, or up to `longest` where one is given."""
    limit = shortest if longest is None else longest
    if found < shortest:
        raise refuse(label, f"is cut off: {found:,} bytes of {shortest:,}")
    if found > limit:
        raise refuse(label, f"is too long: it has more than {limit:,} bytes")


def check_labels(label: object, labels: bytes) -> None:
    """Refuse labels that are not one of the ten classes."""
    if max(labels) > 9:
        place = next(index for index, value in enumerate(labels) if value > 9)
        raise refuse(label, f"has the label {labels[place]} at position {place}; labels are 0 to 9")


def check_content(label: object, content: bytes | memoryview, official: OfficialFile, title: str) -> None:
    """Refuse a file of the right form that is another one, naming it where it is known."""
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if md5 == official.md5:
        return
    what = KNOWN.get(md5, "of the right form, but not the official one")
    raise refuse(label, f"is {what} (md5 {md5}); {title}'s {official.name} has md5 {official.md5}")
