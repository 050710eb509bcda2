"""The report in a notebook and as a web page. `python -m hessinit.present.html` prints a page."""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from hessinit.present.columns import build_columns
from hessinit.present.further import further_tables
from hessinit.present.numbers import format_number, printable
from hessinit.present.sentences import describe_cost
from hessinit.report.report import CurvatureReport


def render_fragment(report: CurvatureReport) -> str:
    """Write the report as a piece of HTML, for a notebook cell; names are escaped."""
    return _render("fragment.html.j2", report)


def render_page(report: CurvatureReport) -> str:
    """Write the report as one page that loads nothing, light or dark as the reader's system is."""
    return _render("page.html.j2", report)


def _render(template: str, report: CurvatureReport) -> str:
    return (
        templates()
        .get_template(template)
        .render(
            columns=build_columns(report),
            further=further_tables(report),
            layers=len(report),
            verdict=report.verdict,
            cost=describe_cost(report),
            notes=[printable(note) for note in report.notes],
            tolerance=format_number(report.tolerance),
            seed=report.seed,
            versions=[(printable(name), printable(version)) for name, version in report.versions.items()],
        )
    )


@cache
def templates() -> Environment:
    """Where all pages come from."""
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

    sys.stdout.write(render_page(example_report()))
