"""The document of reproduced experiments: our numbers beside those of the paper, and which claims hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

from hessinit.present import document as doc
from hessinit.present import words as w
from hessinit.results.reproduction import PaperCell, PaperFigure, PaperTable, Reproduction

ORDER = ("table-1", "table-2", "table-3", "table-4", "table-5", "word2vec")
DATA_OF_THE_PAPER = ("mnist", "cifar-10", "wikipedia")
SYMBOLS = ("circle", "square", "diamond", "triangle")
MOST_NAMED = 5  # numbers outside their tolerance
TEXT_WIDTH = 96  # a wider table continues below in a terminal


def describe_reproductions(reproductions: Reproduction | Sequence[Reproduction]) -> doc.Document:
    """Return how many claims hold, and every experiment: tables beside the paper's numbers, and figures."""
    if not reproductions:
        raise ValueError("reproductions is empty; give at least one to show.")
    ordered = in_order(
        [reproductions] if isinstance(reproductions, Reproduction) else reproductions
    )
    several = len(ordered) > 1
    overview = [_overview(ordered)] if several else []
    return doc.Document(
        title="The paper, reproduced" if several else ordered[0].title,
        verdict=[summarize(ordered) if several else _conclude(ordered[0])],
        sections=[*overview, *(_section(each, at, several) for at, each in enumerate(ordered))],
        footer="" if several else f"Revision {ordered[0].revision}.",
    )


def in_order(reproductions: Sequence[Reproduction]) -> list[Reproduction]:
    """Return them in the order of the paper, its own data first; the name of a further variant is longer."""

    def place(one: Reproduction) -> tuple[int, bool, bool, str]:
        at = ORDER.index(one.experiment) if one.experiment in ORDER else len(ORDER)
        return at, not one.judged, one.data not in DATA_OF_THE_PAPER, one.name

    return sorted(reproductions, key=place)


def summarize(reproductions: Sequence[Reproduction]) -> str:
    """Return how many claims hold; of several variants of an experiment the first one counts."""
    judged = [reproduction for reproduction in in_order(reproductions) if reproduction.judged]
    if not (first := {reproduction.experiment: reproduction for reproduction in reversed(judged)}):
        return "No tolerance is claimed for these numbers: the paper's are for other data."
    variants = " Of several variants of an experiment, the first one is counted."
    return _count_claims(list(first.values())) + (variants if len(judged) > len(first) else "")


def _count_claims(reproductions: Sequence[Reproduction]) -> str:
    claimed = sum(len(reproduction.judged) for reproduction in reproductions)
    within = sum(reproduction.within for reproduction in reproductions)
    verb = "is" if within == 1 else "are"
    return f"{within} of {w.count(claimed, 'printed number')} with a claimed tolerance {verb} within it."


def _conclude(reproduction: Reproduction) -> str:
    tables = reproduction.findings.tables
    if not reproduction.judged:
        is_printed = any(cell.paper is not None for table in tables for cell in table.cells)
        why = (
            "the paper's numbers are for other data"
            if is_printed
            else "the paper prints no such numbers"
        )
        return f"No tolerance is claimed here: {why}."
    said = _count_claims([reproduction])
    outside = [
        f"{cell.column} in row {cell.row}" for cell in reproduction.judged if not cell.within
    ]
    return f"{said} Outside: {w.join_names(outside, MOST_NAMED)}." if outside else said


def _overview(ordered: Sequence[Reproduction]) -> doc.Section:
    shares = [each.within / len(each.judged) if each.judged else math.nan for each in ordered]
    within = [f"{each.within} / {len(each.judged)}" if each.judged else "–" for each in ordered]
    keys = [float(at) for at in range(len(ordered))]
    columns = [
        replace(w.name_column("experiment", [each.title for each in ordered]), keys=keys),
        w.name_column("data", [each.data for each in ordered], 7),
        w.name_column("variant", [each.variant for each in ordered], 6),
        doc.Column("seeds", [str(len(each.seeds)) for each in ordered], 3),
        doc.Column("within / claimed", within, 8, keys=shares),
    ]
    return doc.Section("All experiments", [doc.Table("All experiments", columns)])


def _section(reproduction: Reproduction, place: int, several: bool) -> doc.Section:
    findings = reproduction.findings
    seeds = reproduction.seeds
    whose = f" ({reproduction.data}, {reproduction.variant})" if several else ""
    setting = (
        f"On {reproduction.data}, {w.count(len(seeds), 'seed')}. Variant {reproduction.variant}: "
        f"{w.unstopped(reproduction.about_variant)}."
    )
    jobs = w.count(len(reproduction.results), "job")
    seconds = w.format_number(reproduction.seconds)
    record = {
        "data": reproduction.source,
        "seeds": ", ".join(map(str, seeds)),
        "work": f"{jobs}, {seconds} s on one core each",
        "revision": reproduction.revision,
        **reproduction.versions,
        **reproduction.hardware,
    }
    cells = [cell for table in findings.tables for cell in table.cells]
    legend = "±: the standard error over n seeds or restarts."
    if any(cell.paper is not None for cell in cells):
        legend += " In parentheses: the paper's number; ✗: outside the claimed tolerance."
    blocks: list[doc.Block] = [doc.Paragraph(setting)]
    for at, table in enumerate(findings.tables):
        title = f"{reproduction.title}{whose} – {table.title}" if at == 0 else table.title
        blocks += _table_blocks(table, title)
    blocks += [doc.Paragraph(legend, "small"), *map(figure_chart, findings.figures)]
    blocks += map(doc.Paragraph, findings.sentences)
    if several:
        blocks.append(doc.Paragraph(_conclude(reproduction), "strong"))
    facts = {"Configuration": reproduction.configuration, "Data, seeds, versions, hardware": record}
    blocks += [
        doc.Facts(summary, w.write_pairs(values)) for summary, values in facts.items() if values
    ]
    heading = f"{reproduction.title}{whose}" if several else "The experiment"
    return doc.Section(heading, blocks, f"experiment-{place}")


def _table_blocks(table: PaperTable, title: str) -> list[doc.Block]:
    """Return the table, and for terminals, where it is too wide, the same in several blocks."""
    try:
        keys = [float(row) for row in table.rows]  # 0.5 before 1.000
    except ValueError:
        keys = [float(at) for at in range(len(table.rows))]  # names stay in their order
    names = replace(w.name_column(table.corner, table.rows), keys=keys)
    whole = [names]
    blocks = [[names]]
    for name in table.columns:
        cells = [table.cell(row, name) for row in table.rows]
        marks = ["no" if cell and cell.within is False else "" for cell in cells]
        column = doc.Column(name, list(map(_write_cell, cells)), 8, marks=marks)
        widths = [max(map(len, (one.heading, *one.cells))) + 3 for one in (*blocks[-1], column)]
        if sum(widths) > TEXT_WIDTH and len(blocks[-1]) > 1:
            blocks.append([names])
        blocks[-1].append(column)
        whole.append(column)
    titles = [title, *["(continued)"] * len(blocks)]
    counts = w.format_range([cell.n for cell in table.cells])
    rules = Counter(cell.rule for cell in table.cells if cell.within is not None)
    claims = "; ".join(f"{rule} ({w.count(many, 'number')})" for rule, many in rules.items())
    pieces = (
        f"n = {counts}." if counts else "",
        f"Claimed: {claims}." if claims else "",
        table.note,
    )
    return [
        *(
            doc.Table(caption, block, show_caption=True, text_only=True)
            for caption, block in zip(titles, blocks, strict=False)
        ),
        doc.Table(table.title, whole, show_caption=True, page_only=True),
        doc.Paragraph(f"{table.title}: {' '.join(filter(None, pieces))}", "small"),
    ]


def _write_cell(cell: PaperCell | None) -> str:
    if cell is None:
        return ""
    paper = ""
    ours = w.format_number(cell.ours)
    if cell.paper is not None:
        paper = (
            f" ({cell.paper:.0f} %)" if cell.unit == "%" else f" ({w.format_number(cell.paper)})"
        )
    if cell.unit == "%":
        error = (
            ""
            if cell.error is None
            else f" ± {w.format_number(cell.error, 1 if cell.error < 10 else 2)}"
        )
        ours = f"{cell.ours:.0f}{error} %"
    elif cell.error is not None:
        ours = w.format_mean(cell.ours, cell.error)
    return f"{ours}{paper}{' ✗' if cell.within is False else ''}"


def figure_chart(figure: PaperFigure) -> doc.LineChart:
    """Return the curves with bands, or points with bars, of one standard error; crosses mark divergence."""
    looks = w.looks([curve.name for curve in figure.curves])
    series = []
    told = []
    for at, curve in enumerate(figure.curves):
        is_finite = list(map(math.isfinite, curve.y))
        style: dict[str, Any] = {"name": curve.name, **looks[curve.name]}
        if figure.style == "points":
            style |= {"points": True, "symbol": SYMBOLS[at % len(SYMBOLS)], "dashed": False}
        x, y, errors = (
            list(compress(one, is_finite)) for one in (curve.x, curve.y, curve.error or ())
        )
        if errors:
            pairs = list(
                zip(y, (one if math.isfinite(one) else 0.0 for one in errors), strict=True)
            )
            style |= {
                "low": [one - error for one, error in pairs],
                "high": [sum(pair) for pair in pairs],
            }
        series.append(doc.Series(**style, x=x, y=y))
        limits = f"from {w.format_number(y[0])} to {w.format_number(y[-1])}" if y else ""
        told.append(f"{curve.name} {limits}{'' if all(is_finite) else ', diverged'}")
        broken = [one for one, finite in zip(curve.x, is_finite, strict=True) if not finite]
        if broken := broken if figure.style == "points" else broken[:1]:
            beyond = [math.inf] * len(broken)
            details = ["diverged"] * len(broken)
            series.append(w.crosses(curve.name, beyond, broken, details, color=style["color"]))
    what = f"{figure.y_label} over {figure.x_label}: {'; '.join(told) or 'nothing was measured'}."
    return doc.LineChart(
        figure.name,
        figure.title,
        what,
        series,
        figure.y_label,
        figure.x_label,
        log_x=figure.log_x,
        log_y=figure.log_y,
    )
