"""Write a file whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace `path` by `text` in one step: a reader, or a crash, finds the old file or the new one."""
    # "x" and not tempfile: the file gets the usual permissions, not those of a private one.
    with replacing(path) as temporary, open(temporary, "x", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A name to write to, which takes the place of `path` in the end; where that fails, `path` stays."""
    target = Path(os.path.realpath(path))  # a link stays a link, and its target is replaced
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"cannot write {path}: the folder {target.parent} does not exist. Create it first."
        )
    if target.exists() and not target.is_file():
        raise ValueError(f"cannot write {path}: it is there and is not a file. Give the name of a file.")
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
