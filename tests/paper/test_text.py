"""Text: clauses by hand, counts and pairs against plain loops and distributions, and what is refused."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from hessinit.errors import ProblemError
from hessinit.paper import text as text_module
from hessinit.paper.text import (
    Corpus,
    Vocabulary,
    collect_pairs,
    count_words,
    find_corpus,
    load_text,
    pair_up,
    read_lines,
    split_clauses,
)

CATS = "The cat sat on the mat, and the dog ran. The cat ran; the dog sat.\n" * 30
LETTERS = Vocabulary(tuple("abcde"), (1, 1, 1, 1, 1), 5)
PACK = {".xz": lzma.compress, ".bz2": bz2.compress, ".gz": gzip.compress}


def put(folder: Path, *names: str, text: str = CATS) -> str:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(PACK.get(path.suffix, bytes)(text.encode()))
    return str(folder)


@pytest.mark.parametrize(
    ("text", "clauses"),
    [
        ("The cat sat. The dog ran!", ["the cat sat", "the dog ran"]),
        ("it rained; we stayed: we read, and slept", ["it rained", "we stayed", "we read", "and slept"]),
        ("the day—a long one – was over -- at last", ["the day", "a long one", "was over", "at last"]),
        ("the king (born in Rome) was old", ["the king", "born in rome", "was old"]),
        ("Dr. Smith met Mrs. Lee, Acme Inc. of St. Ives", ["dr smith met mrs lee", "acme inc of st ives"]),
        ("The U.S. Army and J. R. R. Tolkien", ["the u.s army and j r r tolkien"]),
        ("some fruit, e.g. apples, i.e. food", ["some fruit", "e.g apples", "i.e food"]),
        ("platform No. 5 was on Jan. 5 closed", ["platform no was on jan closed"]),
        ("he said no. Then he left", ["he said no", "then he left"]),
        ("about 1,000 men at 10:30 ran 3.5 miles", ["about men at ran miles"]),
        ("the Paris–Dakar and the well-known race", ["the paris dakar and the well known race"]),
        ('He said "it works." Then he left', ["he said it works", "then he left"]),
        ("don't and don’t, the dogs' o'clock 'tis", ["don't and don't", "the dogs o'clock tis"]),
        ("the 20th mp3 of read_file in the 1990s __NOTOC__", ["the of in the"]),
        ("CAFÉ Cafe\u0301 straße Ελλάδα", ["café café straße ελλάδα"]),
        ("an area of 5 km² or ½ more", ["an area of or more"]),
        ("see http://example.com/a,b;c or www.example.org now", ["see or now"]),
        ("alone. Twice here. Once", ["twice here"]),
        ("... !!! 123", []),
    ],
)
def test_text_is_split_at_punctuation_only(text: str, clauses: list[str]) -> None:
    assert [" ".join(clause) for clause in split_clauses(text)] == clauses


@pytest.mark.parametrize(
    ("many", "lengths"),
    [(1, []), (2, [2]), (20, [20]), (21, [10, 11]), (41, [13, 14, 14]), (1000, [20] * 50)],
)
def test_a_long_clause_is_cut_into_equal_parts_and_loses_nothing(many: int, lengths: list[int]) -> None:
    words = [chr(97 + number // 26 % 26) + chr(97 + number % 26) + "x" for number in range(many)]
    clauses = list(split_clauses(" ".join(words)))
    assert [len(clause) for clause in clauses] == lengths
    assert [word for clause in clauses for word in clause] == (words if many > 1 else [])


CLAUSES = [["b", "a", "b"], ["c", "a"], ["b", "d"], ["d", "e"]]  # b 3; a, d 2; c, e 1


def test_the_most_frequent_words_are_kept_and_ties_go_by_the_alphabet() -> None:
    assert count_words(CLAUSES, size=2) == Vocabulary(("b", "a"), (3, 2), 9)
    assert count_words(CLAUSES, size=99) == Vocabulary(("b", "a", "d", "c", "e"), (3, 2, 2, 1, 1), 9)


def test_dropping_rare_words_keeps_the_frequent_ones_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless() -> Iterator[list[str]]:
        for number in range(5000):
            yield ["often", "always" if number % 2 else "seldom", f"once{number}"]

    monkeypatch.setattr(text_module, "CLAUSES_AT_ONCE", 100)
    found = count_words(endless(), size=3, most_counted=200)
    assert found == Vocabulary(("often", "always", "seldom"), (5000, 2500, 2500), 15_000)


def test_keep_probability_and_noise_are_the_formulas_of_the_article() -> None:
    vocabulary = Vocabulary(("the", "of", "cat"), (640, 10, 1), 10_000)
    # f = 0.064, 0.001, 0.0001: √(0.001 / 0.064) = 1/8, then 1, then no more than 1.
    assert vocabulary.keep_probability(1e-3) == pytest.approx([0.125, 1, 1], rel=1e-14)
    assert vocabulary.keep_probability(1e-5) == pytest.approx([1 / 80, 0.1, 10**-0.5], rel=1e-14)
    noise = Vocabulary(("the", "of", "cat"), (625, 81, 1), 10_000).noise()
    assert noise == pytest.approx(np.array([125, 27, 1]) / 153, rel=1e-14)


def collect(clauses: list[list[str]], vocabulary: Vocabulary = LETTERS, **changes: float) -> np.ndarray:
    options = {"window": 1, "threshold": math.inf, "seed": 0, "most": 10**6, **changes}
    return collect_pairs(clauses, vocabulary, **options)  # type: ignore[arg-type]


def spelled(pairs: np.ndarray, vocabulary: Vocabulary = LETTERS) -> list[str]:
    return sorted(vocabulary.words[centre] + vocabulary.words[context] for centre, context in pairs)


def test_pairs_of_a_tiny_text_are_those_found_by_hand() -> None:
    pairs = collect([list("abc"), list("de")])
    assert spelled(pairs) == ["ab", "ba", "bc", "cb", "de", "ed"]
    assert pairs.dtype == np.int32
    # Words outside the vocabulary go before the window is taken.
    assert spelled(collect([["a", "x", "y", "b"], ["x", "c"], ["x"]])) == ["ab", "ba"]
    assert collect([]).shape == collect([["x", "y"]]).shape == collect([["a"], ["b"]]).shape == (0, 2)
    rare = Vocabulary(("the", "a", "b"), (10**12, 1, 1), 10**12)  # "the" is subsampled away
    assert (
        spelled(collect([["a", "the", "b"]] * 50, rare, threshold=1e-12), rare) == ["ab"] * 50 + ["ba"] * 50
    )


def test_pairs_of_given_widths_are_those_of_the_plain_loop() -> None:
    generator = np.random.default_rng(0)
    for window in (1, 2, 5):
        clause = np.repeat(np.arange(40), generator.integers(0, 9, size=40))
        numbers = generator.integers(0, 100, size=len(clause)).astype(np.int32)
        widths = generator.integers(1, window + 1, size=len(clause))
        truth = [
            [numbers[centre], numbers[context]]
            for centre in range(len(clause))
            for context in range(len(clause))
            if context != centre
            and clause[context] == clause[centre]
            and abs(context - centre) <= widths[centre]
        ]
        assert len(truth) > 100
        assert pair_up(numbers, clause, widths, window).tolist() == truth


def test_widths_and_subsampling_have_their_distributions() -> None:
    # In a clause of five letters the first pairs with the n-th when its width, of 1 … 4, is at least n − 1.
    counted = Counter(spelled(collect([list("abcde")] * 20_000, window=4)))
    widths = -np.diff([counted["ab"], counted["ac"], counted["ad"], counted["ae"], 0])
    assert counted["ab"] == 20_000
    assert stats.chisquare(widths).pvalue > 1e-3
    clauses = [["a", "b"], ["a", "c"], ["a", "d"], ["a", "e"]] * 10_000
    vocabulary = count_words(clauses, size=5)  # a: 1/2 of all; b, c, d, e: 1/8 each
    # t = 1/50: a is kept with √0.04 = 0.2, the others with √0.16 = 0.4; a pair needs both.
    found = len(collect(clauses, vocabulary, threshold=0.02)) / 2
    mean, deviation = 40_000 * 0.08, math.sqrt(40_000 * 0.08 * 0.92)
    assert abs(found - mean) < 4 * deviation < 0.4 * mean


def test_the_sample_is_uniform_and_its_beginning_a_smaller_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "CLAUSES_AT_ONCE", 3)
    clauses = [[a, b] for a, b in zip("abcdeabcdeabcdeabcde", "bcdeacdeabdeabceabcd", strict=True)]
    drawn: Counter[str] = Counter()  # of the 40 pairs, 10 each time
    for seed in range(800):
        sample = collect(clauses, seed=seed, most=10)
        assert len(sample) == 10
        drawn.update(spelled(sample))
    every = Counter(spelled(collect(clauses)))
    expected = np.array([every[pair] * 200 for pair in sorted(every)])
    assert stats.chisquare([drawn[pair] for pair in sorted(every)], expected).pvalue > 1e-3
    whole = collect(clauses * 20, window=1)
    assert collect(clauses * 20, most=100).tolist() == whole[:100].tolist()


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        (["b.txt", "a.txt.xz", "README.txt", "x.csv", ".hidden.txt"], ["a.txt.xz", "b.txt"]),
        (["a.txt", "a.txt.xz", "b.txt.bz2"], ["a.txt", "b.txt.bz2"]),
        (["other.txt", "enwiki-2014.txt.xz", "enwiki-2014.txt.xz.md5"], ["enwiki-2014.txt.xz"]),
        (["wikipedia/part1.txt.gz", "mnist/labels.txt"], ["wikipedia/part1.txt.gz"]),
    ],
)
def test_the_corpus_is_found_by_its_names(tmp_path: Path, there: list[str], taken: list[str]) -> None:
    assert list(find_corpus(put(tmp_path, *there))) == taken


def test_doc_blocks_titles_tags_and_entities_are_taken_off(tmp_path: Path) -> None:
    page = '<doc id="1" url="u" title="A &amp; B">\nA &amp; B\n\nOne &lt;b&gt;two<br>three\n</doc>\n'
    put(tmp_path, "wiki.txt", text="\ufeff" + page + "A &amp; B\nlast")
    assert list(read_lines(tmp_path / "wiki.txt")) == ["One  two; three", "A & B", "last"]


def same(one: Corpus, other: Corpus) -> bool:
    return (one.vocabulary, one.source) == (other.vocabulary, other.source) and np.array_equal(
        one.pairs, other.pairs
    )


def test_a_corpus_is_counted_paired_described_and_kept(tmp_path: Path) -> None:
    folder, cache = put(tmp_path / "data", "a.txt.xz", "b.txt"), tmp_path / "new" / "cache"
    text = load_text(folder, vocabulary=3, pairs=100, cache=str(cache))
    assert text.vocabulary == Vocabulary(("the", "cat", "dog"), (300, 120, 120), 60 * 16)
    assert 0 < len(text.pairs) <= 100
    sums = [
        hashlib.md5((tmp_path / "data" / name).read_bytes()).hexdigest() for name in ("a.txt.xz", "b.txt")
    ]
    assert text.source == f"a.txt.xz (md5 {sums[0]}), b.txt (md5 {sums[1]})"
    (kept,) = cache.iterdir()
    again = load_text(folder, vocabulary=3, pairs=100, cache=str(cache))
    assert same(text, again)
    whole = kept.read_bytes()
    for content in (b"", b"junk", whole[:-30], whole[:200] + b"\x55" + whole[201:]):
        kept.write_bytes(content)  # a damaged file is made again, and never believed
        assert same(text, load_text(folder, vocabulary=3, pairs=100, cache=str(cache)))
    load_text(folder, vocabulary=4, pairs=100, cache=str(cache))
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"12 34\n", r"a.txt \(md5 .* no pair of neighbours is left"),
        ("a.txt", "naïve".encode("latin-1"), "a.txt is not UTF-8 text"),
        ("a.txt", "two words".encode("utf-16"), "a.txt is not UTF-8 text"),
        ("a.txt", b"<mediawiki>", "a.txt is XML or HTML.*WikiExtractor"),
        ("a.txt.xz", lzma.compress(CATS.encode())[:-20], "a.txt.xz cannot be read .*copy or download"),
        ("a.txt.bz2", b"no bz2 at all", "a.txt.bz2 cannot be read"),
        ("a.txt.gz", gzip.compress(CATS.encode(), mtime=0)[:-20], "a.txt.gz cannot be read"),
        ("x.csv", b"", r"holds no text; word2vec needs a Wikipedia text.*--data-dir"),
    ],
)
def test_what_is_no_text_is_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ProblemError, match=message):
        load_text(str(tmp_path), vocabulary=10, pairs=10)


def test_without_a_text_the_way_to_one_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        ProblemError, match=r"word2vec needs .*files \*.txt.*WikiExtractor.*Pass their folder as --data-dir"
    ):
        load_text(None, vocabulary=10, pairs=10)
    with pytest.raises(ProblemError, match=r"data_dir='.*gone' cannot be read \(No such file"):
        load_text(str(tmp_path / "gone"), vocabulary=10, pairs=10)


@pytest.mark.skipif("HESSINIT_DATA" not in os.environ, reason="HESSINIT_DATA names no folder with a corpus")
def test_the_real_wikipedia_has_the_words_of_english() -> None:
    text = load_text(os.environ["HESSINIT_DATA"], vocabulary=2000, pairs=500_000)
    assert text.vocabulary.words[:2] == ("the", "of")
    # Zipf's law for English: "the" is some 6 % of the running words; 2000 words cover most of them.
    assert 0.05 < text.vocabulary.counts[0] / text.vocabulary.total < 0.09
    assert 0.65 < sum(text.vocabulary.counts) / text.vocabulary.total < 0.85
    # Subsampling thins "the" to about √(f·t), relative to what is left.
    share = np.bincount(text.pairs[:, 0], minlength=2000) / len(text.pairs)
    expected = np.array(text.vocabulary.counts) * text.vocabulary.keep_probability(1e-3)
    assert share[0] == pytest.approx(expected[0] / expected.sum(), rel=0.1)
