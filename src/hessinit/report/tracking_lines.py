"""The JSON lines of a tracker: a header, then a line for each point, and one at the end.

A line of a point carries the training losses since the point before. The last line, which a killed run does
not have, has the losses after the last point, the notes and the time.
"""

from __future__ import annotations

import json

from hessinit.report.json_form import Plain, read_number
from hessinit.report.tracked_point import describe_failures
from hessinit.report.tracking_losses import thin

KIND = "hessinit tracking"
SCHEMA = 1
END = "end"


def are_lines(text: str | bytes) -> bool:
    """Whether these are a tracker's JSON lines, not a JSON document."""
    try:
        header = json.loads(_lines(text)[0])
    except (ValueError, IndexError):
        return False
    return isinstance(header, dict) and bool(header.get("lines"))


def gather_lines(text: str | bytes, source: str) -> dict[str, Plain]:
    """The lines as one plain tracking. What a training that went back to an earlier step does counts."""
    lines = _lines(text)
    if not are_lines(text):
        raise ValueError(
            f"{source} does not begin with a tracker's header. Give the .jsonl file of a tracker."
        )
    header = json.loads(lines[0])
    check_kind(header, source)
    points: list[Plain] = []
    losses: list[tuple[int, Plain]] = []
    end: dict[str, Plain] = {}
    stride = 1
    for number, line in enumerate(lines[1:], start=2):
        try:
            data = json.loads(line)
            losses = _go_on(losses, [(int(step), loss) for step, loss in data.pop("losses")])
            stride = int(data.pop("stride"))
            if data.get("line") == END:
                end = data
            else:
                points = [point for point in points if point["step"] < data["step"]] + [data]
        except (ValueError, TypeError, KeyError, AttributeError) as problem:
            if number == len(lines):
                break  # the run was killed while it wrote this line
            raise ValueError(
                f"line {number} of {source} is not a tracked point ({problem!r}). Was the file edited?"
            ) from problem
    last = points[-1]["seconds"] if points else 0.0
    notes = describe_failures((point["step"], point["note"]) for point in points)
    known = {key: value for key, value in end.items() if key != "line"}
    return {
        **header, "notes": [*header["notes"], *notes], "seconds": last, **known,
        "points": points, "losses": thin(losses, stride),
    }  # fmt: skip


def check_kind(data: Plain, source: str) -> None:
    """Refuse what is no tracking, or one of a version to come."""
    if not isinstance(data, dict) or data.get("kind") != KIND or type(data.get("schema")) is not int:
        raise ValueError(f"{source} is not a {KIND}. Give a file that a tracker or tracking.save() wrote.")
    if data["schema"] > SCHEMA:
        raise ValueError(
            f"{source} has tracking schema {data['schema']}, and this hessinit reads up to {SCHEMA}: it "
            "comes from a newer version. Upgrade with `pip install --upgrade hessinit`."
        )


def read_losses(data: Plain) -> tuple[tuple[int, float], ...]:
    return tuple((int(step), read_number(loss)) for step, loss in data)


def _lines(text: str | bytes) -> list[str]:
    # A character may be cut in half at the end.
    written = text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text
    return [line for line in written.split("\n") if line.strip()]


def _go_on(losses: list[tuple[int, Plain]], more: list[tuple[int, Plain]]) -> list[tuple[int, Plain]]:
    if not more:
        return losses
    return [pair for pair in losses if pair[0] < more[0][0]] + more
