"""The document of reproduced experiments: our numbers beside those of the paper, and which claims hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hessinit.present import document as doc
from hessinit.present import words as w
from hessinit.results.reproduction import Curve, PaperCell, PaperFigure, PaperTable, Reproduction

ORDER = ("table-1", "table-2", "table-3", "table-4", "table-5", "word2vec")
DATA_OF_THE_PAPER = ("mnist", "cifar-10", "wikipedia")
SYMBOLS = ("circle", "square", "diamond", "triangle")
MOST_NAMED = 5  # columns outside their tolerance
TEXT_WIDTH = 96  # a wider table continues below in a terminal
# Shape, colour and word differ: none of them alone tells it.
VERDICTS = {True: ("✓ yes", "yes"), False: ("✗ no", "no"), None: ("", "")}


def describe_reproductions(reproductions: Reproduction | Sequence[Reproduction]) -> doc.Document:
    """Return how many claims hold, and every experiment: tables beside the paper's numbers, and figures."""
    if not reproductions:
        raise ValueError("reproductions is empty; give at least one to show.")
    ordered = in_order([reproductions] if isinstance(reproductions, Reproduction) else reproductions)
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
    first = {reproduction.experiment: reproduction for reproduction in reversed(judged)}
    if not first:
        return "No tolerance is claimed for these numbers: the paper's are for other data."
    variants = " Of several variants of an experiment, the first one is counted."
    return _count_claims(list(first.values())) + (variants if len(judged) > len(first) else "")


def _count_claims(reproductions: Sequence[Reproduction]) -> str:
    claimed = sum(len(reproduction.judged) for reproduction in reproductions)
    within = sum(reproduction.within for reproduction in reproductions)
    verb = "is" if within == 1 else "are"
    return f"{within} of {w.count(claimed, 'printed number')} with a claimed tolerance {verb} within it."


def _conclude(reproduction: Reproduction) -> str:
    """Say how many of the claims hold, and which do not."""
    tables = reproduction.findings.tables
    if not reproduction.judged:
        is_printed = any(cell.paper is not None for table in tables for cell in table.cells)
        why = "the paper's numbers are for other data" if is_printed else "the paper prints no such numbers"
        return f"No tolerance is claimed here: {why}."
    outside = []
    for table in tables:
        for column in table.columns:
            rows = [cell.row for cell in table.cells if cell.column == column and cell.within is False]
            if rows:
                outside.append(f"{column} in {_name_rows(rows, table.rows)}")
    if len(outside) > MOST_NAMED + 1:
        outside[MOST_NAMED:] = [f"{len(outside) - MOST_NAMED} more columns"]
    return _count_claims([reproduction]) + (f" Outside: {'; '.join(outside)}." if outside else "")


def _overview(ordered: Sequence[Reproduction]) -> doc.Section:
    titles = [each.title.partition(": ") for each in ordered]
    shares = [each.within / len(each.judged) if each.judged else math.nan for each in ordered]
    within = [f"{each.within} / {len(each.judged)}" if each.judged else "–" for each in ordered]
    links = [f"#experiment-{at}" for at in range(len(ordered))]
    keys = [float(at) for at in range(len(ordered))]
    columns = [
        replace(w.name_column("experiment", [name for name, _, _ in titles]), keys=keys, links=links),
        w.name_column("about", [about for _, _, about in titles], 2),
        w.name_column("data", [each.data for each in ordered], 7),
        w.name_column("variant", [each.variant for each in ordered], 6),
        doc.Column("seeds", [str(len(each.seeds)) for each in ordered], 3),
        doc.Column("within / claimed", within, 8, keys=shares),
    ]
    return doc.Section("All experiments", [doc.Table("All experiments", columns)])


def _section(reproduction: Reproduction, place: int, several: bool) -> doc.Section:
    findings, seeds = reproduction.findings, reproduction.seeds
    subtitle = f"{reproduction.data}, {reproduction.variant}" if several else ""
    said = f"{w.unstopped(reproduction.about_variant)}."
    setting = f"On {reproduction.data}, {w.count(len(seeds), 'seed')}. Variant {reproduction.variant}: {said}"
    is_range = len(seeds) > 2 and seeds == tuple(range(seeds[0], seeds[0] + len(seeds)))
    jobs, seconds = w.count(len(reproduction.results), "job"), w.format_number(reproduction.seconds)
    record = {
        "data": reproduction.source,
        "seeds": f"{seeds[0]} to {seeds[-1]}" if is_range else ", ".join(map(str, seeds)),
        "work": f"{jobs}, {seconds} s on one core each",
        "revision": reproduction.revision,
        **reproduction.versions,
        **reproduction.hardware,
    }
    cells = [cell for table in findings.tables for cell in table.cells]
    texts = []
    if any(cell.error is not None for cell in cells):
        texts.append(doc.Paragraph("± is the standard error over n seeds or restarts.", "small"))
    if any(cell.paper is not None for cell in cells):
        legend = "In parentheses: the paper's number; ✗: outside the claimed tolerance."
        texts.append(doc.Paragraph(legend, "small", text_only=True))
    blocks: list[doc.Block] = [doc.Paragraph(setting)]
    for at, table in enumerate(findings.tables):
        whose = f"{reproduction.title}{f' ({subtitle})' if several else ''}"
        title = f"{whose} – {table.title}" if at == 0 else table.title
        blocks += _table_blocks(table, title)
    blocks += [*texts, *(figure_chart(figure) for figure in findings.figures)]
    if findings.sentences:
        blocks += [
            doc.Paragraph("Findings", "heading", page_only=True),
            *map(doc.Paragraph, findings.sentences),
        ]
    if several:
        blocks.append(doc.Paragraph(_conclude(reproduction), "strong"))
    facts = {"Configuration": reproduction.configuration, "Data, seeds, versions, hardware": record}
    blocks += [doc.Facts(summary, w.write_pairs(values)) for summary, values in facts.items() if values]
    heading = reproduction.title if several else "The experiment"
    return doc.Section(heading, blocks, f"experiment-{place}", subtitle)


def _table_blocks(table: PaperTable, title: str) -> list[doc.Block]:
    """Return the table for pages, with the paper's numbers in columns, and for terminals, in parentheses."""
    try:
        keys = [float(row) for row in table.rows]  # 0.5 before 1.000
    except ValueError:
        keys = [float(at) for at in range(len(table.rows))]  # names stay in their order
    names = replace(w.name_column(table.corner, table.rows), keys=keys)
    compares = any(cell.paper is not None or cell.within is not None for cell in table.cells)
    wide, blocks = [names], [[names]]
    for name in table.columns:
        cells = [table.cell(row, name) for row in table.rows]
        wide += _page_columns(name, cells, name if compares else "")
        marks = ["no" if cell and cell.within is False else "" for cell in cells]
        column = doc.Column(name, [_write_with_paper(cell) for cell in cells], 8, marks=marks)
        widths = [max(map(len, (one.heading, *one.cells))) + 3 for one in (*blocks[-1], column)]
        if sum(widths) > TEXT_WIDTH and len(blocks[-1]) > 1:
            blocks.append([names])
        blocks[-1].append(column)
    below = " ".join(part for part in (_describe_counts(table), _describe_claims(table), table.note) if part)
    titles, shown = [title, *["(continued)"] * len(blocks)], {"show_caption": True, "text_only": True}
    return [
        *(doc.Table(caption, block, **shown) for caption, block in zip(titles, blocks, strict=False)),
        doc.Table(table.title, wide, show_caption=True, page_only=True),
        doc.Paragraph(f"{table.title}: {below}", "small", text_only=True),
        doc.Paragraph(below, "small", page_only=True),
    ]


def _page_columns(name: str, cells: Sequence[PaperCell | None], group: str) -> list[doc.Column]:
    words, marks = zip(*(VERDICTS[cell.within if cell else None] for cell in cells), strict=True)
    ours = [math.nan if cell is None else cell.ours for cell in cells]
    papers = [math.nan if cell is None or cell.paper is None else cell.paper for cell in cells]
    outside = ["no" if mark == "no" else "" for mark in marks]
    columns = [
        doc.Column("paper", [*map(_write_paper, cells)], keys=papers),
        doc.Column("ours" if group else name, [*map(_write, cells)], keys=ours, marks=outside),
        doc.Column("within?", words, is_number=False, marks=marks),
    ]
    return [replace(column, group=group) for column in columns if any(column.cells)]


def _write(cell: PaperCell | None) -> str:
    if cell is None:
        return ""
    if cell.unit == "%":
        error = "" if cell.error is None else f" ± {w.format_number(cell.error, 1 if cell.error < 10 else 2)}"
        return f"{cell.ours:.0f}{error} %"
    return w.format_number(cell.ours) if cell.error is None else w.format_mean(cell.ours, cell.error)


def _write_paper(cell: PaperCell | None) -> str:
    if cell is None or cell.paper is None:
        return ""
    return f"{cell.paper:.0f} %" if cell.unit == "%" else w.format_number(cell.paper)


def _write_with_paper(cell: PaperCell | None) -> str:
    paper = _write_paper(cell)
    return f"{_write(cell)}{f' ({paper})' if paper else ''}{' ✗' if cell and cell.within is False else ''}"


def _describe_counts(table: PaperTable) -> str:
    """Say over how many seeds or restarts each number is taken."""
    counts = sorted({cell.n for cell in table.cells}, reverse=True)
    if len(counts) < 2:
        return f"n = {counts[0]:,}." if counts else ""
    for names, which in ((table.columns, "column"), (table.rows, "row")):
        found = {name: {cell.n for cell in table.cells if getattr(cell, which) == name} for name in names}
        if all(len(each) < 2 for each in found.values()):
            named = {n: [name for name, each in found.items() if n in each] for n in counts}
            return (
                f"n = {', '.join(f'{n:,} for {w.join_names(some, len(some))}' for n, some in named.items())}."
            )
    return f"n = {counts[-1]:,} to {counts[0]:,}."


def _describe_claims(table: PaperTable) -> str:
    """Say which tolerance is claimed for which columns and rows."""
    judged = [cell for cell in table.cells if cell.within is not None]
    rows = [row for row in table.rows if any(cell.row == row for cell in judged)]
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for column in table.columns:
        for rule in dict.fromkeys(cell.rule for cell in judged if cell.column == column):
            covered = {cell.row for cell in judged if (cell.column, cell.rule) == (column, rule)}
            groups.setdefault((rule, tuple(row for row in rows if row in covered)), []).append(column)
    parts = []
    for (rule, some), named in groups.items():
        where = f" for {w.join_names(named, len(named))}" if len(named) < len(table.columns) else ""
        which = f" in {_name_rows(some, table.rows)}" if len(some) < len(rows) else ""
        parts.append(f"{rule}{where}{which}")
    return f"Claimed: {'; '.join(parts)}." if parts else ""


def _name_rows(covered: Sequence[str], rows: Sequence[str]) -> str:
    """Name three or more rows that follow each other by the first and the last."""
    if len(covered) == 1:
        return f"row {covered[0]}"
    first = rows.index(covered[0])
    if len(covered) > 2 and tuple(rows[first : first + len(covered)]) == tuple(covered):
        return f"rows {covered[0]} to {covered[-1]}"
    return f"rows {w.join_names(covered, len(covered))}"


def figure_chart(figure: PaperFigure) -> doc.LineChart:
    """Return the curves with bands, or points with bars, of one standard error; crosses mark divergence."""
    look = w.looks([curve.name for curve in figure.curves])
    series, told = [], []
    for at, curve in enumerate(figure.curves):
        finite = [y for y in curve.y if math.isfinite(y)] or [math.nan]
        symbol = SYMBOLS[at % len(SYMBOLS)] if figure.style == "points" else ""
        series += _curve_series(curve, look[curve.name], symbol)
        first, last = (min(finite), max(finite)) if symbol else (finite[0], finite[-1])
        broken = ", diverged" if len(finite) < len(curve.y) or math.isnan(first) else ""
        told.append(f"{curve.name} from {w.format_number(first)} to {w.format_number(last)}{broken}")
    what = f"{figure.y_label} over {figure.x_label}: {'; '.join(told) or 'nothing was measured'}."
    chart = doc.LineChart(figure.name, figure.title, what, series, figure.y_label, figure.x_label)
    return replace(chart, log_x=figure.log_x, log_y=figure.log_y)


def _curve_series(curve: Curve, look: Any, symbol: str) -> list[doc.Series]:
    """Return the finite part, and crosses for divergence: at the end of a line, or at the upper edge."""
    finite = [at for at, y in enumerate(curve.y) if math.isfinite(y)]
    x, y = [curve.x[at] for at in finite], [curve.y[at] for at in finite]
    series: dict[str, Any] = {"name": curve.name, **look}
    if symbol:
        series |= {"points": True, "symbol": symbol, "dashed": False}
    bars: dict[str, Any] = {}
    if curve.error is not None:
        errors = [curve.error[at] if math.isfinite(curve.error[at]) else 0.0 for at in finite]
        bars["low"] = [value - error for value, error in zip(y, errors, strict=True)]
        bars["high"] = [value + error for value, error in zip(y, errors, strict=True)]
    found = [doc.Series(**series, x=x, y=y, **bars)] if finite else []
    places = [curve.x[at] for at in range(len(curve.x)) if at not in finite]
    edges = [math.inf] * len(places)
    if places and not symbol:
        places, edges = (x[-1:], y[-1:]) if finite else (places[:1], edges[:1])
    if places:
        series |= {"points": True, "symbol": "cross", "in_legend": not finite}
        found.append(doc.Series(**series, x=places, y=edges, details=["diverged"] * len(places)))
    return found
