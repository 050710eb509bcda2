"""Images from hand-made files in the published formats: values, places, downloads, and what is refused."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import struct
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy
import pytest
import torch

from hessinit.digits import load_digits
from hessinit.errors import ProblemError
from hessinit.paper.images import PUBLISHED, ImageSet, load_images

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
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
    "cifar-10": {f"data_batch_{number}.bin": rows.tobytes() for number, rows in enumerate(ROWS, start=1)},
}
FILES["fashion-mnist"] = FILES["mnist"]


@pytest.fixture(autouse=True)
def small_sets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hand-made files are the published ones."""
    for name, contents in FILES.items():
        rows = 4 if name == "cifar-10" else 12
        files = {
            file: (md5(contents[file]), header, (rows, *shape[1:]))
            for file, (_, header, shape) in PUBLISHED[name].files.items()
        }
        monkeypatch.setitem(PUBLISHED, name, replace(PUBLISHED[name], files=files))
    load_images.cache_clear()
    yield
    load_images.cache_clear()


def put(folder: Path, name: str = "mnist", packed: bool = False, **changed: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in {**FILES[name], **changed}.items():
        (folder / f"{file}{'.gz' * packed}").write_bytes(gzip.compress(content) if packed else content)
    return folder


def archive(folder: str = "cifar-10-batches-bin", **changed: bytes) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as packed:
        for name, content in {**FILES["cifar-10"], **changed}.items():
            information = tarfile.TarInfo(f"{folder}/{name}")
            information.size = len(content)
            packed.addfile(information, io.BytesIO(content))
    return held.getvalue()


def check_mnist(images: ImageSet) -> None:
    inputs, labels = images.batch(torch.arange(12), flat=True)
    assert inputs.dtype == torch.float32
    assert torch.equal(inputs, torch.from_numpy(PIXELS).float().flatten(1) / 255)
    assert labels.tolist() == CLASSES.tolist()
    assert (images.examples, images.shape) == (12, (1, 28, 28))
    assert images.source == f"{IMAGES} md5 {md5(idx(PIXELS))}; {LABELS} md5 {md5(idx(CLASSES))}"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("mnist", "mnist"),
        ("mnist", "MNIST/raw"),
        ("fashion-mnist", "FashionMNIST/raw"),
        ("fashion-mnist", "."),
    ],
)
def test_idx_files_are_read_from_the_usual_places(
    name: str, place: str, packed: bool, tmp_path: Path
) -> None:
    put(tmp_path / place, packed=packed)
    if place == ".":
        (tmp_path / IMAGES).with_suffix(".gz" * packed).rename(tmp_path / f"{IMAGES}.gz")  # unpacked or not
    check_mnist(load_images(name, str(tmp_path)))


@pytest.mark.parametrize(
    "place",
    [
        "cifar-10-batches-bin",
        "cifar-10/cifar-10-batches-bin",
        ".",
        "cifar-10-binary.tar.gz",
        "cifar-10/cifar-10-binary.tar.gz",
    ],
)
def test_cifar_batches_are_read_in_order_from_folders_and_the_archive(place: str, tmp_path: Path) -> None:
    if place.endswith(".gz"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_bytes(archive())
    else:
        put(tmp_path / place, "cifar-10")
    images = load_images("cifar-10", str(tmp_path))
    rows = ROWS.reshape(20, 3073)
    assert images.labels.tolist() == rows[:, 0].tolist()
    assert torch.equal(images.pixels, torch.from_numpy(rows[:, 1:].reshape(20, 3, 32, 32)))
    assert images.source.startswith(f"data_batch_1.bin md5 {md5(ROWS[0].tobytes())}; data_batch_2.bin md5 ")


OTHER = idx(CLASSES)[:-1] + b"\x09"
PACKED = gzip.compress(idx(PIXELS))
BATCH_1 = ROWS[0].tobytes()
# What lies in the place of a published file, and what is said of it.
MALFORMED = {
    "missing": (LABELS, None, rf"does not hold MNIST's .* lacks {LABELS}\). Add {IMAGES} and"),
    "empty": (LABELS, b"", rf"{LABELS} is not MNIST's {LABELS}: it has 0 bytes and md5 d41d8"),
    "cut off": (IMAGES, idx(PIXELS)[:-1], "has 9,423 bytes and md5 .* the published file 9,424"),
    "too long": (IMAGES, idx(PIXELS) + b"0", "has more than 9,424 bytes"),
    "another label": (LABELS, OTHER, f"it has 20 bytes and md5 {md5(OTHER)}.*Put the published"),
    "gzip cut off": (IMAGES, PACKED[:-9], f"{IMAGES} cannot be read .*ended before"),
    "gzip corrupt": (IMAGES, b"\x1f\x8b\x08" + bytes(50), f"{IMAGES} cannot be read"),
    "gzip checksum": (LABELS, gzip.compress(idx(CLASSES))[:-8] + bytes(8), "CRC check failed"),
    "missing batch": ("data_batch_3.bin", None, r"lacks data_batch_3.bin\). Add cifar-10-binary"),
    "wrong batch": ("data_batch_2.bin", BATCH_1, "data_batch_2.bin is not CIFAR-10's"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_refused_by_name(case: str, tmp_path: Path) -> None:
    file, content, message = MALFORMED[case]
    name = "cifar-10" if "batch" in file else "mnist"
    (put(tmp_path, name) / file).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(ProblemError, match=message):
        load_images(name, str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no archive", "cannot be read .*not be opened"),
        (archive()[:-40], "cannot be read"),
        (archive(folder="another"), "cifar-10-batches-bin/data_batch_1.bin.* not found"),
        (archive(**{"data_batch_4.bin": b"short"}), "data_batch_4.bin, is not CIFAR-10's .*: it has 5 "),
    ],
)
def test_a_malformed_archive_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(content)
    with pytest.raises(ProblemError, match=message):
        load_images("cifar-10", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "data_dir", "message"),
    [
        ("minst", None, "data='minst' is unknown; .*'digits'. Did you mean 'mnist'"),
        ("cifar10", None, "Did you mean 'cifar-10'"),
        ("fashion", None, "Did you mean 'fashion-mnist'"),
        ("mnist", "/nowhere", "does not hold MNIST's training files .it is not a folder"),
        ("cifar-10", ".", "Add cifar-10-binary.tar.gz .not the Python version.*pickles can run code"),
    ],
)
def test_what_cannot_be_found_is_refused(name: str, data_dir: str | None, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        load_images(name, data_dir)


def test_the_digits_are_the_embedded_ones() -> None:
    images, (inputs, labels) = load_images("digits"), load_digits()
    pixels = (inputs * 16).numpy().astype(numpy.uint8)
    assert torch.equal(images.batch(torch.arange(1797), flat=False)[0], inputs)
    assert torch.equal(images.labels, labels)
    content = pixels.tobytes() + labels.numpy().astype(numpy.uint8).tobytes()
    assert images.source == f"embedded digits md5 {md5(content)}"


def test_an_epoch_has_every_image_at_most_once_in_a_new_order() -> None:
    images = load_images("digits")
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.cat(list(images.epoch(100, generator))) for _ in range(2))
    assert len(first) == len(set(first.tolist())) == 1700
    assert not torch.equal(first, second)
    drawn = images.draw(32, torch.Generator().manual_seed(0))
    assert len(set(drawn.tolist())) == 32


class Mirror(BaseHTTPRequestHandler):
    """Serves the small MNIST below /good/, other bytes below /wrong/, and nothing else."""

    def do_GET(self) -> None:
        kind, name = self.path.strip("/").split("/")
        content = gzip.compress(FILES["mnist"][name.removesuffix(".gz")], mtime=0)
        self.send_response({"good": 200, "wrong": 200}.get(kind, 404))
        body = content if kind == "good" else b"wrong"
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Let MNIST be offered at mirrors of a server on this machine."""
    pooch = pytest.importorskip("pooch")
    monkeypatch.setattr(pooch, "os_cache", lambda name: tmp_path / "cache" / name)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def describe(*kinds: str) -> None:
        files = FILES["mnist"].items()
        packed = {f"{name}.gz": md5(gzip.compress(content, mtime=0)) for name, content in files}
        mirrors = tuple(f"http://127.0.0.1:{server.server_port}/{kind}/" for kind in kinds)
        offered = replace(PUBLISHED["mnist"], downloads=packed, mirrors=mirrors)
        monkeypatch.setitem(PUBLISHED, "mnist", offered)

    yield describe
    server.shutdown()
    server.server_close()


def test_files_are_downloaded_once_from_the_first_good_mirror(
    offer: Callable[..., None], tmp_path: Path
) -> None:
    offer("gone", "wrong", "good")
    check_mnist(load_images("mnist"))
    cached = tmp_path / "cache" / "hessinit" / "mnist"
    assert sorted(path.name for path in cached.iterdir()) == [f"{IMAGES}.gz", f"{LABELS}.gz"]
    offer("gone")  # what is in the cache is not asked for again
    load_images.cache_clear()
    check_mnist(load_images("mnist"))


def test_failed_downloads_name_every_mirror_and_the_ways_out(offer: Callable[..., None]) -> None:
    offer("gone", "wrong")
    message = rf"gone/{IMAGES}.gz \(HTTPError\), .*wrong/{IMAGES}.gz \(ValueError\). Try again .*--data-dir"
    with pytest.raises(ProblemError, match=message):
        load_images("mnist")


def test_without_pooch_the_ways_out_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ProblemError, match=r"pip install 'hessinit\[paper\]', or pass --data-dir"):
        load_images("cifar-10")


# Means over 255 as the literature gives them, and the first labels as every tutorial shows them.
REAL = {
    "mnist": ((60_000, 1, 28, 28), [5, 0, 4, 1, 9, 2, 1, 3, 1, 4], [0.1307]),
    "fashion-mnist": ((60_000, 1, 28, 28), [9, 0, 0, 3, 0, 2, 7, 2, 5, 5], [0.2860]),
    "cifar-10": ((50_000, 3, 32, 32), [6, 9, 9, 4, 1, 1, 2, 7, 8, 3], [0.4914, 0.4822, 0.4465]),
}


@pytest.mark.parametrize("name", REAL)
def test_the_real_images_have_the_means_that_are_known_of_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "HESSINIT_DATA" not in os.environ:
        pytest.skip("HESSINIT_DATA names no folder with the real MNIST, Fashion-MNIST and CIFAR-10")
    monkeypatch.undo()  # the published checksums
    images, (shape, first, means) = load_images(name, os.environ["HESSINIT_DATA"]), REAL[name]
    assert images.pixels.shape == shape
    assert images.labels[:10].tolist() == first
    assert (images.pixels.double().mean((0, 2, 3)) / 255).tolist() == pytest.approx(means, abs=1e-4)
