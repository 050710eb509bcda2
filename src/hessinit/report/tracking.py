"""Sharpness through training: the points measured on the way, as plain data."""

from __future__ import annotations

import html
import json
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from hessinit.report.atomic import write_text
from hessinit.report.initialization import Initialization
from hessinit.report.json_form import Plain, read_number, to_plain
from hessinit.report.reading import read_if_there
from hessinit.report.tracked_point import TrackedPoint, find_crossings, read_point
from hessinit.report.tracking_lines import KIND, SCHEMA, are_lines, check_kind, gather_lines, read_losses

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console, ConsoleOptions, RenderResult

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
