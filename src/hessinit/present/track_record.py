"""The document of tracked training: sharpness ‖H‖ against its stability limit, one run or several."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, TypeAlias

from hessinit.present import document as doc
from hessinit.present.words import (
    count,
    format_number,
    format_ratio,
    looks,
    ramp,
    shorten,
    spans_much,
    spread_out,
    write_versions,
)
from hessinit.results.track_record import TrackedPoint, Tracking

Runs: TypeAlias = Sequence[tuple[str, Tracking]]  # label and record
Value: TypeAlias = tuple[int, float, str]  # step, value, and what hovering shows

MOST_ROWS, MOST_PAGE_ROWS = 20, 500
MOST_LINES = 12  # more layers than this are shown as a heat map
MOST_COLUMNS = 40
CHANGED = 1.1  # a smaller change of ‖H‖ is within what mini-batches and rounding do
SAME = 1.02  # limits within this ratio are drawn as one line


def describe_tracking(tracking: Tracking) -> doc.Document:
    """Return the verdict, the charts of loss and sharpness, and the table of all points."""
    name = shorten(tracking.name)
    return doc.Document(
        title=f"Curvature during training{': ' + name if name else ''}",
        verdict=[*conclude_tracking(tracking), _describe_cost(tracking)],
        sections=tracking_sections([(name or "training", tracking)]),
        footer=write_versions(f"Seed {tracking.seed}", tracking.versions),
        numbers=_key_numbers(tracking),
        tone=_judge(tracking),
        picture=("sharpness", "loss"),
    )


def tracking_sections(runs: Runs) -> list[doc.Section]:
    """Return the charts of one run, or of several together, and then the points of each."""
    layers = [chart for label, tracking in runs for chart in _layer_charts(label, tracking, len(runs) > 1)]
    points = [block for label, tracking in runs for block in _point_blocks(label, tracking, len(runs) > 1)]
    sections = [
        doc.Section("Loss and sharpness", _step_charts(runs)),
        doc.Section("Layers", layers),
        doc.Section("All measurements", points),
    ]
    return [section for section in sections if section.blocks]


def conclude_tracking(tracking: Tracking) -> list[str]:
    """Return how the sharpness changed, whether lr reached the stability limit, and what failed."""
    points = tracking.points
    measured = [point for point in points if math.isfinite(point.norm)]
    end = find_divergence(tracking)
    said = [] if end is None else [f"Training diverged: the loss became {end[1]} at step {end[0]}."]
    if not points:
        return [*said, "Nothing was measured."]
    if not measured:
        is_infinite = any(math.isinf(point.norm) for point in points)
        return [
            *said,
            "‖H‖ was not finite at any measurement." if is_infinite else "No measurement succeeded.",
        ]
    said += [_describe_course(measured), *_compare_with_limit(tracking, measured)]
    failed = len(points) - len(measured)
    last = list(takewhile(lambda point: not math.isfinite(point.norm), reversed(points)))
    if last and len(last) == failed:
        why = "" if end else "; training may have diverged"
        said.append(f"No measurement succeeded from step {last[-1].step} on{why}.")
    elif failed:
        said.append(f"{failed} of {len(points)} measurements failed.")
    return said


def find_divergence(tracking: Tracking) -> tuple[int, float] | None:
    """Return the step from which on no training loss is finite, and that loss; None if the last is finite."""
    given = {point.step: point.training_loss for point in tracking.points if point.training_loss is not None}
    losses = sorted({**dict(tracking.losses), **given}.items(), reverse=True)
    ended = list(takewhile(lambda pair: not math.isfinite(pair[1]), losses))
    return ended[-1] if ended else None


def warn_of_limit(point: TrackedPoint, optimizer: str) -> str:
    """Return the warning that the learning rate is at or above its stability limit, and what to do."""
    assert point.lr is not None
    lr, limit = format_number(point.lr), format_number(point.stable_learning_rate)
    return (
        f"step {point.step}: lr = {lr} is at or above the stability limit {limit} of "
        f"{optimizer or 'gradient descent'}: ‖H‖ = {format_number(point.norm)}, so lr·‖H‖ = "
        f"{format_number(point.lr * point.norm)}, and steps are stable up to lr·‖H‖ = "
        f"{format_number(point.stable_learning_rate * point.norm)}. If the loss rises or jumps, use lr < "
        f"{limit}, a slower warmup, or initialize with hessinit.initialize_(…, lr={point.lr:g})."
    )


def _describe_course(measured: list[TrackedPoint]) -> str:
    first, last = measured[0], measured[-1]
    if len(measured) == 1:
        return f"‖H‖ = {format_number(first.norm)} at step {first.step}."
    course = "stayed about the same"
    if max(last.norm, first.norm) > CHANGED * min(last.norm, first.norm):
        course = "rose" if last.norm > first.norm else "fell"
    span = f"from {format_number(first.norm)} at step {first.step} to {format_number(last.norm)}"
    highest = max(measured, key=lambda point: point.norm)
    peak = ""
    if highest.norm > CHANGED * max(first.norm, last.norm):
        peak = f", with a peak of {format_number(highest.norm)} at step {highest.step}"
    return f"The sharpness ‖H‖ {course}, {span} at step {last.step}{peak}."


def _compare_with_limit(tracking: Tracking, measured: list[TrackedPoint]) -> list[str]:
    known = [point for point in measured if point.lr_over_limit is not None]
    whose = tracking.optimizer or "gradient descent"
    if not known:
        return []
    above = [point for point in known if (point.lr_over_limit or 0.0) >= 1]
    if not above:
        nearest = max(known, key=lambda point: point.lr_over_limit or 0.0)
        share = format_number(100 * (nearest.lr_over_limit or 0.0), 2)
        # Weights that are not measured, such as biases, may have a lower limit.
        most = f"at most {share} % of it, at step {nearest.step}"
        return [f"For the measured weights lr stayed below the stability limit of {whose}: {most}."]
    limits = [point.stable_learning_rate * point.norm for point in known]
    if len(above) == len(known):
        # Adaptive optimizers, and negative curvature, give another limit at every point.
        span = " to ".join(dict.fromkeys(map(format_number, (min(limits), max(limits)))))
        return [f"lr·‖H‖ was at or above the stability limit ({span} for {whose}) at every measurement."]
    limit = format_number(above[0].stable_learning_rate * above[0].norm)
    many = f"{len(above)} of {len(known)} measurements {'was' if len(above) == 1 else 'were'} at or above it"
    return [f"lr·‖H‖ reached the stability limit ({limit} for {whose}) at step {above[0].step}; {many}."]


def _describe_cost(tracking: Tracking) -> str:
    kind = "the Gauss-Newton matrix" if tracking.curvature == "gauss-newton" else "the Hessian"
    many = count(len(tracking.points), "measurement")
    said = (
        f"{many} of {kind} on {count(tracking.examples, 'example')} took "
        f"{format_number(100 * tracking.overhead, 2)} % of {format_number(tracking.seconds, 2)} s."
    )
    if tracking.max_overhead >= 1 or not tracking.points:
        return said
    last = max([*(step for step, _ in tracking.losses[-1:]), tracking.points[-1].step])
    due = range(tracking.points[0].step // tracking.every, last // tracking.every + 1)
    missing = len(set(due) - {point.step // tracking.every for point in tracking.points})
    if not missing:
        return said
    return (
        f"{said} {missing} of {len(due)} measurements, one every {count(tracking.every, 'step')}, were "
        f"skipped to stay within max_overhead = {tracking.max_overhead:g}; max_overhead=1 measures all."
    )


def _judge(tracking: Tracking) -> str:
    failed = bool(tracking.points) and not any(math.isfinite(point.norm) for point in tracking.points)
    if failed or find_divergence(tracking) is not None:
        return "bad"
    return "fair" if tracking.crossings else "plain"


def _key_numbers(tracking: Tracking) -> list[doc.KeyNumber]:
    measured = [point for point in tracking.points if math.isfinite(point.norm)]
    if not measured:
        return []
    last = measured[-1]
    when = "at the end" if last is tracking.points[-1] else "last measured"
    numbers = [doc.KeyNumber(f"‖H‖ {when}", format_number(last.norm), f"step {last.step}")]
    known = [point for point in measured if point.lr_over_limit is not None]
    if known:
        highest = max(known, key=lambda point: point.lr_over_limit or 0.0)
        note = f"step {highest.step}; unstable above 1"
        numbers.append(doc.KeyNumber("highest lr / limit", format_ratio(highest.lr_over_limit or 0.0), note))
    share = f"{format_number(100 * tracking.overhead, 2)} %"
    return [*numbers, doc.KeyNumber("spent measuring", share, "of the time")]


def _step_charts(runs: Runs) -> list[doc.LineChart]:
    """Return the loss, ‖H‖ with its stability limit, and the learning rate over its limit, over the steps."""
    kind = "training loss" if any(tracking.losses for _, tracking in runs) else "loss of the tracked batch"
    losses = _series(runs, kind, [_losses(tracking) for _, tracking in runs])
    finite = [y for series in losses for y in series.y if y is not None and math.isfinite(y)]
    norms = _series(runs, "‖H‖", [_values(tracking, "norm") for _, tracking in runs])
    stable = [_values(tracking, "stable_norm") for _, tracking in runs]
    stable = [[value for value in values if math.isfinite(value[1])] for values in stable]
    limits = [limit for values in stable for _, limit, _ in values]
    rules: list[doc.Rule] = []
    if limits and 0 < max(limits) <= SAME * min(limits):
        rules = [doc.Rule(limits[0], f"stability limit {format_number(limits[0])}", "vermilion")]
    else:
        moving = _series(runs, "stability limit", stable)
        norms += [replace(each, name=_of(runs, "stability limit", each.name), dashed=True) for each in moving]
    ratios = _series(runs, "lr / limit", [_values(tracking, "lr_over_limit") for _, tracking in runs])
    charts = [
        _chart("sharpness", "Sharpness ‖H‖ and its stability limit", "‖H‖", norms, rules=rules),
        _chart("loss", kind.capitalize(), kind, losses, log_y=spans_much(finite) and min(finite) > 0),
        _chart(
            "limit",
            "Learning rate over its stability limit",
            "lr / limit",
            ratios,
            log_y=not any(y == 0 for series in ratios for y in series.y),
            rules=[doc.Rule(1.0, "stability limit", "vermilion")],
        ),
    ]
    return [chart for chart in charts if chart.series]


def _losses(tracking: Tracking) -> list[Value]:
    """Return the training losses if they were given, else those of the tracked batch."""
    return [(step, loss, "") for step, loss in tracking.losses] or _values(tracking, "loss")


def _values(tracking: Tracking, field: str) -> list[Value]:
    found = [(point, getattr(point, field)) for point in tracking.points]
    return [(point.step, value, _describe_point(point)) for point, value in found if value is not None]


def _series(runs: Runs, quantity: str, values: Sequence[Sequence[Value]]) -> list[doc.Series]:
    """Return a curve for each run that has values; the curve of a single run is named after the quantity."""
    look = looks([label for label, _ in runs])
    return [
        doc.Series(
            name=quantity if len(runs) == 1 else label,
            x=[step for step, _, _ in some],
            y=[value for _, value, _ in some],
            details=[detail for _, _, detail in some],
            **look[label],
        )
        for (label, _), some in zip(runs, values, strict=True)
        if some
    ]


def _of(runs: Runs, quantity: str, name: str) -> str:
    return quantity if len(runs) == 1 else f"{quantity}, {name}"


def _chart(
    name: str,
    caption: str,
    y_label: str,
    series: Sequence[doc.Series],
    *,
    log_y: bool = True,
    rules: Sequence[doc.Rule] = (),
) -> doc.LineChart:
    spans = [f"{one.name} from {_write(one.y[0])} to {_write(one.y[-1])}" for one in series]
    return doc.LineChart(
        name=name,
        caption=caption,
        description=f"Over the steps: {'; '.join([*spans, *(rule.label for rule in rules)])}.",
        series=series,
        x_label="step",
        y_label=y_label,
        log_y=log_y,
        rules=rules,
    )


def _layer_charts(label: str, tracking: Tracking, several: bool) -> list[doc.Chart]:
    """Return ‖H‖ of each layer over the steps: lines, or a heat map of many layers."""
    points = [point for point in tracking.points if point.layers]
    if not points:
        return []
    names = list(dict.fromkeys(name for point in points for name in point.layers))
    last = points[-1].layers
    ends = ", ".join(f"{name} {_write(last.get(name))}" for name in names[:MOST_LINES])
    told: dict[str, Any] = {
        "name": f"layers, {label}" if several else "layers",
        "caption": f"‖H‖ of each layer{f': {label}' if several else ''}",
        "description": f"‖H‖ of {count(len(names), 'layer')} over the steps; at the end {ends}.",
    }
    if len(names) <= MOST_LINES:
        steps = [point.step for point in points]
        series = [
            doc.Series(name=name, x=steps, y=[point.layers.get(name) for point in points], color=color)
            for name, color in zip(names, ramp(range(len(names))), strict=True)
        ]
        return [doc.LineChart(**told, series=series, x_label="step", y_label="‖H‖", log_y=True)]
    chosen = spread_out(points, MOST_COLUMNS)
    values = [[point.layers.get(name, math.nan) for point in chosen] for name in names]
    return [
        doc.HeatMap(
            **told,
            rows=names,
            columns=[str(point.step) for point in chosen],
            values=values,
            texts=[[""] * len(row) for row in values],
            x_label="step",
            y_label="layer",
            value_label="‖H‖",
            log_color=True,
            details=[[format_number(value) for value in row] for row in values],
        )
    ]


def _point_blocks(label: str, tracking: Tracking, several: bool) -> list[doc.Block]:
    of = f" of {label}" if several else ""
    points, few = tracking.points, spread_out(tracking.points, MOST_ROWS)
    tables: list[tuple[Sequence[TrackedPoint], dict[str, Any]]] = [(few, {})]
    blocks: list[doc.Block] = []
    if len(few) < len(points):
        tables = [(few, {"text_only": True}), (spread_out(points, MOST_PAGE_ROWS), {"page_only": True})]
        shown = f"{len(few)} of {len(points)} measurements{of} are shown; .points has all."
        blocks = [doc.Text(shown, text_only=True)]
    blocks += [
        doc.Table(f"Measurements{of}", _columns(rows), show_caption=several, **where)
        for rows, where in tables
        if rows
    ]
    share, most = (format_number(100 * part) for part in (tracking.overhead, tracking.max_overhead))
    pairs = [
        ("optimizer", tracking.optimizer or "not given: the limit is that of gradient descent"),
        ("curvature", tracking.curvature),
        ("examples", f"{tracking.examples:,}"),
        ("every", f"{count(tracking.every, 'step')}, within {most} % of the time"),
        ("time", f"{format_number(tracking.seconds)} s, {share} % of it measuring"),
        ("seed", str(tracking.seed)),
        *tracking.versions.items(),
    ]
    notes = [doc.Text(f"Note: {note}", "note") for note in tracking.notes]
    return [*blocks, *notes, doc.Facts(f"Settings{of}", pairs)]


def _columns(points: Sequence[TrackedPoint]) -> list[doc.Column]:
    """Return the columns that have a number."""

    def numbers(
        heading: str,
        values: Sequence[float | None],
        importance: int,
        form: Callable[[float], str] = format_number,
    ) -> doc.Column:
        cells = ["" if value is None else form(value) for value in values]
        return doc.Column(heading, cells, importance, keys=[math.nan if x is None else x for x in values])

    above = ["diverged" if (point.lr_over_limit or 0) >= 1 else "" for point in points]
    rough = ["~" if not point.converged and not math.isnan(point.norm) else "" for point in points]
    norms = numbers("‖H‖", [point.norm for point in points], 8)
    ratios = numbers("lr / limit", [point.lr_over_limit for point in points], 8, format_ratio)
    sharpest = [max(point.layers, key=point.layers.__getitem__) if point.layers else "" for point in points]
    columns = [
        doc.Column("step", [str(point.step) for point in points], 9),
        numbers("loss", [point.loss for point in points], 7),
        numbers("training loss", [point.training_loss for point in points], 3),
        numbers("lr", [point.lr for point in points], 6),
        replace(norms, cells=[mark + cell for mark, cell in zip(rough, norms.cells, strict=True)]),
        numbers("lr·‖H‖", [point.lr_times_norm for point in points], 7),
        replace(ratios, marks=above),
        doc.Column("sharpest layer", sharpest, 2, is_number=False),
    ]
    return [column for column in columns if any(column.cells)]


def _describe_point(point: TrackedPoint) -> str:
    if math.isnan(point.norm) and point.note:
        return point.note
    rate = "" if point.lr is None else f", lr {format_number(point.lr)}"
    return f"loss {format_number(point.loss)}{rate}{f' ({point.note})' if point.note else ''}"


def _write(number: float | None) -> str:
    return "none" if number is None else format_number(number)
