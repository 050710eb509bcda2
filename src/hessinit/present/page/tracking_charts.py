"""The charts of tracked runs for a page: loss, sharpness, the edge, the layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hessinit.present.page.content import Block, HeatMap, LineChart, LineSeries, Rule
from hessinit.present.page.strokes import Look, looks, ramp_of
from hessinit.present.tracking_table import spread_out
from hessinit.present.words import format_number, printable
from hessinit.results.track_record import TrackedPoint, Tracking

Labelled = Sequence[tuple[str, Tracking]]

MOST_LINES = 12  # more layers than this are shown as a map
MOST_COLUMNS = 40
_SAME = 1.02
_SPANS_MUCH = 5.0


def loss_chart(runs: Labelled) -> LineChart | None:
    """The training losses where they were given, else those of the tracked batch."""
    look, series = _looks(runs), []
    kind = "training loss" if any(tracking.losses for _, tracking in runs) else "loss of the tracked batch"
    for label, tracking in runs:
        given = tracking.losses or tuple((point.step, point.loss) for point in tracking.points)
        if given:
            steps, losses = zip(*given, strict=True)
            series.append(LineSeries(name=_name(runs, label, kind), x=steps, y=losses, **look[label]))
    if not series:
        return None
    values = [loss for one in series for loss in one.y if loss is not None and math.isfinite(loss)]
    ends = [f"{_who(runs, one)}ends at {_write(one.y[-1])}" for one in series]
    return LineChart(
        caption=kind[0].upper() + kind[1:],
        description=f"The {kind} over the steps {', '.join(ends)}.",
        series=series,
        x_label="step",
        y_label=kind,
        log_y=_spans_much(values),
    )


def sharpness_chart(runs: Labelled) -> LineChart | None:
    """‖H‖, and the largest that is stable at the rate."""
    look, series, limits = _looks(runs), [], []
    for label, tracking in runs:
        points = tracking.points
        if not points:
            continue
        steps = [point.step for point in points]
        series.append(
            LineSeries(
                name=_name(runs, label, "‖H‖"), x=steps, y=[point.norm for point in points],
                details=[_details(point) for point in points], **look[label],
            )
        )  # fmt: skip
        limits.append((label, steps, [point.stable_norm for point in points]))
    if not series:
        return None
    known = [limit for _, _, values in limits for limit in values if math.isfinite(limit)]
    one = bool(known) and min(known) > 0 and max(known) <= _SAME * min(known)
    rules = [Rule(value=known[0], label=f"stable up to {format_number(known[0])}")] if one else []
    moving = [] if one else [
        LineSeries(
            name=f"stable up to{f' ({label})' if len(runs) > 1 else ''}", x=steps,
            y=[limit if math.isfinite(limit) else None for limit in values], dashed=True,
            color=look[label]["color"] if len(runs) > 1 else "grey",
        )
        for label, steps, values in limits
        if any(map(math.isfinite, values))
    ]  # fmt: skip
    spans = [f"{_who(runs, line)}from {_write(line.y[0])} to {_write(line.y[-1])}" for line in series]
    limit = f" Stable up to {format_number(known[0])}." if one else ""
    return LineChart(
        caption="Sharpness ‖H‖, and what the rate can stand",
        description=f"‖H‖ over the steps, {', '.join(spans)}.{limit}",
        series=[*series, *moving],
        x_label="step",
        y_label="‖H‖",
        log_y=True,
        rules=rules,
    )


def edge_chart(runs: Labelled) -> LineChart | None:
    """The rate as a share of the largest stable one: 1 is the edge."""
    look, series = _looks(runs), []
    for label, tracking in runs:
        known = [point for point in tracking.points if point.lr_over_limit is not None]
        if known:
            series.append(
                LineSeries(
                    name=_name(runs, label, "share of the stable rate"),
                    x=[point.step for point in known], y=[point.lr_over_limit for point in known],
                    details=[_details(point) for point in known], **look[label],
                )
            )  # fmt: skip
    if not series:
        return None
    highest = []
    for one in series:
        values = [value for value in one.y if value is not None and not math.isnan(value)]
        highest.append(f"{_who(runs, one)}at most {_write(max(values, default=math.nan))}")
    return LineChart(
        caption="The learning rate, as a share of the largest stable one",
        description=f"1 is the edge of stability; {', '.join(highest)}.",
        series=series,
        x_label="step",
        y_label="rate ÷ stable rate",
        log_y=all(value is None or value > 0 or math.isnan(value) for one in series for value in one.y),
        rules=[Rule(value=1.0, label="edge of stability", color="vermilion")],
    )


def layer_charts(label: str, tracking: Tracking, several: bool) -> list[Block]:
    points = [point for point in tracking.points if point.layers]
    if not points:
        return []
    names = list(dict.fromkeys(name for point in points for name in point.layers))
    caption = f"‖H‖ of each layer{f': {label}' if several else ''}"
    last = points[-1].layers
    ends = ", ".join(f"{printable(name)} {_write(last.get(name))}" for name in names[:MOST_LINES])
    if len(names) <= MOST_LINES:
        colors = ramp_of(list(range(len(names))))
        return [
            LineChart(
                caption=caption,
                description=f"‖H‖ of each layer over the steps; at the end {ends}.",
                series=[
                    LineSeries(
                        name=printable(name), x=[point.step for point in points],
                        y=[point.layers.get(name) for point in points], color=color,
                    )
                    for name, color in zip(names, colors, strict=True)
                ],
                x_label="step",
                y_label="‖H‖",
                log_y=True,
            )
        ]  # fmt: skip
    chosen = spread_out(points, MOST_COLUMNS)
    values = [[point.layers.get(name, math.nan) for point in chosen] for name in names]
    return [
        HeatMap(
            caption=caption,
            description=f"‖H‖ of {len(names)} layers over the steps; at the end, of the first, {ends}.",
            rows=[printable(name) for name in names],
            columns=[str(point.step) for point in chosen],
            values=values,
            texts=[["" for _ in row] for row in values],
            x_label="step",
            y_label="layer",
            value_label="‖H‖",
            log_color=True,
            details=[[format_number(value) for value in row] for row in values],
        )
    ]


def _name(runs: Labelled, label: str, quantity: str) -> str:
    """Runs are told apart by their labels; the curve of a single one is what it shows."""
    return label if len(runs) > 1 else quantity


def _who(runs: Labelled, series: LineSeries) -> str:
    return f"{series.name} " if len(runs) > 1 else ""


def _looks(runs: Labelled) -> dict[str, Look]:
    return looks([label for label, _ in runs])


def _details(point: TrackedPoint) -> str:
    if math.isnan(point.norm) and point.note:
        return printable(point.note)
    rate = "" if point.lr is None else f", lr {format_number(point.lr)}"
    note = f" ({printable(point.note)})" if point.note else ""
    return f"loss {format_number(point.loss)}{rate}{note}"


def _write(number: float | None) -> str:
    return "nothing" if number is None else format_number(number)


def _spans_much(values: Sequence[float]) -> bool:
    return bool(values) and min(values) > 0 and max(values) > _SPANS_MUCH * min(values)
