"""A picture as a part of a page: it loads nothing and takes the page's colours."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from markupsafe import Markup

from hessinit.present.comparison_colours import PAPER
from hessinit.present.figure import GREY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Light or dark, as the page is: what is black or grey in print takes the page's own colours.
PAGE_COLOURS = {"#000000": "currentColor", GREY.lower(): "var(--muted)", PAPER: "var(--paper)"}
SCREEN = 1.35  # so many times the size on paper


def draw_inline(figure: Figure, name: str) -> Markup:
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
