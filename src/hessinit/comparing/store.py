"""A folder of finished runs: one JSON file each, so that an interrupted comparison goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from hessinit.comparing.agreement import check_same, compare_versions
from hessinit.comparing.starts import Start
from hessinit.errors import ProblemError
from hessinit.results.comparison import Run
from hessinit.results.result import Plain, from_plain, to_plain, write_text

KIND = "hessinit experiment"
RUN = "hessinit run"
SCHEMA = 1
RECORD = "experiment.json"
RUNS = "runs"
Key = tuple[str, float, int]


def key_of(run: Run) -> Key:
    return run.scheme, run.learning_rate, run.seed


class RunStore:
    """Finished runs, kept in a folder or only in memory (`folder=None`)."""

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.runs: dict[Key, Run] = {}
        self._experiment = ""

    def open(
        self, fingerprint: Plain, starts: Iterable[Start], versions: dict[str, str], behaviour: Plain
    ) -> tuple[str, ...]:
        """Read what is there, refuse another experiment's folder; returns remarks for the reader."""
        if self.folder is None:
            return ()
        wanted = {
            "kind": KIND, "schema": SCHEMA, "experiment": fingerprint,
            "starts": {start.name: start.description for start in starts}, "behaviour": behaviour,
            "versions": versions,
        }  # fmt: skip
        try:
            found = self._agree_with(wanted)
            self._experiment = _digest(found["experiment"])
            for path in sorted((self.folder / RUNS).glob("*.json")):
                run = _read_run(path, self._experiment)
                self.runs[key_of(run)] = run
        except ProblemError:
            raise
        except (OSError, ValueError) as failure:
            raise ProblemError(
                f"folder={str(self.folder)!r} cannot be used: {_reason(failure)}. Pass a folder that can be "
                "read and written."
            ) from failure
        return compare_versions(found["versions"], versions)

    def add(self, run: Run) -> None:
        """Keep a finished run, on disk whole or not at all; of one that is there, only the norms are new."""
        key = key_of(run)
        before = self.runs.get(key)
        if before is not None:
            note = before.note or run.note
            run = replace(before, norms=run.norms, note=note)
        if self.folder is not None:
            data = {"kind": RUN, "schema": SCHEMA, "experiment": self._experiment, **to_plain(run)}
            try:
                write_text(
                    self.folder / RUNS / file_name(key), json.dumps(data, indent=1, allow_nan=False) + "\n"
                )
            except OSError as failure:
                many = len(self.runs)
                raise ProblemError(
                    f"a run could not be written to {self.folder}: {_reason(failure)}. {many} "
                    f"run{' is' if many == 1 else 's are'} kept there; once it can be written again, the "
                    "same call goes on from them."
                ) from failure
        self.runs[key] = run

    def _agree_with(self, wanted: Plain) -> Plain:
        """The folder's record: a new one, or the one that is there, with what it did not know yet."""
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / RUNS).mkdir(exist_ok=True)
        record = self.folder / RECORD
        if not record.exists():
            if any((self.folder / RUNS).glob("*.json")):
                raise ProblemError(
                    f"folder={str(self.folder)!r} holds runs but no {RECORD}, so nobody knows which "
                    "experiment they belong to; pass another folder, or delete this one."
                )
            if create_text(record, _to_text(wanted)):
                return wanted
        # Also where another process was quicker by a moment: its experiment may be another one.
        found = _read(record, KIND)
        check_same(self.folder, found, wanted)
        merged = {
            **found,
            "starts": {**found["starts"], **wanted["starts"]},
            "behaviour": {**wanted["behaviour"], **found.get("behaviour", {})},
        }
        if merged != found:
            write_text(record, _to_text(merged))
        return merged


def create_text(path: Path, text: str) -> bool:
    """Write a new file, whole or not at all; False where there is one, whoever made it and however late."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        write_text(temporary, text)
        try:
            os.link(temporary, path)  # unlike a renaming, it replaces nothing
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            try:
                with open(path, "x", encoding="utf-8", newline="\n") as file:
                    file.write(text)
            except FileExistsError:
                return False
        return True
    finally:
        temporary.unlink(missing_ok=True)


def _to_text(data: Plain) -> str:
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def _digest(fingerprint: Plain) -> str:
    return hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:16]


def _reason(failure: Exception) -> str:
    return (getattr(failure, "strerror", None) or str(failure)).rstrip(".")


def check_folder(folder: object) -> None:
    """A folder, there already or to be made."""
    if folder is None:
        return
    if not isinstance(folder, (str, os.PathLike)) or not str(folder):
        raise ProblemError(f"folder={folder!r} must be the path of a folder, or None to keep nothing.")
    path = Path(folder)
    try:
        path.stat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as failure:
        raise ProblemError(
            f"folder={str(folder)!r} cannot be used: {_reason(failure)}. Pass a folder that can be read and "
            "written."
        ) from failure
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


def _read_run(path: Path, experiment: str) -> Run:
    data = _read(path, RUN)
    if data.get("experiment", experiment) != experiment:
        raise ProblemError(
            f"{path} belongs to another experiment than the {RECORD} of its folder: two were made there at "
            "once. Delete it, and it is run again, or pass another folder."
        )
    try:
        run: Run = from_plain(Run, {key: data[key] for key in data.keys() - {"kind", "schema", "experiment"}})
        return run
    except ValueError as problem:
        raise ProblemError(
            f"{path} is not a whole run: {problem}. Was it edited? Delete it, and it is run again."
        ) from problem
