"""Counts, keep probabilities and noise, against counts made by hand."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from hessinit.paper.text.vocabulary import Vocabulary, count_words

CLAUSES = [["b", "a", "b"], ["c", "a"], ["b", "d"], ["d", "e"]]  # b 3; a, d 2; c, e 1


def test_the_most_frequent_words_are_kept_and_ties_go_by_the_alphabet() -> None:
    assert count_words(CLAUSES, size=2) == Vocabulary(("b", "a"), (3, 2), 9)
    assert count_words(CLAUSES, size=4) == Vocabulary(("b", "a", "d", "c"), (3, 2, 2, 1), 9)
    assert count_words(CLAUSES, size=99) == Vocabulary(("b", "a", "d", "c", "e"), (3, 2, 2, 1, 1), 9)
    assert count_words(CLAUSES, size=2).index() == {"b": 0, "a": 1}


def test_counts_do_not_depend_on_where_the_chunks_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    clauses = [[f"w{number}" for number in generator.geometric(0.02, size=7)] for _ in range(500)]
    truth = Counter(word for clause in clauses for word in clause)
    for many in (1, 3, 10_000):
        monkeypatch.setattr("hessinit.paper.text.vocabulary.CLAUSES_AT_ONCE", many)
        found = count_words(clauses, size=30)
        assert dict(zip(found.words, found.counts, strict=True)) == {
            word: truth[word] for word in found.words
        }
        assert min(found.counts) >= max(truth[word] for word in truth if word not in found.words)
        assert found.total == 3500


def test_keep_probability_is_the_formula_of_the_article() -> None:
    vocabulary = Vocabulary(("the", "of", "cat"), (640, 10, 1), 10_000)
    # f = 0.064, 0.001, 0.0001: √(0.001 / 0.064) = 1/8, then 1, then no more than 1.
    assert vocabulary.keep_probability(1e-3) == pytest.approx([0.125, 1, 1], rel=1e-14)
    assert vocabulary.keep_probability(1e-5) == pytest.approx([1 / 80, 0.1, 10**-0.5], rel=1e-14)
    assert vocabulary.keep_probability(float("inf")).tolist() == [1, 1, 1]


def test_noise_is_the_count_to_the_power_of_three_quarters() -> None:
    vocabulary = Vocabulary(("the", "of", "cat"), (625, 81, 1), 10_000)
    assert vocabulary.noise() == pytest.approx(np.array([125, 27, 1]) / 153, rel=1e-14)
    assert vocabulary.noise(power=0) == pytest.approx([1 / 3] * 3, rel=1e-14)


def endless_new_words(many: int) -> Iterator[list[str]]:
    for number in range(many):
        yield ["often", "always" if number % 2 else "seldom", f"once{number}"]


def test_forgetting_rare_words_keeps_the_frequent_ones_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hessinit.paper.text.vocabulary.CLAUSES_AT_ONCE", 100)
    found = count_words(endless_new_words(5000), size=3, most_counted=200)
    assert found == Vocabulary(("often", "always", "seldom"), (5000, 2500, 2500), 15_000)


def test_memory_does_not_grow_with_the_stream() -> None:
    peaks = []
    for many in (30_000, 300_000):
        tracemalloc.start()
        count_words(endless_new_words(many), size=3, most_counted=5_000)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]
