"""The page of a comparison or of a sweep: the verdict, the charts, the table, and what was done."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from hessinit.present.comparison_columns import BEST, DIVERGED, comparison_columns, write_cell
from hessinit.present.comparison_sentences import (
    collect_notes,
    describe_runs,
    explain_comparison,
    format_result,
)
from hessinit.present.comparison_standing import Result, best_start, ordered_starts
from hessinit.present.comparison_verdict import conclusions
from hessinit.present.grid import Column
from hessinit.present.page.content import (
    Block,
    Details,
    HeatMap,
    KeyNumber,
    Page,
    Section,
    Table,
    TableColumn,
    Words,
)
from hessinit.present.page.loss_charts import best_rates_chart, explain_curves, rate_charts
from hessinit.present.page.start_charts import norms_over_depth, norms_over_rates
from hessinit.present.page.sweep_charts import (
    losses_over_sharpness,
    losses_over_std,
    norms_by_std,
    norms_over_std,
    sweep_curves,
)
from hessinit.present.words import format_number, printable, shorten
from hessinit.results.comparison import Comparison

MARKS = {BEST: "best", DIVERGED: "diverged"}


def comparison_page(comparison: Comparison) -> Page:
    """All that the page shows, as plain data."""
    is_sweep = comparison.kind == "sweep"
    seeds = ", ".join(map(str, comparison.seeds))
    versions = [f"{printable(name)} {printable(version)}" for name, version in comparison.versions.items()]
    return Page(
        title="Sweep of standard deviations" if is_sweep else "Comparison of starts",
        verdict=conclusions(comparison),
        sections=[
            *(_sweep_sections(comparison) if is_sweep else _compare_sections(comparison)),
            Section(heading="Every number", blocks=[*_table(comparison), *_record(comparison)]),
        ],
        footer=f"{', '.join([f'Seeds {seeds}', *versions])}.",
        numbers=_key_numbers(comparison),
    )


def _key_numbers(comparison: Comparison) -> list[KeyNumber]:
    """What to take from here: where the loss is lowest; nothing where no start trains."""
    trained = [start for start in comparison.schemes if not math.isnan(comparison.best_rate(start))]
    if not trained:
        return []
    start, rate = comparison.best
    result = Result(comparison.loss(start, rate), comparison.error(start, rate))
    sharpness = rate * comparison.norm(start, rate)
    if comparison.kind == "sweep":
        chosen = KeyNumber(
            label="lowest loss at std", text=f"{comparison.stds[comparison.schemes.index(start)]:g}"
        )
    else:
        chosen = KeyNumber(
            label="lowest loss", text=shorten(printable(start)), note=f"at lr {format_number(rate)}"
        )
    found = [chosen, KeyNumber(label="final loss", text=format_result(result))]
    if not math.isnan(sharpness):
        found.append(KeyNumber(label="lr·‖H‖ at the start", text=format_number(sharpness)))
    return found


def _compare_sections(comparison: Comparison) -> list[Section]:
    rates, best = rate_charts(comparison), best_rates_chart(comparison)
    # A heading between them, or the first would be as small as those of the rates.
    first: list[Block] = [] if best is None else [best, Words(text="All starts at each rate", tone="heading")]
    norms = [norms_over_rates(comparison), norms_over_depth(comparison)]
    return [
        Section(heading="Start and learning rate", blocks=[heat_map(comparison)]),
        *_section("Loss curves", explain_curves(comparison), [*first, *rates]),
        *_section("Curvature at the start", "", norms),
    ]


def _sweep_sections(comparison: Comparison) -> list[Section]:
    norms = [norms_over_std(comparison), norms_by_std(comparison)]
    losses = [losses_over_std(comparison), losses_over_sharpness(comparison)]
    return [
        *_section("From the std to the curvature", "", norms),
        *_section("From the curvature to the loss", "", losses),
        *_section("Loss curves", explain_curves(comparison), [sweep_curves(comparison)]),
    ]


def _section(heading: str, words: str, charts: Sequence[Block | None]) -> list[Section]:
    """A section of the charts that there are; none of an empty list."""
    blocks = [chart for chart in charts if chart is not None]
    return [Section(heading=heading, blocks=[*_words(words), *blocks])] if blocks else []


def heat_map(comparison: Comparison) -> HeatMap:
    """The final loss of each start at each rate; what diverged has none."""
    starts, rates = ordered_starts(comparison), comparison.learning_rates
    best = {rate: best_start(comparison, rate) for rate in rates}
    losses = [
        [comparison.loss(start, rate) if comparison.trains(start, rate) else math.nan for rate in rates]
        for start in starts
    ]
    is_crossed = any(run.diverged for run in comparison.runs)
    shown = [loss for row in losses for loss in row if not math.isnan(loss)]
    lowest = [
        f"lr {format_number(rate)}: {'none trains' if start is None else printable(start)}"
        for rate, start in best.items()
    ]
    return HeatMap(
        caption="Final loss; framed: the lowest at that rate" + ("; ✗: diverged" if is_crossed else ""),
        description=f"Final loss for each start and learning rate. Lowest at {'; '.join(lowest)}.",
        rows=[printable(start) for start in starts],
        columns=[format_number(rate) for rate in rates],
        values=losses,
        texts=[[write_cell(comparison, start, rate, short=True) for rate in rates] for start in starts],
        x_label="learning rate",
        y_label="start",
        value_label="final loss",
        log_color=bool(shown) and min(shown) > 0,
        details=[[_describe_cell(comparison, start, rate) for rate in rates] for start in starts],
        marked=[[best[rate] == start for rate in rates] for start in starts],
    )


def _describe_cell(comparison: Comparison, start: str, rate: float) -> str:
    if not comparison.applies(start):
        return "does not apply to this model"
    parts = []
    diverged = comparison.diverged(start, rate)
    if diverged:
        parts.append(f"{diverged} of {len(comparison.seeds)} seeds diverged")
    error, norm = comparison.error(start, rate), comparison.norm(start, rate)
    if comparison.trains(start, rate) and not math.isnan(error):
        parts.append(f"± {format_number(error, 2)} over {len(comparison.seeds)} seeds")
    if not math.isnan(norm):
        parts.append(f"lr·‖H‖ = {format_number(rate * norm)} at the start")
    return "; ".join(parts)


def _table(comparison: Comparison) -> list[Block]:
    columns = comparison_columns(comparison)
    shown = [
        TableColumn(
            heading=column.heading,
            cells=column.cells,
            is_number=column.is_number,
            keys=keys,
            marks=[MARKS.get(column.styles.get(cell, ""), "") for cell in column.cells],
        )
        for column, keys in zip(columns, _sorting_keys(comparison, columns), strict=True)
    ]
    caption = "Final losses and ‖H‖ at the start" if comparison.layers else "Final losses"
    return [
        Table(caption=caption, columns=shown, show_caption=False),
        *_words(explain_comparison(comparison, columns), "small"),
        *_words(describe_runs(comparison), "small"),
        *(Words(text=f"Note: {note}", tone="note") for note in collect_notes(comparison)),
    ]


def _sorting_keys(comparison: Comparison, columns: Sequence[Column]) -> list[Sequence[float] | None]:
    """The numbers behind the texts of each of these columns; nan, and so at the end, where it diverged."""

    def losses(starts: Sequence[str], rate: float) -> list[float]:
        return [
            math.nan if comparison.diverged(start, rate) else comparison.loss(start, rate) for start in starts
        ]

    rates = comparison.learning_rates
    if comparison.kind == "sweep":
        (rate,) = rates
        starts = comparison.schemes
        layers = [[comparison.norm(start, rate, layer) for start in starts] for layer in comparison.layers]
        network = [comparison.norm(start, rate) for start in starts]
        further = [network, [rate * norm for norm in network]]
        is_measured = len(columns) == len(layers) + 2 + len(further)
        return [comparison.stds, *layers, *(further if is_measured else []), losses(starts, rate)]
    starts = ordered_starts(comparison)
    norms = [[comparison.norm(start) for start in starts] for column in columns if column.heading == "‖H‖"]
    best = [comparison.best_rate(start) for start in starts]
    return [None, *(losses(starts, rate) for rate in rates), *norms, best]


def _record(comparison: Comparison) -> list[Block]:
    pairs = [
        (printable(name.replace("_", " ")), printable(value if isinstance(value, str) else json.dumps(value)))
        for name, value in comparison.settings.items()
        if value is not None
    ]
    return [Details(summary="Settings", pairs=pairs)] if pairs else []


def _words(text: str, tone: str = "plain") -> list[Words]:
    return [Words(text=text, tone=tone)] if text else []
