"""One record of a run that was interrupted and goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hessinit.errors import ProblemError
from hessinit.results.track_record import Tracking, describe_notes


def go_on_with(earlier: Tracking, record: Tracking, path: Path) -> Tracking:
    """The earlier record, gone on with; what is different now is noted, another curvature refused."""
    if earlier.curvature != record.curvature:
        raise ProblemError(
            f"cannot resume: {path} follows curvature={earlier.curvature!r}, and {record.curvature!r} was "
            "asked for, which are different numbers. Ask for the same, or give another path."
        )
    asked = {
        name: (getattr(earlier, name), getattr(record, name)) for name in ("optimizer", "examples", "seed")
    }
    changes = [f"{name} was {then!r} and is {now!r}" for name, (then, now) in asked.items() if then != now]
    notes = [f"Resumed with other settings: {'; '.join(changes)}."] if changes else []
    told = describe_notes((point.step, point.note) for point in earlier.points)  # and will be again
    kept = [note for note in earlier.notes if note not in told]
    return replace(earlier, every=record.every, max_overhead=record.max_overhead, notes=(*kept, *notes))
