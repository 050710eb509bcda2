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
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from hessinit._version import __version__
from hessinit.present import document as doc
from hessinit.present.words import LONGEST_NAME, printable, shorten, text_if

STYLE_SHEETS = ("colors.css", "page.css", "charts.css", "tables.css", "print.css")
SCRIPTS = (
    "numbers.js",
    "axes.js",
    "labels.js",
    "curves.js",
    "heat.js",
    "rates.js",
    "reading.js",
    "listing.js",
    "figures.js",
    "sorting.js",
    "paper.js",
    "theme.js",
)
# Each comes with the notice that its licence asks for in every copy.
LIBRARIES = {
    "d3 7.9.2": ("d3.min.js", "d3"),
    "@observablehq/plot 0.6.17": ("plot.umd.min.js", "plot"),
}


@dataclass(frozen=True)
class Sizes:
    """From which size on a page shows something in another way."""

    long: int = 25  # rows: longer tables scroll inside their frame, under headings that stay
    wide: int = 25  # layers: a chart of more takes the whole width
    words: int = 40  # letters: longer cells may break into lines


PAGE_SIZES = Sizes()
_UNBROKEN = re.compile(rf"\S{{{LONGEST_NAME + 1},}}")
_NUMBER = re.compile(r"[-−]?(?:\d[\d,]*\.?\d*(?:e[-+]?\d+)?|inf)", re.IGNORECASE)


def render_page(document: doc.Document) -> str:
    """Return one HTML file, in which every text is escaped and only its own two scripts may run."""
    library = "".join(
        f"/* {name}\n{_asset('vendor', f'{licence}.LICENSE.txt')}*/\n{_asset('vendor', code)}\n"
        for name, (code, licence) in LIBRARIES.items()
    )
    script = (
        f'(() => {{\n"use strict";\n{"".join(_asset("assets", name) for name in SCRIPTS)}}})();\n'
    )
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(script)}; "
        "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    return (
        _templates()
        .get_template("page.html.j2")
        .render(
            page=document,
            linked=[section for section in document.sections if section.heading and section.anchor],
            version=__version__,
            style=Markup("".join(_asset("assets", name) for name in STYLE_SHEETS)),
            library=Markup(library),
            script=Markup(script),
            policy=policy,
        )
    )


def render_fragment(document: doc.Document) -> str:
    """Return tables, verdict and texts as HTML that runs nothing and styles nothing but itself."""
    template = _templates().get_template("notebook.html.j2")
    return template.render(
        answer=document.answer,
        tables=document.tables,
        verdict=document.verdict,
        texts=document.paragraphs,
    )


def group_blocks(blocks: Sequence[doc.Block]) -> list[tuple[str, list[doc.Block]]]:
    """Put neighbouring charts together in a grid, unless they take the whole width."""
    groups: list[tuple[str, list[doc.Block]]] = []
    kinds = {doc.Paragraph: "words", doc.Table: "table", doc.Facts: "details"}
    beside = False  # the block before is a chart that leaves room
    for block in blocks:
        if getattr(block, "text_only", False):
            continue
        narrow = isinstance(block, doc.LineChart) and len(block.layers or ()) < PAGE_SIZES.wide
        if narrow and beside:
            groups[-1][1].append(block)
        else:
            groups.append((kinds.get(type(block), "charts"), [block]))
        beside = narrow
    return groups


def write_island(chart: doc.Chart) -> Markup:
    """Return a chart as JSON for the script, which no `</script>` or `<!--` in a text can end."""
    kind = {doc.HeatMap: "heat", doc.RateLine: "rates", doc.LineChart: "lines"}[type(chart)]
    if isinstance(chart, doc.LineChart) and chart.layers is not None:
        kind = "depth"
    data = {"kind": kind, **_plain(chart)}
    for field in ("name", "caption", "description"):  # these are in the page itself
        del data[field]
    # ASCII: U+2028 is escaped as well.
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        plain = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        if "color" in plain:
            plain["color"] = css_color(plain["color"])
        return plain
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, str):
        return printable(value)
    return [_plain(item) for item in value] if isinstance(value, Sequence) else value


def css_color(color: str) -> str:
    if color in doc.COLORS:
        return f"var(--{color})"
    position = 2 * float(color.removeprefix("ramp:"))
    low = int(position > 1)
    part = 100 * (position - low)
    return f"color-mix(in oklab, var(--ramp-{low + 1}) {part:.3g}%, var(--ramp-{low}))"


def legend(chart: doc.Chart) -> list[tuple[str, str, str]]:
    """Return name, shape and colour of what a legend explains, where it has two lines or more."""
    if not isinstance(chart, doc.LineChart):
        return []
    items = [
        (curve.name, _swatch(curve), css_color(curve.color))
        for curve in chart.series
        if curve.in_legend
    ]
    items += [(band.label, "band", css_color(band.color)) for band in chart.bands]
    return items if len(items) > 1 else []


def _swatch(series: doc.Series) -> str:
    if series.points:
        return "cross" if series.symbol == "cross" else "points"
    if series.hollow:
        return "ring"
    return "dashed" if series.dashed else "line"


@dataclass(frozen=True)
class Cell:
    """A cell of the body: its classes, what to sort it by ("" at the end), and its dot."""

    text: str
    classes: str
    key: str


def rows(table: doc.Table) -> list[list[Cell]]:
    """Return the cells of each row, the fixed ones last."""
    return [list(row) for row in zip(*map(_cells, table.shown), strict=True)]


def _cells(column: doc.Column) -> list[Cell]:
    texts = list(column.cells)
    keys = column.keys or (list(map(number_in, texts)) if column.is_number else texts)
    marks = column.marks or [""] * len(texts)
    cells = []
    for text, key, mark in zip(texts, keys, marks, strict=True):
        shape = "number" if column.is_number else text_if(len(text) > PAGE_SIZES.words, "words")
        classes = " ".join(filter(None, (shape, text_if(mark in doc.TONES, mark))))
        cells.append(Cell(text, classes, _write_key(key)))
    return cells


def _write_key(key: float | str) -> str:
    if isinstance(key, str):
        return key
    return "" if math.isnan(key) else repr(float(key))


def number_in(text: str) -> float:
    """Return the first number of a cell; nan, which is sorted to the end, where there is none."""
    number = _NUMBER.search(text)
    return float(number[0].replace(",", "").replace("−", "-")) if number else math.nan


def brief(text: str) -> Markup:
    """Return the text as HTML; words that are longer than a name are shortened."""
    return escape(_UNBROKEN.sub(lambda run: shorten(run[0]), printable(text)))


def breakable(text: str) -> Markup:
    """Return a name as HTML, cut where it is long, which may break after its dots."""
    return escape(printable(shorten(text))).replace(".", Markup(".<wbr>"))


@cache
def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("hessinit.present"),
        autoescape=True,  # jinja2 itself goes by the file's ending, and would not escape .j2
        undefined=StrictUndefined,
        finalize=_printable_text,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    helpers = (breakable, brief, group_blocks, legend, rows, shorten, write_island)
    templates.globals.update(
        {helper.__name__: helper for helper in helpers}, long_from=PAGE_SIZES.long
    )
    return templates


def _printable_text(value: object) -> object:
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _asset(folder: str, name: str) -> str:
    return (files("hessinit.present") / folder / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
