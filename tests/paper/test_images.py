"""Images from hand-made files in the published formats: values, places, downloads, and what is refused."""

from __future__ import annotations

import gzip
import hashlib
import io
import struct
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

from hessinit.digits import load_digits
from hessinit.errors import ProblemError
from hessinit_paper.images import IMAGES, LABELS, PUBLISHED, load_images

PIXELS = numpy.random.default_rng(0).integers(0, 256, (12, 28, 28), numpy.uint8)
CLASSES = (numpy.arange(12) % 10).astype(numpy.uint8)
ROWS = numpy.random.default_rng(1).integers(0, 256, (5, 4, 3073), numpy.uint8)
ROWS[:, :, 0] %= 10


def idx(values: numpy.ndarray) -> bytes:
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


FILES = {
    "mnist": {IMAGES: idx(PIXELS), LABELS: idx(CLASSES)},
    "fashion-mnist": {IMAGES: idx(255 - PIXELS), LABELS: idx(9 - CLASSES)},
    "cifar-10": {f"data_batch_{number}.bin": rows.tobytes() for number, rows in enumerate(ROWS, start=1)},
}


@pytest.fixture(autouse=True)
def small_sets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hand-made files are the published ones."""
    for name, contents in FILES.items():
        rows = 4 if name == "cifar-10" else 12
        files = {
            file: (md5(contents[file]), header, (rows, *shape[1:]))
            for file, (_, header, shape) in PUBLISHED[name].files.items()
        }
        monkeypatch.setitem(PUBLISHED, name, PUBLISHED[name]._replace(files=files))
    load_images.cache_clear()
    yield
    load_images.cache_clear()


def put(folder: Path, name: str = "mnist", packed: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in FILES[name].items():
        (folder / f"{file}{'.gz' * packed}").write_bytes(gzip.compress(content) if packed else content)
    return folder


@pytest.mark.parametrize("place", [".", "mnist", "MNIST/raw"])
def test_idx_files_are_read_from_the_usual_places_and_told_apart(place: str, tmp_path: Path) -> None:
    put(tmp_path / "fashion-mnist", "fashion-mnist", packed=place == ".")
    put(tmp_path / place, packed=place != ".")
    for name, pixels, classes in (("mnist", PIXELS, CLASSES), ("fashion-mnist", 255 - PIXELS, 9 - CLASSES)):
        images = load_images(name, str(tmp_path))
        inputs, labels = images.batch(torch.arange(12), flat=True)
        assert inputs.dtype == torch.float32
        assert torch.equal(inputs, torch.from_numpy(pixels).float().flatten(1) / 255)
        assert labels.tolist() == classes.tolist()
        assert (images.examples, images.shape) == (12, (1, 28, 28))
        assert images.source == f"{IMAGES} md5 {md5(idx(pixels))}; {LABELS} md5 {md5(idx(classes))}"


def check_cifar(data_dir: str | None) -> None:
    images, rows = load_images("cifar-10", data_dir), ROWS.reshape(20, 3073)
    assert images.labels.tolist() == rows[:, 0].tolist()
    assert torch.equal(images.pixels, torch.from_numpy(rows[:, 1:].reshape(20, 3, 32, 32)))
    assert images.source.startswith(f"data_batch_1.bin md5 {md5(ROWS[0].tobytes())}; data_batch_2.bin md5 ")


def test_cifar_batches_are_read_in_order(tmp_path: Path) -> None:
    put(tmp_path / "cifar-10" / "cifar-10-batches-bin", "cifar-10")
    check_cifar(str(tmp_path))


# What lies in the place of a published file.
MALFORMED = {
    "missing": (LABELS, None),
    "cut off": (IMAGES, idx(PIXELS)[:-1]),
    "another label": (LABELS, idx(CLASSES)[:-1] + b"\x09"),
    "gzip cut off": (IMAGES, gzip.compress(idx(PIXELS))[:-9]),
    "gzip checksum": (LABELS, gzip.compress(idx(CLASSES))[:-8] + bytes(8)),
    "wrong batch": ("data_batch_2.bin", ROWS[0].tobytes()),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_refused_by_name(case: str, tmp_path: Path) -> None:
    file, content = MALFORMED[case]
    name = "mnist" if file in FILES["mnist"] else "cifar-10"
    (put(tmp_path, name) / file).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    wrong = rf" \({tmp_path}/{file}: another content\)" if content else ""
    message = rf"does not hold \S+'s {file}, gzipped or not, with md5 \w+{wrong}. Put the published .*digits"
    with pytest.raises(ProblemError, match=message):
        load_images(name, str(tmp_path))


def test_the_digits_are_the_embedded_ones_and_an_epoch_has_each_at_most_once() -> None:
    images, (inputs, labels) = load_images("digits"), load_digits()
    assert torch.equal(images.batch(torch.arange(1797), flat=False)[0], inputs)
    assert torch.equal(images.labels, labels)
    content = (inputs * 16).byte().numpy().tobytes() + labels.byte().numpy().tobytes()
    assert images.source == f"embedded digits md5 {md5(content)}"
    epoch = torch.cat(list(images.epoch(100, torch.Generator())))
    assert len(epoch) == len(set(epoch.tolist())) == 1700


def test_files_are_downloaded_once_and_failures_name_the_ways_out(tmp_path: Path, monkeypatch) -> None:
    pooch = pytest.importorskip("pooch")
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as packed:
        for name, content in FILES["cifar-10"].items():
            information = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            information.size = len(content)
            packed.addfile(information, io.BytesIO(content))
    asked = []

    class Server:
        def __init__(self, **_: object) -> None: ...

        def __call__(self, url: str, output: str, *_: object) -> None:
            asked.append(url)
            Path(output).write_bytes(held.getvalue())

    monkeypatch.setattr(pooch, "HTTPDownloader", Server)
    monkeypatch.setattr(pooch, "os_cache", lambda name: tmp_path / name)
    with pytest.raises(ProblemError, match=r"tar.gz could not be downloaded .*hash.* pass --data-dir FOLDER"):
        load_images("cifar-10")  # not the published archive
    downloads = {"cifar-10-binary.tar.gz": md5(held.getvalue())}
    monkeypatch.setitem(PUBLISHED, "cifar-10", PUBLISHED["cifar-10"]._replace(downloads=downloads))
    check_cifar(None)
    load_images.cache_clear()
    check_cifar(None)  # what is in the cache is not asked for again
    assert asked == ["https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"] * 2
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ProblemError, match=r"pip install 'hessinit\[paper\]', pass --data-dir"):
        load_images("mnist")
