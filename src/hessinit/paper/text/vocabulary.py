"""The words of a corpus and how often each occurs, counted in one pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

# Past so many distinct words (some 80 MB) the rarest are forgotten.
MOST_COUNTED = 500_000
CLAUSES_AT_ONCE = 10_000


@dataclass(frozen=True)
class Vocabulary:
    """The most frequent words, in falling order of count; `total` are all running words, also those outside.

    >>> vocabulary = count_words([["the", "cat"], ["the", "dog"], ["the", "cat"]], size=2)
    >>> vocabulary
    Vocabulary(words=('the', 'cat'), counts=(3, 2), total=6)
    >>> vocabulary.keep_probability(0.125)
    array([0.5       , 0.61237244])
    >>> vocabulary.noise(power=1)
    array([0.6, 0.4])
    """

    words: tuple[str, ...]
    counts: tuple[int, ...]
    total: int

    def index(self) -> dict[str, int]:
        return {word: place for place, word in enumerate(self.words)}

    def keep_probability(self, threshold: float) -> NDArray[np.float64]:
        """How likely a word survives subsampling: min(1, √(threshold / frequency)).

        This is the formula of Mikolov et al. (2013), eq. 5. Their program word2vec.c has another one,
        (√(f/t) + 1)·t/f, which keeps a little more. A frequency is the count over all running words.
        """
        frequency = np.asarray(self.counts, dtype=np.float64) / self.total
        return np.minimum(1.0, np.sqrt(threshold / frequency))

    def noise(self, power: float = 0.75) -> NDArray[np.float64]:
        """Probabilities ∝ count^power, to draw negative samples from; 3/4 is Mikolov et al.'s (2013)."""
        weights = np.asarray(self.counts, dtype=np.float64) ** power
        return weights / weights.sum()


def count_words(clauses: Iterable[list[str]], *, size: int, most_counted: int = MOST_COUNTED) -> Vocabulary:
    """The `size` most frequent words; among equals, the first of the alphabet.

    One pass. When there are more than `most_counted` different words, those seen once are forgotten, the next
    time those seen at most twice, and so on (word2vec.c's ReduceVocab), so that counts of rare words may be
    too low; a word that is frequent from early on is not touched.
    """
    table: Counter[str] = Counter()
    most_counted = max(most_counted, 2 * size)
    total = 0
    forgotten_up_to = 0
    stream = iter(clauses)
    while chunk := list(islice(stream, CLAUSES_AT_ONCE)):
        table.update(chain.from_iterable(chunk))
        total += sum(map(len, chunk))
        while len(table) > most_counted:
            forgotten_up_to += 1
            table = Counter({word: count for word, count in table.items() if count > forgotten_up_to})
    kept = sorted(table.items(), key=lambda item: (-item[1], item[0]))[:size]
    return Vocabulary(tuple(word for word, _ in kept), tuple(count for _, count in kept), total)
