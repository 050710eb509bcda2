"""The document of tracked training: sharpness ‖H‖ against its stability limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from statistics import median
from typing import Any, TypeAlias

from hessinit.present import document as doc
from hessinit.present import words as w
from hessinit.results.track_record import FREE_SECONDS, TrackedPoint, Tracking

Value: TypeAlias = tuple[int, float, str]  # step, value, and what hovering shows

MOST_ROWS = 20
MOST_PAGE_ROWS = 500
MOST_LINES = 12  # layers in a chart: the sharpest
CHANGED = 1.1  # a smaller change of ‖H‖ is within what mini-batches and rounding do
SAME = 1.02  # limits within this ratio are drawn as one line
# Heading, field of a point, importance.
COLUMNS = (
    ("step", "step", 9),
    ("loss", "loss", 7),
    ("training loss", "training_loss", 3),
    ("lr", "lr", 6),
    ("‖H‖", "norm", 8),
    ("lr·‖H‖", "lr_times_norm", 7),
    ("lr / limit", "lr_over_limit", 8),
)


def describe_tracking(tracking: Tracking) -> doc.Document:
    """Return the verdict, the charts of loss and sharpness, and the table of all points."""
    name = w.shorten(tracking.name)
    layers = _layer_charts(tracking)
    is_bad = (bool(tracking.points) and not _measured(tracking)) or find_divergence(
        tracking
    ) is not None
    return doc.Document(
        title=w.title("Curvature during training", {"model": name} if name else tracking.versions),
        verdict=[*conclude_tracking(tracking), _describe_cost(tracking)],
        sections=[
            doc.Section("Loss and sharpness", _step_charts(tracking)),
            *([doc.Section("Layers", layers)] if layers else []),
            doc.Section("All measurements", _point_blocks(tracking)),
        ],
        footer=w.write_versions(f"Seed {tracking.seed}", tracking.versions),
        numbers=_key_numbers(tracking),
        tone="bad" if is_bad else "fair" if tracking.crossings else "plain",
        picture=("sharpness", "loss"),
    )


def _measured(tracking: Tracking) -> list[TrackedPoint]:
    return [point for point in tracking.points if math.isfinite(point.norm)]


def conclude_tracking(tracking: Tracking) -> list[str]:
    """Return how the sharpness changed, whether lr reached the stability limit, and what failed."""
    count = len(tracking.points)
    measured = _measured(tracking)
    end = find_divergence(tracking)
    said = [] if end is None else [f"Training diverged: the loss became {end[1]} at step {end[0]}."]
    if not measured:
        return [*said, "No measurement gave a finite ‖H‖." if count else "Nothing was measured."]
    said += [_describe_course(measured), *_compare_with_limit(tracking, measured)]
    failed = f"{count - len(measured)} of {count} measurements gave no finite ‖H‖."
    return [*said, failed] if len(measured) < count else said


def find_divergence(tracking: Tracking) -> tuple[int, float] | None:
    """Return the step from which on no training loss is finite, and that loss; None if the last is finite."""
    given = {
        point.step: point.training_loss
        for point in tracking.points
        if point.training_loss is not None
    }
    losses = sorted({**dict(tracking.losses), **given}.items(), reverse=True)
    ended = list(takewhile(lambda pair: not math.isfinite(pair[1]), losses))
    return ended[-1] if ended else None


def warn_of_limit(point: TrackedPoint, optimizer: str) -> str:
    """Return the warning that the learning rate is at or above its stability limit, and what to do."""
    assert point.lr is not None
    lr = w.format_number(point.lr)
    limit = w.format_number(point.stable_learning_rate)
    return (
        f"step {point.step}: lr = {lr} is at or above the stability limit {limit} of "
        f"{optimizer or 'gradient descent'}: ‖H‖ = {w.format_number(point.norm)}, so lr·‖H‖ = "
        f"{w.format_number(point.lr * point.norm)}, and steps are stable up to lr·‖H‖ = "
        f"{w.format_number(point.stable_learning_rate * point.norm)}. If the loss rises or jumps, use lr < "
        f"{limit}, a slower warmup, or initialize with hessinit.initialize_(…, lr={point.lr:g})."
    )


def _describe_course(measured: list[TrackedPoint]) -> str:
    first = measured[0]
    last = measured[-1]
    if first is last:
        return f"‖H‖ = {w.format_number(first.norm)} at step {first.step}."
    course = "stayed about the same"
    if max(last.norm, first.norm) > CHANGED * min(last.norm, first.norm):
        course = "rose" if last.norm > first.norm else "fell"
    span = (
        f"from {w.format_number(first.norm)} at step {first.step} to {w.format_number(last.norm)}"
    )
    highest = max(measured, key=lambda point: point.norm)
    peak = ""
    if highest.norm > CHANGED * max(first.norm, last.norm):
        peak = f", with a peak of {w.format_number(highest.norm)} at step {highest.step}"
    return f"The sharpness ‖H‖ {course}, {span} at step {last.step}{peak}."


def _compare_with_limit(tracking: Tracking, measured: list[TrackedPoint]) -> list[str]:
    known = [(point.lr_over_limit, point) for point in measured if point.lr_over_limit is not None]
    whose = tracking.optimizer or "gradient descent"
    if not known:
        return []
    if not (above := [point for ratio, point in known if ratio >= 1]):
        ratio, nearest = max(known, key=lambda pair: pair[0])
        # Weights that are not measured, such as biases, may have a lower limit.
        return [
            (
                f"For the measured weights lr stayed below the stability limit of {whose}: at most "
                f"{w.format_percent(ratio, 2)} of it, at step {nearest.step}."
            )
        ]
    # Adaptive optimizers, and negative curvature, give another limit at every point.
    limit = w.format_range([point.stable_learning_rate * point.norm for point in above])
    return [
        (
            f"lr·‖H‖ was at or above the stability limit ({limit} for {whose}) at {len(above)} of "
            f"{w.count(len(known), 'measurement')}, first at step {above[0].step}."
        )
    ]


def _describe_cost(tracking: Tracking) -> str:
    kind = "the Gauss-Newton matrix" if tracking.curvature == "gauss-newton" else "the Hessian"
    known = [point.gradients for point in tracking.points if point.gradients is not None]
    each = f" (about {w.format_number(median(known), 2)} gradients each)" if known else ""
    limited = tracking.max_overhead < 1 and tracking.measuring_seconds > FREE_SECONDS / 2
    most = f"; some may be skipped to stay within max_overhead = {tracking.max_overhead:g}"
    return (
        f"{w.count(len(tracking.points), 'measurement')} of {kind}{each} on "
        f"{w.count(tracking.examples, 'example')} took {w.format_percent(tracking.overhead, 2)} of "
        f"{w.format_number(tracking.seconds, 2)} s{most if limited else ''}."
    )


def _key_numbers(tracking: Tracking) -> list[doc.KeyNumber]:
    measured = _measured(tracking)
    numbers = [
        doc.KeyNumber("last ‖H‖", w.format_number(p.norm), f"step {p.step}") for p in measured[-1:]
    ]
    if known := [
        (point.lr_over_limit, point.step) for point in measured if point.lr_over_limit is not None
    ]:
        ratio, step = max(known, key=lambda pair: pair[0])
        note = f"step {step}; unstable above 1"
        numbers.append(doc.KeyNumber("highest lr / limit", w.format_ratio(ratio), note))
    return [
        *numbers,
        doc.KeyNumber("spent measuring", w.format_percent(tracking.overhead, 2), "of the time"),
    ]


def _step_charts(tracking: Tracking) -> list[doc.LineChart]:
    norms = _series("‖H‖", _values(tracking, "norm"))
    stable = [value for value in _values(tracking, "stable_norm") if math.isfinite(value[1])]
    limits = [limit for _, limit, _ in stable]
    rules = []
    if limits and 0 < max(limits) <= SAME * min(limits):
        rules = [doc.ReferenceLine(limits[0], f"stability limit {w.format_number(limits[0])}")]
    else:
        norms += [replace(one, dashed=True) for one in _series("stability limit", stable)]
    kind = "training loss" if tracking.losses else "loss of the tracked batch"
    given = [(step, loss, "") for step, loss in tracking.losses]
    losses = _series(kind, given or _values(tracking, "loss"))
    finite = [y for series in losses for y in series.y if y is not None and math.isfinite(y)]
    ratios = _series("lr / limit", _values(tracking, "lr_over_limit"))
    one = [doc.ReferenceLine(1.0, "stability limit")]
    charts = [
        _chart("sharpness", "Sharpness ‖H‖ and its stability limit", "‖H‖", norms, rules=rules),
        _chart(
            "loss", kind.capitalize(), kind, losses, log_y=w.spans_much(finite) and min(finite) > 0
        ),
        _chart("limit", "Learning rate over its stability limit", "lr / limit", ratios, rules=one),
    ]
    return [chart for chart in charts if chart.series]


def _chart(
    name: str, caption: str, y_label: str, series: Sequence[doc.Series], **more: Any
) -> doc.LineChart:
    known = {one.name: [y for y in one.y if y is not None] for one in series}
    ranges = [f"{name} {w.format_range(values)}" for name, values in known.items()]
    told = f"Over the steps: {'; '.join(ranges)}."
    log_y = not any(y == 0 for one in series for y in one.y)
    return doc.LineChart(name, caption, told, series, y_label, "step", **{"log_y": log_y, **more})


def _values(tracking: Tracking, field: str) -> list[Value]:
    found = [(point, getattr(point, field)) for point in tracking.points]
    return [
        (point.step, value, _describe_point(point)) for point, value in found if value is not None
    ]


def _series(name: str, values: Sequence[Value]) -> list[doc.Series]:
    if not values:
        return []
    steps, numbers, details = zip(*values, strict=True)
    return [doc.Series(name, numbers, steps, details=details)]


def _layer_charts(tracking: Tracking) -> list[doc.LineChart]:
    if not (points := [point for point in tracking.points if point.layers]):
        return []
    last = points[-1].layers
    steps = [point.step for point in points]
    names = sorted(last, key=lambda name: -last[name])[:MOST_LINES]
    ends = ", ".join(f"{name} {w.format_number(last[name])}" for name in names)
    which = (
        f"the {MOST_LINES} sharpest of {len(last)} layers"
        if len(last) > MOST_LINES
        else "each layer"
    )
    told = f"‖H‖ of {which} over the steps; at the end {ends}."
    curves = {name: [point.layers.get(name) for point in points] for name in names}
    pairs = zip(curves.items(), w.ramp(range(len(names))), strict=True)
    series = [doc.Series(name, norms, steps, color) for (name, norms), color in pairs]
    return [doc.LineChart("layers", f"‖H‖ of {which}", told, series, "‖H‖", "step", log_y=True)]


def _point_blocks(tracking: Tracking) -> list[doc.Block]:
    points = tracking.points
    few = spread_out(tracking.points, MOST_ROWS)
    blocks: list[doc.Block] = [doc.Table("Measurements", _columns(few))] if few else []
    if len(few) < len(points):
        shown = f"{len(few)} of {len(points)} measurements are shown; .points has all."
        blocks = [
            doc.Table("Measurements", _columns(few), text_only=True),
            doc.Table("Measurements", _columns(spread_out(points, MOST_PAGE_ROWS)), page_only=True),
            doc.Paragraph(shown, text_only=True),
        ]
    settings = {
        "optimizer": tracking.optimizer or "not given: the limit is that of gradient descent",
        **{
            name: getattr(tracking, name)
            for name in ("curvature", "examples", "every", "max_overhead")
        },
        "seconds": w.format_number(tracking.seconds),
        "seed": tracking.seed,
        **tracking.versions,
    }
    return [
        *blocks,
        *w.note_paragraphs(tracking.notes),
        doc.Facts("Settings", w.write_pairs(settings)),
    ]


def spread_out(points: Sequence[TrackedPoint], most: int) -> Sequence[TrackedPoint]:
    if len(points) <= most:
        return points
    return [points[round(number * (len(points) - 1) / (most - 1))] for number in range(most)]


def _columns(points: Sequence[TrackedPoint]) -> list[doc.Column]:
    columns = []
    for heading, field, importance in COLUMNS:
        values = [getattr(point, field) for point in points]
        keys = [math.nan if value is None else value for value in values]
        write = (
            w.format_ratio
            if field == "lr_over_limit"
            else str
            if field == "step"
            else w.format_number
        )
        cells = ["" if value is None else write(value) for value in values]
        if field == "norm":
            rough = [not point.converged and not math.isnan(point.norm) for point in points]
            cells = [f"~{cell}" if mark else cell for cell, mark in zip(cells, rough, strict=True)]
        marks = (
            ["diverged" if key >= 1 else "" for key in keys] if field == "lr_over_limit" else None
        )
        columns.append(doc.Column(heading, cells, importance, keys=keys, marks=marks))
    sharpest = [
        max(point.layers, key=point.layers.__getitem__) if point.layers else "" for point in points
    ]
    columns.append(w.name_column("sharpest layer", sharpest, 2))
    return [column for column in columns if any(column.cells)]


def _describe_point(point: TrackedPoint) -> str:
    if math.isnan(point.norm) and point.note:
        return point.note
    rate = "" if point.lr is None else f", lr {w.format_number(point.lr)}"
    return f"loss {w.format_number(point.loss)}{rate}{f' ({point.note})' if point.note else ''}"
