"""A folder of finished runs: one JSON file for each, so that an interrupted experiment can be continued."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hessinit.errors import ProblemError
from hessinit.results.result import Plain, to_plain, write_text

SCHEMA = 1
RECORD = "experiment.json"


class RunFolder:
    """Results by key, kept in a folder, or in memory only (`folder=None`).

    experiment.json records the settings, and runs/ has a file for each result, all written
    atomically.
    """

    def __init__(self, folder: Any) -> None:
        if folder is not None and (not isinstance(folder, (str, os.PathLike)) or not str(folder)):
            raise ProblemError(
                f"folder={folder!r} must be the path of a folder, or None to keep nothing."
            )
        self.folder = None if folder is None else Path(folder)
        self.results: dict[str, Plain] = {}
        self._experiment = ""  # a hash of the settings, which every run file carries

    def open(self, settings: Mapping[str, Plain], named: Mapping[str, str] | None = None) -> None:
        """Read the results that are there; refuse a folder whose recorded settings differ.

        `named` describes parts of the experiment by name: new names may join, known ones must not
        change.
        """
        if self.folder is None:
            return
        wanted = json.loads(_to_text({"settings": settings, "named": named or {}}))
        self._experiment = hashlib.sha256(_to_text(wanted["settings"]).encode()).hexdigest()[:16]
        try:
            self._open_record(self.folder, wanted)
            for path in sorted((self.folder / "runs").glob("*.json")):
                data = _read(path, "hessinit run", "Delete it, and it is run again")
                if (
                    data.get("experiment") != self._experiment
                    or file_name(str(data["key"])) != path.name
                ):
                    raise ProblemError(
                        f"{path} belongs to another experiment or run than its folder and name say. Delete "
                        "it, and it is run again, or pass another folder."
                    )
                self.results[data["key"]] = data["value"]
        except OSError as failure:
            raise ProblemError(
                f"folder={str(self.folder)!r} cannot be used: {failure}. Pass a folder that can be read and "
                "written."
            ) from failure

    def add(self, key: str, value: Plain) -> None:
        head = {"kind": "hessinit run", "schema": SCHEMA, "experiment": self._experiment}
        text = _to_text({**head, "key": key, "value": value})
        if self.folder is not None:
            try:
                write_text(self.path_of(key), text)
            except OSError as failure:
                raise ProblemError(
                    f"a run could not be written to {self.folder}: {failure}. Runs kept there: "
                    f"{len(self.results)}; once it can be written again, the same call continues from them."
                ) from failure
        self.results[key] = json.loads(text)["value"]  # as it would be read back

    def path_of(self, key: str) -> Path:
        return (self.folder or Path()) / "runs" / file_name(key)

    def _open_record(self, folder: Path, wanted: Plain) -> None:
        path = folder / RECORD
        if folder.exists() and not path.exists():
            names = sorted(entry.name for entry in folder.iterdir() if entry.name[0] != ".")
            if names and names != ["runs"]:
                raise ProblemError(
                    f"folder={str(folder)!r} holds other things ({', '.join(names[:3])}) but no {RECORD}; "
                    f"pass a folder of its own, such as {str(folder / 'comparison')!r}."
                )
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_text(path, _to_text({"kind": "hessinit experiment", "schema": SCHEMA, **wanted}))
            return
        found = _read(path, "hessinit experiment", "Pass another folder")
        fixed = [("settings", name) for name in {**wanted["settings"], **found["settings"]}]
        fixed += [("named", name) for name in wanted["named"] if name in found["named"]]
        for part, name in fixed:
            before = found[part].get(name)
            now = wanted[part].get(name)
            if before != now:
                raise ProblemError(
                    f"folder={str(folder)!r} belongs to another experiment: {name} was {before!r:.80} there "
                    f"and is {now!r:.80} here. Pass another folder, or delete this one to begin anew."
                )
        if wanted["named"].keys() - found["named"].keys():
            write_text(path, _to_text({**found, "named": {**found["named"], **wanted["named"]}}))


def describe_interruption(folder: Path | None, done: int, total: int) -> str:
    if folder is None:
        return f"stopped after {done} of {total} runs, and none is kept; pass folder= to keep them next time."
    return (
        f"stopped; {done} of {total} runs are kept in {folder}. The same call continues from there."
    )


def file_name(key: str) -> str:
    """A readable file name, different for different keys.

    >>> file_name("he+warmup, lr 0.1, seed 2")
    'he-warmup-lr-0.1-seed-2_60348def.json'
    """
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", key).strip("-.")[:80]
    return f"{readable}_{hashlib.sha256(key.encode()).hexdigest()[:8]}.json"


def _to_text(data: Plain) -> str:
    return json.dumps(to_plain(data), indent=1, allow_nan=False) + "\n"


def _read(path: Path, kind: str, way_out: str) -> Plain:
    try:
        data = json.loads(path.read_bytes())
        if data["kind"] != kind or data["schema"] != SCHEMA:
            raise ValueError(f"no {kind} of schema {SCHEMA}")
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise ProblemError(
            f"{path} cannot be read ({problem}); was it edited? {way_out}."
        ) from problem
    return data
