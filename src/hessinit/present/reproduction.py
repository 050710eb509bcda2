"""The document of reproduced experiments: our numbers beside those of the paper, and which claims hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hessinit.present import document as doc
from hessinit.present.words import (
    count,
    format_mean,
    format_number,
    join_names,
    looks,
    unstopped,
    write_pairs,
)
from hessinit.results.reproduction import Curve, PaperCell, PaperFigure, PaperTable, Reproduction

ORDER = ("table-1", "table-2", "table-3", "table-4", "table-5", "word2vec")
DATA_OF_THE_PAPER = ("mnist", "cifar-10", "wikipedia")
SYMBOLS = ("circle", "square", "diamond", "triangle")
MOST_NAMED = 5  # columns outside their tolerance
TEXT_WIDTH = 96  # a wider table continues below in a terminal
# Shape, colour and word differ: none of them alone tells it.
VERDICTS = {True: ("✓ yes", "yes"), False: ("✗ no", "no"), None: ("", "")}


def describe_reproduction(reproduction: Reproduction) -> doc.Document:
    """Return the tables beside the paper's numbers, the figures, and which claims hold."""
    return describe_reproductions([reproduction])


def describe_reproductions(
    reproductions: Sequence[Reproduction], unreadable: Sequence[str] = ()
) -> doc.Document:
    """Return how many claims hold, and every experiment; `unreadable` names files that are left out."""
    if not reproductions:
        raise ValueError("reproductions is empty; give at least one to show.")
    ordered = in_order(reproductions)
    several = len(ordered) > 1
    overview = [_overview(ordered)] if several else []
    return doc.Document(
        title="The paper, reproduced" if several else ordered[0].title,
        verdict=[
            summarize(ordered) if several else _conclude(ordered[0]),
            *(f"{name} is left out: it is not a record of this version." for name in unreadable),
        ],
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
    said = _count_claims(list(first.values()))
    variants = " Of several variants of an experiment, the first one is counted."
    return said + (variants if len(judged) > len(first) else "")


def _count_claims(reproductions: Sequence[Reproduction]) -> str:
    claimed = sum(len(reproduction.judged) for reproduction in reproductions)
    within = sum(reproduction.within for reproduction in reproductions)
    verb = "is" if within == 1 else "are"
    return f"{within} of {count(claimed, 'printed number')} with a claimed tolerance {verb} within it."


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
        doc.Column("experiment", [name for name, _, _ in titles], 9, is_number=False, keys=keys, links=links),
        doc.Column("about", [about for _, _, about in titles], 2, is_number=False),
        doc.Column("data", [each.data for each in ordered], 7, is_number=False),
        doc.Column("variant", [each.variant for each in ordered], 6, is_number=False),
        doc.Column("seeds", [str(len(each.seeds)) for each in ordered], 3),
        doc.Column("within / claimed", within, 8, keys=shares),
    ]
    return doc.Section("All experiments", [doc.Table("All experiments", columns, show_caption=False)])


def _section(reproduction: Reproduction, place: int, several: bool) -> doc.Section:
    findings, seeds = reproduction.findings, reproduction.seeds
    subtitle = f"{reproduction.data}, {reproduction.variant}" if several else ""
    said = f"{unstopped(reproduction.about_variant)}."
    setting = f"On {reproduction.data}, {count(len(seeds), 'seed')}. Variant {reproduction.variant}: {said}"
    is_range = len(seeds) > 2 and seeds == tuple(range(seeds[0], seeds[0] + len(seeds)))
    jobs, seconds = count(len(reproduction.results), "job"), format_number(reproduction.seconds)
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
        texts.append(doc.Text("± is the standard error over n seeds or restarts.", "small"))
    if any(cell.paper is not None for cell in cells):
        legend = "In parentheses: the paper's number; ✗: outside the claimed tolerance."
        texts.append(doc.Text(legend, "small", text_only=True))
    blocks: list[doc.Block] = [doc.Text(setting)]
    for at, table in enumerate(findings.tables):
        whose = f"{reproduction.title}{f' ({subtitle})' if several else ''}"
        title = f"{whose} – {table.title}" if at == 0 else table.title
        blocks += _table_blocks(table, title)
    blocks += [*texts, *(figure_chart(figure) for figure in findings.figures)]
    if findings.sentences:
        blocks += [doc.Text("Findings", "heading", page_only=True), *map(doc.Text, findings.sentences)]
    if several:
        blocks.append(doc.Text(_conclude(reproduction), "strong"))
    for summary, values in (
        ("Configuration", reproduction.configuration),
        ("Data, seeds, versions, hardware", record),
    ):
        blocks += [doc.Facts(summary, write_pairs(values))] if values else []
    heading = reproduction.title if several else "The experiment"
    return doc.Section(heading, blocks, f"experiment-{place}", subtitle)


def _table_blocks(table: PaperTable, title: str) -> list[doc.Block]:
    """Return the table for pages, with the paper's numbers in columns, and for terminals, in parentheses."""
    try:
        keys = [float(row) for row in table.rows]  # 0.5 before 1.000
    except ValueError:
        keys = [float(at) for at in range(len(table.rows))]  # names stay in their order
    names = doc.Column(table.corner, table.rows, 9, is_number=False, keys=keys)
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
    return [
        *(
            doc.Table("(continued)" if at else title, block, text_only=True)
            for at, block in enumerate(blocks)
        ),
        doc.Table(table.title, wide, page_only=True),
        doc.Text(f"{table.title}: {below}", "small", text_only=True),
        doc.Text(below, "small", page_only=True),
    ]


def _page_columns(name: str, cells: Sequence[PaperCell | None], group: str) -> list[doc.Column]:
    verdicts = [VERDICTS[cell.within if cell else None] for cell in cells]
    ours = [math.nan if cell is None else cell.ours for cell in cells]
    outside = ["no" if mark == "no" else "" for _, mark in verdicts]
    heading, shown = "ours" if group else name, [_write(cell) for cell in cells]
    columns = [doc.Column(heading, shown, keys=ours, marks=outside, group=group)]
    papers = [math.nan if cell is None or cell.paper is None else cell.paper for cell in cells]
    if not all(map(math.isnan, papers)):
        columns = [doc.Column("paper", [*map(_write_paper, cells)], keys=papers, group=group), *columns]
    if any(mark for _, mark in verdicts):
        words, marks = [word for word, _ in verdicts], [mark for _, mark in verdicts]
        columns.append(doc.Column("within?", words, is_number=False, marks=marks, group=group))
    return columns


def _write(cell: PaperCell | None) -> str:
    if cell is None:
        return ""
    if cell.unit == "%":
        error = "" if cell.error is None else f" ± {format_number(cell.error, 1 if cell.error < 10 else 2)}"
        return f"{cell.ours:.0f}{error} %"
    return format_number(cell.ours) if cell.error is None else format_mean(cell.ours, cell.error)


def _write_paper(cell: PaperCell | None) -> str:
    if cell is None or cell.paper is None:
        return ""
    return f"{cell.paper:.0f} %" if cell.unit == "%" else format_number(cell.paper)


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
            named = {n: _join([name for name, each in found.items() if n in each]) for n in counts}
            return f"n = {', '.join(f'{n:,} for {names}' for n, names in named.items())}."
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
        where = f" for {_join(named)}" if len(named) < len(table.columns) else ""
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
    return f"rows {_join(covered)}"


def _join(names: Sequence[str]) -> str:
    return join_names(list(names), most=len(names))


def figure_chart(figure: PaperFigure) -> doc.LineChart:
    """Return the curves with bands, or points with bars, of one standard error; crosses mark divergence."""
    look = looks([curve.name for curve in figure.curves])
    series, told = [], []
    for at, curve in enumerate(figure.curves):
        finite = [y for y in curve.y if math.isfinite(y)] or [math.nan]
        symbol = SYMBOLS[at % len(SYMBOLS)] if figure.style == "points" else ""
        series += _curve_series(curve, look[curve.name], symbol)
        first, last = (min(finite), max(finite)) if symbol else (finite[0], finite[-1])
        broken = ", diverged" if len(finite) < len(curve.y) or math.isnan(first) else ""
        told.append(f"{curve.name} from {format_number(first)} to {format_number(last)}{broken}")
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
    broken = [(at, math.inf) for at, value in zip(curve.x, curve.y, strict=True) if not math.isfinite(value)]
    if broken and not symbol:
        broken = [(x[-1], y[-1])] if finite else broken[:1]
    if broken:
        series |= {"points": True, "symbol": "cross", "in_legend": not finite}
        at, edge = [place for place, _ in broken], [value for _, value in broken]
        found.append(doc.Series(**series, x=at, y=edge, details=["diverged"] * len(broken)))
    return found
