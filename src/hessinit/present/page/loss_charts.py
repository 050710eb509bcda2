"""Loss curves for a page: each start over the steps, the median over seeds with their range."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hessinit.present.comparison_curves import (
    Cross,
    Curve,
    Heights,
    crosses_of,
    curve_of,
    curves_at,
    end_of_line,
    heights_of,
)
from hessinit.present.comparison_standing import at_best_rate, ordered_starts
from hessinit.present.page.content import LineChart, LineSeries
from hessinit.present.page.strokes import Look, looks
from hessinit.present.words import format_number, printable
from hessinit.results.comparison import Comparison


def explain_curves(comparison: Comparison) -> str:
    """What lines, bands and crosses are, as far as they are there."""
    several = len(comparison.seeds) > 1
    parts = ["Lines are medians over seeds, bands reach from the least to the largest"] if several else []
    if any(run.diverged for run in comparison.runs):
        parts.append("a cross is where seeds diverge" if several else "A cross is where a run diverges")
    return f"{'; '.join(parts)}." if parts else ""


def best_rates_chart(comparison: Comparison) -> LineChart | None:
    """Each start at its own best rate; None where nothing trains, or all are best at the same rate."""
    rates = {start: comparison.best_rate(start) for start in ordered_starts(comparison)}
    trained = {start: rate for start, rate in rates.items() if not math.isnan(rate)}
    curves = {
        start: curve_of(comparison.runs_of(start, rate), comparison.steps) for start, rate in trained.items()
    }
    heights = heights_of([curves], comparison)
    if heights is None or len(set(trained.values())) < 2:
        return None
    names = {start: f"{printable(start)}, lr {format_number(rate)}" for start, rate in trained.items()}
    ends = [f"{printable(start)} {format_number(at_best_rate(comparison, start).mean)}" for start in curves]
    return LineChart(
        caption="Each start at its own best rate",
        description=f"Training loss over {comparison.steps:,} steps. Final losses: {', '.join(ends)}.",
        series=curve_series(curves, names, looks(comparison.schemes), heights),
        x_label="step",
        y_label="training loss",
        log_y=heights.logarithmic,
        x_range=(0.0, comparison.steps),
        y_range=(heights.low, heights.high),
    )


def rate_charts(comparison: Comparison) -> list[LineChart]:
    """All starts at each rate, one chart a rate; they share the axis of the losses."""
    drawn = [curves_at(comparison, rate) for rate in comparison.learning_rates]
    heights = heights_of(drawn, comparison)
    if heights is None:
        return []
    order = ordered_starts(comparison)
    names = {start: printable(start) for start in order}
    charts = []
    for rate, curves in zip(comparison.learning_rates, drawn, strict=True):
        ordered = {start: curves[start] for start in order if start in curves}
        charts.append(
            LineChart(
                caption=f"lr {format_number(rate)}",
                description=_describe_rate(comparison, rate),
                series=curve_series(ordered, names, looks(comparison.schemes), heights),
                x_label="step",
                y_label="training loss",
                log_y=heights.logarithmic,
                x_range=(0.0, comparison.steps),
                y_range=(heights.low, heights.high),
            )
        )
    return charts


def curve_series(
    curves: Mapping[str, Curve], names: Mapping[str, str], look: Mapping[str, Look], heights: Heights
) -> list[LineSeries]:
    """A line for each start as far as it stays in the chart, then the crosses."""
    lines = [_line(curve, names[start], look[start], heights) for start, curve in curves.items()]
    marks = [
        _mark(cross, names[start], look[start])
        for start, curve in curves.items()
        for cross in crosses_of(curve, heights)
    ]
    return [*lines, *marks]


def _line(curve: Curve, name: str, look: Look, heights: Heights) -> LineSeries:
    steps, median, low, high = (list(part) for part in (curve.steps, curve.median, curve.low, curve.high))
    inside = [at for at, loss in enumerate(median) if loss <= heights.high]
    last = inside[-1] + 1 if inside else 0
    end: Sequence[float] = ()
    if last < len(median):  # it leaves at the top, and what follows would be drawn outside
        steps[last:], end = [end_of_line(curve, heights)[0]], [heights.high]
    details = [
        f"{format_number(a)} to {format_number(b)}" for a, b in zip(low[:last], high[:last], strict=True)
    ]
    return LineSeries(
        name=name,
        x=steps,
        y=[*median[:last], *end],
        low=[*low[:last], *end] if curve.seeds > 1 else None,
        high=[*high[:last], *end] if curve.seeds > 1 else None,
        details=[*details, *(["off the chart from here"] if end else [])] if curve.seeds > 1 else None,
        **look,
    )


def _mark(cross: Cross, name: str, look: Look) -> LineSeries:
    seeds = f"{cross.diverged} of {cross.seeds} seeds" if cross.seeds > 1 else "the one seed"
    verb = "diverges" if cross.diverged == 1 else "diverge"
    return LineSeries(
        name=name,
        x=[cross.step],
        y=[cross.loss],
        color=look["color"],
        points=True,
        symbol="cross",
        in_legend=False,
        details=[f"{seeds} {verb}"],
    )


def _describe_rate(comparison: Comparison, rate: float) -> str:
    ends = []
    for start in ordered_starts(comparison):
        if comparison.trains(start, rate):
            ends.append(f"{printable(start)} {format_number(comparison.loss(start, rate))}")
        elif comparison.diverged(start, rate):
            ends.append(f"{printable(start)} diverges")
    return f"Training loss over {comparison.steps:,} steps. Final losses: {', '.join(ends) or 'none'}."
