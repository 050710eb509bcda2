"""What a tracker writes, followed while it goes on: its last ‖H‖, and a copy under the name asked for."""

from __future__ import annotations

import itertools
import json
from pathlib import Path


class Lines:
    """A tracker's file, read on only when it has grown: it is asked after every step.

    `copy_to` is the name for the copy; where it is taken, the next free one, such as curvature-2.jsonl.
    `copied_to` is the name that it got, and `failure` why it could not be written.
    """

    def __init__(self, path: Path, copy_to: Path | None = None) -> None:
        self.path = path
        self.copied_to: Path | None = None
        self.failure: OSError | None = None
        self._copy_to = copy_to
        self._size = 0
        self._norm: float | None = None

    def norm(self) -> float | None:
        """‖H‖ of the last point; None before the first."""
        self.follow()
        return self._norm

    def follow(self) -> None:
        """Read what is new, and copy it."""
        try:
            size = self.path.stat().st_size
            if size == self._size:
                return
            with self.path.open("rb") as file:
                file.seek(self._size)
                new = file.read(size - self._size)
        except OSError:  # not there yet
            return
        self._size = size
        self._copy(new)
        self._norm = _last_norm(new, self._norm)

    def _copy(self, new: bytes) -> None:
        if self._copy_to is None or self.failure is not None:
            return
        try:
            if self.copied_to is None:
                self.copied_to = _claim(self._copy_to.absolute())  # training may move to another folder
            with self.copied_to.open("ab") as file:
                file.write(new)
        except OSError as failure:  # a full disk ends no training
            self.failure = failure


def _last_norm(new: bytes, before: float | None) -> float | None:
    try:
        found = json.loads(new.splitlines()[-1]).get("norm")
    except (ValueError, AttributeError, IndexError):
        return before
    return float(found) if isinstance(found, int | float | str) else before  # nan and inf are words


def _claim(wanted: Path) -> Path:
    """Make the file, unless another run was faster: then the next name."""
    for number in itertools.count(1):
        name = wanted if number == 1 else wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}")
        try:
            name.touch(exist_ok=False)
        except FileExistsError:
            continue
        return name
    raise AssertionError  # there is always another number
