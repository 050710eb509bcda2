from __future__ import annotations

import gzip
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import image_files as files
import numpy
import pytest

from hessinit.errors import ProblemError
from hessinit.paper.images.load import check_images, load_images

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with a small MNIST whose files are taken for the official ones."""
    files.describe_small_mnist(monkeypatch)
    files.write_mnist(tmp_path / "mnist")
    return tmp_path


def refusals(folder: Path) -> list[str]:
    """What the cheap check says, and what the variant says: both must refuse it, and name a way out."""
    said = []
    for look in (check_images, load_images):
        with pytest.raises(ProblemError, match="--data digits") as caught:
            look("mnist", folder)
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("packed", [False, True])
def test_the_values_are_those_that_were_written(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.describe_small_mnist(monkeypatch)
    files.write_mnist(tmp_path / "mnist", packed)
    check_images("mnist", tmp_path)
    images = load_images("mnist", tmp_path)
    assert numpy.array_equal(images.pixels[:, 0], files.small_images())
    assert numpy.array_equal(images.labels, files.small_labels())
    assert (images.pixels.dtype, images.labels.dtype) == (numpy.uint8, numpy.uint8)
    assert images.pixels.shape == (files.COUNT, 1, 28, 28)


def test_the_values_may_be_written_to(folder: Path) -> None:
    images = load_images("mnist", folder)
    images.pixels[0], images.labels[0] = 7, 7
    assert load_images("mnist", folder).labels[0] == 0


@pytest.mark.parametrize("packed", [False, True])
def test_the_packing_is_told_from_the_bytes_and_not_from_the_name(folder: Path, packed: bool) -> None:
    path = folder / "mnist" / LABELS
    content = path.read_bytes()
    path.unlink()
    if packed:
        path.write_bytes(gzip.compress(content))
    else:
        path.with_name(f"{LABELS}.gz").write_bytes(content)
    check_images("mnist", folder)
    assert numpy.array_equal(load_images("mnist", folder).labels, files.small_labels())


def test_gzip_data_in_several_parts_passes_the_quick_check_too(folder: Path) -> None:
    path = folder / "mnist" / IMAGES
    content = path.read_bytes()
    path.write_bytes(gzip.compress(content[:500]) + gzip.compress(content[500:]))
    check_images("mnist", folder)
    assert numpy.array_equal(load_images("mnist", folder).pixels[:, 0], files.small_images())


def header_of(kind: int, *sizes: int) -> Callable[[bytes], bytes]:
    head = bytes([0, 0, kind, len(sizes)]) + b"".join(size.to_bytes(4, "big") for size in sizes)
    return lambda content: head + content[16:]


FAULTS = {
    "empty": (lambda content: b"", "is empty"),
    "three bytes": (lambda content: content[:3], "cut off: 3 bytes, and an idx header"),
    "half a header": (lambda content: content[:9], "cut off: 9 bytes, and its header alone has 16"),
    "a web page": (lambda content: b"<!DOCTYPE html>" + content, "no idx file: it begins with 3c 21 44 4f"),
    "an unknown type": (header_of(0x07, files.COUNT, 28, 28), "begins with 00 00 07 03, not with 00 00 08"),
    "floats": (header_of(0x0D, files.COUNT, 28, 28), "holds float32 values .type 0x0d.; uint8 is needed"),
    "another count": (
        header_of(0x08, files.COUNT - 1, 28, 28),
        "holds 11 × 28 × 28 values; .* holds 12 × 28",
    ),
    "another size": (header_of(0x08, files.COUNT, 32, 32), "holds 12 × 32 × 32 values"),
    "flat": (header_of(0x08, files.COUNT, 784), "holds 12 × 784 values"),
    "no sizes": (header_of(0x08), "holds no values"),
    "cut off": (lambda content: content[:-1], "is cut off: 9,423 bytes of 9,424"),
    "longer": (lambda content: content + b"\0", "is too long: it has more than 9,424 bytes"),
    "packed and cut off": (lambda content: gzip.compress(content)[:-20], "is cut off: its gzip data ends"),
    "packed, its end lost": (lambda content: gzip.compress(content)[:-8], "is cut off: its gzip data ends"),
    "a packing of nothing": (lambda content: gzip.compress(b""), "cut off: 0 bytes"),
    "only the mark of gzip": (lambda content: b"\x1f\x8b", "is cut off"),
    "packed and shorter": (lambda content: gzip.compress(content[:-1]), "is cut off: 9,423 bytes of 9,424"),
    "packed and longer": (lambda content: gzip.compress(content + b"\0"), "is too long"),
    "an unknown packing": (lambda content: b"\x1f\x8b\x07" + content, "is corrupt"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_is_not_whole_is_named_and_refused(folder: Path, fault: str) -> None:
    damage, match = FAULTS[fault]
    path = folder / "mnist" / IMAGES
    path.write_bytes(damage(path.read_bytes()))
    for message in refusals(folder):
        assert re.search(f"mnist/{IMAGES} .*{match}", message), message


def test_a_byte_changed_in_packed_data_is_refused(folder: Path) -> None:
    path = folder / "mnist" / IMAGES
    good = gzip.compress(path.read_bytes())
    for place in numpy.random.default_rng(0).integers(10, len(good) - 4, 50):
        bad = bytearray(good)
        bad[place] ^= 0x10
        path.write_bytes(bad)
        with pytest.raises(
            ProblemError, match=f"mnist/{IMAGES} (is corrupt|is cut off|holds|is no idx|is too)"
        ):
            load_images("mnist", folder)


def test_a_label_above_nine_is_refused_with_its_place(folder: Path) -> None:
    labels = files.small_labels()
    labels[7] = 26
    (folder / "mnist" / LABELS).write_bytes(files.idx_bytes(labels))
    with pytest.raises(ProblemError, match=f"{LABELS} has the label 26 at position 7; labels are 0 to 9"):
        load_images("mnist", folder)


def test_a_file_of_the_right_form_with_other_content_is_refused(folder: Path) -> None:
    images = files.small_images()
    images[3, 4, 5] ^= 1
    content = files.idx_bytes(images)
    (folder / "mnist" / IMAGES).write_bytes(content)
    match = f"{IMAGES} is of the right form, but not the official one .md5 {files.md5(content)}.; MNIST's"
    with pytest.raises(ProblemError, match=match):
        load_images("mnist", folder)


def test_a_folder_in_place_of_a_file_is_refused(folder: Path) -> None:
    (folder / "mnist" / IMAGES).unlink()
    (folder / "mnist" / IMAGES).mkdir()
    for message in refusals(folder):
        assert f"mnist/{IMAGES} is a folder; a file is needed" in message


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_in_place_of_a_file_is_refused_at_once(folder: Path) -> None:
    (folder / "mnist" / IMAGES).unlink()
    os.mkfifo(folder / "mnist" / IMAGES)
    for message in refusals(folder):
        assert f"mnist/{IMAGES} is no plain file" in message


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that others may enter: pytest's own is closed to all but the user."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture
def as_ordinary_user() -> Iterator[Callable[[], None]]:
    """A call that gives up root's right to read everything, until the test is over."""
    if not hasattr(os, "seteuid"):
        pytest.skip("this system has no users to change to")
    before = os.geteuid()
    yield lambda: os.seteuid(65534) if before == 0 else None
    os.seteuid(before)


@pytest.mark.parametrize("closed", [f"mnist/{IMAGES}", "mnist"])
def test_what_may_not_be_read_is_named(
    closed: str,
    open_folder: Path,
    as_ordinary_user: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files.describe_small_mnist(monkeypatch)
    files.write_mnist(open_folder / "mnist")
    (open_folder / closed).chmod(0)
    as_ordinary_user()
    try:
        for message in refusals(open_folder):
            assert re.search("mnist/train-.* cannot be read .Permission denied.", message), message
    finally:
        if os.geteuid() != 65534:
            (open_folder / closed).chmod(0o755)  # for the cleaning up
