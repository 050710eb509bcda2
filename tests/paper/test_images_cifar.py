from __future__ import annotations

import gzip
import pickle
from collections.abc import Callable
from pathlib import Path

import image_files as files
import numpy
import pytest

from hessinit.errors import ProblemError
from hessinit.paper.images.load import check_images, load_images


def python_3_batch(rows: numpy.ndarray) -> bytes:
    return pickle.dumps({"labels": rows[:, 0].tolist(), "data": rows[:, 1:].copy()})


def write(form: str, folder: Path) -> None:
    """The small batches in one of the forms in which the real ones are handed on."""
    binary, python = folder / "cifar-10-batches-bin", folder / "cifar-10-batches-py"
    apart = folder.parent / "apart"
    if form == "binary":
        files.write_binary_batches(binary)
    elif form == "python 2":
        files.write_python_batches(python, files.python_2_batch)
    elif form == "python 3":
        files.write_python_batches(python, python_3_batch)
    elif form == "binary archive":
        files.write_binary_batches(apart / binary.name)
        files.pack(apart / binary.name, folder / "cifar-10-binary.tar.gz")
    elif form == "python archive":
        files.write_python_batches(apart / python.name, files.python_2_batch)
        files.pack(apart / python.name, folder / "cifar-10-python.tar.gz")


FORMS = ["binary", "python 2", "python 3", "binary archive", "python archive"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files.describe_small_cifar(monkeypatch)
    place = tmp_path / "data"
    place.mkdir()
    return place


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_images(form: str, folder: Path) -> None:
    write(form, folder)
    before = sorted(path.name for path in folder.rglob("*"))
    check_images("cifar-10", folder)
    images = load_images("cifar-10", folder)
    rows = numpy.concatenate(files.small_batches())
    assert numpy.array_equal(images.labels, rows[:, 0])
    # Row 6, green, line 2, column 3: where the format's description puts it.
    assert images.pixels[6, 1, 2, 3] == rows[6, 1 + 1024 + 2 * 32 + 3]
    assert numpy.array_equal(images.pixels.reshape(len(rows), -1), rows[:, 1:])
    assert images.pixels.shape == (5 * files.ROWS, 3, 32, 32)
    assert sorted(path.name for path in folder.rglob("*")) == before  # an archive stays packed


def test_every_form_has_the_same_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    official = files.describe_small_cifar(monkeypatch)
    sources = set()
    for form in FORMS:
        place = tmp_path / form / "data"
        place.mkdir(parents=True)
        write(form, place)
        sources.add(load_images("cifar-10", place).source)
    (source,) = sources
    assert source.startswith(f"data_batch_1.bin md5 {official.batches[0].md5}; data_batch_2.bin md5 ")
    assert str(tmp_path) not in source


BATCH = "cifar-10-batches-bin/data_batch_3.bin"
BINARY_FAULTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda content: b"", "is empty"),
    "cut off": (lambda content: content[:-1], "is cut off: 12,291 bytes of 12,292"),
    "a row short": (lambda content: content[:-3073], "is cut off: 9,219 bytes of 12,292"),
    "rows of CIFAR-100": (lambda content: content + bytes(4), "is too long: it has more than 12,292"),
    "packed and cut off": (lambda content: gzip.compress(content)[:15], "is cut off"),
}


@pytest.mark.parametrize("fault", BINARY_FAULTS)
def test_a_binary_batch_that_is_not_whole_is_named_and_refused(fault: str, folder: Path) -> None:
    write("binary", folder)
    damage, match = BINARY_FAULTS[fault]
    (folder / BATCH).write_bytes(damage((folder / BATCH).read_bytes()))
    for look in (check_images, load_images):
        with pytest.raises(ProblemError, match=f"{BATCH} {match}.*--data digits"):
            look("cifar-10", folder)


def test_a_label_above_nine_is_refused(folder: Path) -> None:
    write("binary", folder)
    rows = files.small_batches()[2]
    rows[1, 0] = 10
    (folder / BATCH).write_bytes(rows.tobytes())
    with pytest.raises(ProblemError, match=f"{BATCH} has the label 10 at position 1; labels are 0 to 9"):
        load_images("cifar-10", folder)


@pytest.mark.parametrize("form", ["binary", "python 2"])
def test_a_batch_in_the_place_of_another_is_refused(form: str, folder: Path) -> None:
    write(form, folder)
    own, suffix = ("cifar-10-batches-bin", ".bin") if form == "binary" else ("cifar-10-batches-py", "")
    third, fourth = (folder / own / f"data_batch_{number}{suffix}" for number in (3, 4))
    third.write_bytes(fourth.read_bytes())
    with pytest.raises(
        ProblemError, match="data_batch_3(.bin)? is of the right form, but not the official one"
    ):
        load_images("cifar-10", folder)


PICKLE = "cifar-10-batches-py/data_batch_3"
PICKLE_FAULTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda content: b"", "is empty"),
    "cut off": (lambda content: content[:5000], "is cut off: 5,000 bytes of 12,292"),
    "a web page": (lambda content: b"<html>" + bytes(13_000), "is no (whole )?pickle"),
    "endless": (lambda content: content + bytes(1_000_000), "is too long"),
}


@pytest.mark.parametrize("fault", PICKLE_FAULTS)
def test_a_python_batch_that_is_not_whole_is_named_and_refused(fault: str, folder: Path) -> None:
    write("python 2", folder)
    damage, match = PICKLE_FAULTS[fault]
    (folder / PICKLE).write_bytes(damage((folder / PICKLE).read_bytes()))
    for look in (check_images, load_images):
        with pytest.raises(ProblemError, match=f"{PICKLE} {match}"):
            look("cifar-10", folder)


def test_a_python_batch_of_another_count_is_refused(folder: Path) -> None:
    write("python 2", folder)
    rows = numpy.concatenate([files.small_batches()[2], files.small_batches()[2]])
    (folder / PICKLE).write_bytes(files.python_2_batch(rows))
    with pytest.raises(ProblemError, match=f"{PICKLE} holds 8 images; data_batch_3.bin holds 4"):
        load_images("cifar-10", folder)


def test_code_in_a_python_batch_is_refused_with_the_file_named(folder: Path) -> None:
    write("python 2", folder)
    content = b"cos\nsystem\n(U\x06exit 1tR." + bytes(13_000)
    (folder / PICKLE).write_bytes(b"\x80\x02" + content)
    with pytest.raises(ProblemError, match=f"{PICKLE} asks for os.system; only arrays"):
        load_images("cifar-10", folder)


def members() -> dict[str, bytes]:
    return {
        f"cifar-10-batches-bin/data_batch_{number}.bin": rows.tobytes()
        for number, rows in enumerate(files.small_batches(), start=1)
    }


def test_an_archive_in_another_order_and_with_a_leading_dot_is_read(folder: Path) -> None:
    turned = {"./README": b"hello", **{f"./{name}": held for name, held in reversed(members().items())}}
    (folder / "cifar-10-binary.tar.gz").write_bytes(files.archive_of(turned))
    rows = numpy.concatenate(files.small_batches())
    assert numpy.array_equal(load_images("cifar-10", folder).labels, rows[:, 0])


def test_an_archive_without_a_batch_is_refused(folder: Path) -> None:
    held = {name: content for name, content in members().items() if name != BATCH}
    (folder / "cifar-10-binary.tar.gz").write_bytes(files.archive_of(held))
    with pytest.raises(ProblemError, match=f"cifar-10-binary.tar.gz lacks {BATCH}"):
        load_images("cifar-10", folder)


def test_a_batch_cut_off_in_an_archive_is_named(folder: Path) -> None:
    (folder / "cifar-10-binary.tar.gz").write_bytes(files.archive_of({**members(), BATCH: b"\1\2"}))
    with pytest.raises(ProblemError, match=f"cifar-10-binary.tar.gz, {BATCH}, is cut off: 2 bytes"):
        load_images("cifar-10", folder)


def test_an_archive_cut_off_or_changed_anywhere_is_refused_and_never_half_read(folder: Path) -> None:
    whole = files.archive_of(members())
    path = folder / "cifar-10-binary.tar.gz"
    fault = r"cifar-10-binary.tar.gz(, cifar-10-batches-bin/data_batch_\d.bin,)? (is|lacks|has)"
    generator = numpy.random.default_rng(0)
    for end in generator.integers(1, len(whole) * 9 // 10, 20):
        path.write_bytes(whole[:end])
        for look in (check_images, load_images):
            with pytest.raises(ProblemError, match=fault):
                look("cifar-10", folder)
    refused = 0
    for place in generator.integers(10, len(whole) * 9 // 10, 40):
        bad = bytearray(whole)
        bad[place] ^= 0x04
        path.write_bytes(bad)
        try:
            images = load_images("cifar-10", folder)
        except ProblemError:
            refused += 1
            continue
        # The change was in a date or an owner's name of the archive.
        assert numpy.array_equal(images.labels, numpy.concatenate(files.small_batches())[:, 0])
    assert refused > 30


def test_something_else_under_the_name_of_the_archive_is_refused(folder: Path) -> None:
    (folder / "cifar-10-binary.tar.gz").write_bytes(gzip.compress(b"no archive" * 1000))
    with pytest.raises(ProblemError, match="cifar-10-binary.tar.gz is not a whole tar archive"):
        load_images("cifar-10", folder)
