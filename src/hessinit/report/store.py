"""Read a saved report back."""

from __future__ import annotations

import os
from pathlib import Path

from hessinit.report.report import CurvatureReport


def load(path: str | os.PathLike[str]) -> CurvatureReport:
    """Read a report that `report.save` wrote, with this or an older version; it equals what was saved.

    Only JSON is read, and nothing in it is run.
    """
    return CurvatureReport.from_json(Path(path).read_bytes(), source=str(path))
