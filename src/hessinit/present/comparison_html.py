"""A comparison in a notebook and as a page. `python -m hessinit.present.comparison_html` prints a page."""

from __future__ import annotations

from markupsafe import Markup

from hessinit.present.comparison_columns import BEST, DIVERGED, comparison_columns
from hessinit.present.comparison_sentences import (
    collect_notes,
    describe_runs,
    explain_comparison,
)
from hessinit.present.comparison_verdict import conclude_comparison
from hessinit.present.html import templates
from hessinit.present.inline_svg import draw_inline
from hessinit.present.numbers import printable
from hessinit.report.comparison import Comparison

CLASSES = {BEST: "best", DIVERGED: "diverged"}


def render_comparison_fragment(comparison: Comparison) -> str:
    """Write the table and what it says as a piece of HTML, for a notebook cell; names are escaped."""
    return _render("comparison_fragment.html.j2", comparison, pictures=[])


def render_comparison_page(comparison: Comparison) -> str:
    """Write one page that loads nothing, light or dark: the verdict, the pictures, the table."""
    from hessinit.present.comparison_figure import draw_heatmap_apart, draw_losses_apart

    pictures = [("Loss curves", draw_inline(draw_losses_apart(comparison), "losses"))]
    if comparison.kind == "compare":
        pictures.insert(0, ("Start and learning rate", draw_inline(draw_heatmap_apart(comparison), "map")))
    return _render("comparison_page.html.j2", comparison, pictures=pictures)


def _render(template: str, comparison: Comparison, pictures: list[tuple[str, Markup]]) -> str:
    columns = comparison_columns(comparison)
    versions = [(printable(name), printable(version)) for name, version in comparison.versions.items()]
    return (
        templates()
        .get_template(template)
        .render(
            title="Comparison of starts" if comparison.kind == "compare" else "Sweep of standard deviations",
            columns=columns,
            classes=CLASSES,
            rows=len(comparison.starts),
            verdict=conclude_comparison(comparison),
            explanation=explain_comparison(comparison, columns),
            cost=describe_runs(comparison),
            notes=collect_notes(comparison),
            pictures=pictures,
            seeds=", ".join(map(str, comparison.seeds)),
            versions=versions,
        )
    )


if __name__ == "__main__":
    import sys

    from hessinit.present.comparison_example import example_comparison

    sys.stdout.write(render_comparison_page(example_comparison()))
