"""Lines of a corpus: every format gives the same text; what is not a corpus is refused by name."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from hessinit.errors import ProblemError
from hessinit.paper.text.corpus import read_lines, split_lines

DOCUMENTS = """<doc id="1" url="http://x?curid=1" title="Tom &amp; "Jerry"">
Tom &amp; "Jerry"

A cat &amp; a mouse.
One<br>two &lt;b&gt;three&lt;/b&gt;

</doc>
<doc id="2" url="http://x?curid=2" title="Über">
Über

Über is a word. Über

</doc>
"""
LINES = ["A cat & a mouse.", "One; two  three ", "Über is a word. Über"]
RAW = DOCUMENTS.encode()
PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes, "xz": lzma.compress, "bz2": bz2.compress, "gz": gzip.compress,
}  # fmt: skip


def write(folder: Path, content: bytes, name: str = "corpus.txt") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("suffix", ["", ".txt", ".xz", ".bz2", ".gz"])
def test_the_content_tells_the_packing_whatever_the_name_says(
    tmp_path: Path, packing: str, suffix: str
) -> None:
    path = write(tmp_path, PACKINGS[packing](RAW), "corpus" + suffix)
    assert list(read_lines(path)) == LINES


@pytest.mark.parametrize("packing", ["xz", "bz2", "gz"])
def test_several_streams_in_one_file_are_read_to_the_last(tmp_path: Path, packing: str) -> None:
    halves = [PACKINGS[packing](half) for half in (RAW[:100], RAW[100:])]
    assert list(read_lines(write(tmp_path, b"".join(halves)))) == LINES


def test_plain_text_with_a_mark_of_utf_8_and_lines_of_windows_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, b"\xef\xbb\xbfOne line\r\nand \xc3\xa9t\xc3\xa9\r\n")
    assert list(read_lines(path)) == ["One line", "and été"]


def test_json_lines_of_wikiextractor_are_read_without_their_titles(tmp_path: Path) -> None:
    articles = [{"id": "1", "title": "Cat", "text": "Cat\n\nA cat &amp; me.\nMore"}, {"id": "2", "text": ""}]
    path = write(tmp_path, "".join(json.dumps(article) + "\n" for article in articles).encode())
    assert [line for line in read_lines(path) if line] == ["A cat & me.", "More"]


def test_a_character_cut_by_the_end_of_a_block_is_whole_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, RAW)
    for size in range(1, 40):
        monkeypatch.setattr("hessinit.paper.text.archive.BLOCK", size)
        # The first block decides whether this is XML or JSON; here it is neither.
        assert list(read_lines(path)) == LINES


def test_one_endless_line_comes_in_pieces_that_cut_no_word() -> None:
    words = [f"word{number}" for number in range(20_000)]
    text = " ".join(words)
    pieces = list(split_lines((text[start : start + 777] for start in range(0, len(text), 777)), 5000))
    assert " ".join(pieces).split() == words
    assert max(map(len, pieces)) <= 5000 + 777
    assert len(pieces) > 20


NO_CORPUS: dict[str, tuple[bytes, str]] = {
    "nothing": (
        b"",
        "corpus.txt is empty; a corpus is UTF-8 text, plain or packed as xz, bz2 or gz. Make or copy",
    ),
    "nothing, xz": (lzma.compress(b""), "corpus.txt is empty"),
    "nothing, gz": (gzip.compress(b""), "corpus.txt is empty"),
    "nothing, bz2": (bz2.compress(b""), "corpus.txt is empty"),
    "latin-1": (b"abc \xe9t\xe9", r"is not UTF-8: byte 4 of its content is b'\\xe9'; .*iconv -f LATIN1"),
    "a mark, then latin-1": (b"\xef\xbb\xbfabc \xff", r"is not UTF-8: byte 7 of its content is b'\\xff'"),
    "half a character": (
        RAW + b"\xc3",
        rf"is not UTF-8: byte {len(RAW)} of its content is b'\\xc3'.*copy it again if cut",
    ),
    "binary": (b"abc\0def", "is binary: byte 3 of its content is zero; .* Pass a text file"),
    "binary, gz": (gzip.compress(b"abc\0def"), "is binary: byte 3"),
    "utf-16": ("text".encode("utf-16"), "is UTF-16; .* iconv -f UTF-16"),
    "zip": (b"PK\x03\x04rest", "is a zip archive; .* Unpack or convert it first"),
    "7z": (b"7z\xbc\xaf\x27\x1crest", "is a 7z archive"),
    "zstandard": (b"\x28\xb5\x2f\xfdrest", "is a zstandard archive"),
    "pdf": (b"%PDF-1.7", "is a PDF document"),
    "raw dump": (b'<mediawiki xmlns="x">', "is XML, such as a raw dump of Wikipedia; .*WikiExtractor"),
    "xml, bz2": (bz2.compress(b"<?xml version='1.0'?>"), "is XML"),
    "web page": (b"<!DOCTYPE html><html>", "is a web page, not a corpus"),
    "half a document": (RAW[: RAW.rindex(b"</doc>")], "is cut off: it ends inside a <doc> block"),
    "half a line of JSON": (
        b'{"text": "one"}\n{"text": "t',
        "line 2, is not a JSON object with a 'text'",
    ),
    "a number for the text": (b'{"text": 3}\n', "line 1, is not a JSON object with a 'text'"),
    "no text": (b'{"id": "3"}\n', "line 1, is not a JSON object with a 'text'"),
}


# Named, since gzip writes the time into its bytes: as names they would differ between the test processes.
@pytest.mark.parametrize("case", NO_CORPUS)
def test_what_is_not_a_corpus_is_refused_by_name(tmp_path: Path, case: str) -> None:
    content, message = NO_CORPUS[case]
    with pytest.raises(ProblemError, match=message):
        list(read_lines(write(tmp_path, content)))


@pytest.mark.parametrize("packing", ["xz", "bz2", "gz"])
def test_an_archive_cut_off_anywhere_is_refused(tmp_path: Path, packing: str) -> None:
    whole = PACKINGS[packing](RAW)
    for length in range(20, len(whole), 7):
        with pytest.raises(ProblemError, match=f"corpus.txt is cut off: its {packing} data have no end"):
            list(read_lines(write(tmp_path, whole[:length])))


@pytest.mark.parametrize("packing", ["xz", "bz2", "gz"])
def test_a_changed_byte_of_an_archive_never_changes_the_text(tmp_path: Path, packing: str) -> None:
    whole = PACKINGS[packing](RAW)
    refused = 0
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 0x55
        path = write(tmp_path, bytes(changed))
        try:
            lines = list(read_lines(path))
        except ProblemError:
            refused += 1
        else:
            assert lines == LINES
    assert refused > 0.9 * len(whole)


def test_a_corrupt_archive_says_so(tmp_path: Path) -> None:
    for packing in ("xz", "bz2", "gz"):
        changed = bytearray(PACKINGS[packing](RAW))
        changed[60] ^= 0xFF
        with pytest.raises(ProblemError, match=f"holds corrupt {packing} data: .* Copy or download it again"):
            list(read_lines(write(tmp_path, bytes(changed))))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, RAW)
    path.chmod(0)
    with pytest.raises(ProblemError, match="corpus.txt cannot be read: Permission denied"):
        list(read_lines(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="gone.txt cannot be read: No such file"):
        list(read_lines(tmp_path / "gone.txt"))


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    peaks = []
    for times in (10_000, 100_000):
        path = write(tmp_path, lzma.compress(RAW * times, preset=0))
        tracemalloc.start()
        assert sum(1 for _ in read_lines(path)) == len(LINES) * times
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]
    assert peaks[1] < 8e6
