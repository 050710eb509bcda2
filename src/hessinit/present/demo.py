"""The document of the demo: loss against learning rate on two networks, and one initialization."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hessinit.present import document as doc
from hessinit.present import words as w
from hessinit.present.comparison import OURS, best_scheme, collect_notes, loss_column
from hessinit.present.initialization import describe_initialization, describe_target
from hessinit.results.comparison import Comparison, window
from hessinit.results.initialization import Initialization

# The loss of guessing a digit; a start that fails at some rate counts as guessing there.
GUESSING = math.log(10)


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """What the demo computes: an initialization, and starts × learning rates on two networks."""

    initialization: Initialization
    plain: Comparison
    normalized: Comparison


def describe_demonstration(demonstration: Demonstration) -> doc.Document:
    """Return the losses of both networks, then the initialization layer by layer."""
    grids = {"Plain": demonstration.plain, "Normalized": demonstration.normalized}
    plain = demonstration.plain
    ranked = sorted(plain.schemes, key=lambda start: _excess(plain, start))
    excesses = {start: [_write_excess(grid, start) for grid in grids.values()] for start in ranked}
    charts = [_rate_chart(name, grid) for name, grid in grids.items()]
    result = demonstration.initialization
    sections = {section.anchor: section for section in describe_initialization(result).sections}
    starts: list[doc.Block] = [
        *charts,
        *(_loss_table(name, grid) for name, grid in grids.items()),
        doc.Paragraph(_explain_excess(plain), "small"),
        *(note for grid in grids.values() for note in w.note_paragraphs(collect_notes(grid))),
    ]
    explained = doc.Paragraph(
        "‖H‖ is the curvature of the loss with respect to the weights of a layer. A tiny norm "
        "means that the layer hardly affects the loss; a large one, that only small steps are "
        "stable. Before: PyTorch's own weights of the plain network; after: hessinit's. "
        f"{describe_target(result)}"
    )
    return doc.Document(
        title="Final loss against learning rate",
        picture=[chart.name for chart in charts],
        verdict=[
            _headline(plain, excesses),
            *(_where_we_lose(name, grid) for name, grid in grids.items()),
        ],
        numbers=[
            doc.KeyNumber(start, " · ".join(texts), "excess: plain · normalized")
            for start, texts in excesses.items()
        ],
        sections=[
            doc.Section("Four starts", starts, "starts"),
            doc.Section(
                "Curvature of each layer", [explained, *sections["layers"].blocks], "layers"
            ),
            *(section for anchor, section in sections.items() if anchor == "rate"),
        ],
        footer=w.write_versions(f"Seeds {', '.join(map(str, plain.seeds))}", plain.versions),
    )


def _headline(plain: Comparison, excesses: Mapping[str, Sequence[str]]) -> str:
    first, *_, last = map(w.format_number, plain.learning_rates)
    means = "; ".join(f"{start} {' and '.join(texts)}" for start, texts in excesses.items())
    return (
        f"Final loss less the lowest, mean over {len(plain.learning_rates)} learning rates from "
        f"{first} to {last}, on the plain and on the normalized network: {means}."
    )


def _explain_excess(plain: Comparison) -> str:
    return (
        f"Final loss: of the last {window(plain.steps)} of {plain.steps} steps, mean over "
        f"{w.count(len(plain.seeds), 'seed')}; * lowest at that rate, ✗ diverged (seeds), ° did "
        "not learn. Plain: ten dense layers with tanh; normalized: the same with a LayerNorm "
        "after each hidden layer. Excess: the loss less the lowest of its table, mean over the "
        "rates; a start that diverges with some seed counts as guessing "
        f"({w.format_number(GUESSING)}) there. Two small networks are an example, not evidence: "
        "run hessinit compare on your own."
    )


def _loss(grid: Comparison, start: str, rate: float) -> float:
    return min(grid.loss(start, rate), GUESSING) if grid.trains(start, rate) else GUESSING


def _excess(grid: Comparison, start: str) -> float:
    """Return the mean loss over the rates, less the lowest of all starts and rates."""
    losses = {s: [_loss(grid, s, rate) for rate in grid.learning_rates] for s in grid.schemes}
    return statistics.fmean(losses[start]) - min(map(min, losses.values()))


def _write_excess(grid: Comparison, start: str) -> str:
    return w.format_number(_excess(grid, start), 2)


def _where_we_lose(name: str, grid: Comparison) -> str:
    behind = []
    network = f"{name} network: "
    for rate in grid.learning_rates:
        best = best_scheme(grid, rate)
        ours = _loss(grid, OURS, rate)
        if best is not None and _loss(grid, best, rate) < ours:
            end = w.format_number(ours) if grid.trains(OURS, rate) else "diverges"
            lowest = w.format_number(_loss(grid, best, rate))
            behind.append(f"lr {w.format_number(rate)} ({end}; {best} {lowest})")
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
        lines.append(doc.Series(label, losses, grid.learning_rates, *looks[start]))
        if failed := [rate for rate in grid.learning_rates if grid.diverged(start, rate)]:
            crosses.append(w.crosses(label, [GUESSING] * len(failed), failed, *looks[start]))
    caption = f"{name}: mean excess of the final loss"
    return doc.LineChart(
        name.lower(),
        caption,
        f"{caption}: {', '.join(line.name for line in lines)}. The table has every loss.",
        [*lines, *crosses],
        "final loss",
        "learning rate",
        log_x=True,
        log_y=True,
        rules=[doc.ReferenceLine(GUESSING, f"guessing {w.format_number(GUESSING)}")],
    )


def _loss_table(name: str, grid: Comparison) -> doc.Table:
    starts = sorted(grid.schemes, key=lambda start: _excess(grid, start))
    losses = [
        loss_column(grid, starts, rate, w.format_number(rate)) for rate in grid.learning_rates
    ]
    means = doc.Column("excess", [_write_excess(grid, start) for start in starts], 9)
    caption = f"{name} network: final loss at each learning rate, and its mean excess."
    return doc.Table(caption, [w.name_column("start", starts), *losses, means], show_caption=True)
