from __future__ import annotations

import shutil
from pathlib import Path

import image_files as files
import pytest

from hessinit.errors import ProblemError
from hessinit.paper.images.folder import find_cifar, find_idx
from hessinit.paper.images.load import check_images, load_images
from hessinit.paper.images.official import OFFICIAL, CifarSet, IdxSet

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def idx_set(name: str) -> IdxSet:
    known = OFFICIAL[name]
    assert isinstance(known, IdxSet)
    return known


def cifar_set() -> CifarSet:
    known = OFFICIAL["cifar-10"]
    assert isinstance(known, CifarSet)
    return known


def put(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"content")


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("mnist", "mnist"),
        ("mnist", "MNIST/raw"),
        ("mnist", "."),
        ("fashion-mnist", "fashion-mnist"),
        ("fashion-mnist", "FashionMNIST/raw"),
        ("fashion-mnist", "."),
    ],
)
@pytest.mark.parametrize(
    ("images", "labels"),
    [
        (IMAGES, LABELS),
        (f"{IMAGES}.gz", f"{LABELS}.gz"),
        (f"{IMAGES}.gz", LABELS),
        ("train-images.idx3-ubyte", "train-labels.idx1-ubyte"),
        ("train-images.idx3-ubyte.gz", "train-labels.idx1-ubyte.gz"),
    ],
)
def test_the_usual_names_are_found_in_the_usual_places(
    name: str, place: str, images: str, labels: str, tmp_path: Path
) -> None:
    put(tmp_path / place / images, tmp_path / place / labels)
    found = find_idx(tmp_path, idx_set(name))
    assert (found.images, found.labels) == (tmp_path / place / images, tmp_path / place / labels)


def test_both_files_come_from_one_place(tmp_path: Path) -> None:
    put(tmp_path / "mnist" / IMAGES, tmp_path / "MNIST/raw" / IMAGES, tmp_path / "MNIST/raw" / LABELS)
    assert find_idx(tmp_path, idx_set("mnist")).images == tmp_path / "MNIST/raw" / IMAGES


def test_a_folder_of_the_same_name_does_not_hide_a_file(tmp_path: Path) -> None:
    # So lie the files in one of the archives that are passed around.
    put(tmp_path / IMAGES / IMAGES, tmp_path / "train-images.idx3-ubyte", tmp_path / LABELS)
    assert find_idx(tmp_path, idx_set("mnist")).images == tmp_path / "train-images.idx3-ubyte"


def test_the_file_that_is_missing_is_named(tmp_path: Path) -> None:
    put(tmp_path / "mnist" / IMAGES)
    with pytest.raises(ProblemError, match=f"mnist/{IMAGES} is there without {LABELS}.*leave --data-dir out"):
        load_images("mnist", tmp_path)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar-10"])
def test_an_empty_folder_is_told_what_to_hold(name: str, tmp_path: Path) -> None:
    needed = "cifar-10-batches-bin, cifar-10-batches-py" if name == "cifar-10" else f"{IMAGES} and {LABELS}"
    for look in (check_images, load_images):
        with pytest.raises(ProblemError, match=f"does not hold .*Add {needed}.*--data digits"):
            look(name, tmp_path)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="data_dir='.*/nowhere' is not there; give a folder"):
        check_images("mnist", tmp_path / "nowhere")


def test_a_file_in_place_of_the_data_folder_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "data.zip")
    for name in ("mnist", "cifar-10"):
        with pytest.raises(ProblemError, match="data_dir='.*/data.zip' is a file; give the folder"):
            check_images(name, tmp_path / "data.zip")


def test_the_home_folder_may_be_written_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    files.describe_small_mnist(monkeypatch)
    files.write_mnist(tmp_path / "data")
    assert load_images("mnist", "~/data").name == "mnist"


@pytest.mark.parametrize("base", [".", "cifar-10"])
@pytest.mark.parametrize(
    ("place", "suffix", "pickled"),
    [
        ("cifar-10-batches-bin", ".bin", False),
        ("cifar-10-batches-py", "", True),
        (".", ".bin", False),
        (".", "", True),
    ],
)
def test_batches_are_found_in_order(
    base: str, place: str, suffix: str, pickled: bool, tmp_path: Path
) -> None:
    paths = tuple(tmp_path / base / place / f"data_batch_{number}{suffix}" for number in range(1, 6))
    put(*paths)
    found = find_cifar(tmp_path, cifar_set())
    assert (found.paths, found.pickled, found.archive) == (paths, pickled, False)


@pytest.mark.parametrize("kind", ["binary", "python"])
def test_an_archive_is_found_where_no_batches_are(kind: str, tmp_path: Path) -> None:
    put(tmp_path / f"cifar-10-{kind}.tar.gz")
    found = find_cifar(tmp_path, cifar_set())
    assert (found.archive, found.pickled) == (True, kind == "python")
    assert found.members[4] == f"cifar-10-batches-{'py' if kind == 'python' else 'bin'}/data_batch_5" + (
        ".bin" if kind == "binary" else ""
    )


def test_a_whole_set_is_taken_before_an_incomplete_one(tmp_path: Path) -> None:
    put(tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin")
    put(*(tmp_path / "cifar-10-batches-py" / f"data_batch_{number}" for number in range(1, 6)))
    assert find_cifar(tmp_path, cifar_set()).pickled
    shutil.rmtree(tmp_path / "cifar-10-batches-py")
    match = (
        "cifar-10-batches-bin lacks data_batch_2.bin, data_batch_3.bin, data_batch_4.bin, data_batch_5.bin"
    )
    with pytest.raises(ProblemError, match=match):
        find_cifar(tmp_path, cifar_set())
