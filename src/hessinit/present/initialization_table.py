"""An initialization in a terminal. `python -m hessinit.present.initialization_table` shows one."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.text import Text

from hessinit.present.grid import Column, build_grid, fit, name_left_out, render, terminal_width
from hessinit.present.initialization_sentences import (
    conclude_initialization,
    describe_target,
    describe_work,
)
from hessinit.present.words import format_estimate, format_number, printable
from hessinit.results.curvature_report import CurvatureReport, LayerCurvature
from hessinit.results.initialization import Initialization


def render_initialization(result: Initialization, width: int | None = None, color: bool = False) -> str:
    """Write the result as text of at most `width` columns (None: the terminal's)."""
    columns = width or terminal_width()
    return render(initialization_renderables(result, columns), columns, color=color)


def initialization_renderables(result: Initialization, width: int) -> Iterator[RenderableType]:
    """Give the parts of the result to a rich console of that width: the table, then the sentences."""
    names = names_in_order(result)
    columns, left_out = fit(initialization_columns(result, names), width)
    yield build_grid(columns, width, rule_before=len(names))
    # Text, never str: rich would read a layer called "[red]" as markup.
    yield Text()
    yield Text(conclude_initialization(result))
    yield Text(describe_target(result))
    yield Text(describe_work(result))
    for note in result.notes:
        yield Text(f"Note: {printable(note)}")
    yield from name_left_out(left_out, width)


def names_in_order(result: Initialization) -> list[str]:
    """The layers as they run, as far as that is known."""
    known = [name for report in (result.after, result.before) if report is not None for name in report.names]
    return list(dict.fromkeys([*known, *result.scales]))


def row_of(report: CurvatureReport | None, name: str) -> LayerCurvature | None:
    """The layer of that name, or the network; None where it was not measured."""
    if report is None:
        return None
    if name == "network":
        return report.network
    return next((row for row in report if name in (row.name, *row.aliases)), None)


def initialization_columns(result: Initialization, names: list[str]) -> list[Column]:
    """Scale, norm before and norm after of every layer, and of the network last."""
    rows = [*names, "network"]
    scales = [
        f"× {format_number(result.scales[name])}" if name in result.scales else "" for name in rows[:-1]
    ]
    return [
        Column("layer", tuple(map(printable, rows)), 9, is_number=False),
        Column("scale", (*scales, ""), 8),
        Column("‖H‖ before", tuple(_write_norm(result.before, name) for name in rows), 8),
        Column("after", tuple(_write_norm(result.after, name) for name in rows), 9),
    ]


def _write_norm(report: CurvatureReport | None, name: str) -> str:
    if report is None:
        return "not finite" if name == "network" else ""
    row = row_of(report, name)
    return "" if row is None else format_estimate(row.estimate)


if __name__ == "__main__":
    from hessinit.present.initialization_example import example_initialization

    Console().print(example_initialization())
