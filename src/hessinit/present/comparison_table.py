"""A comparison in a terminal. `python -m hessinit.present.comparison_table` shows one and a sweep."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.text import Text

from hessinit.present.comparison_columns import comparison_columns
from hessinit.present.comparison_sentences import (
    collect_notes,
    describe_runs,
    explain_comparison,
)
from hessinit.present.comparison_verdict import conclude_comparison
from hessinit.present.grid import Column, build_grid, fit, name_left_out, render, terminal_width
from hessinit.results.comparison import Comparison


def render_comparison(comparison: Comparison, width: int | None = None, color: bool = False) -> str:
    """Write the comparison as text of at most `width` columns (None: the terminal's)."""
    columns = width or terminal_width()
    return render(comparison_renderables(comparison, columns), columns, color=color)


def comparison_renderables(comparison: Comparison, width: int) -> Iterator[RenderableType]:
    """Give the parts to a rich console of that width: the table, then what it means."""
    columns, left_out = fit(comparison_columns(comparison), width)
    short = bool(left_out) and comparison.kind == "compare"
    if short:  # losses at more rates say more than errors at fewer
        columns, left_out = fit(comparison_columns(comparison, short=True), width)
        if len(comparison.seeds) > 1:
            left_out = [Column("± standard error", (), 0), *left_out]
    yield build_grid(columns, width)
    # Text, never str: rich would read a start called "[red]" as markup.
    yield Text()
    yield Text(conclude_comparison(comparison))
    yield Text(explain_comparison(comparison, columns))
    yield Text(describe_runs(comparison))
    for note in collect_notes(comparison):
        yield Text(f"Note: {note}")
    yield from name_left_out(left_out, width)


if __name__ == "__main__":
    from hessinit.present.comparison_example import example_comparison, example_sweep

    console = Console()
    console.print(example_comparison())
    console.print()
    console.print(example_sweep())
