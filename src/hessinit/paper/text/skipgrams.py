"""(centre, context) pairs of a corpus, as word2vec.c draws them, and a fair sample of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice, repeat

import numpy as np
from numpy.typing import NDArray

from hessinit.paper.text.vocabulary import Vocabulary

CLAUSES_AT_ONCE = 10_000
Pairs = NDArray[np.int32]


def collect_pairs(
    clauses: Iterable[list[str]],
    vocabulary: Vocabulary,
    *,
    window: int,
    threshold: float,
    seed: int,
    most: int,
) -> Pairs:
    """At most `most` (centre, context) pairs of word numbers, shape (n, 2), every pair equally likely.

    Words outside the vocabulary go first, then the subsampled ones, and only then the window is taken, so
    that it reaches over them; each centre draws its own width from 1 … `window`. So does word2vec.c.

    The sample is a reservoir: every pair of the stream draws a number, and those with the smallest stay. They
    come in the order of these numbers, so that the first k are a fair sample too. One pass; memory for
    2 · `most` pairs and one chunk; the same seed gives the same pairs.
    """
    for_keeping, for_widths, for_sample = (
        np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(3)
    )
    keep = vocabulary.keep_probability(threshold)
    reservoir = Reservoir(most, for_sample)
    for numbers, clause in _number_words(clauses, vocabulary):
        stays = for_keeping.random(len(numbers)) < keep[numbers]
        numbers, clause = numbers[stays], clause[stays]
        # Not rng.integers: one draw a word, so that the pairs do not depend on where the chunks are cut.
        widths = 1 + (for_widths.random(len(numbers)) * window).astype(np.int64)
        reservoir.add(pair_up(numbers, clause, widths, window))
    return reservoir.take()


def pair_up(
    numbers: NDArray[np.int32], clause: NDArray[np.int64], widths: NDArray[np.int64], window: int
) -> Pairs:
    """All pairs of words at most `widths[centre]` apart in the same clause, in order of centre, then context.

    >>> pair_up(np.array([7, 8, 9]), np.array([0, 0, 0]), np.array([1, 1, 2]), window=2).tolist()
    [[7, 8], [8, 7], [8, 9], [9, 7], [9, 8]]
    """
    steps = np.concatenate([np.arange(-window, 0), np.arange(1, window + 1)])
    padded = np.pad(clause, window, constant_values=-1)
    places = np.arange(len(numbers))[:, None] + steps
    inside = (np.abs(steps) <= widths[:, None]) & (padded[places + window] == clause[:, None])
    centres, columns = np.nonzero(inside)
    return np.stack([numbers[centres], numbers[places[centres, columns]]], axis=1)


class Reservoir:
    """A uniform sample without replacement of a stream's rows, however many (Efraimidis, Spirakis 2006)."""

    def __init__(self, most: int, generator: np.random.Generator) -> None:
        self.most = most
        self.generator = generator
        self._limit = 1.0
        self._keys: list[NDArray[np.float64]] = []
        self._rows: list[Pairs] = []
        self._held = 0

    def add(self, rows: Pairs) -> None:
        keys = self.generator.random(len(rows))
        near = np.flatnonzero(keys < self._limit)
        self._keys.append(keys[near])
        self._rows.append(rows[near].astype(np.int32))
        self._held += len(near)
        if self._held > 2 * self.most:
            self._shrink()

    def take(self) -> Pairs:
        self._shrink()
        return self._rows[0]

    def _shrink(self) -> None:
        keys = np.concatenate([*self._keys, np.empty(0)])
        rows = np.concatenate([*self._rows, np.empty((0, 2), dtype=np.int32)])
        first = np.argsort(keys, kind="stable")[: self.most]
        self._keys, self._rows, self._held = [keys[first]], [rows[first]], len(first)
        if len(first) == self.most:
            self._limit = float(keys[first[-1]])


def _number_words(
    clauses: Iterable[list[str]], vocabulary: Vocabulary
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int64]]]:
    """Chunks of word numbers, and the clause each stands in; words outside the vocabulary are gone."""
    number = vocabulary.index().get
    stream = iter(clauses)
    while chunk := list(islice(stream, CLAUSES_AT_ONCE)):
        lengths = np.fromiter(map(len, chunk), dtype=np.int64, count=len(chunk))
        words = chain.from_iterable(chunk)
        numbers = np.fromiter(map(number, words, repeat(-1)), dtype=np.int32, count=int(lengths.sum()))
        inside = numbers >= 0
        yield numbers[inside], np.repeat(np.arange(len(chunk)), lengths)[inside]
