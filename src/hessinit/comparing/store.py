"""A folder of finished runs: one JSON file each, so that an interrupted comparison goes on where it was."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path

from hessinit.comparing.experiment import NUMBERS
from hessinit.comparing.starts import Start
from hessinit.errors import ProblemError
from hessinit.report.atomic import write_text
from hessinit.report.json_form import Plain
from hessinit.report.run import Run, run_from_dict

KIND = "hessinit experiment"
RUN = "hessinit run"
SCHEMA = 1
RECORD = "experiment.json"
RUNS = "runs"
# How far the fingerprint's numbers may differ: another machine rounds otherwise.
SAME_NUMBER = 1e-3

Key = tuple[str, float, int]


def key_of(run: Run) -> Key:
    return run.start, run.learning_rate, run.seed


class RunStore:
    """Finished runs, kept in a folder or only in memory (`folder=None`)."""

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.runs: dict[Key, Run] = {}

    def open(self, fingerprint: Plain, starts: Iterable[Start], versions: dict[str, str]) -> tuple[str, ...]:
        """Read what is there, refuse another experiment's folder; returns remarks for the reader."""
        if self.folder is None:
            return ()
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / RUNS).mkdir(exist_ok=True)
        record = self.folder / RECORD
        named = {start.name: start.description for start in starts}
        remarks: tuple[str, ...] = ()
        if record.exists():
            found = _read(record, KIND)
            _check_same(self.folder, found, fingerprint, named)
            named = {**found["starts"], **named}
            remarks = _compare_versions(found["versions"], versions)
            versions = found["versions"]
        elif any((self.folder / RUNS).glob("*.json")):
            raise ProblemError(
                f"folder={str(self.folder)!r} holds runs but no {RECORD}, so nobody knows which experiment "
                "they belong to; pass another folder, or delete this one."
            )
        data = {
            "kind": KIND, "schema": SCHEMA, "experiment": fingerprint, "starts": named, "versions": versions,
        }  # fmt: skip
        text = json.dumps(data, indent=2, allow_nan=False) + "\n"
        if not record.exists() or record.read_text(encoding="utf-8") != text:
            write_text(record, text)
        for path in sorted((self.folder / RUNS).glob("*.json")):
            run = _read_run(path)
            self.runs[key_of(run)] = run
        return remarks

    def add(self, run: Run) -> None:
        """Keep a finished run, on disk whole or not at all."""
        self.runs[key_of(run)] = run
        if self.folder is not None:
            text = json.dumps({"kind": RUN, "schema": SCHEMA, **run.to_dict()}, indent=1, allow_nan=False)
            write_text(self.folder / RUNS / file_name(key_of(run)), text + "\n")


def check_folder(folder: object) -> None:
    """A folder, there already or to be made."""
    if folder is None:
        return
    if not isinstance(folder, (str, os.PathLike)) or not str(folder):
        raise ProblemError(f"folder={folder!r} must be the path of a folder, or None to keep nothing.")
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ProblemError(
            f"folder={str(folder)!r} is a file; pass the name of a folder, new or used before."
        )
    if path.is_dir() and not (path / RECORD).exists():
        others = sorted(entry.name for entry in path.iterdir() if entry.name != RUNS and entry.name[0] != ".")
        if others:
            raise ProblemError(
                f"folder={str(folder)!r} holds other things ({', '.join(others[:3])}"
                f"{', …' if len(others) > 3 else ''}); pass a folder of its own, such as "
                f"{str(path / 'comparison')!r}."
            )


def file_name(key: Key) -> str:
    """Readable, and different for different runs whatever characters a start's name has.

    >>> file_name(("he+warmup", 0.1, 2))
    'he-warmup_lr0.1_seed2_850f2e65.json'
    """
    start, learning_rate, seed = key
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", start).strip("-.")[:60]
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:8]
    return f"{readable}_lr{learning_rate!r}_seed{seed}_{digest}.json"


def _read(path: Path, kind: str) -> Plain:
    try:
        data = json.loads(path.read_bytes())
    except ValueError as problem:
        way = "Delete it, and it is run again" if kind == RUN else "Pass another folder"
        raise ProblemError(f"{path} is not JSON ({problem}); was it edited? {way}.") from problem
    if not isinstance(data, dict) or data.get("kind") != kind or data.get("schema") != SCHEMA:
        raise ProblemError(
            f"{path} is no {kind} of schema {SCHEMA}; it was edited, or written by another version of "
            "hessinit. Pass another folder."
        )
    return data


def _read_run(path: Path) -> Run:
    data = _read(path, RUN)
    try:
        return run_from_dict(data)
    except (KeyError, TypeError, AttributeError, ValueError) as problem:
        what = f"{problem} is missing" if isinstance(problem, KeyError) else str(problem)
        raise ProblemError(
            f"{path} is not a whole run: {what}. Was it edited? Delete it, and it is run again."
        ) from problem


def _check_same(folder: Path, found: Plain, wanted: Plain, starts: dict[str, str]) -> None:
    stored = found["experiment"]
    different = [key for key in wanted if not _same(key, stored.get(key), wanted[key])]
    if different and set(different) <= set(NUMBERS):
        there, here = (", ".join(str(each.get(name)) for name in NUMBERS) for each in (stored, wanted))
        raise ProblemError(
            f"folder={str(folder)!r} belongs to another experiment: a new model's first loss and the length "
            f"of its gradient were {there} there and are {here} here, so build, loss or forward has changed. "
            "Pass another folder, or delete this one to begin anew."
        )
    if different:
        shown = "; ".join(_difference(key, stored.get(key), wanted[key]) for key in different[:3])
        raise ProblemError(
            f"folder={str(folder)!r} belongs to another experiment: {shown}. "
            "Pass another folder, or delete this one to begin anew."
        )
    for name, how in starts.items():
        if found["starts"].get(name, how) != how:
            raise ProblemError(
                f"folder={str(folder)!r} has runs of a start {name!r} that was {found['starts'][name]} and "
                f"is {how} here; give the new one another name, or pass another folder."
            )


def _same(key: str, stored: Plain, wanted: Plain) -> bool:
    if key not in NUMBERS or not isinstance(stored, str) or stored == wanted:
        return bool(stored == wanted)
    return math.isclose(float(stored), float(wanted), rel_tol=SAME_NUMBER, abs_tol=1e-6)


def _difference(key: str, stored: Plain, wanted: Plain) -> str:
    if key == "data":
        return "the data hold other values"
    if isinstance(stored, str) and max(len(stored), len(str(wanted))) > 60:
        return f"the {key} differ" if key.endswith("s") and key != "loss" else f"the {key} differs"
    return f"{key} was {stored!r} there and is {wanted!r} here"


def _compare_versions(stored: dict[str, str], present: dict[str, str]) -> tuple[str, ...]:
    changed = [
        f"{name} {stored[name]} then, {present[name]} now"
        for name in stored.keys() & present.keys()
        if stored[name] != present[name]
    ]
    if not changed:
        return ()
    shown = "; ".join(sorted(changed))
    return (f"Some runs were read from the folder, which was begun with other versions: {shown}.",)
