"""A comparison in a notebook and as a page. `python -m hessinit.present.comparison_html` prints a page."""

from __future__ import annotations

from hessinit.present.comparison_columns import BEST, DIVERGED, comparison_columns
from hessinit.present.comparison_sentences import (
    collect_notes,
    describe_runs,
    explain_comparison,
)
from hessinit.present.comparison_verdict import conclude_comparison
from hessinit.present.html import templates
from hessinit.results.comparison import Comparison

CLASSES = {BEST: "best", DIVERGED: "diverged"}


def render_comparison_fragment(comparison: Comparison) -> str:
    """Write the table and what it says as a piece of HTML, for a notebook cell; names are escaped."""
    columns = comparison_columns(comparison)
    return (
        templates()
        .get_template("comparison_fragment.html.j2")
        .render(
            columns=columns,
            classes=CLASSES,
            rows=len(comparison.schemes),
            verdict=conclude_comparison(comparison),
            explanation=explain_comparison(comparison, columns),
            cost=describe_runs(comparison),
            notes=collect_notes(comparison),
        )
    )


def render_comparison_page(comparison: Comparison) -> str:
    """Write one page that loads nothing: the verdict, the charts, the table."""
    from hessinit.present.page.comparison import comparison_page
    from hessinit.present.page.render import render_page

    return render_page(comparison_page(comparison))


if __name__ == "__main__":
    import sys

    from hessinit.present.comparison_example import example_comparison

    sys.stdout.write(render_comparison_page(example_comparison()))
