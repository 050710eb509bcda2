"""What a tracker wrote last, while it goes on."""

from __future__ import annotations

import json
from pathlib import Path


class LastPoint:
    """Reads the file again only when it has grown: it is asked after every step."""

    def __init__(self, lines: Path) -> None:
        self._lines = lines
        self._size = 0
        self._norm: float | None = None

    def norm(self) -> float | None:
        """‖H‖ of the last point; None before the first."""
        try:
            size = self._lines.stat().st_size
            if size == self._size:
                return self._norm
            with self._lines.open("rb") as file:
                file.seek(self._size)
                last = file.read(size - self._size).splitlines()[-1]
            self._size = size
            found = json.loads(last).get("norm")
        except (OSError, ValueError, AttributeError, IndexError):
            return self._norm
        if isinstance(found, int | float | str):  # nan and inf are words in strict JSON
            self._norm = float(found)
        return self._norm
