"""The document of the demo: an initialization, training from it and from PyTorch's, and other seeds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hessinit.present import document as doc
from hessinit.present import words as w
from hessinit.present.comparison import describe_comparison
from hessinit.present.initialization import describe_initialization
from hessinit.present.track_record import Runs, conclude_tracking, step_charts
from hessinit.results.comparison import Comparison
from hessinit.results.initialization import Initialization


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """What the demo computes.

    `runs` are the tracked trainings from PyTorch's default weights and from hessinit's, with their names;
    `comparison` repeats both with other seeds and schemes.
    """

    initialization: Initialization
    runs: Runs
    comparison: Comparison


def describe_demonstration(demonstration: Demonstration) -> doc.Document:
    """Return both initializations layer by layer, both trainings, and the comparison over seeds."""
    initialization, runs = demonstration.initialization, demonstration.runs
    comparison, seeds = demonstration.comparison, describe_comparison(demonstration.comparison)
    rate = comparison.learning_rates[0]
    finals = [w.format_number(comparison.loss(name, rate)) for name in ("default", "hessinit")]
    headline = "The final loss is {} from PyTorch's default weights and {} from hessinit's, at lr {:g}."
    named = zip(("PyTorch", "hessinit"), finals, strict=True)
    sections = {section.anchor: section for section in describe_initialization(initialization).sections}
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
    return replace(
        seeds,
        title="Two initializations of one network",
        verdict=[headline.format(*finals, rate), *seeds.verdict],
        numbers=[doc.KeyNumber(name, final, "final loss, mean over seeds") for name, final in named],
        picture=("loss", "sharpness"),
        sections=[
            doc.Section(
                "Curvature of each layer", [explained, *before, *sections["layers"].blocks], "layers"
            ),
            *(section for anchor, section in sections.items() if anchor == "rate"),
            doc.Section("Training from both", [reason, *step_charts(runs), *verdicts], "training"),
            doc.Section("Other seeds and schemes", [*seeds.sections[-1].blocks, limits], "seeds"),
        ],
    )
