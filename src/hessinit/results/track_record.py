"""Sharpness through training: the points that a tracker measured, and the JSON lines of its log.

The log has a header, then a line for each point with the training losses since the point before,
and one at the end, which a killed run does not have: with the losses after the last point, the
notes and the time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hessinit.results.initialization import Initialization
from hessinit.results.result import LATER, Plain, Result, read_number

MOST_LOSSES = 1000  # as many as a picture can show
# At the limit the sharpness hovers: only after falling below this fraction of it does a new
# crossing count.
BELOW_AGAIN = 0.9
FREE_SECONDS = 5.0  # of measuring, whatever the overhead
END = "end"


@dataclass(frozen=True, kw_only=True)
class TrackedPoint:
    """The curvature after `step` steps, on the tracked batch.

    `loss` is that of the tracked batch, `training_loss` the one last given to `tracker.step`.
    `norm` is ‖H‖; `lr_over_limit` is the rate over `stable_learning_rate`, the optimizer's largest
    stable one: training is unstable above 1. A measurement that failed has nan for its numbers, and
    `note` says why.
    """

    step: int
    seconds: float  # since tracking began, at the end of this measurement
    measuring_seconds: float
    gradients: float | None = field(default=None, metadata=LATER)  # the same, in gradients
    loss: float
    training_loss: float | None = None
    lr: float | None = None
    norm: float
    error: float
    converged: bool
    lr_times_norm: float | None = None
    stable_learning_rate: float
    lr_over_limit: float | None = None
    layers: dict[str, float] = field(default_factory=dict, hash=False)
    products: int = 0  # with the curvature, for ‖H‖ and the stability limit
    note: str = ""

    @property
    def stable_norm(self) -> float:
        """The ‖H‖ up to which the rate is stable, were all curvature to grow alike.

        Nan without a rate.
        """
        if self.lr_over_limit is None or math.isnan(self.lr_over_limit):
            return math.nan
        return self.norm / self.lr_over_limit if self.lr_over_limit else math.inf


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Tracking(Result):
    """What `track` found.

    `losses` holds training losses by step, thinned to a thousand. `optimizer` is empty where none
    was given: the limit is then that of plain gradient descent. `spent` are the seconds that
    measuring took with logging and writing; None: those of the points.

    >>> point = TrackedPoint(step=0, seconds=1.0, measuring_seconds=0.1, loss=2.3, lr=0.1, norm=30.0,
    ...                      error=0.1, converged=True, lr_times_norm=3.0, stable_learning_rate=2 / 30,
    ...                      lr_over_limit=1.5)
    >>> tracking = Tracking(points=(point,), curvature="gauss-newton", seconds=1.0)
    >>> tracking.overhead, tracking.crossings, Tracking.from_json(tracking.to_json()) == tracking
    (0.1, (0,), True)
    """

    KIND: ClassVar[str] = "hessinit tracking"
    SCHEMA: ClassVar[int] = 2

    points: tuple[TrackedPoint, ...] = ()
    losses: tuple[tuple[int, float], ...] = ()
    optimizer: str = ""
    curvature: str
    every: int = 1
    max_overhead: float = 1.0
    examples: int = 0
    seconds: float = 0.0
    spent: float | None = None
    seed: int = 0
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    name: str = ""
    initialization: Initialization | None = None

    @property
    def overhead(self) -> float:
        """The fraction of the time that was spent measuring."""
        return self.measuring_seconds / self.seconds if self.seconds > 0 else 0.0

    @property
    def measuring_seconds(self) -> float:
        """The time spent measuring, with logging and writing where that is known."""
        return (
            sum(point.measuring_seconds for point in self.points)
            if self.spent is None
            else self.spent
        )

    @property
    def crossings(self) -> tuple[int, ...]:
        """The steps at which the rate was seen to reach the stability limit, coming from below."""
        return find_crossings(self.points)


def find_crossings(points: Sequence[TrackedPoint]) -> tuple[int, ...]:
    """Return the steps at which the rate reached the limit from below.

    Hovering there is one crossing.
    """
    steps = []
    below = True
    for point in points:
        if point.lr_over_limit is None or math.isnan(point.lr_over_limit):
            continue
        if point.lr_over_limit >= 1 and below:
            steps.append(point.step)
            below = False
        elif point.lr_over_limit < BELOW_AGAIN:
            below = True
    return tuple(steps)


def describe_notes(notes: Iterable[tuple[int, str]]) -> list[str]:
    """Return what went wrong, or changed, and at which steps, each thing once.

    >>> describe_notes([(0, ""), (10, "no numbers"), (20, "no numbers"), (30, "no memory")])
    ['Steps 10 to 20 (2 measurements): no numbers', 'Step 30: no memory']
    """
    steps: dict[str, list[int]] = {}
    for step, note in notes:
        if note:
            steps.setdefault(note, []).append(step)
    many = {
        note: f"Steps {at[0]} to {at[-1]} ({len(at)} measurements)" for note, at in steps.items()
    }
    return [
        f"{many[note] if len(at) > 1 else f'Step {at[0]}'}: {note}" for note, at in steps.items()
    ]


def are_lines(text: str | bytes) -> bool:
    """Return whether these are a tracker's JSON lines, not a JSON document."""
    try:
        header = json.loads(_lines(text)[0])
    except (ValueError, IndexError, RecursionError):
        return False
    return isinstance(header, dict) and bool(header.get("lines"))


def gather_lines(text: str | bytes, source: str) -> dict[str, Plain]:
    """Return a tracker's JSON lines as the plain data of one Tracking, without a half-written last
    one.
    """
    lines = _lines(text)
    header = {key: value for key, value in json.loads(lines[0]).items() if key != "lines"}
    points: list[Plain] = []
    losses: list[list[Plain]] = []
    facts = {}
    stride = 1
    ended = False
    for number, line in enumerate(lines[1:], start=2):
        try:
            data = json.loads(line)
            more = [[int(step), loss] for step, loss in data.pop("losses")]
            losses = [pair for pair in losses if not more or pair[0] < more[0][0]] + more
            stride = int(data.pop("stride"))
            kind = data.pop("line", None)
            ended = kind == END
            if kind is not None:
                facts.update(data)
            else:
                points = [point for point in points if point["step"] < data["step"]] + [data]
        except (ValueError, TypeError, KeyError, AttributeError) as problem:
            if number == len(lines):
                break  # the run was killed while it wrote this line
            raise ValueError(
                f"line {number} of {source} is not a tracked point ({problem!r})."
            ) from problem
    kept = [pair for pair in losses if pair[0] % stride == 0]
    gathered = {"seconds": 0.0, "spent": None, **header, **facts, "points": points, "losses": kept}
    if not ended:  # what only the end knows is told by the points
        failures = describe_notes((point["step"], point["note"]) for point in points)
        times = [read_number(point["seconds"]) for point in points]
        gathered |= {
            "notes": [*gathered["notes"], *failures],
            "seconds": max([read_number(gathered["seconds"]), *times]),
            "spent": None,
        }
    return gathered


def _lines(text: str | bytes) -> list[str]:
    # A character may be cut in half at the end.
    written = text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text
    return [line for line in written.split("\n") if line.strip()]
