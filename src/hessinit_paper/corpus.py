"""A Wikipedia text as skip-gram pairs: its clauses, its vocabulary, and a sample of the pairs."""

from __future__ import annotations

import hashlib
import html
import lzma
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby, islice, pairwise, repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hessinit import ProblemError

TITLE = re.compile(r'title="(.*)">$')
BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
HOW_TO_GET = (
    "word2vec needs a Wikipedia text, which is not downloaded: files *wiki*.txt or *wiki*.txt.xz "
    "of plain text, or of the <doc> blocks that WikiExtractor makes of a dump from "
    "dumps.wikimedia.org. Pass their folder as --data-dir (data_dir), or leave word2vec out"
)
Pairs = NDArray[np.int32]


@dataclass(frozen=True)
class Sampling:
    """How pairs are drawn: the defaults of word2vec.c and gensim for window and threshold.

    `window` is the largest distance within a pair; words of a frequency above `threshold` are
    thinned out. `clauses_at_once` bounds the memory; no number depends on it. Clauses longer than
    `longest_clause` words are cut: one in twenty of Wikipedia's is, and the mean is 9.
    """

    window: int = 5
    threshold: float = 1e-3
    clauses_at_once: int = 10_000
    longest_clause: int = 20


SAMPLING = Sampling()


@dataclass(frozen=True)
class Vocabulary:
    """The most frequent words, in falling order of count; `total` counts all running words.

    >>> vocabulary = count_words([["the", "cat"], ["the", "dog"], ["the", "cat"]], size=2)
    >>> vocabulary
    Vocabulary(words=('the', 'cat'), counts=(3, 2), total=6)
    >>> vocabulary.keep_probability(0.125)
    array([0.5       , 0.61237244])
    """

    words: tuple[str, ...]
    counts: tuple[int, ...]
    total: int

    def keep_probability(self, threshold: float) -> NDArray[np.float64]:
        """Return the probability that subsampling keeps a word: min(1, √(threshold / frequency)).

        This is eq. 5 of Mikolov et al. (2013); word2vec.c has (√(f/t) + 1)·t/f, which keeps a
        little more.
        """
        frequency = np.asarray(self.counts, dtype=np.float64) / self.total
        return np.minimum(1.0, np.sqrt(threshold / frequency))

    def noise(self) -> NDArray[np.float64]:
        """Return the probabilities of noise words, ∝ count^0.75 as in Mikolov et al. (2013)."""
        weights = np.asarray(self.counts, dtype=np.float64) ** 0.75
        return weights / weights.sum()


class Corpus(NamedTuple):
    """A text prepared for skip-gram: its vocabulary, and a sample of its pairs of word numbers."""

    vocabulary: Vocabulary
    pairs: Pairs


def find_text(data_dir: str | None) -> tuple[list[Path], str]:
    """Return the files of the text in that folder, and their names with md5, for the record."""
    folder = Path(data_dir or "").expanduser()
    files = sorted(folder.glob("*wiki*.txt")) + sorted(folder.glob("*wiki*.txt.xz"))
    if data_dir is None or not files:
        raise ProblemError(f"data_dir={data_dir!r} holds no text; {HOW_TO_GET}.")
    sums = [hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest() for path in files]
    named = zip(files, sums, strict=True)
    return files, ", ".join(f"{path.name} (md5 {checksum})" for path, checksum in named)


@lru_cache(maxsize=2)
def load_text(data_dir: str | None, *, vocabulary: int, pairs: int) -> Corpus:
    """Read the text in `data_dir` twice, to count its words and to draw pairs: 2.5 MB a second.

    `vocabulary` and `pairs` are upper limits: a small corpus has fewer.
    """
    files, source = find_text(data_dir)

    def clauses() -> Iterator[list[str]]:
        return chain.from_iterable(map(split_clauses, chain.from_iterable(map(read_lines, files))))

    counted = count_words(clauses(), size=vocabulary)
    sample = collect_pairs(clauses(), counted, most=pairs)
    if len(sample) == 0:
        raise ProblemError(
            f"{source} holds {counted.total} words in clauses of two or more, and no pair of "
            "neighbours is left for skip-gram; pass a longer running text."
        )
    return Corpus(counted, sample)


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file without <doc> lines, article titles, tags and entities.

    A line end also ends a sentence: WikiExtractor writes a paragraph to a line.
    """
    title: str | None = None
    opener = lzma.open if path.suffix == ".xz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig") as file:
            for line in chain.from_iterable(map(str.splitlines, file)):
                text = line.strip()
                if text.startswith("<doc id=") and text.endswith(">"):
                    match = TITLE.search(text)
                    title = html.unescape(match[1]) if match else None
                elif text and text != "</doc>":
                    if title is None or html.unescape(text) != title:
                        plain = html.unescape(line)
                        yield TAG.sub(" ", BREAK.sub("; ", plain)) if "<" in plain else plain
                    title = None
    except (OSError, EOFError, ValueError, lzma.LZMAError) as failure:
        raise ProblemError(
            f"{path} cannot be read as UTF-8 text ({failure}); pass another file."
        ) from failure


# A full stop after one of these, or after a single letter (initials, U.S., e.g.), does not end a
# sentence.
ABBREVIATIONS = (
    "adm al approx assn bros ca capt cf cmdr co col corp dept dr ed eds esp est fig figs fr ft gen "
    "gov hon inc jr lt ltd maj messrs mme mr mrs ms mt mts op pl pp pres prof rep rev sen sgt sr "
    "st ste supt univ viz vol vols vs"
)
LETTER = r"[^\W\d_¹²³¼½¾]"
# Python's look-behind needs one width, so there is one for each length of abbreviation.
BY_LENGTH = groupby(sorted(ABBREVIATIONS.split(), key=len), key=len)
NO_ABBREVIATION = "".join(rf"(?<!\b(?:{'|'.join(words)})\.)" for _, words in BY_LENGTH)
# "No. 5" and "Jan. 5" go on; "he said no." ends.
NUMBERED = (
    r"(?!(?:(?<=\bno\.)|(?<=\bnos\.)|(?<=\b(?:jan|feb|aug|sep|oct|nov|dec)\.)|(?<=\bsept\.))\s*\d)"
)
# The full stop first and then the look-behinds: the other way round they are tried at every letter.
FULL_STOP = rf"\.(?=[\"'”)\]]*(?:\s|$))(?<!\b{LETTER}\.){NO_ABBREVIATION}{NUMBERED}"
# Marks between digits (1,000 and 10:30) and dashes inside a word (Paris–Dakar) are no marks.
MARK = re.compile(rf"[;!?…—()\[\]{{}}|]|[,:](?!\d)|\s[-–]+\s|--+|{FULL_STOP}")
# Anything with a digit or an underscore in it (20th, mp3, read_file) is no word of English.
WORD = re.compile(rf"(?<!\w)(?:(?:{LETTER}\.)+{LETTER}(?!\w)|{LETTER}+(?:'{LETTER}+)*(?!\w))")
ADDRESS = re.compile(r"(?:https?://|ftp://|www\.)\S+")


def split_clauses(text: str) -> Iterator[list[str]]:
    """Yield the clauses of a line of text as lower-case words, split at punctuation and brackets.

    Clauses of one word are dropped; those of over 20 are cut into equal parts, so that text without
    punctuation becomes clauses, too.

    >>> list(split_clauses("Dr. Smith's U.S. team won 1,000 games; it didn't lose. Why?"))
    [['dr', "smith's", 'u.s', 'team', 'won', 'games'], ['it', "didn't", 'lose']]
    """
    text = ADDRESS.sub(" ", unicodedata.normalize("NFC", text.lower()).replace("’", "'"))
    for part in MARK.split(text):
        words: list[str] = WORD.findall(part)
        length = len(words)
        if length > 1:
            pieces = math.ceil(length / SAMPLING.longest_clause)
            ends = [length * number // pieces for number in range(pieces + 1)]
            yield from (words[start:end] for start, end in pairwise(ends))


def count_words(clauses: Iterable[list[str]], *, size: int) -> Vocabulary:
    """Return the `size` most frequent words; among equals, the first of the alphabet."""
    counts = Counter(chain.from_iterable(clauses))
    words = sorted(counts, key=lambda word: (-counts[word], word))[:size]
    return Vocabulary(tuple(words), tuple(counts[word] for word in words), counts.total())


def collect_pairs(
    clauses: Iterable[list[str]],
    vocabulary: Vocabulary,
    *,
    window: int = SAMPLING.window,
    threshold: float = SAMPLING.threshold,
    seed: int = 0,
    most: int,
) -> Pairs:
    """Return at most `most` (centre, context) pairs of word numbers, every pair equally likely.

    As in word2vec.c, words outside the vocabulary are removed first, then the subsampled ones, and
    only then the window is taken, so that it reaches over them; each centre draws its own width
    from 1 … `window`. The sample is a reservoir (Efraimidis, Spirakis 2006): every pair draws a
    key, and those with the smallest keys stay.
    """
    streams = np.random.SeedSequence(seed).spawn(3)
    for_keeping, for_widths, for_sample = (np.random.default_rng(stream) for stream in streams)
    number = {word: index for index, word in enumerate(vocabulary.words)}.get
    keep = vocabulary.keep_probability(threshold)
    sampled_keys = np.empty(0)
    sampled_pairs = np.empty((0, 2), dtype=np.int32)
    limit = 1.0
    stream = iter(clauses)
    while chunk := list(islice(stream, SAMPLING.clauses_at_once)):
        numbers = np.fromiter(map(number, chain.from_iterable(chunk), repeat(-1)), dtype=np.int32)
        clause = np.repeat(np.arange(len(chunk)), list(map(len, chunk)))[numbers >= 0]
        numbers = numbers[numbers >= 0]
        stays = for_keeping.random(len(numbers)) < keep[numbers]
        numbers = numbers[stays]
        clause = clause[stays]
        # Not rng.integers: one draw a word, so that pairs do not depend on where chunks are cut.
        widths = 1 + (for_widths.random(len(numbers)) * window).astype(np.int64)
        pairs = pair_up(numbers, clause, widths, window)
        keys = for_sample.random(len(pairs))
        sampled_keys = np.concatenate([sampled_keys, keys[keys < limit]])
        sampled_pairs = np.concatenate([sampled_pairs, pairs[keys < limit]])
        if len(sampled_keys) > 2 * most:
            smallest = np.argsort(sampled_keys, kind="stable")[:most]
            sampled_keys = sampled_keys[smallest]
            sampled_pairs = sampled_pairs[smallest]
            limit = float(sampled_keys[-1])
    return sampled_pairs[np.argsort(sampled_keys, kind="stable")[:most]]


def pair_up(
    numbers: Pairs, clause: NDArray[np.int64], widths: NDArray[np.int64], window: int
) -> Pairs:
    """Return all pairs of words at most `widths[centre]` apart in a clause, ordered by centre.

    >>> pair_up(np.array([7, 8, 9]), np.array([0, 0, 0]), np.array([1, 1, 2]), window=2).tolist()
    [[7, 8], [8, 7], [8, 9], [9, 7], [9, 8]]
    """
    steps = np.concatenate([np.arange(-window, 0), np.arange(1, window + 1)])
    padded = np.pad(clause, window, constant_values=-1)
    positions = np.arange(len(numbers))[:, None] + steps
    inside = (np.abs(steps) <= widths[:, None]) & (padded[positions + window] == clause[:, None])
    centres, columns = np.nonzero(inside)
    return np.stack([numbers[centres], numbers[positions[centres, columns]]], axis=1)
