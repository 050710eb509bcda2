"""The document of the demo: an initialization, training from it and from PyTorch's, and other seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from hessinit.present import document as doc
from hessinit.present import words as w
from hessinit.present.comparison import describe_comparison
from hessinit.present.initialization import describe_initialization
from hessinit.present.track_record import Runs, conclude_tracking, step_charts
from hessinit.results.comparison import Comparison, window
from hessinit.results.initialization import Initialization

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
    """Return first and final losses, accuracies, and which training is ahead."""
    names = [name for name, _ in runs]
    losses = [[loss for _, loss in run.losses] for _, run in runs]
    finals = [statistics.fmean(some[-window(len(some)) :]) for some in losses]  # as in a comparison
    columns = [
        w.name_column("weights", names),
        doc.Column("first loss", [w.format_number(some[0]) for some in losses]),
        doc.Column("final loss", [w.format_number(loss) for loss in finals]),
        doc.Column("held-out accuracy", [f"{100 * accuracy[name]:.1f} %" for name in names]),
    ]
    table = doc.Table("Loss and accuracy of both", columns)
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
    return doc.Document(title="Training", verdict=[said], sections=[doc.Section("", [table])], tone=tone)
