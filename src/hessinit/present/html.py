"""Records in a notebook: small HTML that runs nothing. `python -m hessinit.present.html` prints one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from hessinit.present.columns import build_columns
from hessinit.present.further import further_tables
from hessinit.present.grid import Column
from hessinit.present.initialization_sentences import (
    conclude_initialization,
    describe_target,
    describe_work,
)
from hessinit.present.initialization_table import initialization_columns, names_in_order
from hessinit.present.sentences import describe_cost
from hessinit.present.words import printable
from hessinit.results.curvature_report import CurvatureReport
from hessinit.results.initialization import Initialization


def render_fragment(report: CurvatureReport) -> str:
    """Write the report as a piece of HTML, for a notebook cell; names are escaped."""
    further = [("", build_columns(report)), *((one.caption, one.columns) for one in further_tables(report))]
    return _render(further, len(report), [report.verdict], [describe_cost(report)], report.notes)


def render_initialization_fragment(result: Initialization) -> str:
    """Write the result as a piece of HTML, for a notebook cell; names are escaped."""
    names = names_in_order(result)
    verdict = [conclude_initialization(result), describe_target(result)]
    tables = [("", initialization_columns(result, names))]
    return _render(tables, len(names), verdict, [describe_work(result)], result.notes)


def _render(
    tables: Sequence[tuple[str, Sequence[Column]]],
    layers: int,
    verdict: Sequence[str],
    cost: Sequence[str],
    notes: Sequence[str],
) -> str:
    template = templates().get_template("fragment.html.j2")
    shown = [printable(note) for note in notes]
    return template.render(tables=tables, layers=layers, verdict=verdict, cost=cost, notes=shown)


@cache
def templates() -> Environment:
    """Where all fragments come from."""
    # autoescape for all: jinja2's own choice goes by the file's ending, and .j2 would not be escaped.
    return Environment(
        loader=PackageLoader("hessinit.present"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


if __name__ == "__main__":
    import sys

    from hessinit.present.example import example_report

    sys.stdout.write(render_fragment(example_report()))
