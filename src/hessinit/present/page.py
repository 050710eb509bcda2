"""Documents as HTML: one page that loads nothing, or a fragment for a notebook cell."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from hessinit._version import __version__
from hessinit.present import document as doc
from hessinit.present.words import LONGEST_NAME, printable, shorten

LONG_TITLE = 140  # letters: more would push the verdict off the screen
LONG_FROM = 25  # rows: longer tables scroll inside their frame, under headings that stay
WIDE_FROM = 25  # layers: a chart of more takes the whole width
WORDS_FROM = 40  # letters: longer cells may break into lines
STYLES = ("colors.css", "page.css", "charts.css", "tables.css", "print.css")
SCRIPTS = (
    "numbers.js", "axes.js", "labels.js", "curves.js", "heat.js", "rates.js", "reading.js", "listing.js",
    "figures.js", "sorting.js", "paper.js", "theme.js",
)  # fmt: skip
_UNBROKEN = re.compile(rf"\S{{{LONGEST_NAME + 1},}}")
_NUMBER = re.compile(r"[-−]?(?:\d[\d,]*\.?\d*(?:e[-+]?\d+)?|inf)", re.IGNORECASE)


def render_page(document: doc.Document) -> str:
    """Return the document as one HTML file: words and tables as HTML, charts as data that its script draws.

    Every text is escaped, and the page may run its own two scripts and nothing else.
    """
    library, script = _library(), _script()
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(script)}; "
        "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    style = Markup("".join(_asset("assets", name) for name in STYLES))
    scripts = {"library": Markup(library), "script": Markup(script), "policy": policy}
    shown = {"page": document, "linked": _contents(document), "version": __version__}
    return _templates().get_template("page.html.j2").render(style=style, **scripts, **shown)


def render_fragment(document: doc.Document) -> str:
    """Return tables, verdict and texts as HTML that runs nothing and styles nothing but itself."""
    blocks = document.blocks
    tables = [one for one in blocks if isinstance(one, doc.Table) and not one.page_only and one.columns]
    texts = [one for one in blocks if isinstance(one, doc.Paragraph) and not one.page_only]
    template = _templates().get_template("notebook.html.j2")
    return template.render(tables=tables, verdict=document.verdict, texts=texts)


def _contents(document: doc.Document) -> list[doc.Section]:
    """Return the sections for the table of contents; a table with links of its own is one already."""
    tables = [one for section in document.sections for one in section.blocks if isinstance(one, doc.Table)]
    if any(column.links for table in tables for column in table.columns):
        return []
    return [section for section in document.sections if section.heading and section.anchor]


def group_blocks(blocks: Sequence[doc.Block]) -> list[tuple[str, list[doc.Block]]]:
    """Put neighbouring charts together in a grid, unless they take the whole width."""
    found: list[tuple[str, list[doc.Block]]] = []
    shown = [one for one in blocks if not getattr(one, "text_only", False)]
    for kind, together in groupby(shown, key=_kind):
        members = list(together)
        found += [("charts", members)] if kind == "charts" else [(kind, [block]) for block in members]
    return [("charts" if kind == "wide" else kind, members) for kind, members in found]


def _kind(block: doc.Block) -> str:
    if isinstance(block, doc.Paragraph | doc.Table | doc.Facts):
        return {doc.Paragraph: "words", doc.Table: "table", doc.Facts: "details"}[type(block)]
    is_long = isinstance(block, doc.LineChart) and len(block.layers or ()) >= WIDE_FROM
    return "wide" if is_long or isinstance(block, doc.HeatMap | doc.RateLine) else "charts"


def write_island(chart: doc.Chart) -> str:
    """Return a chart as JSON for the script; no text can leave it, as `</script>` or `<!--` would."""
    kind = {doc.HeatMap: "heat", doc.RateLine: "rates", doc.LineChart: "lines"}[type(chart)]
    is_depth = isinstance(chart, doc.LineChart) and chart.layers is not None
    data = {"kind": "depth" if is_depth else kind, **_plain(chart)}
    for written in ("name", "caption", "description"):  # these are in the page itself
        del data[written]
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII: U+2028 is escaped as well
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plain(value: Any) -> Any:
    """What strict JSON can hold: nan and inf as strings, colours as CSS."""
    if is_dataclass(value):
        found = {one.name: getattr(value, one.name) for one in fields(value)}
        return {name: css_color(item) if name == "color" else _plain(item) for name, item in found.items()}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, str):
        return printable(value)
    return [_plain(item) for item in value] if isinstance(value, Sequence) else value


def css_color(color: str) -> str:
    """Return the CSS of a colour of the document."""
    if color in doc.COLORS:
        return f"var(--{color})"
    if found := re.fullmatch(r"ramp:([01]?\.?\d*)", color):
        place = 2 * min(max(float(found[1] or 0), 0.0), 1.0)
        low, part = (0, place) if place <= 1 else (1, place - 1)
        return f"color-mix(in oklab, var(--ramp-{low + 1}) {100 * part:.3g}%, var(--ramp-{low}))"
    known = ", ".join(map(repr, doc.COLORS))
    raise ValueError(f"color={color!r} is unknown; choose from {known}, or 'ramp:0' to 'ramp:1'.")


def legend(chart: doc.Chart) -> list[tuple[str, str, str]]:
    """Return name, shape and colour of what a legend explains; nothing where there is but one series."""
    if not isinstance(chart, doc.LineChart):
        return []
    items = [(one.name, _swatch(one), css_color(one.color)) for one in chart.series if one.in_legend]
    items += [(band.label, "band", css_color(band.color)) for band in chart.bands]
    return items if len(items) > 1 else []


def _swatch(series: doc.Series) -> str:
    if series.points:
        return "cross" if series.symbol == "cross" else "points"
    return "ring" if series.hollow else "dashed" if series.dashed else "line"


@dataclass(frozen=True)
class Cell:
    """A cell of the body: its classes, what to sort it by ("" at the end), its dot and link."""

    text: str
    classes: str
    key: str
    dot: str
    link: str


@dataclass(frozen=True)
class Heading:
    """A cell of the head: of one column, or (`column` None) of a group of them."""

    text: str
    classes: str
    column: int | None
    across: int = 1
    down: int = 1


def headings(table: doc.Table) -> list[list[Heading]]:
    """Return the rows of the head: two where columns have a group's heading above them."""
    grouped = any(column.group for column in table.columns)
    upper: list[Heading] = []
    lower: list[Heading] = []
    for name, members in groupby(enumerate(table.columns), key=lambda numbered: numbered[1].group):
        together = list(members)
        first = together[0][0]
        if name:
            upper.append(Heading(name, "group begins" if first else "group", None, across=len(together)))
        for number, column in together:
            begins = "begins" if name and number == first and first else ""
            classes = " ".join(filter(None, ("number" if column.is_number else "", begins)))
            down = 2 if grouped and not name else 1
            (lower if name else upper).append(Heading(column.heading, classes, number, down=down))
    return [upper, lower] if lower else [upper]


def rows(table: doc.Table) -> list[list[Cell]]:
    """Return the cells of each row, the fixed ones last."""
    groups = ["", *(column.group for column in table.columns)]
    begins = [place > 0 and one not in ("", groups[place]) for place, one in enumerate(groups[1:])]
    columns = [_cells(column, first) for column, first in zip(table.columns, begins, strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]


def _cells(column: doc.Column, begins: bool) -> list[Cell]:
    nothing = [""] * len(column.cells)
    texts = [number_in(text) if column.is_number else text for text in column.cells]
    keys: Sequence[float | str] = column.keys or texts
    marks, links, found = column.marks or nothing, column.links or nothing, []
    for text, key, mark, link in zip(column.cells, keys, marks, links, strict=True):
        shape = "number" if column.is_number else "words" if len(text) > WORDS_FROM else ""
        classes = " ".join(filter(None, (shape, mark if mark in doc.TONES else "", "begins" * begins)))
        written = key if isinstance(key, str) else "" if math.isnan(key) else repr(float(key))
        dot, place = mark if mark in doc.VERDICTS else "", link if link.startswith("#") else ""
        found.append(Cell(text, classes, written, dot, place))
    return found


def number_in(text: str) -> float:
    """Return the first number of a cell; nan, which is sorted to the end, where there is none."""
    found = _NUMBER.search(text)
    return float(found[0].replace(",", "").replace("−", "-")) if found else math.nan


def brief(text: str) -> Markup:
    """Return the text as HTML, with unbroken runs of letters shortened that are longer than a name."""
    shown = printable(text)
    parts, end = [], 0
    for run in _UNBROKEN.finditer(shown):
        whole = Markup('<span title="{}">{}</span>').format(run[0], shorten(run[0]))
        parts += [escape(shown[end : run.start()]), whole]
        end = run.end()
    return Markup("").join([*parts, escape(shown[end:])])


def breakable(text: str) -> Markup:
    """Return a name as HTML, cut where it is long, which may break after its dots."""
    return escape(printable(shorten(text))).replace(".", Markup(".<wbr>"))


@cache
def _templates() -> Environment:
    # autoescape for all: jinja2's own choice goes by the file's ending, and .j2 would not be escaped.
    blanks = {"trim_blocks": True, "lstrip_blocks": True}
    strict = {"autoescape": True, "undefined": StrictUndefined, "finalize": _printable_text}
    templates = Environment(loader=PackageLoader("hessinit.present"), **strict, **blanks)  # type: ignore[arg-type]
    helpers = (breakable, brief, group_blocks, headings, legend, rows, shorten)
    templates.globals.update({helper.__name__: helper for helper in helpers})
    island = {"island": lambda chart: Markup(write_island(chart))}
    templates.globals.update(long_from=LONG_FROM, long_title=LONG_TITLE, **island)
    return templates


def _printable_text(value: object) -> object:
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _library() -> str:
    """Return d3 and Observable Plot, with the notices that their licences ask for in every copy."""
    names = {"d3 7.9.2": ("d3.min.js", "d3"), "@observablehq/plot 0.6.17": ("plot.umd.min.js", "plot")}
    return "".join(
        f"/* {name}\n{_asset('vendor', f'{licence}.LICENSE.txt')}*/\n{_asset('vendor', code)}\n"
        for name, (code, licence) in names.items()
    )


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
