"""Advice in a terminal, a line for each answer. `python -m hessinit.present.advice_table` shows one."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from hessinit.present.advice_sentences import looked_ahead
from hessinit.present.grid import render, terminal_width
from hessinit.present.sentences import MATRIX_NAMES
from hessinit.present.words import format_number, join_names, printable
from hessinit.results.advice import LearningRateAdvice


def render_advice(advice: LearningRateAdvice, width: int | None = None, color: bool = False) -> str:
    """Write the advice as text of at most `width` columns (None: the terminal's)."""
    return render(advice_renderables(advice), width or terminal_width(), color=color)


def advice_renderables(advice: LearningRateAdvice) -> Iterator[RenderableType]:
    """Give the parts to a rich console: the answers with their reasons, then what they stand on."""
    lines = Table.grid(padding=(0, 2))
    for _ in range(3):
        lines.add_column(overflow="fold")
    doubt = "" if advice.converged else "~"
    lines.add_row(
        Text("learning rate"),
        Text(doubt + format_number(advice.learning_rate)),
        Text(advice.learning_rate_reason),
    )
    lines.add_row(
        Text("stable up to"),
        Text(doubt + format_number(advice.stable_learning_rate)),
        Text(advice.stable_reason),
    )
    warmup = f"{advice.warmup.steps} steps" if advice.warmup.advised else "none"
    lines.add_row(Text("warmup"), Text(warmup), Text(advice.warmup.reason))
    yield lines
    yield Text(_describe(advice))
    if advice.ahead is not None:
        yield Text(looked_ahead(advice.ahead, advice.loss, advice.stable_learning_rate))
    if not advice.converged:
        yield Text(f"Not converged (marked ~): {printable(advice.norm.reason).rstrip('.')}.")
    for note in advice.notes:
        yield Text(f"Note: {printable(note)}")


def _describe(advice: LearningRateAdvice) -> str:
    still = f", {advice.frozen:,} of them without gradient" if advice.frozen else ""
    examples = f"{advice.examples:,} example{'' if advice.examples == 1 else 's'}"
    return (
        f"{printable(advice.optimizer)} on {join_names(list(advice.weights))} ({advice.parameters:,} numbers"
        f"{still}); {MATRIX_NAMES[advice.curvature]} on {examples}; loss {format_number(advice.loss)}."
    )


if __name__ == "__main__":
    from hessinit.present.example import example_report

    Console().print(example_report().advice("momentum", lr=0.1))
