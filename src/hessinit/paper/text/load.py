"""The one entry to text: counted, sampled and described."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from hessinit.errors import ProblemError, choose
from hessinit.paper.text.corpus import read_lines
from hessinit.paper.text.docstrings import find_sources, read_docstrings
from hessinit.paper.text.folder import describe_files, find_corpus
from hessinit.paper.text.sentences import read_clauses
from hessinit.paper.text.skipgrams import collect_pairs
from hessinit.paper.text.vocabulary import Vocabulary, count_words

TEXTS = ["wikipedia", "docstrings"]
# Frequencies above this are thinned: the default of word2vec.c and gensim.
THRESHOLD = 1e-3
FILES_CHECKED = 16


@dataclass(frozen=True, eq=False)
class Text:
    """A corpus made ready for skip-gram: its vocabulary, and pairs of word numbers from all over it."""

    name: str
    vocabulary: Vocabulary
    pairs: NDArray[np.int32]
    clauses: int
    words: int
    source: str


def load_text(
    name: str, data_dir: str | os.PathLike[str] | None = None, *, vocabulary: int = 2000,
    pairs: int = 500_000, window: int = 5, threshold: float = THRESHOLD, seed: int = 0,
) -> Text:  # fmt: skip
    """Read `name` twice: once to count its words, once to draw pairs. Memory does not grow with the corpus.

    "wikipedia" is read from `data_dir` (its folder, or the file itself), some 2.5 MB of text a second;
    "docstrings" needs no data. `vocabulary` and `pairs` are upper limits: a small corpus has fewer.
    """
    check_arguments(name, vocabulary, pairs, window, threshold, seed)
    read, source = _open(name, data_dir)
    tally = Tally()
    counted = count_words(tally.watch(read()), size=vocabulary)
    if len(counted.words) < 2:
        raise ProblemError(
            f"{source} holds {tally.clauses} clauses of two words or more and {len(counted.words)} different "
            "words; skip-gram needs at least two words. Pass a corpus of running text."
        )
    drawn = collect_pairs(read(), counted, window=window, threshold=threshold, seed=seed, most=pairs)
    if len(drawn) == 0:
        raise ProblemError(
            f"threshold={threshold} leaves no two words of {source} side by side; raise it or pass more text."
        )
    return Text(name, counted, drawn, tally.clauses, counted.total, source)


def check_text(name: str, data_dir: str | os.PathLike[str] | None = None) -> None:
    """Refuse at once what `load_text` would refuse, as far as the first block of a file tells."""
    choose("name", name, TEXTS)
    if name == "docstrings":
        find_sources()
        return
    for file in find_corpus(data_dir)[:FILES_CHECKED]:
        for _ in islice(read_lines(file.path), 1):
            pass


def check_arguments(
    name: str, vocabulary: object, pairs: object, window: object, threshold: object, seed: object
) -> None:
    """Refuse arguments of `load_text` that cannot be meant."""
    choose("name", name, TEXTS)
    for argument, value, least in (
        ("vocabulary", vocabulary, 2), ("pairs", pairs, 1), ("window", window, 1), ("seed", seed, 0),
    ):  # fmt: skip
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ProblemError(f"{argument}={value!r} must be a whole number of at least {least}.")
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not threshold > 0:
        raise ProblemError(
            f"threshold={threshold!r} must be a positive frequency, such as {THRESHOLD}; inf thins nothing."
        )


class Tally:
    """Counts the clauses that pass."""

    def __init__(self) -> None:
        self.clauses = 0

    def watch(self, clauses: Iterator[list[str]]) -> Iterator[list[str]]:
        for clause in clauses:
            self.clauses += 1
            yield clause


def _open(
    name: str, data_dir: str | os.PathLike[str] | None
) -> tuple[Callable[[], Iterator[list[str]]], str]:
    """How to begin variant the clauses, as often as needed, and what the record says of them."""
    if name == "docstrings":
        found = read_docstrings()
        return lambda: read_clauses(found.paragraphs), found.source
    files = find_corpus(data_dir)
    check_text(name, data_dir)
    return lambda: read_clauses(chain.from_iterable(read_lines(file.path) for file in files)), describe_files(
        files
    )
