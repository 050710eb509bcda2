"""Pairs: all of a tiny corpus by hand, widths and subsampling by their distributions, a fair sample."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from hessinit.paper.text.skipgrams import Reservoir, collect_pairs, pair_up
from hessinit.paper.text.vocabulary import Vocabulary, count_words

LETTERS = Vocabulary(tuple("abcde"), (1, 1, 1, 1, 1), 5)


def collect(clauses: list[list[str]], vocabulary: Vocabulary = LETTERS, **changes: float) -> np.ndarray:
    options = {"window": 1, "threshold": math.inf, "seed": 0, "most": 10**6, **changes}
    return collect_pairs(clauses, vocabulary, **options)  # type: ignore[arg-type]


def spelled(pairs: np.ndarray, vocabulary: Vocabulary = LETTERS) -> list[str]:
    return sorted(vocabulary.words[centre] + vocabulary.words[context] for centre, context in pairs)


def test_a_window_of_one_pairs_the_neighbours_of_a_clause_and_no_others() -> None:
    pairs = collect([list("abc"), list("de")])
    assert spelled(pairs) == ["ab", "ba", "bc", "cb", "de", "ed"]
    assert pairs.dtype == np.int32


def test_words_outside_go_before_the_window_is_taken() -> None:
    assert spelled(collect([["a", "x", "y", "b"], ["x", "c"], ["x"]])) == ["ab", "ba"]


def test_pairs_of_given_widths_are_those_of_the_plain_loop() -> None:
    generator = np.random.default_rng(0)
    for window in (1, 2, 5):
        lengths = generator.integers(0, 9, size=40)
        clause = np.repeat(np.arange(40), lengths)
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


def test_no_words_give_no_pairs() -> None:
    assert collect([]).shape == (0, 2)
    assert collect([["x", "y"]]).shape == (0, 2)
    assert collect([["a"], ["b"]]).shape == (0, 2)


def test_each_width_is_drawn_equally_often() -> None:
    # In a clause of five letters the first pairs with the n-th when its width, of 1 … 4, is at least n − 1.
    many = 20_000
    counted = Counter(spelled(collect([list("abcde")] * many, window=4)))
    widths = -np.diff([counted["ab"], counted["ac"], counted["ad"], counted["ae"], 0])
    assert counted["ab"] == many
    assert stats.chisquare(widths).pvalue > 1e-3


def test_words_are_kept_as_often_as_the_vocabulary_says() -> None:
    clauses = [["a", "b"], ["a", "c"], ["a", "d"], ["a", "e"]] * 10_000
    vocabulary = count_words(clauses, size=5)  # a: 1/2 of all; b, c, d, e: 1/8 each
    # t = 1/50: a is kept with √0.04 = 0.2, the others with √0.16 = 0.4; a pair needs both.
    found = len(collect(clauses, vocabulary, threshold=0.02)) / 2
    mean, deviation = 40_000 * 0.08, math.sqrt(40_000 * 0.08 * 0.92)
    assert abs(found - mean) < 4 * deviation
    assert 4 * deviation < 0.1 * mean


def test_the_window_reaches_over_subsampled_words() -> None:
    vocabulary = Vocabulary(("the", "a", "b"), (10**12, 1, 1), 10**12)
    pairs = collect([["a", "the", "the", "b"]] * 50, vocabulary, threshold=1e-12)
    assert spelled(pairs, vocabulary) == ["ab"] * 50 + ["ba"] * 50


def test_the_sample_is_uniform_over_the_whole_stream() -> None:
    # 60 different pairs in chunks of 7, a sample of 10, 3000 times: each is drawn 500 times.
    rows = np.array(list(itertools.product(range(6), range(10))), dtype=np.int32)
    drawn = np.zeros((6, 10))
    first = np.zeros((6, 10))
    for seed in range(3000):
        reservoir = Reservoir(10, np.random.default_rng(seed))
        for start in range(0, 60, 7):
            reservoir.add(rows[start : start + 7])
        sample = reservoir.take()
        assert len({(int(left), int(right)) for left, right in sample}) == 10
        drawn[sample[:, 0], sample[:, 1]] += 1
        first[sample[0, 0], sample[0, 1]] += 1
    # Without replacement the counts spread less than chi-square expects, by (1 − 10/60): corrected.
    statistic = ((drawn - 500) ** 2 / (500 * 50 / 60)).sum() * 59 / 60
    assert 1e-3 < stats.chi2.sf(statistic, 59) < 1 - 1e-3
    assert stats.chisquare(first.ravel()).pvalue > 1e-3


def test_a_smaller_sample_is_the_beginning_of_a_larger_one() -> None:
    clauses = [list("abcde")] * 300
    whole = collect(clauses, window=3)
    assert collect(clauses, window=3, most=100).tolist() == whole[:100].tolist()
    assert len(collect(clauses, window=3, most=1)) == 1


def test_the_seed_alone_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    clauses = [list("abcde"), list("cab"), ["a", "x", "b"]] * 200
    vocabulary = count_words(clauses, size=4)
    options = {"window": 3, "threshold": 0.1, "most": 500}
    once = collect(clauses, vocabulary, **options)
    assert len(once) == 500
    assert not np.array_equal(once, collect(clauses, vocabulary, **{**options, "seed": 1}))
    for many in (1, 17, 10_000):
        monkeypatch.setattr("hessinit.paper.text.skipgrams.CLAUSES_AT_ONCE", many)
        assert np.array_equal(once, collect(clauses, vocabulary, **options))


def test_memory_does_not_grow_with_the_stream() -> None:
    peaks = []
    for many in (30_000, 300_000):
        tracemalloc.start()
        collect_pairs(
            (["a", "b", "c", "d"] for _ in range(many)),
            LETTERS,
            window=2,
            threshold=math.inf,
            seed=0,
            most=20_000,
        )
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]
