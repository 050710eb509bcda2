"""The report in a terminal: a table, a verdict, the cost. `python -m hessinit.present.table` shows one."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.text import Text

from hessinit.present.columns import build_columns
from hessinit.present.further import further_tables
from hessinit.present.grid import build_grid, fit, name_left_out, render, terminal_width
from hessinit.present.sentences import describe_cost
from hessinit.present.words import printable
from hessinit.results.curvature_report import CurvatureReport


def render_text(report: CurvatureReport, width: int | None = None, color: bool = False) -> str:
    """Write the report as text of at most `width` columns (None: the terminal's)."""
    columns = width or terminal_width()
    return render(renderables(report, columns), columns, color=color)


def renderables(report: CurvatureReport, width: int) -> Iterator[RenderableType]:
    """Give the parts of the report to a rich console of that width: the table, then the sentences."""
    columns, left_out = fit(build_columns(report), width)
    yield build_grid(columns, width, rule_before=len(report))
    for table in further_tables(report):
        kept, dropped = fit(table.columns, width)
        left_out += dropped
        yield Text()
        yield Text(table.caption)
        yield Text()
        yield build_grid(kept, width)
    # Text, never str: rich would read a layer called "[red]" as markup.
    yield Text()
    yield Text(report.verdict)
    yield Text(describe_cost(report))
    for note in report.notes:
        yield Text(f"Note: {printable(note)}")
    yield from name_left_out(left_out, width)


if __name__ == "__main__":
    from hessinit.present.example import example_report

    Console().print(example_report())
