"""A tracking in a terminal. `python -m hessinit.present.tracking_table` shows one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from hessinit.present.grid import Column, build_grid, fit, name_left_out, render, terminal_width
from hessinit.present.tracking_sentences import conclude_tracking, describe_tracking
from hessinit.present.words import format_number, format_ratio, printable
from hessinit.results.track_record import TrackedPoint, Tracking

MOST_ROWS = 20
_BEYOND = "red"


def render_tracking(tracking: Tracking, width: int | None = None, color: bool = False) -> str:
    """Write the tracking as text of at most `width` columns (None: the terminal's)."""
    columns = width or terminal_width()
    return render(tracking_renderables(tracking, columns), columns, color=color)


def tracking_renderables(tracking: Tracking, width: int) -> Iterator[RenderableType]:
    """Give the parts to a rich console of that width: the table, then what it says."""
    points = spread_out(tracking.points, MOST_ROWS)
    left_out: list[Column] = []
    if points:
        columns, left_out = fit(tracking_columns(points), width)
        yield build_grid(columns, width)
        yield Text()
    # Text, never str: rich would read a layer called "[red]" as markup.
    yield Text(conclude_tracking(tracking))
    yield Text(describe_tracking(tracking))
    if len(points) < len(tracking.points):
        yield Text(f"{len(points)} of {len(tracking.points)} measurements are shown; .points has all.")
    for note in tracking.notes:
        yield Text(f"Note: {printable(note)}")
    yield from name_left_out(left_out, width)


def tracking_columns(points: Sequence[TrackedPoint]) -> list[Column]:
    """What is known of the points; a column without a number is not there."""
    edges = tuple(_write(point.lr_over_limit, format_ratio) for point in points)
    beyond = {
        text: _BEYOND for text, point in zip(edges, points, strict=True) if (point.lr_over_limit or 0) >= 1
    }
    columns = [
        Column("step", tuple(str(point.step) for point in points), 9),
        Column("loss", tuple(format_number(point.loss) for point in points), 7),
        Column("training loss", tuple(_write(point.training_loss) for point in points), 3),
        Column("lr", tuple(_write(point.lr) for point in points), 6),
        Column("‖H‖", tuple(write_norm(point) for point in points), 8),
        Column("lr·‖H‖", tuple(_write(point.lr_times_norm) for point in points), 7),
        Column("of the edge", edges, 8, styles=beyond),
        Column("sharpest layer", tuple(map(_sharpest, points)), 2, is_number=False),
    ]
    return [column for column in columns if any(column.cells)]


def write_norm(point: TrackedPoint) -> str:
    """‖H‖, with `~` before it when it did not converge."""
    known = point.converged or math.isnan(point.norm)
    return ("" if known else "~") + format_number(point.norm)


def spread_out(points: Sequence[TrackedPoint], most: int) -> list[TrackedPoint]:
    """At most so many, evenly spread, with the first and the last.

    >>> from hessinit.present.tracking_example import example_tracking
    >>> [point.step for point in spread_out(example_tracking(points=101).points, 5)]
    [0, 500, 1000, 1500, 2000]
    """
    if len(points) <= most:
        return list(points)
    places = sorted({round(number * (len(points) - 1) / (most - 1)) for number in range(most)})
    return [points[place] for place in places]


def _write(number: float | None, form: object = format_number) -> str:
    assert callable(form)
    return "" if number is None else form(number)


def _sharpest(point: TrackedPoint) -> str:
    return printable(max(point.layers, key=lambda name: point.layers[name])) if point.layers else ""


if __name__ == "__main__":
    from hessinit.present.tracking_example import example_tracking

    Console().print(example_tracking())
