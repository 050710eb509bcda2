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
        """The ‖H‖ at which the rate would reach its limit, were all curvature to grow alike.

        It is nan without a rate.
        """
        if self.lr_over_limit is None or math.isnan(self.lr_over_limit):
            return math.nan
        return self.norm / self.lr_over_limit if self.lr_over_limit else math.inf


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Tracking(Result):
    """The points that `track` measured, and the training losses between them.

    `losses` holds training losses by step, thinned to a thousand. `optimizer` is empty where none
    was given: the limit is then that of plain gradient descent. `spent` are the seconds that
    measuring took with logging and writing; None: those of the points.

    >>> point = TrackedPoint(
    ...     step=0, seconds=1.0, measuring_seconds=0.1, loss=2.3, lr=0.1, norm=30.0, error=0.1,
    ...     converged=True, lr_times_norm=3.0, stable_learning_rate=2 / 30, lr_over_limit=1.5)
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
        if self.spent is not None:
            return self.spent
        return sum(point.measuring_seconds for point in self.points)

    @property
    def crossings(self) -> tuple[int, ...]:
        """The steps at which the rate was seen to reach the stability limit, coming from below."""
        return find_crossings(self.points)


def find_crossings(points: Sequence[TrackedPoint], below_again: float = 0.9) -> tuple[int, ...]:
    """Return the steps at which the rate reached the limit from below.

    At the limit the sharpness hovers, which is one crossing: another one counts only after the rate
    fell below the fraction `below_again` of the limit.
    """
    steps = []
    below = True
    for point in points:
        if point.lr_over_limit is None or math.isnan(point.lr_over_limit):
            continue
        if point.lr_over_limit >= 1 and below:
            steps.append(point.step)
            below = False
        elif point.lr_over_limit < below_again:
            below = True
    return tuple(steps)


def describe_notes(notes: Iterable[tuple[int, str]]) -> list[str]:
    """Return each note once, with the steps that have it.

    >>> describe_notes([(0, ""), (10, "no numbers"), (20, "no numbers"), (30, "no memory")])
    ['Steps 10 to 20 (2 measurements): no numbers', 'Step 30: no memory']
    """
    steps_of: dict[str, list[int]] = {}
    for step, note in notes:
        if note:
            steps_of.setdefault(note, []).append(step)
    return [f"{_name_steps(steps)}: {note}" for note, steps in steps_of.items()]


def _name_steps(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"Step {steps[0]}"
    return f"Steps {steps[0]} to {steps[-1]} ({len(steps)} measurements)"


def are_lines(text: str | bytes) -> bool:
    """Return whether these are a tracker's JSON lines, not a JSON document."""
    try:
        header = json.loads(_lines(text)[0])
    except (ValueError, IndexError, RecursionError):
        return False
    return isinstance(header, dict) and bool(header.get("lines"))


def gather_lines(text: str | bytes, source: str) -> dict[str, Plain]:
    """Return a tracker's JSON lines as the plain data of one Tracking.

    A half-written last line is left out.
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
            added = [[int(step), loss] for step, loss in data.pop("losses")]
            losses = [pair for pair in losses if not added or pair[0] < added[0][0]] + added
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
    gathered = {"seconds": 0.0, "spent": None, **header, **facts, "points": points}
    gathered["losses"] = [pair for pair in losses if pair[0] % stride == 0]
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
