"""A comparison in a notebook and as a page. `python -m hessinit.present.comparison_html` prints a page."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from markupsafe import Markup

from hessinit.present.comparison_colours import PAPER
from hessinit.present.comparison_columns import BEST, DIVERGED, comparison_columns
from hessinit.present.comparison_sentences import (
    collect_notes,
    describe_runs,
    explain_comparison,
)
from hessinit.present.comparison_verdict import conclude_comparison
from hessinit.present.figure import GREY
from hessinit.present.html import templates
from hessinit.present.numbers import printable
from hessinit.report.comparison import Comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLASSES = {BEST: "best", DIVERGED: "diverged"}
# Light or dark, as the page is: what is black or grey in print takes the page's own colours.
PAGE_COLOURS = {"#000000": "currentColor", GREY.lower(): "var(--muted)", PAPER: "var(--paper)"}
SCREEN = 1.35  # so many times the size on paper


def render_comparison_fragment(comparison: Comparison) -> str:
    """Write the table and what it says as a piece of HTML, for a notebook cell; names are escaped."""
    return _render("comparison_fragment.html.j2", comparison, pictures=[])


def render_comparison_page(comparison: Comparison) -> str:
    """Write one page that loads nothing, light or dark: the verdict, the pictures, the table."""
    from hessinit.present.comparison_figure import draw_heatmap_apart, draw_losses_apart

    pictures = [("Loss curves", _draw_inline(draw_losses_apart(comparison), "losses"))]
    if comparison.kind == "compare":
        pictures.insert(0, ("Start and learning rate", _draw_inline(draw_heatmap_apart(comparison), "map")))
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


def _draw_inline(figure: Figure, name: str) -> Markup:
    """The figure as an SVG element: text stays text, ids are unlike those of other pictures on the page."""
    from matplotlib import rc_context

    text = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'width="([\d.]+)pt" height="[\d.]+pt"', _enlarge, svg, count=1)
    for color, own in PAGE_COLOURS.items():
        svg = svg.replace(f": {color}", f": {own}")
    return Markup(svg)  # matplotlib has escaped the names in it


def _enlarge(size: re.Match[str]) -> str:
    """Print is read closer than a screen; the height follows."""
    return f'style="width: {SCREEN * float(size[1]):.0f}pt"'


if __name__ == "__main__":
    import sys

    from hessinit.present.comparison_example import example_comparison

    sys.stdout.write(render_comparison_page(example_comparison()))
