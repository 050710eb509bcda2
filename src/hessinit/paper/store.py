"""A folder of results: one JSON file for every finished job, so that a killed experiment goes on."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hessinit.errors import ProblemError
from hessinit.paper.provenance import revision
from hessinit.results.result import Plain, to_plain, write_text
from hessinit.training.run_folder import create_text

KIND = "hessinit paper result"
SCHEMA = 1
SETTING = "setting.json"


@dataclass(frozen=True)
class Result:
    """What a job found, how long it took, and by which code."""

    value: Plain
    seconds: float
    revision: str


class ResultStore:
    """The results of one setting, kept in a folder or only in memory (`folder=None`)."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.results: dict[str, Result] = {}
        self.found: frozenset[str] = frozenset()  # the keys of those that were there

    def open(self, fingerprint: Plain) -> None:
        """Read what is there; refuse results of another setting, which must not be mixed with these."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            wanted = json.loads(json.dumps(to_plain(fingerprint)))
            path = self.folder / SETTING
            if not create_text(path, _to_text(wanted)):
                self._check_same(_read_json(path), wanted)
            for path in sorted(self.folder.glob("*.json")):
                if path.name != SETTING:
                    key, result = _read_result(path)
                    self.results[key] = result
        except OSError as failure:
            raise ProblemError(
                f"folder={str(self.folder)!r} cannot be used: {failure.strerror or failure}. Pass a folder "
                "that can be read and written."
            ) from failure
        self.found = frozenset(self.results)

    def add(self, key: str, value: Plain, seconds: float) -> None:
        """Keep a result, on disk whole or not at all."""
        # Through JSON also where nothing is written: a result read back must be the same.
        plain = json.loads(json.dumps(to_plain(value), allow_nan=False))
        self.results[key] = Result(plain, seconds, revision())
        if self.folder is None:
            return
        data = {"kind": KIND, "schema": SCHEMA, "key": key, "value": plain, "seconds": seconds,
                "revision": revision()}  # fmt: skip
        with written("a result", self.folder):
            write_text(self.folder / file_name(key), _to_text(data))

    def _check_same(self, found: Plain, wanted: Plain) -> None:
        there = found if isinstance(found, dict) else {}
        different = [name for name in wanted if there.get(name) != wanted[name]]
        if different:
            shown = "; ".join(_difference(name, there.get(name), wanted[name]) for name in different)
            raise ProblemError(
                f"{self.folder} holds results of another setting: {shown}. Pass another folder, or delete "
                "this one to begin anew."
            )


@contextmanager
def written(what: str, folder: Path) -> Iterator[None]:
    """A disk that is full or gone is told, with what is left."""
    try:
        yield
    except (OSError, ValueError) as failure:  # ValueError: a folder stands where the file should
        if not folder.is_dir():
            raise ProblemError(
                f"{what} could not be written: the folder {folder} is no longer there, nor what it held. The "
                "same call begins anew."
            ) from failure
        reason = getattr(failure, "strerror", None) or str(failure).rstrip(".")
        raise ProblemError(
            f"{what} could not be written to {folder}: {reason}. What was written before is kept; once there "
            "is room for more, the same call goes on from it."
        ) from failure


def file_name(key: str) -> str:
    """Readable, and different for different keys.

    >>> file_name("std 0.1, seed 3")
    'std-0.1-seed-3_059b5e8a.json'
    """
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", key).strip("-.")[:80]
    return f"{readable}_{hashlib.sha256(key.encode()).hexdigest()[:8]}.json"


def _to_text(data: Plain) -> str:
    return json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _read_json(path: Path) -> Plain:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as problem:
        raise ProblemError(
            f"{path} is not JSON ({problem}); was it edited? Delete it, or pass another folder."
        ) from problem


def _read_result(path: Path) -> tuple[str, Result]:
    data = _read_json(path)
    try:
        if data["kind"] != KIND or data["schema"] != SCHEMA or file_name(data["key"]) != path.name:
            raise ValueError("it says that it is something else")
        return data["key"], Result(data["value"], float(data["seconds"]), str(data["revision"]))
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise ProblemError(
            f"{path} is not a whole result ({problem}). Was it edited? Delete it, and it is made again."
        ) from problem


def _difference(name: str, there: Plain, here: Plain) -> str:
    if isinstance(there, dict) and isinstance(here, dict):
        keys = [key for key in here if there.get(key) != here[key]] or [
            key for key in there if key not in here
        ]
        return "; ".join(_difference(f"{name}: {key}", there.get(key), here.get(key)) for key in keys[:3])
    if max(len(str(there)), len(str(here))) > 80:
        return f"{name} differs"
    return f"{name} was {there!r} there and is {here!r} here"
