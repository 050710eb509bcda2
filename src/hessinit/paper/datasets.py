"""The published data: training images, the embedded digits, and a Wikipedia text as skip-gram pairs."""

from __future__ import annotations

import gzip
import hashlib
import html
import lzma
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby, islice, repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hessinit.digits import load_digits
from hessinit.errors import ProblemError, choose

IMAGES = "train-images-idx3-ubyte"
LABELS = "train-labels-idx1-ubyte"


class PublishedSet(NamedTuple):
    """Training files by name: md5 unpacked, bytes of header, and shape of the uint8 values that follow it.

    `downloads` are packed files below `url` by md5.
    """

    title: str
    files: Mapping[str, tuple[str, int, tuple[int, ...]]]
    url: str
    downloads: Mapping[str, str]


def _idx_set(title: str, url: str, *md5: str) -> PublishedSet:
    files = {IMAGES: (md5[0], 16, (60_000, 28, 28)), LABELS: (md5[1], 8, (60_000,))}
    return PublishedSet(title, files, url, {f"{IMAGES}.gz": md5[2], f"{LABELS}.gz": md5[3]})


CIFAR_SUMS = [
    "5dd7e06a14cb22eb9f671a540d1b7c25",
    "5ea93a67294ea407fff1d09f752e9692",
    "942cd6a4bcdd0dd3c604fbe906cb4421",
    "ae636b3ba5c66a11e91e8cb52e771fcb",
    "53f37980c15c3d472c316c40844f3f0d",
]
PUBLISHED = {
    "mnist": _idx_set(
        "MNIST",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "6bbc9ace898e44ae57da46a324031adb",
        "a25bea736e30d166cdddb491f175f624",
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
    ),
    "fashion-mnist": _idx_set(
        "Fashion-MNIST",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "9018921c3c673c538a1fc5bad174d6f9",
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
    ),
    "cifar-10": PublishedSet(
        "CIFAR-10",
        # Every row is a label, then the red, the green and the blue plane.
        {
            f"data_batch_{at}.bin": (md5, 0, (10_000, 3073))
            for at, md5 in enumerate(CIFAR_SUMS, start=1)
        },
        "https://www.cs.toronto.edu/~kriz/",
        {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
    ),
}


class ImageSet:
    """A training set as tensors; pixels stay uint8, so that every worker can hold CIFAR-10 (0.15 GB).

    `top` is the value of a white pixel. `source` names the files with their md5, for the record.
    """

    def __init__(self, pixels: Tensor, labels: Tensor, top: int, source: str) -> None:
        self.pixels = pixels
        self.labels = labels
        self.top = top
        self.source = source
        self.examples = len(pixels)
        self.shape: tuple[int, int, int] = (pixels.shape[1], pixels.shape[2], pixels.shape[3])

    def batch(self, index: Tensor, flat: bool) -> tuple[Tensor, Tensor]:
        """New float32 pixels in [0, 1] and int64 labels of those images; `flat` gives one row for each."""
        pixels = self.pixels[index].float().div_(self.top)
        return (pixels.flatten(1) if flat else pixels), self.labels[index]

    def draw(self, size: int, generator: torch.Generator) -> Tensor:
        """The index of `size` different images."""
        return torch.randperm(self.examples, generator=generator)[:size]

    def epoch(self, size: int, generator: torch.Generator) -> Iterator[Tensor]:
        """The indices of every mini-batch of an epoch, in a new order; an incomplete last one is left out."""
        order = torch.randperm(self.examples, generator=generator)
        for start in range(0, self.examples - size + 1, size):
            yield order[start : start + size]


@lru_cache(maxsize=2)
def load_images(name: str, data_dir: str | None = None) -> ImageSet:
    """Return the training images of `name`, from `data_dir` or, without one, downloaded once into the cache.

    Every file must have the published md5; anything else is refused. The last two sets stay in
    memory.

    >>> images = load_images("digits")
    >>> images.examples, images.shape, images.batch(torch.arange(32), flat=True)[0].shape
    (1797, (1, 8, 8), torch.Size([32, 64]))
    """
    choose("data", name, [*PUBLISHED, "digits"])
    if name == "digits":
        images, labels = load_digits()
        pixels = (images * 16).to(torch.uint8)
        content = pixels.numpy().tobytes() + labels.to(torch.uint8).numpy().tobytes()
        return ImageSet(pixels, labels, 16, f"embedded digits md5 {_md5(content)}")
    published = PUBLISHED[name]
    folder = _download(name, published) if data_dir is None else Path(data_dir).expanduser()
    values = [_read_file(folder, published, file) for file in published.files]
    if name == "cifar-10":
        rows = np.concatenate(values)
        values = [rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]]
    else:
        values[0] = values[0][:, None]
    source = "; ".join(f"{file} md5 {md5}" for file, (md5, _, _) in published.files.items())
    return ImageSet(torch.tensor(values[0]), torch.tensor(values[1]).long(), 255, source)


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _read_file(folder: Path, published: PublishedSet, file: str) -> NDArray[np.uint8]:
    """The values of the file of that name, gzipped or not, in the folder or two below, with the right md5."""
    md5, header, shape = published.files[file]
    found = [
        path for place in ("", "*/", "*/*/") for path in sorted(folder.glob(f"{place}{file}*"))
    ]
    for path in found:
        content = path.read_bytes()
        try:
            content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        except (OSError, EOFError, zlib.error):
            continue
        if _md5(content) == md5:
            return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
    wrong = f" ({', '.join(map(str, found))}: another content)" if found else ""
    raise ProblemError(
        f"data_dir={str(folder)!r} does not hold {published.title}'s {file}, gzipped or not, with md5 {md5}"
        f"{wrong}. Put the published file there ({published.url}{next(iter(published.downloads))}; unpack a "
        ".tar.gz), leave --data-dir out to download it, or run on --data digits."
    )


def _download(name: str, published: PublishedSet) -> Path:
    """The cache folder with all files of the set, each with its checksum."""
    try:
        import pooch
        import requests
    except ImportError as error:
        raise ProblemError(
            f"{published.title} is downloaded with pooch, which is not installed. Run pip install "
            "'hessinit[paper]', pass --data-dir FOLDER, or run on the embedded --data digits."
        ) from error
    folder = Path(pooch.os_cache("hessinit")) / name
    # The packed file itself is asked for, as the checksum has it.
    downloader = pooch.HTTPDownloader(timeout=(10, 30), headers={"Accept-Encoding": "identity"})
    for file, md5 in published.downloads.items():
        unpack = pooch.Untar() if file.endswith(".tar.gz") else None
        try:
            pooch.retrieve(published.url + file, f"md5:{md5}", file, folder, unpack, downloader)
        except (
            requests.RequestException,
            ValueError,
            OSError,
        ) as error:  # ValueError: another checksum
            raise ProblemError(
                f"{published.url}{file} could not be downloaded to {folder} ({error}). Try again with a "
                "connection, pass --data-dir FOLDER, or run on the embedded --data digits."
            ) from error
    return folder


# more frequent words are thinned; both as in word2vec.c and gensim
WINDOW = 5
THRESHOLD = 1e-3
CLAUSES_AT_ONCE = 10_000
TITLE = re.compile(r'title="(.*)">$')
BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
HOW_TO_GET = (
    "word2vec needs a Wikipedia text, which is not downloaded: files *wiki*.txt or *wiki*.txt.xz of plain "
    "text, or of the <doc> blocks that WikiExtractor makes of a dump from dumps.wikimedia.org. Pass their "
    "folder as --data-dir (data_dir), or leave word2vec out"
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

        This is eq. 5 of Mikolov et al. (2013); word2vec.c has (√(f/t) + 1)·t/f, which keeps a
        little more.
        """
        frequency = np.asarray(self.counts, dtype=np.float64) / self.total
        return np.minimum(1.0, np.sqrt(threshold / frequency))

    def noise(self) -> NDArray[np.float64]:
        """Probabilities ∝ count^0.75, to draw negative samples from, as Mikolov et al. (2013)."""
        weights = np.asarray(self.counts, dtype=np.float64) ** 0.75
        return weights / weights.sum()


class Corpus(NamedTuple):
    """A text made ready for skip-gram: its vocabulary, and pairs of word numbers from all over it."""

    vocabulary: Vocabulary
    pairs: Pairs


def find_text(data_dir: str | None) -> tuple[list[Path], str]:
    """The files of the text in that folder, and their names with md5, for the record."""
    folder = Path(data_dir or "").expanduser()
    files = sorted(folder.glob("*wiki*.txt")) + sorted(folder.glob("*wiki*.txt.xz"))
    if data_dir is None or not files:
        raise ProblemError(f"data_dir={data_dir!r} holds no text; {HOW_TO_GET}.")
    return files, ", ".join(f"{path.name} (md5 {_md5(path.read_bytes())})" for path in files)


@lru_cache(maxsize=2)
def load_text(data_dir: str | None, *, vocabulary: int, pairs: int) -> Corpus:
    """Read the text in `data_dir` twice: once to count its words, once to draw pairs, 2.5 MB a second.

    `vocabulary` and `pairs` are upper limits: a small corpus has fewer.
    """
    files, source = find_text(data_dir)

    def clauses() -> Iterator[list[str]]:
        return chain.from_iterable(map(split_clauses, chain.from_iterable(map(read_lines, files))))

    counted = count_words(clauses(), size=vocabulary)
    drawn = collect_pairs(clauses(), counted, most=pairs)
    if len(drawn) == 0:
        raise ProblemError(
            f"{source} holds {counted.total} words in clauses of two or more, and no pair of neighbours is "
            "left for skip-gram; pass a longer running text."
        )
    return Corpus(counted, drawn)


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a text file without <doc> lines, article titles, tags and entities.

    A line end also ends a sentence: WikiExtractor writes a paragraph to a line.
    """
    title: str | None = None
    try:
        with (lzma.open if path.suffix == ".xz" else open)(
            path, "rt", encoding="utf-8-sig"
        ) as file:
            for line in chain.from_iterable(map(str.splitlines, file)):
                text = line.strip()
                if text.startswith("<doc id=") and text.endswith(">"):
                    found = TITLE.search(text)
                    title = html.unescape(found[1]) if found else None
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
    "adm al approx assn bros ca capt cf cmdr co col corp dept dr ed eds esp est fig figs fr ft gen gov hon "
    "inc jr lt ltd maj messrs mme mr mrs ms mt mts op pl pp pres prof rep rev sen sgt sr st ste supt univ "
    "viz vol vols vs"
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
MOST_WORDS = 20  # longer clauses are cut into equal parts


def split_clauses(text: str) -> Iterator[list[str]]:
    """The clauses of a line of text, as lower-case words: split at punctuation, dashes and brackets.

    Those of one word are dropped; those of over 20 are cut into equal parts, so that text without
    punctuation becomes clauses too. (One in twenty of Wikipedia's is longer; the mean is 9.)

    >>> list(split_clauses("Dr. Smith's U.S. team won 1,000 games; it didn't lose. Why? No one knows."))
    [['dr', "smith's", 'u.s', 'team', 'won', 'games'], ['it', "didn't", 'lose'], ['no', 'one', 'knows']]
    """
    text = ADDRESS.sub(" ", unicodedata.normalize("NFC", text.lower()).replace("’", "'"))
    for part in MARK.split(text):
        words: list[str] = WORD.findall(part)
        many = len(words)
        pieces = -(-len(words) // MOST_WORDS)
        if many > 1:
            yield from (words[many * n // pieces : many * (n + 1) // pieces] for n in range(pieces))


def count_words(clauses: Iterable[list[str]], *, size: int) -> Vocabulary:
    """The `size` most frequent words in one pass; among equals, the first of the alphabet."""
    table = Counter(chain.from_iterable(clauses))
    kept = sorted(table.items(), key=lambda item: (-item[1], item[0]))[:size]
    return Vocabulary(
        tuple(word for word, _ in kept), tuple(count for _, count in kept), table.total()
    )


def collect_pairs(
    clauses: Iterable[list[str]],
    vocabulary: Vocabulary,
    *,
    window: int = WINDOW,
    threshold: float = THRESHOLD,
    seed: int = 0,
    most: int,
) -> Pairs:
    """At most `most` (centre, context) pairs of word numbers, shape (n, 2), every pair equally likely.

    As in word2vec.c, words outside the vocabulary go first, then the subsampled ones, and only then
    the window is taken, so that it reaches over them; each centre draws its own width from 1 …
    `window`. The sample is a reservoir (Efraimidis, Spirakis 2006): the pairs that draw the
    smallest numbers stay.
    """
    streams = np.random.SeedSequence(seed).spawn(3)
    for_keeping, for_widths, for_sample = (np.random.default_rng(stream) for stream in streams)
    number = {word: place for place, word in enumerate(vocabulary.words)}.get
    keep = vocabulary.keep_probability(threshold)
    kept_keys = np.empty(0)
    kept_pairs = np.empty((0, 2), dtype=np.int32)
    limit = 1.0
    stream = iter(clauses)
    while chunk := list(islice(stream, CLAUSES_AT_ONCE)):
        numbers = np.fromiter(map(number, chain.from_iterable(chunk), repeat(-1)), dtype=np.int32)
        clause = np.repeat(np.arange(len(chunk)), list(map(len, chunk)))[numbers >= 0]
        numbers = numbers[numbers >= 0]
        stays = for_keeping.random(len(numbers)) < keep[numbers]
        numbers = numbers[stays]
        clause = clause[stays]
        # Not rng.integers: one draw a word, so that the pairs do not depend on where the chunks are
        # cut.
        widths = 1 + (for_widths.random(len(numbers)) * window).astype(np.int64)
        pairs = pair_up(numbers, clause, widths, window)
        keys = for_sample.random(len(pairs))
        kept_keys = np.concatenate([kept_keys, keys[keys < limit]])
        kept_pairs = np.concatenate([kept_pairs, pairs[keys < limit]])
        if len(kept_keys) > 2 * most:
            first = np.argsort(kept_keys, kind="stable")[:most]
            kept_keys = kept_keys[first]
            kept_pairs = kept_pairs[first]
            limit = float(kept_keys[-1])
    return kept_pairs[np.argsort(kept_keys, kind="stable")[:most]]


def pair_up(
    numbers: Pairs, clause: NDArray[np.int64], widths: NDArray[np.int64], window: int
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
