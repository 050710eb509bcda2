"""Read a saved result back, whatever it is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hessinit.report.report import CurvatureReport
from hessinit.report.schema import KIND


def load(path: str | os.PathLike[str]) -> Any:
    """Read what `save` wrote, with this or an older version: an object equal to what was saved.

    The file says what it holds: a curvature report, an initialization, a comparison, a reproduction or a
    tracking, also the JSON lines of a tracker. What `hessinit reproduce --json` printed becomes a list.
    Only JSON is read, and nothing in it is run.
    """
    # Any, not a union: whoever loads a file knows what is in it, and goes on with it.
    text = Path(path).read_bytes()
    source = str(path)
    kind = _kind(text)
    if kind is list:
        from hessinit.report.reproduction import read_reproduction

        return [read_reproduction(each, source) for each in json.loads(text)]
    if kind is None or kind == KIND:  # the reader of reports says what is wrong with a file of no kind
        return CurvatureReport.from_json(text, source=source)
    readers = _readers()
    if not isinstance(kind, str) or kind not in readers:
        known = ", ".join(name.removeprefix("hessinit ") for name in (KIND, *readers))
        raise ValueError(f"{source} holds {kind!r}, which cannot be read back; what can is a {known}.")
    return readers[kind](text, source=source)


def _readers() -> dict[str, Callable[..., Any]]:
    from hessinit.report import comparison, initialization, reproduction, tracking

    return {
        initialization.KIND: initialization.Initialization.from_json,
        comparison.KIND: comparison.Comparison.from_json,
        reproduction.KIND: reproduction.Reproduction.from_json,
        tracking.KIND: tracking.Tracking.from_json,
    }


def _kind(text: bytes) -> str | type[list[Any]] | None:
    """What the file says it is, in the whole of it or in its first line; None where it says nothing."""
    for part in (text, text.partition(b"\n")[0]):
        try:
            data = json.loads(part)
        except (ValueError, RecursionError):
            continue
        if (
            isinstance(data, list)
            and data
            and all(isinstance(each, dict) and "kind" in each for each in data)
        ):
            return list
        kind = data.get("kind") if isinstance(data, dict) else None
        return kind if isinstance(kind, str) else None
    return None
