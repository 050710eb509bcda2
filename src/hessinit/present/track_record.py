"""The document of tracked training: sharpness ‖H‖ against its stability limit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from statistics import median
from typing import Any, TypeAlias

from hessinit.present import document as doc
from hessinit.present import words as w
from hessinit.results.track_record import FREE_SECONDS, TrackedPoint, Tracking

Value: TypeAlias = tuple[int, float, str]  # step, value, and what hovering shows


@dataclass(frozen=True)
class Extent:
    """How much of a record is shown, and which changes are worth a word."""

    rows: int = 20
    page_rows: int = 500
    lines: int = 12  # layers in a chart: the sharpest
    changed: float = 1.1  # a smaller change of ‖H‖ is within what mini-batches and rounding do
    same: float = 1.02  # limits within this ratio are drawn as one line


EXTENT = Extent()


def describe_tracking(tracking: Tracking) -> doc.Document:
    """Return the verdict, the charts of loss and sharpness, and the table of all points."""
    facts = tracking.versions
    if tracking.name:
        facts = {"model": tracking.name}
    return doc.Document(
        title=w.title("Curvature during training", facts),
        verdict=[*conclude_tracking(tracking), _describe_cost(tracking)],
        sections=[
            doc.Section("Loss and sharpness", _step_charts(tracking)),
            *doc.filled(doc.Section("Layers", _layer_charts(tracking))),
            doc.Section("All measurements", _point_blocks(tracking)),
        ],
        footer=w.write_versions(f"Seed {tracking.seed}", tracking.versions),
        numbers=_key_numbers(tracking),
        tone=_tone(tracking),
        picture=("sharpness", "loss"),
    )


def _tone(tracking: Tracking) -> str:
    if (bool(tracking.points) and not _finite_points(tracking)) or find_divergence(
        tracking
    ) is not None:
        return "bad"
    return "fair" if tracking.crossings else "plain"


def _finite_points(tracking: Tracking) -> list[TrackedPoint]:
    return [point for point in tracking.points if math.isfinite(point.norm)]


def conclude_tracking(tracking: Tracking) -> list[str]:
    """Return how the sharpness changed, whether lr reached the stability limit, and what failed."""
    sentences = []
    if end := find_divergence(tracking):
        sentences.append(f"Training diverged: the loss became {end[1]} at step {end[0]}.")
    measured = _finite_points(tracking)
    count = len(tracking.points)
    if not measured:
        failure = "No measurement gave a finite ‖H‖." if count else "Nothing was measured."
        return [*sentences, failure]
    sentences += [_describe_course(measured), *_compare_with_limit(tracking)]
    if len(measured) < count:
        sentences.append(f"{count - len(measured)} of {count} measurements gave no finite ‖H‖.")
    return sentences


def find_divergence(tracking: Tracking) -> tuple[int, float] | None:
    """Return the step from which on no training loss is finite, and that loss.

    None if the last loss is finite.
    """
    losses = dict(tracking.losses) | {
        point.step: point.training_loss
        for point in tracking.points
        if point.training_loss is not None
    }
    latest_first = sorted(losses.items(), reverse=True)
    diverged = list(takewhile(lambda pair: not math.isfinite(pair[1]), latest_first))
    return diverged[-1] if diverged else None


def warn_of_limit(point: TrackedPoint, optimizer: str) -> str:
    """Return the warning that the rate is at or above its stability limit, and what to do."""
    assert point.lr is not None
    limit = w.format_number(point.stable_learning_rate)
    return (
        f"step {point.step}: lr = {w.format_number(point.lr)} is at or above the stability limit "
        f"{limit} of {optimizer or 'gradient descent'}: ‖H‖ = {w.format_number(point.norm)}, so "
        f"lr·‖H‖ = {w.format_number(point.lr * point.norm)}, and steps are stable up to lr·‖H‖ = "
        f"{w.format_number(point.stable_learning_rate * point.norm)}. If the loss rises or jumps, "
        f"use lr < {limit}, a slower warmup, or initialize with hessinit.initialize_(…, "
        f"lr={point.lr:g})."
    )


def _describe_course(measured: Sequence[TrackedPoint]) -> str:
    first = measured[0]
    last = measured[-1]
    start = f"{w.format_number(first.norm)} at step {first.step}"
    if first is last:
        return f"‖H‖ = {start}."
    course = "stayed about the same"
    if max(last.norm, first.norm) > EXTENT.changed * min(last.norm, first.norm):
        course = "rose" if last.norm > first.norm else "fell"
    highest = max(measured, key=lambda point: point.norm)
    has_peak = highest.norm > EXTENT.changed * max(first.norm, last.norm)
    peak = f", with a peak of {w.format_number(highest.norm)} at step {highest.step}"
    return (
        f"The sharpness ‖H‖ {course}, from {start} to {w.format_number(last.norm)} at step "
        f"{last.step}{w.text_if(has_peak, peak)}."
    )


def _compare_with_limit(tracking: Tracking) -> Iterator[str]:
    ratios = _limit_ratios(tracking)
    optimizer = tracking.optimizer or "gradient descent"
    above = [point for ratio, point in ratios if ratio >= 1]
    if above:
        # Adaptive optimizers, and negative curvature, give another limit at every point.
        yield (
            "lr·‖H‖ was at or above the stability limit "
            f"({w.format_range([point.stable_learning_rate * point.norm for point in above])} for "
            f"{optimizer}) at {len(above)} of {w.count(len(ratios), 'measurement')}, first at step "
            f"{above[0].step}."
        )
    elif ratios:
        ratio, nearest = max(ratios, key=lambda pair: pair[0])
        # Weights that are not measured, such as biases, may have a lower limit.
        yield (
            f"For the measured weights lr stayed below the stability limit of {optimizer}: at most "
            f"{w.format_percent(ratio, 2)} of it, at step {nearest.step}."
        )


def _limit_ratios(tracking: Tracking) -> list[tuple[float, TrackedPoint]]:
    """Return the learning rates over their stability limits, where both are known."""
    return [
        (point.lr_over_limit, point)
        for point in _finite_points(tracking)
        if point.lr_over_limit is not None
    ]


def _describe_cost(tracking: Tracking) -> str:
    matrix = {"gauss-newton": "the Gauss-Newton matrix"}.get(tracking.curvature, "the Hessian")
    gradients = [point.gradients for point in tracking.points if point.gradients is not None]
    if gradients:
        matrix += f" (about {w.format_number(median(gradients), 2)} gradients each)"
    limited = tracking.max_overhead < 1 and tracking.measuring_seconds > FREE_SECONDS / 2
    skipped = f"; some may be skipped to stay within max_overhead = {tracking.max_overhead:g}"
    return (
        f"{w.count(len(tracking.points), 'measurement')} of {matrix} on "
        f"{w.count(tracking.examples, 'example')} took {w.format_percent(tracking.overhead, 2)} of "
        f"{w.format_number(tracking.seconds, 2)} s{w.text_if(limited, skipped)}."
    )


def _key_numbers(tracking: Tracking) -> list[doc.KeyNumber]:
    numbers = [
        doc.KeyNumber("last ‖H‖", w.format_number(point.norm), f"step {point.step}")
        for point in _finite_points(tracking)[-1:]
    ]
    if ratios := _limit_ratios(tracking):
        ratio, point = max(ratios, key=lambda pair: pair[0])
        numbers.append(
            doc.KeyNumber(
                "highest lr / limit", w.format_ratio(ratio), f"step {point.step}; unstable above 1"
            )
        )
    return [
        *numbers,
        doc.KeyNumber("spent measuring", w.format_percent(tracking.overhead, 2), "of the time"),
    ]


def _step_charts(tracking: Tracking) -> list[doc.LineChart]:
    norms = _series("‖H‖", _values(tracking, "norm"))
    stable = [value for value in _values(tracking, "stable_norm") if math.isfinite(value[1])]
    limits = [limit for _, limit, _ in stable]
    rules = []
    if limits and 0 < max(limits) <= EXTENT.same * min(limits):
        rules = [doc.ReferenceLine(limits[0], f"stability limit {w.format_number(limits[0])}")]
    else:
        norms += [replace(curve, dashed=True) for curve in _series("stability limit", stable)]
    ratios = _series("lr / limit", _values(tracking, "lr_over_limit"))
    caption = "Learning rate over its stability limit"
    charts = [
        _chart("sharpness", "Sharpness ‖H‖ and its stability limit", "‖H‖", norms, rules),
        _loss_chart(tracking),
        _chart("limit", caption, "lr / limit", ratios, [doc.ReferenceLine(1.0, "stability limit")]),
    ]
    return [chart for chart in charts if chart.series]


def _loss_chart(tracking: Tracking) -> doc.LineChart:
    kind = "loss of the tracked batch"
    values = _values(tracking, "loss")
    if tracking.losses:
        kind = "training loss"
        values = [(step, loss, "") for step, loss in tracking.losses]
    finite = [loss for _, loss, _ in values if math.isfinite(loss)]
    log_y = w.spans_much(finite) and min(finite) > 0
    return replace(_chart("loss", kind.capitalize(), kind, _series(kind, values)), log_y=log_y)


def _chart(
    name: str,
    caption: str,
    y_label: str,
    series: Sequence[doc.Series],
    rules: Sequence[doc.ReferenceLine] = (),
) -> doc.LineChart:
    values = {curve.name: [y for y in curve.y if y is not None] for curve in series}
    ranges = "; ".join(f"{label} {w.format_range(ys)}" for label, ys in values.items())
    log_y = not any(y == 0 for ys in values.values() for y in ys)
    return doc.LineChart(
        name,
        caption,
        f"Over the steps: {ranges}.",
        series,
        y_label,
        "step",
        log_y=log_y,
        rules=rules,
    )


def _values(tracking: Tracking, field: str) -> list[Value]:
    return [
        (point.step, value, _describe_point(point))
        for point in tracking.points
        if (value := getattr(point, field)) is not None
    ]


def _series(name: str, values: Sequence[Value]) -> list[doc.Series]:
    if not values:
        return []
    steps, numbers, details = zip(*values, strict=True)
    return [doc.Series(name, numbers, steps, details=details)]


def _layer_charts(tracking: Tracking) -> list[doc.LineChart]:
    points = [point for point in tracking.points if point.layers]
    if not points:
        return []
    last = points[-1].layers
    names = sorted(last, key=lambda name: -last[name])[: EXTENT.lines]
    ends = ", ".join(f"{name} {w.format_number(last[name])}" for name in names)
    shown = "each layer"
    if len(last) > len(names):
        shown = f"the {len(names)} sharpest of {len(last)} layers"
    description = f"‖H‖ of {shown} over the steps; at the end {ends}."
    series = [
        doc.Series(
            name,
            [point.layers.get(name) for point in points],
            [point.step for point in points],
            color,
        )
        for name, color in zip(names, w.ramp(range(len(names))), strict=True)
    ]
    return [
        doc.LineChart("layers", f"‖H‖ of {shown}", description, series, "‖H‖", "step", log_y=True)
    ]


def _point_blocks(tracking: Tracking) -> list[doc.Block]:
    settings: dict[str, Any] = {
        "optimizer": tracking.optimizer or "not given: the limit is that of gradient descent",
        "curvature": tracking.curvature,
        "examples": tracking.examples,
        "every": tracking.every,
        "max_overhead": tracking.max_overhead,
        "seconds": w.format_number(tracking.seconds),
        "seed": tracking.seed,
        **tracking.versions,
    }
    return [
        *_point_tables(tracking.points),
        *w.note_paragraphs(tracking.notes),
        doc.Facts("Settings", w.write_pairs(settings)),
    ]


def _point_tables(points: Sequence[TrackedPoint]) -> list[doc.Block]:
    if not points:
        return []
    shown = spread_out(points, EXTENT.rows)
    table = doc.Table("Measurements", _point_columns(shown))
    if len(shown) == len(points):
        return [table]
    remark = f"{len(shown)} of {len(points)} measurements are shown; .points has all."
    return [
        replace(table, text_only=True),
        doc.Table(
            "Measurements", _point_columns(spread_out(points, EXTENT.page_rows)), page_only=True
        ),
        doc.Paragraph(remark, text_only=True),
    ]


def spread_out(points: Sequence[TrackedPoint], most: int) -> Sequence[TrackedPoint]:
    """Return at most so many of the points, evenly spaced, with the first and the last one."""
    if len(points) <= most:
        return points
    return [points[round(number * (len(points) - 1) / (most - 1))] for number in range(most)]


def _point_columns(points: Sequence[TrackedPoint]) -> list[doc.Column]:
    norms = [
        w.mark_doubt(w.format_number(point.norm), point.converged or math.isnan(point.norm))
        for point in points
    ]
    ratios = _point_column("lr / limit", points, "lr_over_limit", 8)
    ratio_cells = w.map_known([point.lr_over_limit for point in points], w.format_ratio, "")
    marks = [w.text_if(ratio >= 1, "diverged") for ratio in _numbers(points, "lr_over_limit")]
    sharpest = [max(point.layers, key=point.layers.__getitem__, default="") for point in points]
    return [
        replace(
            _point_column("step", points, "step", 9), cells=[str(point.step) for point in points]
        ),
        _point_column("loss", points, "loss", 7),
        _point_column("training loss", points, "training_loss", 3),
        _point_column("lr", points, "lr", 6),
        replace(_point_column("‖H‖", points, "norm", 8), cells=norms),
        _point_column("lr·‖H‖", points, "lr_times_norm", 7),
        replace(ratios, cells=ratio_cells, marks=marks),
        w.name_column("sharpest layer", sharpest, 2),
    ]


def _point_column(
    heading: str, points: Sequence[TrackedPoint], field: str, importance: int
) -> doc.Column:
    cells = w.map_known([getattr(point, field) for point in points], w.format_number, "")
    return doc.Column(heading, cells, importance, keys=_numbers(points, field))


def _numbers(points: Sequence[TrackedPoint], field: str) -> list[float]:
    return w.map_known([getattr(point, field) for point in points], float, math.nan)


def _describe_point(point: TrackedPoint) -> str:
    if math.isnan(point.norm) and point.note:
        return point.note
    rate = "" if point.lr is None else f", lr {w.format_number(point.lr)}"
    return f"loss {w.format_number(point.loss)}{rate}{w.text_if(point.note, f' ({point.note})')}"
