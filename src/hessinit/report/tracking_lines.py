"""The JSON lines of a tracker: a header, then a line for each point, and one at the end.

A line of a point carries the training losses since the point before. The last line, which a killed run does
not have, has the losses after the last point, the notes and the time. Between them are a line where a run was
resumed, with what is different since, and one where training went back to an earlier step.
"""

from __future__ import annotations

import json

from hessinit.report.json_form import Plain, read_number
from hessinit.report.tracked_point import describe_notes
from hessinit.report.tracking_losses import thin

KIND = "hessinit tracking"
SCHEMA = 1
END = "end"
RESUMED = "resumed"
BACK = "back"


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
    facts: dict[str, Plain] = {}
    stride, ended = 1, False
    for number, line in enumerate(lines[1:], start=2):
        try:
            data = json.loads(line)
            losses = _go_on(losses, [(int(step), loss) for step, loss in data.pop("losses")])
            stride = int(data.pop("stride"))
            kind = data.pop("line", None)
            if kind == BACK:
                points = [point for point in points if point["step"] <= data["step"]]
                losses = [pair for pair in losses if pair[0] <= data["step"]]
            elif kind is not None:
                facts.update(data)
                ended = kind == END
            else:
                points = [point for point in points if point["step"] < data["step"]] + [data]
                ended = False
        except (ValueError, TypeError, KeyError, AttributeError) as problem:
            if number == len(lines):
                break  # the run was killed while it wrote this line
            raise ValueError(
                f"line {number} of {source} is not a tracked point ({problem!r}). Was the file edited?"
            ) from problem
    gathered = {**header, "seconds": 0.0, **facts, "points": points, "losses": thin(losses, stride)}
    if not ended:  # what only the end knows is told by the points
        failures = describe_notes((point["step"], point["note"]) for point in points)
        times = [read_number(point["seconds"]) for point in points]
        gathered["notes"] = [*gathered["notes"], *failures]
        gathered["seconds"] = max([read_number(gathered["seconds"]), *times])
        gathered["spent"] = None
    return gathered


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
