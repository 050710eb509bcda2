from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import image_files as files
import numpy
import pytest
import torch

from hessinit.digits import load_digits
from hessinit.errors import ProblemError
from hessinit.paper.images.load import check_images, load_images
from hessinit.paper.images.official import KNOWN, OFFICIAL, IdxSet


def real_data() -> Path:
    if "HESSINIT_DATA" not in os.environ:
        pytest.skip("HESSINIT_DATA names no folder with the real MNIST, Fashion-MNIST and CIFAR-10")
    return Path(os.environ["HESSINIT_DATA"])


def test_the_digits_are_those_that_are_embedded() -> None:
    images = load_images("digits")
    inputs, targets = load_digits()
    assert torch.equal(images.inputs(flat=False), inputs)
    assert torch.equal(images.targets(), targets)
    assert images.top == images.pixels.max() == 16
    assert images.pixels.dtype == images.labels.dtype == numpy.uint8
    check_images("digits")


def test_the_source_of_the_digits_is_the_md5_of_pixels_and_labels() -> None:
    images = load_images("digits")
    assert (
        images.source == f"embedded digits md5 {files.md5(images.pixels.tobytes() + images.labels.tobytes())}"
    )


def test_inputs_lie_between_zero_and_one_and_keep_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.describe_small_mnist(monkeypatch)
    files.write_mnist(tmp_path)
    images = load_images("mnist", tmp_path)
    shaped, flat = images.inputs(flat=False), images.inputs(flat=True)
    assert (shaped.shape, flat.shape) == ((files.COUNT, 1, 28, 28), (files.COUNT, 784))
    assert shaped.dtype == flat.dtype == torch.float32
    assert torch.equal(shaped, torch.from_numpy(files.small_images()).unsqueeze(1).float() / 255)
    assert torch.equal(shaped.flatten(1), flat)
    assert images.targets().dtype == torch.int64
    assert images.targets().tolist() == files.small_labels().tolist()


def test_writing_to_the_inputs_leaves_the_images_as_they_were() -> None:
    images = load_images("digits")
    images.inputs(flat=True).zero_()
    images.targets().zero_()
    assert images.pixels.any()
    assert images.labels.any()


def test_the_source_names_files_and_contents_and_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.describe_small_mnist(monkeypatch)
    files.write_mnist(tmp_path / "mnist", packed=True)
    images = files.md5(files.idx_bytes(files.small_images()))
    labels = files.md5(files.idx_bytes(files.small_labels()))
    source = load_images("mnist", tmp_path).source
    assert source == f"train-images-idx3-ubyte md5 {images}; train-labels-idx1-ubyte md5 {labels}"


@pytest.mark.parametrize(
    ("name", "meant"),
    [("minst", "mnist"), ("cifar10", "cifar-10"), ("fashion", "fashion-mnist"), ("CIFAR", "cifar-10")],
)
def test_a_name_that_is_unknown_is_answered_with_the_known_ones(name: str, meant: str) -> None:
    for look in (check_images, load_images):
        with pytest.raises(
            ProblemError, match=f"data='{name}' is unknown; .*'digits'. Did you mean '{meant}'"
        ):
            look(name, None)


def test_every_official_file_is_known_by_its_content() -> None:
    for known in OFFICIAL.values():
        held = (known.images, known.labels) if isinstance(known, IdxSet) else known.batches
        for file in held:
            assert KNOWN[file.md5].startswith(known.title)


# Means over 255 as the literature gives them, and the first labels as every tutorial shows them.
REAL = {
    "mnist": ((60_000, 1, 28, 28), [5, 0, 4, 1, 9, 2, 1, 3, 1, 4], [0.1307], 0.5),
    "fashion-mnist": ((60_000, 1, 28, 28), [9, 0, 0, 3, 0, 2, 7, 2, 5, 5], [0.2860], 1.5),
    "cifar-10": ((50_000, 3, 32, 32), [6, 9, 9, 4, 1, 1, 2, 7, 8, 3], [0.4914, 0.4822, 0.4465], 1.0),
}


@pytest.mark.parametrize("name", REAL)
def test_the_real_images_have_the_means_that_are_known_of_them(name: str) -> None:
    folder = real_data()
    shape, first, means, seconds = REAL[name]
    check_images(name, folder)
    load_images(name, folder)  # the first variant may wait for the disk
    start = time.process_time()
    images = load_images(name, folder)
    assert time.process_time() - start < seconds
    assert images.pixels.shape == shape
    assert images.labels[:10].tolist() == first
    assert images.pixels.mean((0, 2, 3)) / 255 == pytest.approx(means, abs=1e-4)
    assert numpy.ptp(images.pixels) == images.top == 255
    counts = numpy.bincount(images.labels)
    assert len(counts) == 10
    assert name == "mnist" or set(counts) == {shape[0] // 10}


def test_fashion_under_the_name_of_mnist_is_told_as_such(tmp_path: Path) -> None:
    shutil.copytree(real_data() / "fashion-mnist", tmp_path / "mnist")
    with pytest.raises(
        ProblemError, match="labels-idx1-ubyte.gz is Fashion-MNIST's training labels .md5 9018"
    ):
        load_images("mnist", tmp_path)


def test_the_test_images_in_place_of_the_training_ones_are_refused(tmp_path: Path) -> None:
    shutil.copytree(real_data() / "mnist", tmp_path / "mnist")
    os.replace(tmp_path / "mnist/t10k-images-idx3-ubyte", tmp_path / "mnist/train-images-idx3-ubyte")
    with pytest.raises(ProblemError, match="holds 10000 × 28 × 28 values; MNIST's .* holds 60000 × 28 × 28"):
        check_images("mnist", tmp_path)


def test_the_test_batch_in_place_of_a_training_one_is_told_as_such(tmp_path: Path) -> None:
    for number in range(1, 6):
        name = f"cifar-10-batches-bin/data_batch_{number}.bin"
        source = real_data() / (name if number != 2 else "cifar-10-batches-bin/test_batch.bin")
        (tmp_path / f"data_batch_{number}.bin").symlink_to(source.resolve())
    with pytest.raises(ProblemError, match="data_batch_2.bin is CIFAR-10's test batch .md5 803d"):
        load_images("cifar-10", tmp_path)


def test_the_real_batches_pickled_as_python_2_did_are_the_same_images(tmp_path: Path) -> None:
    folder = real_data()
    for number in range(1, 6):
        content = (folder / f"cifar-10-batches-bin/data_batch_{number}.bin").read_bytes()
        rows = numpy.frombuffer(content, numpy.uint8).reshape(10_000, 3073)
        (tmp_path / f"data_batch_{number}").write_bytes(files.python_2_batch(rows))
    check_images("cifar-10", tmp_path)
    images, known = load_images("cifar-10", tmp_path), load_images("cifar-10", folder)
    assert numpy.array_equal(images.pixels, known.pixels)
    assert images.source == known.source
