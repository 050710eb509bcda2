"""The document of the demo: loss against learning rate on two networks, and one initialization."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from hessinit.present import document as doc
from hessinit.present import words as w
from hessinit.present.comparison import OURS, best_scheme, collect_notes, loss_column
from hessinit.present.initialization import describe_initialization, describe_target
from hessinit.results.comparison import Comparison, window
from hessinit.results.initialization import Initialization

GUESSING = math.log(
    10
)  # the loss of guessing a digit, which a start that fails at some rate has there


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """What the demo computes: one initialization, and several starts × learning rates on two networks."""

    initialization: Initialization
    plain: Comparison
    normalized: Comparison


def describe_demonstration(demonstration: Demonstration) -> doc.Document:
    """Return the losses of both networks over the learning rates, then the initialization layer by layer."""
    grids = [demonstration.plain, demonstration.normalized]
    result = demonstration.initialization
    named = dict(zip(("Plain", "Normalized"), grids, strict=True))
    steps = grids[0].steps
    rates = list(map(w.format_number, grids[0].learning_rates))
    seeds = grids[0].seeds
    ranked = sorted(grids[0].schemes, key=lambda start: _excess(grids[0], start))
    shown = {start: [_write_excess(grid, start) for grid in grids] for start in ranked}
    means = "; ".join(f"{start} {' and '.join(texts)}" for start, texts in shown.items())
    headline = (
        f"Final loss less the lowest, mean over {len(rates)} learning rates from {rates[0]} to {rates[-1]}, "
        f"on the plain and on the normalized network: {means}."
    )
    told = (
        f"Final loss: of the last {window(steps)} of {steps} steps, mean over {w.count(len(seeds), 'seed')}; "
        "* lowest at that rate, ✗ diverged (seeds). Plain: ten dense layers with tanh; normalized: the same "
        "with a LayerNorm after each hidden layer. Excess: the loss less the lowest of its table, mean over "
        "the rates; a start that diverges with some seed counts as guessing "
        f"({w.format_number(GUESSING)}) there. Two small networks are an example, not evidence: run hessinit "
        "compare on your own."
    )
    charts = [_rate_chart(name, grid) for name, grid in named.items()]
    tables = [_loss_table(name, grid) for name, grid in named.items()]
    notes = [note for grid in grids for note in w.note_paragraphs(collect_notes(grid))]
    sections = {section.anchor: section for section in describe_initialization(result).sections}
    explained = doc.Paragraph(
        "‖H‖ is the curvature of the loss with respect to the weights of a layer. A tiny norm means that the "
        "layer hardly affects the loss; a large one, that only small steps are stable. Before: PyTorch's own "
        f"weights of the plain network; after: hessinit's. {describe_target(result)}"
    )
    return doc.Document(
        title="Final loss against learning rate",
        picture=[chart.name for chart in charts],
        verdict=[headline, *(_where_we_lose(name, grid) for name, grid in named.items())],
        numbers=[
            doc.KeyNumber(one, " · ".join(shown[one]), "excess: plain · normalized")
            for one in ranked
        ],
        sections=[
            doc.Section(
                "Four starts", [*charts, *tables, doc.Paragraph(told, "small"), *notes], "starts"
            ),
            doc.Section(
                "Curvature of each layer", [explained, *sections["layers"].blocks], "layers"
            ),
            *(section for anchor, section in sections.items() if anchor == "rate"),
        ],
        footer=w.write_versions(f"Seeds {', '.join(map(str, seeds))}", grids[0].versions),
    )


def _loss(grid: Comparison, start: str, rate: float) -> float:
    return min(grid.loss(start, rate), GUESSING) if grid.trains(start, rate) else GUESSING


def _excess(grid: Comparison, start: str) -> float:
    """Return the mean loss over the rates, less the lowest of all starts and rates."""
    lowest = min(_loss(grid, one, rate) for one in grid.schemes for rate in grid.learning_rates)
    return statistics.fmean(_loss(grid, start, rate) for rate in grid.learning_rates) - lowest


def _write_excess(grid: Comparison, start: str) -> str:
    return w.format_number(_excess(grid, start), 2)


def _where_we_lose(name: str, grid: Comparison) -> str:
    behind = []
    network = f"{name} network: "
    for rate in grid.learning_rates:
        best = best_scheme(grid, rate)
        ours = _loss(grid, OURS, rate)
        if best is not None and _loss(grid, best, rate) < ours:
            how = w.format_number(ours) if grid.trains(OURS, rate) else "diverges"
            behind.append(
                f"lr {w.format_number(rate)} ({how}; {best} {w.format_number(_loss(grid, best, rate))})"
            )
    if not behind:
        return f"{network}no other start ends lower than {OURS} at any rate."
    return f"{network}{OURS} is behind at {w.join_names(behind, len(behind))}."


def _rate_chart(name: str, grid: Comparison) -> doc.LineChart:
    looks = w.looks(grid.schemes)
    lines = []
    crosses = []
    for start in grid.schemes:
        losses = [_loss(grid, start, rate) for rate in grid.learning_rates]
        label = f"{start} {_write_excess(grid, start)}"
        lines.append(doc.Series(label, losses, grid.learning_rates, **looks[start]))
        if failed := [rate for rate in grid.learning_rates if grid.diverged(start, rate)]:
            crosses.append(w.crosses(label, [GUESSING] * len(failed), failed, **looks[start]))
    caption = f"{name}: mean excess of the final loss"
    told = f"{caption}: {', '.join(line.name for line in lines)}. The table has every loss."
    rules = [doc.ReferenceLine(GUESSING, f"guessing {w.format_number(GUESSING)}")]
    return doc.LineChart(
        name.lower(),
        caption,
        told,
        [*lines, *crosses],
        "final loss",
        "learning rate",
        log_x=True,
        log_y=True,
        rules=rules,
    )


def _loss_table(name: str, grid: Comparison) -> doc.Table:
    starts = sorted(grid.schemes, key=lambda start: _excess(grid, start))
    losses = [
        loss_column(grid, starts, rate, w.format_number(rate)) for rate in grid.learning_rates
    ]
    means = doc.Column("excess", [_write_excess(grid, start) for start in starts], 9)
    columns = [w.name_column("start", starts), *losses, means]
    caption = f"{name} network: final loss at each learning rate, and its mean excess."
    return doc.Table(caption, columns, show_caption=True)
