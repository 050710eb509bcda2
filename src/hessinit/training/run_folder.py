"""A folder of finished runs: one JSON file for each, so that an interrupted experiment can be continued."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from hessinit.errors import ProblemError
from hessinit.results.result import Plain, to_plain, write_text

SCHEMA = 1
RECORD = "experiment.json"
RUNS = "runs"


class RunFolder:
    """Results by key, kept in a folder, or in memory only (`folder=None`).

    The folder holds experiment.json, which records the settings, and one file for each result in runs/. All
    files are written atomically. Results are plain data; nan and inf are kept as strings.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     runs = RunFolder(folder)
    ...     runs.open({"steps": 100})
    ...     runs.add("he, lr 0.1, seed 0", {"loss": 0.5})
    ...     again = RunFolder(folder)
    ...     again.open({"steps": 100})
    ...     again.results
    {'he, lr 0.1, seed 0': {'loss': 0.5}}
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        if folder is not None and (not isinstance(folder, (str, os.PathLike)) or not str(folder)):
            raise ProblemError(f"folder={folder!r} must be the path of a folder, or None to keep nothing.")
        self.folder = None if folder is None else Path(folder)
        self.results: dict[str, Plain] = {}
        self.found: frozenset[str] = frozenset()  # keys of the results that were there when it was opened
        self._experiment = ""  # a hash of the settings, which every run file carries

    def open(self, settings: Mapping[str, Plain], named: Mapping[str, str] | None = None) -> None:
        """Read the results that are there; refuse a folder whose recorded settings differ.

        `named` describes parts of the experiment by name: new names may join, known ones must not change.
        """
        if self.folder is None:
            return
        wanted = json.loads(_to_text({"settings": settings, "named": named or {}}))
        try:
            self._check_place(self.folder)
            (self.folder / RUNS).mkdir(parents=True, exist_ok=True)
            found = self._agree(wanted)
            self._experiment = _hash(found["settings"])
            for path in sorted((self.folder / RUNS).glob("*.json")):
                key, value = self._read_run(path)
                self.results[key] = value
        except ProblemError:
            raise
        except (OSError, ValueError) as failure:
            raise ProblemError(
                f"folder={str(self.folder)!r} cannot be used: {_reason(failure)}. Pass a folder that can be "
                "read and written."
            ) from failure
        self.found = frozenset(self.results)

    def add(self, key: str, value: Plain) -> None:
        """Keep a result; on disk, the file is whole or not there."""
        data = {"kind": "hessinit run", "schema": SCHEMA, "experiment": self._experiment, "key": key}
        text = _to_text({**data, "value": value})
        if self.folder is not None:
            try:
                write_text(self.path_of(key), text)
            except (OSError, ValueError) as failure:
                many = len(self.results)
                raise ProblemError(
                    f"a run could not be written to {self.folder}: {_reason(failure)}. {many} "
                    f"run{' is' if many == 1 else 's are'} kept there; once it can be written again, the "
                    "same call continues from them."
                ) from failure
        self.results[key] = json.loads(text)["value"]  # as it would be read back

    def path_of(self, key: str) -> Path:
        """The file of a result."""
        return (self.folder or Path()) / RUNS / file_name(key)

    def _check_place(self, folder: Path) -> None:
        if not folder.exists() or (folder / RECORD).exists():
            return
        if not folder.is_dir():
            raise ProblemError(
                f"folder={str(folder)!r} is a file; pass the name of a folder, new or used before."
            )
        names = sorted(entry.name for entry in folder.iterdir() if entry.name[0] != ".")
        if names and (names != [RUNS] or any((folder / RUNS).glob("*.json"))):
            raise ProblemError(
                f"folder={str(folder)!r} holds other things ({', '.join(names[:3])}"
                f"{', …' if len(names) > 3 else ''}) but no {RECORD}, so it is not a folder of runs; pass "
                f"one of its own, such as {str(folder / 'comparison')!r}."
            )

    def _agree(self, wanted: Plain) -> Plain:
        """The folder's record: a new one, or the one that is there with the new names added."""
        assert self.folder is not None
        path = self.folder / RECORD
        head = {"kind": "hessinit experiment", "schema": SCHEMA}
        # Two processes may begin at once with different settings: one of them creates the record.
        if create_text(path, _to_text({**head, **wanted})):
            return wanted
        found = _read(path, "hessinit experiment", "Pass another folder")
        there, here = found["settings"], wanted["settings"]
        if there != here:
            raise ProblemError(
                f"folder={str(self.folder)!r} belongs to another experiment: {_differences(there, here)}. "
                "Pass another folder, or delete this one to begin anew."
            )
        for name, description in wanted["named"].items():
            before = found["named"].get(name, description)
            if before != description:
                raise ProblemError(
                    f"folder={str(self.folder)!r} has runs of {name!r}, which was {before} and is "
                    f"{description} here; give the new one another name, or pass another folder."
                )
        merged = {**found, "named": {**found["named"], **wanted["named"]}}
        if merged != found:
            write_text(path, _to_text(merged))
        return merged

    def _read_run(self, path: Path) -> tuple[str, Plain]:
        data = _read(path, "hessinit run", "Delete it, and it is run again")
        if data.get("experiment") != self._experiment or file_name(str(data.get("key"))) != path.name:
            raise ProblemError(
                f"{path} belongs to another experiment or run than its folder and name say. Delete it, and "
                "it is run again, or pass another folder."
            )
        return data["key"], data.get("value")


def describe_interruption(folder: Path | None, done: int, total: int) -> str:
    """What an interrupted experiment has kept, and how to continue it."""
    if folder is None:
        return f"stopped after {done} of {total} runs, and none is kept; pass folder= to keep them next time."
    return f"stopped; {done} of {total} runs are kept in {folder}. The same call continues from there."


def create_text(path: Path, text: str) -> bool:
    """Write a new file atomically; returns False where the file exists already."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        write_text(temporary, text)
        try:
            os.link(temporary, path)  # unlike a renaming, it replaces nothing
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            if path.exists():
                return False
            write_text(path, text)
        return True
    finally:
        temporary.unlink(missing_ok=True)


def file_name(key: str) -> str:
    """A readable file name, different for different keys.

    >>> file_name("he+warmup, lr 0.1, seed 2")
    'he-warmup-lr-0.1-seed-2_60348def.json'
    """
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", key).strip("-.")[:80]
    return f"{readable}_{hashlib.sha256(key.encode()).hexdigest()[:8]}.json"


def _to_text(data: Plain) -> str:
    return json.dumps(to_plain(data), indent=1, allow_nan=False) + "\n"


def _hash(settings: Plain) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def _reason(failure: Exception) -> str:
    return (getattr(failure, "strerror", None) or str(failure)).rstrip(".")


def _read(path: Path, kind: str, way_out: str) -> Plain:
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as problem:
        raise ProblemError(f"{path} is not JSON ({problem}); was it edited? {way_out}.") from problem
    if not isinstance(data, dict) or data.get("kind") != kind or data.get("schema") != SCHEMA:
        raise ProblemError(
            f"{path} is no {kind} of schema {SCHEMA}; it was edited, or written by another version of "
            f"hessinit. {way_out}."
        )
    return data


def _differences(there: Mapping[str, Plain], here: Mapping[str, Plain], inside: str = "") -> str:
    """The first three settings that differ, in words."""
    found = []
    for name in sorted(there.keys() | here.keys(), key=[*here, *there].index):
        before, now = there.get(name), here.get(name)
        if before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            found.append(_differences(before, now, f"{inside}{name}: "))
        elif max(len(str(before)), len(str(now))) > 80:
            found.append(f"{inside}{name} differs")
        else:
            found.append(f"{inside}{name} was {before!r} there and is {now!r} here")
    return "; ".join(found[:3])
