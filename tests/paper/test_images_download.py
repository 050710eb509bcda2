from __future__ import annotations

import gzip
import io
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import image_files as files
import numpy
import pytest
from rich.console import Console

from hessinit.errors import ProblemError
from hessinit.paper.images import official
from hessinit.paper.images.download_bar import download_bar
from hessinit.paper.images.load import check_images, load_images
from hessinit.paper.images.official import IdxSet, Offer

pooch = pytest.importorskip("pooch", reason="pooch is not installed: no downloads")

IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
CONTENT = {
    IMAGES: gzip.compress(files.idx_bytes(files.small_images()), mtime=0),
    LABELS: gzip.compress(files.idx_bytes(files.small_labels()), mtime=0),
}


class Mirror(BaseHTTPRequestHandler):
    """Serves the small files, well or badly by the folder that is asked for."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        manner, name = self.path.strip("/").split("/")
        content = CONTENT[name]
        if manner == "gone":
            self.send_error(404)
            return
        self.send_response(200)
        if manner != "unmeasured":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if manner == "wrong":
            content = content[:-1] + bytes([content[-1] ^ 1])
        self.wfile.write(content if manner in ("good", "wrong") else content[: len(content) // 2])

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: the tests look at stderr."""


@pytest.fixture
def server() -> Iterator[str]:
    Mirror.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Mirror) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}/"
        running.shutdown()
        thread.join()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache" / project)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return tmp_path / "cache" / "hessinit" / "mnist"


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., IdxSet]:
    """Let MNIST be the small files, offered by the given mirrors."""

    def describe(*mirrors: str) -> IdxSet:
        offers = tuple(Offer(name, files.md5(content), mirrors) for name, content in CONTENT.items())
        small = replace(files.describe_small_mnist(monkeypatch), offers=offers)
        monkeypatch.setitem(official.OFFICIAL, "mnist", small)
        return small

    return describe


def held(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*"))


def test_a_set_is_downloaded_once_and_then_read_from_the_cache(
    server: str, cache: Path, offer: Callable[..., IdxSet], capfd: pytest.CaptureFixture[str]
) -> None:
    offer(f"{server}good/")
    check_images("mnist")
    assert Mirror.asked == []  # the check downloads nothing
    images = load_images("mnist")
    assert numpy.array_equal(images.pixels[:, 0], files.small_images())
    assert held(cache) == [IMAGES, LABELS]
    again = load_images("mnist")
    assert numpy.array_equal(again.labels, files.small_labels())
    assert Mirror.asked == [f"/good/{IMAGES}", f"/good/{LABELS}"]
    assert capfd.readouterr() == ("", "")  # nothing is printed where nobody watches


def closed_port() -> str:
    with ThreadingHTTPServer(("127.0.0.1", 0), Mirror) as short:
        return f"http://127.0.0.1:{short.server_port}/"


@pytest.mark.parametrize("manner", ["gone", "wrong", "cut", "unmeasured", "down"])
def test_the_next_mirror_is_taken_when_one_fails(
    manner: str, server: str, cache: Path, offer: Callable[..., IdxSet]
) -> None:
    first = closed_port() if manner == "down" else f"{server}{manner}/"
    offer(first, f"{server}good/")
    assert numpy.array_equal(load_images("mnist").pixels[:, 0], files.small_images())
    assert held(cache) == [IMAGES, LABELS]


@pytest.mark.parametrize(
    ("manner", "reason"),
    [
        ("gone", "HTTP 404"),
        ("wrong", "another checksum"),
        ("cut", "the connection was cut"),
        ("unmeasured", "another checksum"),
        ("down", "no connection"),
    ],
)
def test_a_failed_download_leaves_nothing_and_says_what_was_tried(
    manner: str, reason: str, server: str, cache: Path, offer: Callable[..., IdxSet]
) -> None:
    first = closed_port() if manner == "down" else f"{server}{manner}/"
    offer(first, f"{server}gone/")
    message = (
        f"MNIST could not be downloaded; tried {first}{IMAGES} ({reason}), {server}gone/{IMAGES} (HTTP 404). "
        "Try again with a connection, or pass --data-dir FOLDER that holds train-images-idx3-ubyte and "
        "train-labels-idx1-ubyte (packed as .gz or not), in a folder mnist or directly, "
        "or run on the embedded --data digits."
    )
    with pytest.raises(ProblemError, match=f"^{re.escape(message)}$"):
        load_images("mnist")
    assert held(cache) == []


def test_a_damaged_file_in_the_cache_is_downloaded_again(
    server: str, cache: Path, offer: Callable[..., IdxSet]
) -> None:
    offer(f"{server}good/")
    load_images("mnist")
    (cache / IMAGES).write_bytes(CONTENT[IMAGES][:100])
    assert numpy.array_equal(load_images("mnist").pixels[:, 0], files.small_images())
    assert (cache / IMAGES).read_bytes() == CONTENT[IMAGES]


def test_a_damaged_file_in_the_cache_is_not_used_when_it_cannot_be_downloaded(
    cache: Path, offer: Callable[..., IdxSet]
) -> None:
    offer(closed_port())
    cache.mkdir(parents=True)
    (cache / IMAGES).write_bytes(CONTENT[IMAGES][:100])
    with pytest.raises(ProblemError, match="MNIST could not be downloaded"):
        load_images("mnist")


def test_what_a_killed_download_left_is_removed_and_one_under_way_is_not(
    server: str, cache: Path, offer: Callable[..., IdxSet]
) -> None:
    offer(f"{server}good/")
    cache.mkdir(parents=True)
    for name, age in (("tmpabandoned", 3600), ("tmpunderway", 5)):
        (cache / name).write_bytes(b"half")
        os.utime(cache / name, (time.time() - age, time.time() - age))
    load_images("mnist")
    assert held(cache) == ["tmpunderway", IMAGES, LABELS]


def test_a_cache_that_cannot_be_written_is_named(
    server: str, cache: Path, offer: Callable[..., IdxSet]
) -> None:
    offer(f"{server}good/")
    cache.parent.parent.mkdir(parents=True)
    cache.parent.write_bytes(b"a file in place of the folder")
    with pytest.raises(ProblemError, match="hessinit/mnist cannot be used as the cache .*or pass --data-dir"):
        load_images("mnist")


def test_a_data_folder_is_enough_and_nothing_is_downloaded(
    server: str, cache: Path, offer: Callable[..., IdxSet], tmp_path: Path
) -> None:
    offer(f"{server}good/")
    (tmp_path / "mine").mkdir()
    with pytest.raises(ProblemError, match="does not hold MNIST's training files"):
        load_images("mnist", tmp_path / "mine")
    assert Mirror.asked == []


def test_without_pooch_the_ways_out_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    for look in (check_images, load_images):
        with pytest.raises(
            ProblemError, match="pip install 'hessinit.paper.', or pass --data-dir.*--data digits"
        ):
            look("cifar-10")
    load_images("digits")


def test_poochs_own_messages_come_back_afterwards(
    server: str, cache: Path, offer: Callable[..., IdxSet]
) -> None:
    offer(f"{server}wrong/")
    logger = logging.getLogger("pooch")
    before = pooch.get_logger().level
    with pytest.raises(ProblemError, match="another checksum"):
        load_images("mnist")
    assert logger.level == pooch.get_logger().level == before


def test_the_bar_shows_the_file_and_is_full_at_the_end(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, color_system=None)
    with download_bar(IMAGES, console) as bar:
        fetch = pooch.HTTPDownloader(progressbar=bar, chunk_size=100)
        fetch(f"{server}good/{IMAGES}", str(tmp_path / "file"), None)
        assert bar is not None
        assert bar.total == len(CONTENT[IMAGES])
    assert IMAGES in screen.getvalue()
    sizes = re.findall(r"([\d.]+)/([\d.]+) kB", screen.getvalue())
    assert sizes[-1] == (f"{len(CONTENT[IMAGES]) / 1000:.1f}",) * 2


def test_the_bar_stops_when_the_download_fails() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, color_system=None)

    def fail() -> None:
        with download_bar(IMAGES, console) as bar:
            assert bar is not None
            bar.total = 100
            raise RuntimeError("cut")

    with pytest.raises(RuntimeError, match="cut"):
        fail()
    assert IMAGES in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[?25h")  # the cursor is back


def test_there_is_no_bar_where_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with download_bar(IMAGES) as bar:
        assert bar is None


def test_a_file_in_the_cache_shows_no_bar_to_one_who_watches(
    server: str, cache: Path, offer: Callable[..., IdxSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    offer(f"{server}good/")
    first, second = Terminal(), Terminal()
    for screen in (first, second):
        monkeypatch.setattr(sys, "stderr", screen)
        load_images("mnist")
    assert IMAGES in first.getvalue()
    assert second.getvalue() == ""
