"""The entry: which files are the corpus, what the record says, what is refused, what is kept."""

from __future__ import annotations

import bz2
import hashlib
import lzma
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hessinit.errors import ProblemError
from hessinit.paper.text import cache
from hessinit.paper.text.cache import cached_text
from hessinit.paper.text.folder import describe_files, find_corpus
from hessinit.paper.text.load import Text, check_text, load_text

CATS = "The cat sat on the mat, and the dog ran. The cat ran; the dog sat.\n" * 30


def put(folder: Path, *names: str, text: str = CATS) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pack = {".xz": lzma.compress, ".bz2": bz2.compress}.get(path.suffix, bytes)
        path.write_bytes(pack(text.encode()))
    return folder


def same(one: Text, other: Text) -> bool:
    return (
        (one.name, one.vocabulary, one.clauses, one.words, one.source)
        == (other.name, other.vocabulary, other.clauses, other.words, other.source)
        and one.pairs.dtype == other.pairs.dtype
        and np.array_equal(one.pairs, other.pairs)
    )


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        (["b.txt", "a.txt.xz", "README.txt", "x.csv", ".hidden.txt"], ["a.txt.xz", "b.txt"]),
        (["a.txt", "a.txt.xz", "b.txt.bz2"], ["a.txt", "b.txt.bz2"]),
        (["other.txt", "enwiki-2014.txt.xz", "enwiki-2014.txt.xz.md5"], ["enwiki-2014.txt.xz"]),
        (["enwiki.xml.bz2", "text/AB/wiki_01", "text/AA/wiki_00"], ["text/AA/wiki_00", "text/AB/wiki_01"]),
        (["wiki.train.tokens", "wiki.sql.gz", "wiki.py"], ["wiki.train.tokens"]),
        (["wikipedia/part1.txt", "mnist/labels.txt"], ["wikipedia/part1.txt"]),
        (["enwiki.xml"], ["enwiki.xml"]),
    ],
)
def test_the_corpus_is_found_by_its_names_in_order(
    tmp_path: Path, there: list[str], taken: list[str]
) -> None:
    assert [file.name for file in find_corpus(put(tmp_path, *there))] == taken


def test_the_folder_may_be_the_file_itself(tmp_path: Path) -> None:
    put(tmp_path, "any.name")
    assert [file.name for file in find_corpus(tmp_path / "any.name")] == ["any.name"]
    assert load_text("wikipedia", str(tmp_path / "any.name")).clauses == 120


def test_a_corpus_is_counted_paired_and_described(tmp_path: Path) -> None:
    put(tmp_path, "a.txt.xz", "b.txt")
    text = load_text("wikipedia", tmp_path, vocabulary=3, window=1, threshold=1.0, pairs=100_000)
    assert text.name == "wikipedia"
    assert text.vocabulary.words == ("the", "cat", "dog")  # of cat, dog, ran, sat: the first by the alphabet
    assert text.vocabulary.counts == (300, 120, 120)
    assert text.clauses == 240
    assert text.words == text.vocabulary.total == 60 * 16
    # the cat (…) the | the dog | the cat | the dog, both ways.
    names = [" ".join(text.vocabulary.words[number] for number in pair) for pair in text.pairs]
    assert sorted(names) == sorted(
        ["the cat", "cat the", "the dog", "dog the"] * 120 + ["cat the", "the cat"] * 60
    )
    sums = [hashlib.md5((tmp_path / name).read_bytes()).hexdigest() for name in ("a.txt.xz", "b.txt")]
    assert text.source == f"a.txt.xz (md5 {sums[0]}), b.txt (md5 {sums[1]})"


def test_many_files_are_described_in_short(tmp_path: Path) -> None:
    put(tmp_path, *(f"AA/wiki_0{number}" for number in range(4)))
    one = hashlib.md5(CATS.encode()).hexdigest()
    combined = hashlib.md5("\n".join([one] * 4).encode()).hexdigest()
    described = describe_files(find_corpus(tmp_path))
    assert described == f"4 files, AA/wiki_00 to AA/wiki_03 (md5 of their md5s {combined})"


def test_docstrings_need_no_data_and_are_the_same_every_time() -> None:
    started = time.process_time()
    text = load_text("docstrings")
    assert time.process_time() - started < 30
    assert len(text.vocabulary.words) == 2000
    assert len(text.pairs) > 100_000
    assert text.source.startswith("Python 3.")
    assert same(text, load_text("docstrings"))
    check_text("docstrings")


@pytest.mark.parametrize(
    ("there", "data_dir", "message"),
    [
        ([], None, r"Wikipedia is not downloaded; pass data_dir, the folder.*--data digits"),
        ([], "gone", "data_dir='.*gone' does not exist; pass the folder with the corpus: wiki\\*"),
        (["x.csv"], "", r"holds no corpus; taken are wiki\* or enwiki\*, else \*.txt.*WikiExtractor"),
    ],
)  # fmt: skip
def test_without_a_corpus_the_way_to_one_is_told(
    tmp_path: Path, there: list[str], data_dir: str | None, message: str
) -> None:
    put(tmp_path, *there)
    folder = None if data_dir is None else tmp_path / data_dir
    for call in (load_text, check_text, lambda name, place: cached_text(tmp_path / "cache", name, place)):
        with pytest.raises(ProblemError, match=message):
            call("wikipedia", folder)


def test_a_wrong_file_is_refused_before_any_work(tmp_path: Path) -> None:
    put(tmp_path, "enwiki-pages.xml.bz2", text="<mediawiki>")
    for call in (load_text, check_text):
        with pytest.raises(ProblemError, match="enwiki-pages.xml.bz2 is XML.*WikiExtractor"):
            call("wikipedia", tmp_path)


def test_the_second_file_is_checked_too(tmp_path: Path) -> None:
    put(tmp_path, "a.txt")
    put(tmp_path, "b.txt", text="")
    with pytest.raises(ProblemError, match="b.txt is empty"):
        check_text("wikipedia", tmp_path)


@pytest.mark.parametrize("text", ["one\n\ntwo\n", "12 34\n", "ha ha\n", " \n"])
def test_a_file_without_clauses_is_refused(tmp_path: Path, text: str) -> None:
    put(tmp_path, "a.txt", text=text)
    with pytest.raises(ProblemError, match=r"a.txt \(md5 .*skip-gram needs at least two words"):
        load_text("wikipedia", tmp_path)


def test_a_threshold_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="threshold=1e-12 leaves no two words of a.txt"):
        load_text("wikipedia", put(tmp_path, "a.txt"), threshold=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "wikpedia"}, "name='wikpedia' is unknown; choose from .*Did you mean 'wikipedia'?"),
        ({"vocabulary": 1}, "vocabulary=1 must be a whole number of at least 2"),
        ({"vocabulary": 2.5}, "vocabulary=2.5 must be a whole number"),
        ({"pairs": 0}, "pairs=0 must be a whole number of at least 1"),
        ({"window": True}, "window=True must be a whole number"),
        ({"seed": -1}, "seed=-1 must be a whole number of at least 0"),
        ({"threshold": 0}, "threshold=0 must be a positive frequency, such as 0.001"),
        ({"threshold": float("nan")}, "threshold=nan must be a positive frequency"),
        ({"threshold": "x"}, "threshold='x' must be a positive frequency"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        load_text(**{"name": "docstrings", **arguments})


def test_a_text_is_made_once_and_read_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = put(tmp_path / "data", "a.txt")
    made: list[int] = []

    def count(*arguments: Any, **options: Any) -> Text:
        made.append(1)
        return load_text(*arguments, **options)

    monkeypatch.setattr(cache, "load_text", count)
    keep = tmp_path / "new" / "cache"
    once = cached_text(keep, "wikipedia", corpus, vocabulary=4)
    assert same(once, load_text("wikipedia", corpus, vocabulary=4))
    assert same(once, cached_text(keep, "wikipedia", corpus, vocabulary=4))
    assert len(made) == 1
    for change in ({"vocabulary": 5}, {"pairs": 9}, {"window": 2}, {"threshold": 0.5}, {"seed": 1}):
        cached_text(keep, "wikipedia", corpus, **{"vocabulary": 4, **change})
    assert len(made) == 6
    os.utime(corpus / "a.txt", ns=(1, 1))
    cached_text(keep, "wikipedia", corpus, vocabulary=4)
    assert len(made) == 7
    assert all(path.name.startswith("wikipedia-") and path.suffix == ".npz" for path in keep.iterdir())


def test_a_damaged_cache_is_made_again_and_never_believed(tmp_path: Path) -> None:
    corpus = put(tmp_path / "data", "a.txt")
    truth = cached_text(tmp_path, "wikipedia", corpus, pairs=20)
    (path,) = tmp_path.glob("*.npz")
    whole = path.read_bytes()
    contents = [b"", b"junk", whole[:-30], b"\x93NUMPY\x01\x00"]
    for place in range(0, len(whole), 11):
        contents.append(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
    for content in contents:
        path.write_bytes(content)
        assert same(truth, cached_text(tmp_path, "wikipedia", corpus, pairs=20))
    path.write_bytes(b"junk")
    cached_text(tmp_path, "wikipedia", corpus, pairs=20)
    assert same(truth, cached_text(tmp_path, "wikipedia", corpus, pairs=20))
    assert path.read_bytes() != b"junk"


def test_a_cache_that_holds_a_pickle_is_not_run(tmp_path: Path) -> None:
    corpus = put(tmp_path / "data", "a.txt")
    truth = cached_text(tmp_path, "wikipedia", corpus)
    (path,) = tmp_path.glob("*.npz")
    np.savez(path, sizes=np.array([Trap(tmp_path / "ran")], dtype=object))
    assert same(truth, cached_text(tmp_path, "wikipedia", corpus))
    assert not (tmp_path / "ran").exists()


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = put(tmp_path / "data", "a.txt")

    def fill_the_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", fill_the_disk)
    with pytest.raises(ProblemError, match="cache' cannot be written: No space left on device. Pass another"):
        cached_text(tmp_path / "cache", "wikipedia", corpus)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_file_in_place_of_the_cache_folder_is_named(tmp_path: Path) -> None:
    corpus = put(tmp_path / "data", "a.txt")
    with pytest.raises(ProblemError, match="a.txt' cannot be written"):
        cached_text(corpus / "a.txt", "wikipedia", corpus)


@pytest.mark.skipif("HESSINIT_DATA" not in os.environ, reason="HESSINIT_DATA names no folder with a corpus")
def test_the_real_wikipedia_is_read_within_a_minute() -> None:
    started = time.process_time()
    text = load_text("wikipedia", os.environ["HESSINIT_DATA"])
    seconds = time.process_time() - started
    assert text.words > 1_000_000
    assert seconds < 60 * max(1.0, text.words / 6e6)
    assert text.vocabulary.words[:2] == ("the", "of")
    assert len(text.pairs) == 500_000
    # The law of Zipf for English: "the" is some 6 % of the running words; 2000 words cover most of them.
    assert 0.05 < text.vocabulary.counts[0] / text.words < 0.09
    assert 0.65 < sum(text.vocabulary.counts) / text.words < 0.85
    # Subsampling thins "the" to about √(f·t), relative to what is left.
    share = np.bincount(text.pairs[:, 0], minlength=2000) / len(text.pairs)
    frequency = np.array(text.vocabulary.counts) / text.words
    expected = frequency * text.vocabulary.keep_probability(1e-3)
    assert share[0] == pytest.approx(expected[0] / expected.sum(), rel=0.1)
