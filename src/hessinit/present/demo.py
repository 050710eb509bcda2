"""The document of the demo: an initialization, training from it and from PyTorch's, and other seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from hessinit.present import document as doc
from hessinit.present import words as w
from hessinit.present.comparison import describe_comparison
from hessinit.present.initialization import describe_initialization
from hessinit.present.track_record import Runs, conclude_tracking, step_charts
from hessinit.results.comparison import Comparison, window
from hessinit.results.initialization import Initialization
from hessinit.results.track_record import Tracking

BLOCKS = "▁▂▃▄▅▆▇█"
COLUMNS = 40  # of a loss curve in a terminal
TIE = 1.25  # losses within this factor are about the same


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """What the demo computes.

    `runs` are the tracked trainings from PyTorch's default weights and from hessinit's, with their names;
    `accuracy` is the held-out accuracy of each; `comparison` repeats both with other seeds and schemes.
    """

    initialization: Initialization
    runs: Runs
    comparison: Comparison
    accuracy: Mapping[str, float]


def describe_demonstration(demonstration: Demonstration) -> doc.Document:
    """Return both initializations layer by layer, both trainings, and the comparison over seeds."""
    initialization, runs = demonstration.initialization, demonstration.runs
    comparison, accuracy = demonstration.comparison, demonstration.accuracy
    first, seeds = describe_training(runs, accuracy), describe_comparison(comparison)
    layers, *others = describe_initialization(initialization).sections
    rates = [section for section in others if section.anchor == "rate"]
    given = initialization.before
    before = [] if given is None else [doc.Paragraph(f"PyTorch: {given.verdict}")]
    explained = doc.Paragraph(
        "‖H‖ is the curvature of the loss with respect to the weights of a layer. A tiny norm means that the "
        "layer hardly affects the loss; a large one, that only small steps are stable. Before: PyTorch's "
        "default weights; after: hessinit's."
    )
    reason = doc.Paragraph(
        "Along the sharpest direction a step of gradient descent multiplies the distance to the minimum by "
        "1 − lr·‖H‖: near lr·‖H‖ = 0 progress is slow, above 2 the step overshoots."
    )
    verdicts = [doc.Paragraph(f"{name}: {' '.join(conclude_tracking(run))}") for name, run in runs]
    limits = doc.Paragraph(
        "One network at one rate is an example, not evidence: run hessinit compare on your own.", "note"
    )
    training = [*first.blocks, reason, *step_charts(runs), *verdicts]
    final = [doc.KeyNumber(name, f"{100 * accuracy[name]:.0f} %", "held-out accuracy") for name, _ in runs]
    return doc.Document(
        title="Two initializations of one network",
        verdict=[*first.verdict, *seeds.verdict],
        numbers=[doc.KeyNumber("learning rate", w.format_number(comparison.learning_rates[0])), *final],
        tone=first.tone,
        picture=("loss", "sharpness"),
        sections=[
            doc.Section("Curvature of each layer", [explained, *before, *layers.blocks], "layers"),
            *rates,
            doc.Section("Training from both", training, "training"),
            doc.Section("Other seeds and schemes", [*seeds.sections[-1].blocks, limits], "seeds"),
        ],
        footer=seeds.footer,
    )


def describe_training(runs: Runs, accuracy: Mapping[str, float]) -> doc.Document:
    """Return the loss curves of both trainings as text, final losses, accuracies, and which is ahead."""
    names = [name for name, _ in runs]
    curves = [[loss for _, loss in run.losses] for _, run in runs]
    finals = [final_loss(run) for _, run in runs]
    shown = [f"{100 * accuracy[name]:.1f} %" for name in names]
    weights = w.name_column("weights", names)
    bars = w.name_column("training loss", draw_bars(curves, COLUMNS), 5)
    numbers = [
        doc.Column("first loss", [w.format_number(curve[0]) for curve in curves], 6),
        doc.Column("final loss", [w.format_number(loss) for loss in finals], 9, keys=finals),
        doc.Column("held-out accuracy", shown, 8, keys=[accuracy[name] for name in names]),
    ]
    caption = "Loss and accuracy of both"
    tables = [
        doc.Table(caption, [weights, bars, *numbers], text_only=True),
        doc.Table(caption, [weights, *numbers], page_only=True),
    ]
    (theirs, ours), (their_loss, our_loss) = names, [x if math.isfinite(x) else math.inf for x in finals]
    ratio = their_loss / max(our_loss, 1e-300)
    ahead, behind, times = (ours, theirs, ratio) if ratio > 1 else (theirs, ours, 1 / (ratio or 1e-300))
    if not min(their_loss, our_loss) < math.inf:
        said = "Neither training ends at a finite loss: use a smaller lr."
    elif 1 / TIE <= ratio <= TIE:
        said = f"Training from the weights of {theirs} and of {ours} ends at about the same loss."
    elif max(their_loss, our_loss) == math.inf:
        said = f"Training diverges from the weights of {behind}, and not from those of {ahead}."
    else:
        much = f"{w.format_times(times)} times as high from those of {behind}"
        said = f"The final loss is lower from the weights of {ahead}; it is {much}."
    tone = "good" if ratio > TIE else "fair" if our_loss < math.inf else "bad"
    return doc.Document(title="Training", verdict=[said], sections=[doc.Section("", tables)], tone=tone)


def final_loss(tracking: Tracking) -> float:
    """Return the mean training loss of the last tenth of the steps, as in a comparison."""
    losses = [loss for _, loss in tracking.losses]
    return statistics.fmean(losses[-window(len(losses)) :])


def draw_bars(curves: Sequence[Sequence[float]], width: int) -> list[str]:
    """Return curves as rows of block characters on one logarithmic scale; x from where one is not finite.

    >>> draw_bars([[1.0, 0.1, 0.01, math.nan], [1.0, 1.0, 1.0, 1.0]], 4)
    ['█▄▁x', '████']
    """
    longest = max(map(len, curves))
    edges = [round(place * longest / width) for place in range(width + 1)]
    finite = [list(takewhile(math.isfinite, curve)) for curve in curves]
    parts = [[curve[a : max(b, a + 1)] for a, b in zip(edges, edges[1:], strict=False)] for curve in finite]
    logs = [[math.log(max(statistics.fmean(part), 1e-12)) if part else None for part in row] for row in parts]
    known = [value for row in logs for value in row if value is not None] or [0.0]
    low, top = min(known), len(BLOCKS) - 1
    span = max(known) - low
    return [
        "".join("x" if v is None else BLOCKS[round(top * (v - low) / span) if span else top] for v in row)
        for row in logs
    ]
