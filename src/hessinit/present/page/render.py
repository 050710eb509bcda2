"""Pages as one HTML file that loads nothing. `python -m hessinit.present.page.render` prints one."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hessinit._version import __version__
from hessinit.present.page.brief import breakable, brief
from hessinit.present.page.content import Block, Details, Page, Section, Table, Words
from hessinit.present.page.islands import is_wide, legend, write_island
from hessinit.present.page.palette import COLORS, css_color, css_variables
from hessinit.present.page.tables import LONG_FROM, headings, rows
from hessinit.present.words import printable, shorten

__all__ = ["COLORS", "render_page"]

LONG_TITLE = 140  # letters: more would push the verdict off the screen
STYLES = ("page.css", "charts.css", "tables.css", "print.css")
SCRIPTS = (
    "numbers.js", "axes.js", "labels.js", "curves.js", "heat.js", "rates.js", "reading.js", "listing.js",
    "figures.js", "sorting.js", "paper.js", "theme.js",
)  # fmt: skip


def render_page(page: Page) -> str:
    """Write the page: words and tables as HTML, charts as data that the script in the page draws.

    Every text is escaped, and the page may run its own two scripts and nothing else.
    """
    library, script = _library(), _script()
    return (
        _templates()
        .get_template("page.html.j2")
        .render(
            page=page,
            style=Markup(_style()),
            library=Markup(library),
            script=Markup(script),
            policy=(
                f"default-src 'none'; script-src {_hash(library)} {_hash(script)}; "
                "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
            ),
            linked=_linked(page),
            version=__version__,
        )
    )


def _linked(page: Page) -> list[Section]:
    """What the list of contents names; a table with links of its own is one already."""
    tables = [block for section in page.sections for block in section.blocks if isinstance(block, Table)]
    if any(column.links for table in tables for column in table.columns):
        return []
    return [section for section in page.sections if section.heading and section.anchor]


def group_blocks(blocks: Sequence[Block]) -> list[tuple[str, list[Block]]]:
    """Neighbouring charts stand together in a grid, unless they want the whole width.

    >>> from hessinit.present.page.content import LineChart, RateLine
    >>> lines = LineChart(caption="", description="", series=[], x_label="", y_label="")
    >>> rates = RateLine(caption="", description="", best=1.0, stable=2.0)
    >>> [(kind, len(found)) for kind, found in group_blocks([Words(text="a"), lines, lines, rates])]
    [('words', 1), ('charts', 2), ('charts', 1)]
    """
    found: list[tuple[str, list[Block]]] = []
    for kind, together in groupby(blocks, key=_kind):
        members = list(together)
        found += [("charts", members)] if kind == "charts" else [(kind, [block]) for block in members]
    return [("charts" if kind == "wide" else kind, members) for kind, members in found]


def _kind(block: Block) -> str:
    if isinstance(block, Words):
        return "words"
    if isinstance(block, Table):
        return "table"
    if isinstance(block, Details):
        return "details"
    return "wide" if is_wide(block) else "charts"


@cache
def _templates() -> Environment:
    # autoescape for all: jinja2's own choice goes by the file's ending, and .j2 would not be escaped.
    templates = Environment(
        loader=PackageLoader("hessinit.present"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable_text,
    )
    helpers: dict[str, Any] = {
        "breakable": breakable,
        "brief": brief,
        "css_color": css_color,
        "group_blocks": group_blocks,
        "headings": headings,
        "island": lambda chart: Markup(write_island(chart)),
        "legend": legend,
        "long_from": LONG_FROM,
        "long_title": LONG_TITLE,
        "rows": rows,
        "shorten": shorten,
    }
    templates.globals.update(helpers)
    return templates


def _printable_text(value: object) -> object:
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _style() -> str:
    dark = css_variables(dark=True)
    theme = (
        f":root {{ {css_variables(dark=False)} color-scheme: light; }}\n"
        # Paper is light: the dark colours are for the screen alone.
        "@media screen and (prefers-color-scheme: dark) {\n"
        f":root:not([data-theme=light]) {{ {dark} color-scheme: dark; }}\n}}\n"
        f"@media screen {{\n:root[data-theme=dark] {{ {dark} color-scheme: dark; }}\n}}\n"
    )
    return theme + "".join(_asset("assets", name) for name in STYLES)


@cache
def _library() -> str:
    """d3 and Observable Plot, with the notices that their licences ask for in every copy."""
    parts = [
        f"/* {name}\n{_asset('vendor', licence)}*/\n{_asset('vendor', code)}\n"
        for name, code, licence in (
            ("d3 7.9.2", "d3.min.js", "d3.LICENSE.txt"),
            ("@observablehq/plot 0.6.17", "plot.umd.min.js", "plot.LICENSE.txt"),
        )
    ]
    return "".join(parts)


@cache
def _script() -> str:
    parts = "".join(_asset("assets", name) for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}}})();\n'


@cache
def _asset(folder: str, name: str) -> str:
    return (files("hessinit.present") / folder / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


if __name__ == "__main__":
    import sys

    from hessinit.present.example import example_report
    from hessinit.present.page.curvature import curvature_page

    sys.stdout.write(render_page(curvature_page(example_report())))
