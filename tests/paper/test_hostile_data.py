"""Files made to harm: they are refused by name, at once, and in little memory."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import image_files as files
import pytest

from hessinit.errors import ProblemError
from hessinit.paper.images.cifar import read_archive
from hessinit.paper.images.folder import CifarFiles
from hessinit.paper.images.idx import check_shape
from hessinit.paper.images.inert_pickle import read_inert
from hessinit.paper.images.load import load_images
from hessinit.paper.text.corpus import read_lines
from hessinit.paper.text.folder import describe_files, find_corpus

FAR_PLACE = 2**27  # a table of so many places takes 2 GB


@pytest.mark.parametrize(
    "steps",
    [
        b"N" + b"r" + struct.pack("<I", FAR_PLACE) + b"0}",
        b"N" + f"p{FAR_PLACE}\n".encode() + b"0}",
        b"]" * 600_000,
    ],
    ids=["a far place", "a far place in words", "lists in lists"],
)
def test_a_pickle_that_would_take_much_memory_is_refused(steps: bytes) -> None:
    with pytest.raises(ProblemError, match=r"batch is a pickle of over 500,000 steps"):
        read_inert("batch", b"\x80\x02" + steps + b".")


def test_a_pickle_as_long_as_a_real_batch_is_read() -> None:
    batch = {"labels": [index % 10 for index in range(10_000)], "filenames": [str(n) for n in range(10_000)]}
    assert read_inert("batch", pickle.dumps(batch, 2)) == batch


def archive_of(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> CifarFiles:
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for member, content in members:
            archive.addfile(member, io.BytesIO(content))
    return CifarFiles(True, (path,), ("cifar-10-batches-py/data_batch_1",))


def member(name: str, size: int, **changes: Any) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.size = size
    for field, value in changes.items():
        setattr(made, field, value)
    return made


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_of_an_archive_no_more_is_unpacked_than_a_real_one_holds(kind: bytes, tmp_path: Path) -> None:
    """The header says how long a name is, and all of it would be held in memory."""
    long = member("x", 30_000_000, type=kind)
    found = archive_of(tmp_path / "a.tar.gz", (long, bytes(long.size)))
    with pytest.raises(
        ProblemError, match=r"a.tar.gz is too long: unpacked, it has more than 2,000,000 bytes"
    ):
        list(read_archive(found, [1_000_000]))


def test_a_member_that_says_it_is_endless_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(member("other", 2**60).tobuf(tarfile.GNU_FORMAT) + bytes(2048))
    found = CifarFiles(True, (path,), ("wanted",))
    with pytest.raises(ProblemError, match=r"has a other of 1,152,921,504,606,846,976 bytes"):
        list(read_archive(found, [1_000_000]))


@pytest.mark.parametrize(
    "headers", [{"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}, {"GNU.sparse.size": "x"}]
)
def test_headers_that_tarfile_stumbles_over_are_told_of_the_archive(
    headers: dict[str, str], tmp_path: Path
) -> None:
    found = archive_of(tmp_path / "a.tar.gz", (member("x", 600, pax_headers=headers), bytes(600)))
    with pytest.raises(ProblemError, match=r"a.tar.gz is not a whole tar archive \(ValueError"):
        list(read_archive(found, [1_000_000]))


def test_many_dimensions_are_counted_and_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    official = files.describe_small_mnist(monkeypatch)
    with pytest.raises(ProblemError, match=r"labels has 255 dimensions; MNIST's .* has 12 values"):
        check_shape("labels", (1,) * 255, official.labels, official.title)


def test_json_nested_without_end_is_told_of_its_line(tmp_path: Path) -> None:
    path = tmp_path / "wiki.txt"
    path.write_text('{"text": ' + "[" * 200_000 + "]" * 200_000 + "}\n")
    with pytest.raises(ProblemError, match=r"wiki.txt, line 1, is not a JSON object with a 'text'"):
        list(read_lines(path))


@pytest.mark.skipif(os.name != "posix", reason="names are bytes on POSIX alone")
def test_a_name_that_is_no_text_can_stand_in_a_record(tmp_path: Path) -> None:
    try:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/wiki_\xff.txt")).write_text("some words")
    except OSError:
        pytest.skip("this file system wants names that are text")
    described = describe_files(find_corpus(tmp_path))
    assert described.startswith(r"wiki_\udcff.txt (md5 ")
    assert described.encode("utf-8")


@pytest.mark.parametrize("find", [find_corpus, lambda folder: load_images("mnist", folder)])
def test_a_home_that_nobody_has_is_refused(find: Any) -> None:
    with pytest.raises(ProblemError, match=r"data_dir='~nobody-of-that-name/x' begins with a ~ that stands"):
        find("~nobody-of-that-name/x")


def test_a_corpus_at_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "wiki.txt").write_text("some words")
    assert [file.name for file in find_corpus("~")] == ["wiki.txt"]
