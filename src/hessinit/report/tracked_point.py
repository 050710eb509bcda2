"""One look at the curvature in the middle of training, as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hessinit.report.json_form import Plain, read_number
from hessinit.report.reading import read_if_there

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
