"""A text made ready once and kept in a file, for the processes that need it next."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import sys
from pathlib import Path

import numpy as np

from hessinit.errors import ProblemError
from hessinit.paper.text.folder import find_corpus
from hessinit.paper.text.load import THRESHOLD, Text, check_arguments, load_text
from hessinit.paper.text.vocabulary import Vocabulary

# Raise it when a change to this package changes the clauses, counts or pairs of a text.
FORMAT = 1


def cached_text(
    folder: str | os.PathLike[str], name: str, data_dir: str | os.PathLike[str] | None = None,
    *, vocabulary: int = 2000, pairs: int = 500_000, window: int = 5, threshold: float = THRESHOLD,
    seed: int = 0,
) -> Text:  # fmt: skip
    """What `load_text` returns, read from `folder` where an earlier call with these arguments has kept it.

    The corpus is known by its files' names, sizes and times. A kept file that is damaged is made again.
    """
    check_arguments(name, vocabulary, pairs, window, threshold, seed)
    arguments = [vocabulary, pairs, window, float(threshold), seed]
    path = Path(folder) / f"{name}-{_digest(name, data_dir, arguments)}.npz"
    kept = _read(path, name)
    if kept is not None:
        return kept
    text = load_text(
        name, data_dir, vocabulary=vocabulary, pairs=pairs, window=window, threshold=threshold, seed=seed
    )
    _write(path, text)
    return text


def _digest(name: str, data_dir: str | os.PathLike[str] | None, arguments: list[int | float]) -> str:
    corpus: list[object] = []
    if name == "wikipedia":
        for file in find_corpus(data_dir):
            found = file.path.stat()
            corpus.append([file.name, found.st_size, found.st_mtime_ns])
    # Python's tables of letters and NumPy's random streams may change between versions.
    known_by = [FORMAT, name, arguments, corpus, sys.version, np.__version__]
    return hashlib.sha256(json.dumps(known_by).encode()).hexdigest()[:16]


def _write(path: Path, text: Text) -> None:
    """Whole or not at all: another process sees the finished file or none."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as stream:
            np.savez_compressed(
                stream,
                pairs=text.pairs,
                words=np.array(text.vocabulary.words),
                counts=np.array(text.vocabulary.counts),
                sizes=np.array([text.vocabulary.total, text.clauses, text.words]),
                source=np.array(text.source),
            )
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError as failure:
        raise ProblemError(
            f"folder={str(path.parent)!r} cannot be written: {failure.strerror or failure}. Pass another."
        ) from failure
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _read(path: Path, name: str) -> Text | None:
    try:
        # Opened here: np.load leaves a damaged file open.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as kept:
            total, clauses, words = map(int, kept["sizes"])
            vocabulary = Vocabulary(tuple(kept["words"].tolist()), tuple(kept["counts"].tolist()), total)
            return Text(name, vocabulary, kept["pairs"], clauses, words, str(kept["source"]))
    except Exception:  # a damaged file may raise nearly anything, and the answer is always the same
        return None
