"""A text for word2vec: its files, its clauses, its vocabulary, and (centre, context) pairs drawn from it."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import html
import lzma
import platform
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hessinit.errors import ProblemError
from hessinit.results.result import replacing

WINDOW, THRESHOLD = 5, 1e-3  # more frequent words are thinned; both as in word2vec.c and gensim
CLAUSES_AT_ONCE = 10_000
MOST_COUNTED = 500_000  # with more distinct words (some 80 MB) the rarest are dropped
LONGEST_LINE = 1 << 20  # a text may be one line of gigabytes; it is read in pieces
OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".bz2": bz2.open, ".gz": gzip.open}
CORPUS_NAME = re.compile(r"(?!readme|licen[cs]e|\.).*\.txt(\.(xz|bz2|gz))?", re.IGNORECASE)
TITLE = re.compile(r'title="(.*)">$')
BREAK, TAG = re.compile(r"<br\s*/?>", re.IGNORECASE), re.compile(r"</?[a-zA-Z][^<>]*>")
HOW_TO_GET = (
    "word2vec needs a Wikipedia text, which is not downloaded: files *.txt, also packed (.xz, .bz2, .gz), of "
    "plain text or of the <doc> blocks that WikiExtractor makes of a dump from dumps.wikimedia.org. Pass "
    "their folder as --data-dir (data_dir), or leave word2vec out"
)
Pairs = NDArray[np.int32]


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
        """How likely a word survives subsampling: min(1, √(threshold / frequency)).

        This is eq. 5 of Mikolov et al. (2013); word2vec.c has (√(f/t) + 1)·t/f, which keeps a little more.
        """
        frequency = np.asarray(self.counts, dtype=np.float64) / self.total
        return np.minimum(1.0, np.sqrt(threshold / frequency))

    def noise(self) -> NDArray[np.float64]:
        """Probabilities ∝ count^0.75, to draw negative samples from, as Mikolov et al. (2013)."""
        weights = np.asarray(self.counts, dtype=np.float64) ** 0.75
        return weights / weights.sum()


@dataclass(frozen=True, eq=False)
class Corpus:
    """A corpus made ready for skip-gram: its vocabulary, and pairs of word numbers from all over it."""

    vocabulary: Vocabulary
    pairs: Pairs
    source: str


@lru_cache(maxsize=2)
def load_text(data_dir: str | None, *, vocabulary: int, pairs: int, cache: str | None = None) -> Corpus:
    """Read the text in `data_dir` twice: once to count its words, once to draw pairs, 2.5 MB a second.

    Memory does not grow with the corpus. `vocabulary` and `pairs` are upper limits: a small corpus has fewer.
    The result is kept in the folder `cache`, for the processes that need it next.
    """
    files = find_corpus(data_dir)
    source = ", ".join(f"{name} (md5 {_md5(path)})" for name, path in files.items())
    kept = None
    if cache is not None:
        # Python's tables of letters and NumPy's random streams may change between versions.
        known_by = repr((source, vocabulary, pairs, platform.python_version(), np.__version__))
        kept = Path(cache) / f"wikipedia-{hashlib.sha256(known_by.encode()).hexdigest()[:16]}.npz"
        # A damaged file may raise nearly anything; the text is then read again. np.load leaves it open.
        with contextlib.suppress(Exception), kept.open("rb") as file, np.load(file) as data:
            *counts, total = data["counts"].tolist()
            known = Vocabulary(tuple(data["words"].tolist()), tuple(counts), total)
            return Corpus(known, data["pairs"], source)

    def clauses() -> Iterator[list[str]]:
        return chain.from_iterable(map(split_clauses, chain.from_iterable(map(read_lines, files.values()))))

    counted = count_words(clauses(), size=vocabulary)
    drawn = collect_pairs(clauses(), counted, most=pairs)
    if len(drawn) == 0:
        raise ProblemError(
            f"{source} holds {counted.total} words in clauses of two or more, and no pair of neighbours is "
            "left for skip-gram; pass a longer running text."
        )
    if kept is not None:
        with contextlib.suppress(OSError):  # then it is counted again
            kept.parent.mkdir(parents=True, exist_ok=True)
            with replacing(kept) as temporary, open(temporary, "wb") as stream:
                counts = np.array([*counted.counts, counted.total])
                np.savez_compressed(stream, pairs=drawn, words=np.array(counted.words), counts=counts)
    return Corpus(counted, drawn, source)


def find_corpus(data_dir: str | None) -> dict[str, Path]:
    """The files of the corpus in `data_dir`, by name; `data_dir` may be the file itself.

    Files named for Wikipedia win over other texts; of `a.txt` and `a.txt.xz`, the plain one is taken.
    """
    if data_dir is None:
        raise ProblemError(f"{HOW_TO_GET}.")
    folder = Path(data_dir).expanduser()
    if folder.is_file():
        return {folder.name: folder}
    places = [folder, *(place for place in [folder / "wikipedia"] if place.is_dir())]
    try:
        paths = [path for place in places for path in sorted(place.iterdir()) if path.is_file()]
    except OSError as failure:
        raise ProblemError(f"data_dir={str(folder)!r} cannot be read ({failure.strerror}).") from failure
    named = {path.relative_to(folder).as_posix(): path for path in paths if CORPUS_NAME.fullmatch(path.name)}
    found = {name: path for name, path in named.items() if "wiki" in path.name.lower()} or named
    if not found:
        raise ProblemError(f"data_dir={str(folder)!r} holds no text; {HOW_TO_GET}.")
    return {name: path for name, path in found.items() if name.removesuffix(path.suffix) not in found}


def _md5(path: Path) -> str:
    found = hashlib.md5(usedforsecurity=False)
    try:
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                found.update(block)
    except OSError as failure:
        raise ProblemError(f"{path} cannot be read ({failure.strerror}); pass a file that can.") from failure
    return found.hexdigest()


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a text file without <doc> lines, article titles, tags and entities.

    A line end also ends a sentence: WikiExtractor writes a paragraph to a line.
    """
    title: str | None = None
    for line in _read_raw_lines(path):
        text = line.strip()
        if text.startswith("<doc id=") and text.endswith(">"):
            found = TITLE.search(text)
            title = html.unescape(found[1]) if found else None
        elif text and text != "</doc>":
            if title is None or html.unescape(text) != title:
                plain = html.unescape(line)
                yield TAG.sub(" ", BREAK.sub("; ", plain)) if "<" in plain else plain
            title = None


def _read_raw_lines(path: Path) -> Iterator[str]:
    try:
        with OPENERS.get(path.suffix.lower(), open)(path, "rt", encoding="utf-8-sig") as file:
            line = file.readline(LONGEST_LINE)
            if line.lstrip().lower().startswith(("<mediawiki", "<?xml", "<!doctype", "<html")):
                raise ProblemError(f"{path} is XML or HTML, such as a raw dump; {HOW_TO_GET}.")
            while line:
                yield from line.splitlines()
                line = file.readline(LONGEST_LINE)
    except UnicodeDecodeError as failure:
        raise ProblemError(f"{path} is not UTF-8 text ({failure}); convert it, or pass another.") from failure
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as failure:
        raise ProblemError(f"{path} cannot be read ({failure}); copy or download it again.") from failure


# A full stop after one of these, or after a single letter (initials, U.S., e.g.), does not end a sentence.
ABBREVIATIONS = (
    "adm al approx assn bros ca capt cf cmdr co col corp dept dr ed eds esp est fig figs fr ft gen gov hon "
    "inc jr lt ltd maj messrs mme mr mrs ms mt mts op pl pp pres prof rep rev sen sgt sr st ste supt univ "
    "viz vol vols vs"
)
LETTER = r"[^\W\d_¹²³¼½¾]"
# Python's look-behind needs one width, so there is one for each length of abbreviation.
NO_ABBREVIATION = "".join(
    rf"(?<!\b(?:{'|'.join(words)})\.)"
    for _, words in groupby(sorted(ABBREVIATIONS.split(), key=len), key=len)
)
# "No. 5" and "Jan. 5" go on; "he said no." ends.
NUMBERED = r"(?!(?:(?<=\bno\.)|(?<=\bnos\.)|(?<=\b(?:jan|feb|aug|sep|oct|nov|dec)\.)|(?<=\bsept\.))\s*\d)"
# The full stop first and then the look-behinds: the other way round they are tried at every letter.
FULL_STOP = rf"\.(?=[\"'”)\]]*(?:\s|$))(?<!\b{LETTER}\.){NO_ABBREVIATION}{NUMBERED}"
# Marks between digits (1,000 and 10:30) and dashes inside a word (Paris–Dakar) are no marks.
MARK = re.compile(rf"[;!?…—()\[\]{{}}|]|[,:](?!\d)|\s[-–]+\s|--+|{FULL_STOP}")
# Anything with a digit or an underscore in it (20th, mp3, read_file) is no word of English.
WORD = re.compile(rf"(?<!\w)(?:(?:{LETTER}\.)+{LETTER}(?!\w)|{LETTER}+(?:'{LETTER}+)*(?!\w))")
ADDRESS = re.compile(r"(?:https?://|ftp://|www\.)\S+")
MOST_WORDS = 20  # longer clauses are cut into equal parts


def split_clauses(text: str) -> Iterator[list[str]]:
    """The clauses of a line of text, as lower-case words: split at punctuation, dashes and brackets.

    Those of one word are dropped; those of over 20 are cut into equal parts, so that text without punctuation
    becomes clauses too. (One in twenty of Wikipedia's is longer; the mean is 9.)

    >>> list(split_clauses("Dr. Smith's U.S. team won 1,000 games; it didn't lose. Why? No one knows."))
    [['dr', "smith's", 'u.s', 'team', 'won', 'games'], ['it', "didn't", 'lose'], ['no', 'one', 'knows']]
    """
    text = ADDRESS.sub(" ", unicodedata.normalize("NFC", text.lower()).replace("’", "'"))
    for part in MARK.split(text):
        words: list[str] = WORD.findall(part)
        many = len(words)
        parts = -(-many // MOST_WORDS)
        if many > 1:
            yield from (words[many * n // parts : many * (n + 1) // parts] for n in range(parts))


def count_words(clauses: Iterable[list[str]], *, size: int, most_counted: int = MOST_COUNTED) -> Vocabulary:
    """The `size` most frequent words in one pass; among equals, the first of the alphabet.

    With more than `most_counted` different words, those seen once are dropped, the next time those seen at
    most twice, and so on (word2vec.c's ReduceVocab), so that counts of rare words may be too low.
    """
    table: Counter[str] = Counter()
    most_counted = max(most_counted, 2 * size)
    total = dropped_up_to = 0
    stream = iter(clauses)
    while chunk := list(islice(stream, CLAUSES_AT_ONCE)):
        table.update(chain.from_iterable(chunk))
        total += sum(map(len, chunk))
        while len(table) > most_counted:
            dropped_up_to += 1
            table = Counter({word: count for word, count in table.items() if count > dropped_up_to})
    kept = sorted(table.items(), key=lambda item: (-item[1], item[0]))[:size]
    return Vocabulary(tuple(word for word, _ in kept), tuple(count for _, count in kept), total)


def collect_pairs(
    clauses: Iterable[list[str]], vocabulary: Vocabulary, *, window: int = WINDOW,
    threshold: float = THRESHOLD, seed: int = 0, most: int,
) -> Pairs:  # fmt: skip
    """At most `most` (centre, context) pairs of word numbers, shape (n, 2), every pair equally likely.

    As in word2vec.c, words outside the vocabulary go first, then the subsampled ones, and only then the
    window is taken, so that it reaches over them; each centre draws its own width from 1 … `window`.

    The sample is a reservoir (Efraimidis, Spirakis 2006): every pair of the stream draws a number, and those
    with the smallest stay, in the order of these numbers, so that the first k are a fair sample too. One
    pass; memory for 2 · `most` pairs and one chunk; the same seed gives the same pairs.
    """
    streams = np.random.SeedSequence(seed).spawn(3)
    for_keeping, for_widths, for_sample = (np.random.default_rng(stream) for stream in streams)
    number = {word: place for place, word in enumerate(vocabulary.words)}.get
    keep = vocabulary.keep_probability(threshold)
    kept_keys, kept_pairs, limit = np.empty(0), np.empty((0, 2), dtype=np.int32), 1.0
    stream = iter(clauses)
    while chunk := list(islice(stream, CLAUSES_AT_ONCE)):
        words = map(number, chain.from_iterable(chunk), repeat(-1))
        numbers = np.fromiter(words, dtype=np.int32)
        clause = np.repeat(np.arange(len(chunk)), list(map(len, chunk)))[numbers >= 0]
        numbers = numbers[numbers >= 0]
        stays = for_keeping.random(len(numbers)) < keep[numbers]
        numbers, clause = numbers[stays], clause[stays]
        # Not rng.integers: one draw a word, so that the pairs do not depend on where the chunks are cut.
        widths = 1 + (for_widths.random(len(numbers)) * window).astype(np.int64)
        pairs = pair_up(numbers, clause, widths, window)
        keys = for_sample.random(len(pairs))
        kept_keys = np.concatenate([kept_keys, keys[keys < limit]])
        kept_pairs = np.concatenate([kept_pairs, pairs[keys < limit]])
        if len(kept_keys) > 2 * most:
            first = np.argsort(kept_keys, kind="stable")[:most]
            kept_keys, kept_pairs = kept_keys[first], kept_pairs[first]
            limit = float(kept_keys[-1])
    return kept_pairs[np.argsort(kept_keys, kind="stable")[:most]]


def pair_up(numbers: Pairs, clause: NDArray[np.int64], widths: NDArray[np.int64], window: int) -> Pairs:
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
