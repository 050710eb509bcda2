"""Losses by step, thinned to as many as a picture can show."""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hessinit.results.curvature_report import read_if_there
from hessinit.results.initialization import Initialization
from hessinit.results.result import Plain, read_number, to_plain, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console, ConsoleOptions, RenderResult


MOST_LOSSES = 1000

Loss = TypeVar("Loss")


def thin(losses: Iterable[tuple[int, Loss]], stride: int) -> list[tuple[int, Loss]]:
    """Those whose step is a multiple of `stride`.

    >>> thin([(1, 2.5), (2, 2.4), (3, 2.3), (4, 2.2)], stride=2)
    [(2, 2.4), (4, 2.2)]
    """
    return [(step, loss) for step, loss in losses if step % stride == 0]


# At the edge the sharpness hovers: only after falling below this share of it does a new crossing count.
BELOW_AGAIN = 0.9


@dataclass(frozen=True, kw_only=True)
class TrackedPoint:
    """The curvature after `step` steps, on the tracked batch.

    `loss` is that of the tracked batch, `training_loss` the one last given to `tracker.step`. `norm` is ‖H‖;
    `stable_learning_rate` is the optimizer's largest stable rate here, and `lr_over_limit` is the rate over
    this limit: training is unstable above 1. A measurement that failed has nan for its numbers, and `note`
    says why; it also says when other weights are measured than before, or in another mode of the model.
    """

    step: int
    seconds: float  # since tracking began, at the end of this measurement
    measuring_seconds: float
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
    products: int = 0  # with the curvature, for ‖H‖ and the edge
    note: str = ""

    @property
    def stable_norm(self) -> float:
        """The ‖H‖ up to which the rate is stable, were all curvature to grow alike; nan without a rate."""
        if self.lr_over_limit is None or math.isnan(self.lr_over_limit):
            return math.nan
        return self.norm / self.lr_over_limit if self.lr_over_limit else math.inf


def find_crossings(points: Sequence[TrackedPoint]) -> tuple[int, ...]:
    """The steps at which the rate came to the edge from below; hovering there is one crossing."""
    steps, below = [], True
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
    """What went wrong, or changed, and at which steps, each thing once.

    >>> describe_notes([(0, ""), (10, "no numbers"), (20, "no numbers"), (30, "no memory")])
    ['Steps 10 to 20 (2 measurements): no numbers', 'Step 30: no memory']
    """
    steps: dict[str, list[int]] = {}
    for step, note in notes:
        if note:
            steps.setdefault(note, []).append(step)
    return [
        f"Step {at[0]}: {note}"
        if len(at) == 1
        else f"Steps {at[0]} to {at[-1]} ({len(at)} measurements): {note}"
        for note, at in steps.items()
    ]


def read_point(data: Plain) -> TrackedPoint:
    return TrackedPoint(
        step=int(data["step"]),
        seconds=read_number(data["seconds"]),
        measuring_seconds=read_number(data["measuring_seconds"]),
        loss=read_number(data["loss"]),
        training_loss=read_if_there(read_number, data["training_loss"]),
        lr=read_if_there(read_number, data["lr"]),
        norm=read_number(data["norm"]),
        error=read_number(data["error"]),
        converged=bool(data["converged"]),
        lr_times_norm=read_if_there(read_number, data["lr_times_norm"]),
        stable_learning_rate=read_number(data["stable_learning_rate"]),
        lr_over_limit=read_if_there(read_number, data["lr_over_limit"]),
        layers={str(name): read_number(norm) for name, norm in data["layers"].items()},
        products=int(data["products"]),
        note=str(data["note"]),
    )


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


__all__ = ["KIND", "SCHEMA", "TrackedPoint", "Tracking", "read_lines"]


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Tracking:
    """What `track` found; `print` shows a table and a verdict, `plot` the sharpness against its limit.

    `losses` holds training losses by step, thinned to a thousand. `examples` counts those of the tracked
    batch. `optimizer` is empty where none was given: the limit is then that of plain gradient descent.
    `spent` are the seconds that measuring took with logging and writing; None: those of the points.

    >>> point = TrackedPoint(step=0, seconds=1.0, measuring_seconds=0.1, loss=2.3, lr=0.1, norm=30.0,
    ...                      error=0.1, converged=True, lr_times_norm=3.0, stable_learning_rate=2 / 30,
    ...                      lr_over_limit=1.5)
    >>> tracking = Tracking(points=(point,), curvature="gauss-newton", seconds=1.0)
    >>> tracking.overhead, tracking.crossings, Tracking.from_json(tracking.to_json()) == tracking
    (0.1, (0,), True)
    """

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
        """The share of the time, from the beginning of the tracking on, that measuring took."""
        return self.measuring_seconds / self.seconds if self.seconds > 0 else 0.0

    @property
    def measuring_seconds(self) -> float:
        """What measuring took, with logging and writing where that is known."""
        if self.spent is not None:
            return self.spent
        return sum(point.measuring_seconds for point in self.points)

    @property
    def crossings(self) -> tuple[int, ...]:
        """The steps at which the rate was seen to reach the edge of stability, coming from below."""
        return find_crossings(self.points)

    @property
    def verdict(self) -> str:
        """What became of the sharpness, in words."""
        from hessinit.present.tracking_sentences import conclude_tracking

        return conclude_tracking(self)

    def to_dict(self) -> dict[str, Plain]:
        """The tracking as what strict JSON can hold."""
        start = None if self.initialization is None else self.initialization.to_dict()
        rest = {
            one.name: to_plain(getattr(self, one.name))
            for one in fields(self)
            if one.name != "initialization"
        }
        return {"kind": KIND, "schema": SCHEMA, **rest, "initialization": start}

    def to_json(self) -> str:
        """The tracking as strict JSON, one point a line; `from_json` gives an equal one back."""
        data = self.to_dict()
        points = ",\n    ".join(json.dumps(point, allow_nan=False) for point in data.pop("points"))
        losses = json.dumps(data.pop("losses"), allow_nan=False)
        head = json.dumps(data, indent=2, allow_nan=False).removesuffix("\n}")
        return f'{head},\n  "losses": {losses},\n  "points": [\n    {points}\n  ]\n}}\n'

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tracking as JSON, whole or not at all; `Tracking.load` reads it."""
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tracking:
        """Read what `save` wrote, or the JSON lines that a tracker writes, also of a run that was killed."""
        return cls.from_json(Path(path).read_bytes(), source=str(path))

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "the text") -> Tracking:
        """Rebuild a tracking from what `to_json` gave, or from JSON lines."""
        if are_lines(text):
            return read_lines(text, source=source)
        try:
            data = json.loads(text)
        except ValueError as problem:
            raise ValueError(
                f"{source} is not JSON ({problem}). Give a file that a tracker or tracking.save() wrote."
            ) from problem
        return cls.from_dict(data, source=source)

    @classmethod
    def from_dict(cls, data: Plain, *, source: str = "the data") -> Tracking:
        """Rebuild a tracking; unknown keys are ignored."""
        check_kind(data, source)
        try:
            return cls(
                points=tuple(map(read_point, data["points"])),
                losses=read_losses(data["losses"]),
                optimizer=str(data["optimizer"]),
                curvature=str(data["curvature"]),
                every=int(data["every"]),
                max_overhead=read_number(data["max_overhead"]),
                examples=int(data["examples"]),
                seconds=read_number(data["seconds"]),
                spent=read_if_there(read_number, data.get("spent")),
                seed=int(data["seed"]),
                notes=tuple(map(str, data["notes"])),
                versions={str(key): str(value) for key, value in data["versions"].items()},
                name=str(data["name"]),
                initialization=read_if_there(Initialization.from_dict, data["initialization"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as problem:
            what = f"{problem} is missing" if isinstance(problem, KeyError) else str(problem)
            raise ValueError(
                f"{source} is not a whole tracking: {what}. Was the file edited or cut?"
            ) from problem

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the tracking as one web page that needs nothing else."""
        from hessinit.present.page.render import render_page
        from hessinit.present.page.tracking import tracking_page

        write_text(path, render_page(tracking_page(self)))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw ‖H‖ over the steps with the largest stable one, and the loss beside it; on `ax` or anew."""
        from hessinit.present.tracking_figure import draw_tracking

        return draw_tracking(self, ax)

    # In plain form, where nan equals nan.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tracking):
            return NotImplemented
        return bool(self.to_dict() == other.to_dict())

    def __hash__(self) -> int:
        return hash((self.points, self.optimizer, self.curvature, self.seed))

    def __repr__(self) -> str:
        last = f", last at step {self.points[-1].step}" if self.points else ""
        return f"<Tracking of {len(self.points)} points{last}: overhead {100 * self.overhead:.2g} %>"

    def __str__(self) -> str:
        from hessinit.present.tracking_table import render_tracking

        return render_tracking(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from hessinit.present.tracking_table import tracking_renderables

        yield from tracking_renderables(self, options.max_width)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def read_lines(text: str | bytes, *, source: str = "the text") -> Tracking:
    """Rebuild a tracking from a tracker's JSON lines; what a killed run left half-written is left out."""
    return Tracking.from_dict(gather_lines(text, source), source=source)
