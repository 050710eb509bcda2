"""The file of JSON lines that a tracker writes as it goes."""

from __future__ import annotations

import io
import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hessinit.errors import ProblemError
from hessinit.results.result import Plain, to_plain
from hessinit.results.track_record import BACK, END, RESUMED, TrackedPoint, Tracking
from hessinit.tracking.losses import Losses


class Lines:
    """Opened for every line, which is with the operating system before the next step: a killed run has it.

    `earlier` is what an earlier run wrote, where this one goes on with it. A line that cannot be written is
    kept, and comes before the next: the disk may be full only for a while. Where the file is taken away, the
    next line begins a new one.
    """

    def __init__(self, path: Path, earlier: Tracking | None, header: str = "") -> None:
        self.path = path
        self.earlier = earlier
        self._place = path.absolute()  # training may move to another folder
        self._header = header
        self._unwritten = ""

    def begin(self, header: Mapping[str, Any]) -> None:
        """Write the header, unless an earlier run did."""
        if self.earlier is None:
            self._header = _header(header) + "\n"
            self._append("")

    def add(self, point: TrackedPoint, losses: Losses) -> None:
        self._write({**to_plain(point), **_since_last(losses)})

    def resume(self, facts: Mapping[str, Plain], losses: Losses) -> None:
        """What is different from here on."""
        self._write({"line": RESUMED, **facts, **_since_last(losses)})

    def go_back(self, step: int, losses: Losses) -> None:
        """What was written of later steps does not count."""
        self._write({"line": BACK, "step": step, **_since_last(losses)})

    def end(self, facts: Mapping[str, Plain], losses: Losses) -> None:
        self._write({"line": END, **facts, **_since_last(losses)})

    def discard(self) -> None:
        """Take the file away again, unless an earlier run wrote to it."""
        if self.earlier is None:
            self._place.unlink(missing_ok=True)

    @property
    def is_behind(self) -> bool:
        """Whether there are lines that could not be written yet."""
        return bool(self._unwritten)

    def _write(self, data: Mapping[str, Plain]) -> None:
        self._append(json.dumps(data, allow_nan=False) + "\n")

    def _append(self, line: str) -> None:
        self._unwritten += line
        with self._place.open("ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            text = ("" if size else self._header) + self._unwritten
            try:
                _write_whole(file, text.encode())
            except OSError:
                file.truncate(size)  # half a line would spoil the one after it
                raise
        self._unwritten = ""


def _write_whole(file: io.FileIO, content: bytes) -> None:
    while content:
        content = content[file.write(content) :]


def _since_last(losses: Losses) -> dict[str, Plain]:
    return {"losses": to_plain(losses.unwritten()), "stride": losses.stride}


def open_lines(path: str | os.PathLike[str], resume: bool | str) -> Lines:
    """A new file of that name or, where it is taken, of the next free one; `resume` goes on in it.

    Where a later run took a numbered name, `resume=True` cannot know which of them goes on, and refuses;
    "anyway" takes the file named.
    """
    wanted = check_path(path)
    if resume and wanted.exists():
        if resume is True:
            _check_newest(wanted)
        return _go_on(wanted)
    for name in itertools.chain([wanted], (_numbered(wanted, number) for number in itertools.count(2))):
        try:
            name.touch(exist_ok=False)
        except FileExistsError:
            continue
        return Lines(name, None)
    raise AssertionError  # there is always another number


def check_path(path: str | os.PathLike[str]) -> Path:
    """The name of a file in a folder that exists."""
    try:
        wanted = Path(os.fspath(path))
    except TypeError:
        raise ProblemError(
            f"path is a {type(path).__name__}; it must be the name of a file, such as 'curvature.jsonl', or "
            "None for none."
        ) from None
    if wanted.is_dir():
        raise ProblemError(f"path={str(path)!r} is a folder; give the name of a file in it.")
    if wanted.exists() and not wanted.is_file():
        raise ProblemError(
            f"path={str(path)!r} is there and is not a file; give the name of a file, or None for none."
        )
    if not wanted.parent.is_dir():
        raise ProblemError(
            f"path={str(path)!r}: the folder {wanted.parent} does not exist. Create it first, or pass "
            "path=None to write no file."
        )
    return wanted


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-{number}{path.suffix}")


def _check_newest(path: Path) -> None:
    numbered = itertools.takewhile(Path.exists, (_numbered(path, number) for number in itertools.count(2)))
    newest = max([path, *numbered], key=lambda one: one.stat().st_mtime_ns)
    if newest != path:
        raise ProblemError(
            f"cannot resume in {path.name}: {newest.name} beside it is newer, of a run that found the name "
            f"taken. Pass the file of the run that goes on, path={str(newest)!r}, or resume='anyway' for "
            f"{path.name}."
        )


def _go_on(path: Path) -> Lines:
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if not whole and _is_begun(content):  # killed before the first line was whole: there is nothing in it
        os.truncate(path, 0)
        return Lines(path, None)
    try:
        earlier = Tracking.from_json(content[:whole], source=str(path))
    except ValueError as problem:
        raise ProblemError(f"cannot resume: {problem}") from problem
    os.truncate(path, whole)  # what a killed run left half-written
    return Lines(path, earlier, content[: content.find(b"\n") + 1].decode())


def _is_begun(content: bytes) -> bool:
    beginning = _header({})[:-1].encode()
    return beginning.startswith(content[: len(beginning)])


def _header(facts: Mapping[str, Any]) -> str:
    head = {"kind": Tracking.KIND, "schema": Tracking.SCHEMA, "lines": True}
    return json.dumps({**head, **to_plain(facts)}, allow_nan=False)
