"""Text: clauses by hand, counts and pairs against plain loops and distributions, and what is refused."""

from __future__ import annotations

import hashlib
import lzma
import math
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from hessinit.errors import ProblemError
from hessinit_paper import corpus as text_module
from hessinit_paper.corpus import (
    SAMPLING,
    Vocabulary,
    collect_pairs,
    count_words,
    find_text,
    load_text,
    pair_up,
    read_lines,
    split_clauses,
)  # fmt: skip

CATS = "The cat sat on the mat, and the dog ran. The cat ran; the dog sat.\n" * 30
LETTERS = Vocabulary(tuple("abcde"), (1, 1, 1, 1, 1), 5)


@pytest.mark.parametrize(
    ("text", "clauses"),
    [
        ("it rained; we stayed: we read, and slept", ["it rained", "we stayed", "we read", "and slept"]),
        ("the day—a long one – was over -- at last", ["the day", "a long one", "was over", "at last"]),
        ("Dr. Smith met Mrs. Lee, Acme Inc. of St. Ives", ["dr smith met mrs lee", "acme inc of st ives"]),
        ("The U.S. Army and J. R. R. Tolkien", ["the u.s army and j r r tolkien"]),
        ("platform No. 5 was on Jan. 5 closed", ["platform no was on jan closed"]),
        ("he said no. Then he left", ["he said no", "then he left"]),
        ("about 1,000 men at 10:30 ran 3.5 miles", ["about men at ran miles"]),
        ("don't and don’t, the dogs' o'clock 'tis", ["don't and don't", "the dogs o'clock tis"]),
        ("the 20th mp3 of read_file in the 1990s __NOTOC__", ["the of in the"]),
        ("CAFÉ Cafe\u0301 straße Ελλάδα", ["café café straße ελλάδα"]),
        ("see http://example.com/a,b;c or www.example.org now", ["see or now"]),
        ("alone. Twice here. Once... !!! 123", ["twice here"]),
    ],
)
def test_text_is_split_at_punctuation_only(text: str, clauses: list[str]) -> None:
    assert [" ".join(clause) for clause in split_clauses(text)] == clauses


def test_a_long_clause_is_cut_into_equal_parts_and_loses_nothing() -> None:
    for many, lengths in ((20, [20]), (21, [10, 11]), (41, [13, 14, 14])):
        words = [chr(97 + number % 26) + "x" for number in range(many)]
        clauses = list(split_clauses(" ".join(words)))
        assert [len(clause) for clause in clauses] == lengths
        assert [word for clause in clauses for word in clause] == words


def test_frequent_words_are_kept_exact_and_ties_go_by_the_alphabet() -> None:
    clauses = [["b", "a", "b"], ["c", "a"], ["b", "d"], ["d", "e"]]
    assert count_words(clauses, size=4) == Vocabulary(("b", "a", "d", "c"), (3, 2, 2, 1), 9)


def test_keep_probability_and_noise_are_the_formulas_of_the_article() -> None:
    vocabulary = Vocabulary(("the", "of", "cat"), (625, 81, 1), 10_000)
    # Frequencies of 0.0625, 0.0081, 0.0001: √(0.0025 / 0.0625) = 1/5, then 5/9, then no more than 1.
    assert vocabulary.keep_probability(2.5e-3) == pytest.approx([1 / 5, 5 / 9, 1], rel=1e-14)
    assert vocabulary.noise() == pytest.approx(np.array([125, 27, 1]) / 153, rel=1e-14)


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
    assert spelled(collect([["a", "the", "b"]] * 2, rare, threshold=1e-12), rare) == ["ab", "ab", "ba", "ba"]


def test_pairs_of_given_widths_are_those_of_the_plain_loop() -> None:
    generator = np.random.default_rng(0)
    for window in (1, 2, 5):
        clause = np.repeat(np.arange(40), generator.integers(0, 9, size=40))
        numbers = generator.integers(0, 100, size=len(clause)).astype(np.int32)
        widths = generator.integers(1, window + 1, size=len(clause))
        truth = [
            [numbers[centre], numbers[context]]
            for centre, context in product(range(len(clause)), repeat=2)
            if clause[context] == clause[centre] and 0 < abs(context - centre) <= widths[centre]
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
    monkeypatch.setattr(text_module, "SAMPLING", replace(SAMPLING, clauses_at_once=3))
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


def test_doc_blocks_titles_tags_and_entities_are_taken_off(tmp_path: Path) -> None:
    page = '<doc id="1" url="u" title="A &amp; B">\nA &amp; B\n\nOne &lt;b&gt;two<br>three\n</doc>\n'
    (tmp_path / "wiki.txt").write_text("\ufeff" + page + "A &amp; B\nlast", encoding="utf-8")
    assert list(read_lines(tmp_path / "wiki.txt")) == ["One  two; three", "A & B", "last"]


def test_the_files_of_a_corpus_are_found_counted_paired_and_described(tmp_path: Path) -> None:
    files = {"b-wiki.txt.xz": lzma.compress(CATS.encode()), "enwiki.txt": CATS.encode()}
    for name, content in {**files, "other.txt": b"another text", "wiki.csv": b"1, 2"}.items():
        (tmp_path / name).write_bytes(content)
    text = load_text(str(tmp_path), vocabulary=3, pairs=100)
    assert text.vocabulary == Vocabulary(("the", "cat", "dog"), (300, 120, 120), 60 * 16)
    assert 0 < len(text.pairs) <= 100
    names = ("enwiki.txt", "b-wiki.txt.xz")
    described = [f"{name} (md5 {hashlib.md5(files[name]).hexdigest()})" for name in names]
    assert find_text(str(tmp_path))[1] == ", ".join(described)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("wiki.txt", b"12 34\n", r"wiki.txt \(md5 .* no pair of neighbours is left"),
        ("wiki.txt", "naïve".encode("latin-1"), "wiki.txt cannot be read as UTF-8 text"),
        ("wiki.txt.xz", lzma.compress(CATS.encode())[:-20], "wiki.txt.xz cannot be read"),
        ("x.csv", b"", r"holds no text; word2vec needs a Wikipedia text.*WikiExtractor.*--data-dir"),
    ],
)
def test_what_is_no_text_is_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ProblemError, match=message):
        load_text(str(tmp_path), vocabulary=10, pairs=10)
