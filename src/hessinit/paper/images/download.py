"""Download what no folder gives: by pooch, checked, into the usual cache, one mirror after the other."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hessinit.errors import ProblemError
from hessinit.paper.images.contents import look_up
from hessinit.paper.images.download_bar import download_bar
from hessinit.paper.images.folder import wanted_files
from hessinit.paper.images.official import CifarSet, IdxSet, Offer

SECONDS_TO_CONNECT = 10
SECONDS_OF_SILENCE = 30
SECONDS_UNTIL_ABANDONED = 20 * SECONDS_OF_SILENCE


def import_pooch(official: IdxSet | CifarSet) -> Any:
    try:
        import pooch
    except ImportError as error:
        raise ProblemError(
            f"{official.title} is downloaded with pooch, which is not installed. "
            f"Run pip install 'hessinit[paper]', or {other_ways(official)}"
        ) from error
    return pooch


def other_ways(official: IdxSet | CifarSet) -> str:
    return (
        f"pass --data-dir FOLDER that holds {wanted_files(official)}, or run on the embedded --data digits."
    )


def cache_folder(name: str, official: IdxSet | CifarSet) -> Path:
    """Where the files of the set `name` are kept, such as `~/.cache/hessinit/mnist`."""
    return Path(import_pooch(official).os_cache("hessinit")) / name


def fetch(name: str, official: IdxSet | CifarSet) -> Path:
    """The folder with all files of the set, each with its checksum; what is not there yet is downloaded."""
    folder = cache_folder(name, official)
    try:
        remove_abandoned(folder)
        for offer in official.offers:
            fetch_file(offer, folder, official)
    except OSError as error:
        raise ProblemError(
            f"{folder} cannot be used as the cache ({error.strerror or error}). Make it writable, or "
            f"{other_ways(official)}"
        ) from error
    return folder


def fetch_file(offer: Offer, folder: Path, official: IdxSet | CifarSet) -> None:
    """`offer` from the first mirror that gives the right bytes.

    Pooch downloads to a temporary file, compares the checksum and only then gives it its name.
    """
    pooch = import_pooch(official)
    import requests

    failures = []
    for mirror in offer.mirrors:
        with download_bar(offer.name) as bar, quiet(pooch.get_logger()):
            download = pooch.HTTPDownloader(
                progressbar=bar or False,
                chunk_size=1 << 16,
                timeout=(SECONDS_TO_CONNECT, SECONDS_OF_SILENCE),
                headers={"Accept-Encoding": "identity"},  # the packed file itself, as the checksum has it
            )
            try:
                pooch.retrieve(
                    mirror + offer.name, f"md5:{offer.md5}", offer.name, folder, downloader=download
                )
            except (requests.RequestException, ValueError) as error:  # ValueError: another checksum
                failures.append(f"{mirror}{offer.name} ({reason_of(error)})")
            else:
                return
    raise ProblemError(
        f"{official.title} could not be downloaded; tried {', '.join(failures)}. "
        f"Try again with a connection, or {other_ways(official)}"
    )


def reason_of(error: Exception) -> str:
    import requests

    if isinstance(error, requests.HTTPError):
        return f"HTTP {error.response.status_code}" if error.response is not None else "an HTTP error"
    reasons = (
        (requests.exceptions.ChunkedEncodingError, "the connection was cut"),
        (requests.exceptions.SSLError, "no trusted connection"),
        (requests.Timeout, "no answer in time"),
        (requests.ConnectionError, "no connection"),
        (requests.RequestException, type(error).__name__),
    )
    return next((reason for kind, reason in reasons if isinstance(error, kind)), "another checksum")


@contextmanager
def quiet(logger: logging.Logger) -> Iterator[None]:
    """Pooch tells of every download on stderr; the bar does that here."""
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def remove_abandoned(folder: Path) -> None:
    """Delete what downloads left that were killed. One under way writes all the time: it is younger."""
    for path in folder.glob("tmp*"):
        found = look_up(path)
        if found and time.time() - found.st_mtime > SECONDS_UNTIL_ABANDONED:
            path.unlink(missing_ok=True)
