"""The page of a tracking: loss, sharpness against its limit, layers, and every point. One run or several."""

from __future__ import annotations

import math

from hessinit.present.page.content import Block, Details, KeyNumber, Page, Section, Table, TableColumn, Words
from hessinit.present.page.tracking_charts import (
    Labelled,
    edge_chart,
    layer_charts,
    loss_chart,
    sharpness_chart,
)
from hessinit.present.tracking_sentences import conclude_tracking, describe_tracking, find_divergence
from hessinit.present.tracking_table import spread_out, tracking_columns
from hessinit.present.words import format_number, format_ratio, printable, shorten
from hessinit.results.track_record import Tracking

MOST_ROWS = 500


def tracking_page(tracking: Tracking) -> Page:
    """All that the page shows, as plain data."""
    name = shorten(printable(tracking.name))
    versions = [f"{printable(name)} {printable(version)}" for name, version in tracking.versions.items()]
    return Page(
        title=f"Curvature through training{': ' + name if name else ''}",
        verdict=[conclude_tracking(tracking), describe_tracking(tracking)],
        sections=tracking_sections([(name or "training", tracking)]),
        footer=f"{', '.join([f'Seed {tracking.seed}', *versions])}.",
        numbers=_key_numbers(tracking),
        tone=judge_tracking(tracking),
    )


def judge_tracking(tracking: Tracking) -> str:
    """Bad where the training diverged or nothing finite was found, fair where it met the edge."""
    failed = bool(tracking.points) and not any(math.isfinite(point.norm) for point in tracking.points)
    if failed or find_divergence(tracking) is not None:
        return "bad"
    return "fair" if tracking.crossings else "plain"


def tracking_sections(runs: Labelled) -> list[Section]:
    """The charts of one run, or of several side by side; then every point."""
    shown = [(printable(label), tracking) for label, tracking in runs]
    course = [chart for chart in (loss_chart(shown), sharpness_chart(shown)) if chart is not None]
    sections = [Section(heading="Through training", blocks=course)] if course else []
    if edge := edge_chart(shown):
        sections.append(Section(heading="The edge of stability", blocks=[edge]))
    layers = [chart for label, tracking in shown for chart in layer_charts(label, tracking, len(shown) > 1)]
    if layers:
        sections.append(Section(heading="Layer by layer", blocks=layers))
    sections.append(Section(heading="Every point", blocks=_points(shown)))
    return sections


def _points(runs: Labelled) -> list[Block]:
    blocks: list[Block] = []
    for label, tracking in runs:
        points = spread_out(tracking.points, MOST_ROWS)
        if points:
            columns = tracking_columns(points)
            marks = ["diverged" if (point.lr_over_limit or 0) >= 1 else "" for point in points]
            blocks.append(
                Table(
                    caption=f"Every measurement{f': {label}' if len(runs) > 1 else ''}",
                    columns=[
                        TableColumn(
                            heading=one.heading, cells=one.cells, is_number=one.is_number,
                            marks=marks if one.heading == "of the edge" else None,
                        )
                        for one in columns
                    ],
                    show_caption=len(runs) > 1,
                )
            )  # fmt: skip
        blocks += [Words(text=printable(note), tone="note") for note in tracking.notes]
        blocks.append(Details(summary=f"How this was measured{f': {label}' if len(runs) > 1 else ''}",
                              pairs=_record(tracking)))  # fmt: skip
    return blocks


def _record(tracking: Tracking) -> list[tuple[str, str]]:
    return [
        ("optimizer", printable(tracking.optimizer) or "not given: the limit is that of gradient descent"),
        ("curvature", tracking.curvature),
        ("examples", f"{tracking.examples:,}"),
        (
            "every",
            f"{tracking.every:,} steps, within {format_number(100 * tracking.max_overhead)} % of the time",
        ),
        (
            "time",
            f"{format_number(tracking.seconds)} s, measuring {format_number(100 * tracking.overhead)} %",
        ),
        ("seed", str(tracking.seed)),
        *((printable(name), printable(version)) for name, version in tracking.versions.items()),
    ]


def _key_numbers(tracking: Tracking) -> list[KeyNumber]:
    seen = [point for point in tracking.points if math.isfinite(point.norm)]
    if not seen:
        return []
    when = "at the end" if seen[-1] is tracking.points[-1] else "last measured"
    numbers = [
        KeyNumber(label=f"‖H‖ {when}", text=format_number(seen[-1].norm), note=f"step {seen[-1].step}")
    ]
    edges = [point for point in seen if point.lr_over_limit is not None]
    if edges:
        nearest = max(edges, key=lambda point: point.lr_over_limit or 0.0)
        share = nearest.lr_over_limit or 0.0
        label = "closest to the edge" if share < 1 else "farthest beyond the edge"
        note = f"step {nearest.step}; 1 is the edge"
        numbers.append(KeyNumber(label=label, text=format_ratio(share), note=note))
    numbers.append(
        KeyNumber(
            label="measuring", text=f"{format_number(100 * tracking.overhead, 2)} %", note="of the time"
        )
    )
    return numbers
