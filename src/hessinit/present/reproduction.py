"""The document of reproduced experiments: our numbers beside those of the paper, and which claims hold."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from hessinit.present import document as doc
from hessinit.present.words import (
    count,
    unstopped,
    format_mean,
    format_number,
    join_names,
    looks,
    write_pairs,
)
from hessinit.results.reproduction import Cell, Curve, Figure, Reproduction, Table

ORDER = ("table-1", "table-2", "table-3", "table-4", "table-5", "word2vec")
DATA_OF_THE_PAPER = ("mnist", "cifar-10", "wikipedia")
SYMBOLS = ("circle", "square", "diamond", "triangle")
MOST_NAMED = 5  # columns outside their tolerance
TEXT_WIDTH = 96  # tables that are wider continue below in a terminal
# Shape, colour and word differ: none of them alone tells it.
VERDICTS = {True: ("✓ yes", "yes"), False: ("✗ no", "no"), None: ("", "")}


def describe_reproductions(
    reproductions: Sequence[Reproduction], unreadable: Sequence[str] = ()
) -> doc.Document:
    """Return how many claims hold, and every experiment; `unreadable` names files that are left out."""
    if not reproductions:
        raise ValueError("reproductions is empty; give at least one to show.")
    ordered = in_order(reproductions)
    several = len(ordered) > 1
    anchors = _anchors(ordered)
    sections = [_section(each, anchor, several) for each, anchor in zip(ordered, anchors, strict=True)]
    return doc.Document(
        title="The paper, reproduced" if several else ordered[0].title,
        verdict=[
            summarize(ordered) if several else _conclude(ordered[0]),
            *(f"{name} is left out: it is not a record of this version." for name in unreadable),
        ],
        sections=[*([_overview(ordered, anchors)] if several else []), *sections],
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
    first: dict[str, Reproduction] = {}
    judged = [reproduction for reproduction in in_order(reproductions) if reproduction.judged]
    for reproduction in judged:
        first.setdefault(reproduction.experiment, reproduction)
    if not first:
        return "No tolerance is claimed for these numbers: the paper's are for other data."
    claimed = sum(len(reproduction.judged) for reproduction in first.values())
    within = sum(reproduction.within for reproduction in first.values())
    counted = (
        " Of several variants of an experiment, the first one is counted." if len(judged) > len(first) else ""
    )
    return f"{within} of {count(claimed, 'printed number')} with a claimed tolerance {_are(within)} within it.{counted}"


def _conclude(reproduction: Reproduction) -> str:
    """Say how many of the claims hold, and which do not."""
    judged, within = reproduction.judged, reproduction.within
    if not judged:
        cells = [cell for table in reproduction.findings.tables for cell in table.cells]
        is_printed = any(cell.paper is not None for cell in cells)
        why = "the paper's numbers are for other data" if is_printed else "the paper prints no such numbers"
        return f"No tolerance is claimed here: {why}."
    outside = []
    for table in reproduction.findings.tables:
        for column in table.columns:
            rows = [cell.row for cell in table.cells if cell.column == column and cell.within is False]
            if rows:
                outside.append(f"{column} in {_name_rows(rows, table.rows)}")
    more = [f"{len(outside) - MOST_NAMED} more columns"] if len(outside) > MOST_NAMED + 1 else []
    named = "; ".join([*outside[: MOST_NAMED + (not more)], *more])
    numbers = count(len(judged), "printed number")
    return (
        f"{within} of {numbers} with a claimed tolerance {_are(within)} within it."
        f"{f' Outside: {named}.' if named else ''}"
    )


def _are(many: int) -> str:
    return "is" if many == 1 else "are"


def _overview(ordered: Sequence[Reproduction], anchors: Sequence[str]) -> doc.Section:
    titles = [each.title.partition(": ") for each in ordered]
    shares = [each.within / len(each.judged) if each.judged else math.nan for each in ordered]
    within = [f"{each.within} / {len(each.judged)}" if each.judged else "–" for each in ordered]
    experiments: dict[str, Any] = {
        "keys": [float(at) for at in range(len(ordered))],
        "links": [f"#{anchor}" for anchor in anchors],
    }
    columns = [
        doc.Column("experiment", [name for name, _, _ in titles], 9, is_number=False, **experiments),
        doc.Column("about", [about for _, _, about in titles], 2, is_number=False),
        doc.Column("data", [each.data for each in ordered], 7, is_number=False),
        doc.Column("variant", [each.variant for each in ordered], 6, is_number=False),
        doc.Column("seeds", [str(len(each.seeds)) for each in ordered], 3),
        doc.Column("within / claimed", within, 8, keys=shares),
    ]
    return doc.Section("All experiments", [doc.Table("All experiments", columns, show_caption=False)])


def _anchors(reproductions: Sequence[Reproduction]) -> list[str]:
    """Return a unique name for each that can stand in an address."""
    found: list[str] = []
    for reproduction in reproductions:
        base = re.sub(r"[^A-Za-z0-9]+", "-", reproduction.name).strip("-") or "reproduction"
        taken = sum(name == base or name.startswith(f"{base}--") for name in found)
        found.append(f"{base}--{taken + 1}" if taken else base)
    return found


def _section(reproduction: Reproduction, anchor: str, several: bool) -> doc.Section:
    findings = reproduction.findings
    setting = (
        f"On {reproduction.data}, {count(len(reproduction.seeds), 'seed')}. Variant {reproduction.variant}: "
        f"{unstopped(reproduction.about_variant)}."
    )
    tables = [block for table in findings.tables for block in _table_blocks(reproduction, table)]
    seeds = reproduction.seeds
    is_range = len(seeds) > 2 and seeds == tuple(range(seeds[0], seeds[0] + len(seeds)))
    record = {
        "data": reproduction.source,
        "seeds": f"{seeds[0]} to {seeds[-1]}" if is_range else ", ".join(map(str, seeds)),
        "work": f"{count(len(reproduction.results), 'job')}, {format_number(reproduction.seconds)} s on one core each",
        "revision": reproduction.revision,
        **reproduction.versions,
        **reproduction.hardware,
    }
    return doc.Section(
        reproduction.title if several else "The experiment",
        [
            doc.Text(setting),
            *tables,
            doc.Text(_explain(reproduction), "small"),
            *(figure_chart(figure) for figure in findings.figures),
            *([doc.Text("Findings", "heading", page_only=True)] if findings.sentences else []),
            *map(doc.Text, findings.sentences),
            *([doc.Text(_conclude(reproduction), "strong")] if several else []),
            *(
                [doc.Facts("Configuration", write_pairs(reproduction.configuration))]
                if reproduction.configuration
                else []
            ),
            doc.Facts("Data, seeds, versions, hardware", write_pairs(record)),
        ],
        anchor,
        f"{reproduction.data}, {reproduction.variant}" if several else "",
    )


def _explain(reproduction: Reproduction) -> str:
    cells = [cell for table in reproduction.findings.tables for cell in table.cells]
    parts = (
        ["± is the standard error over n seeds or restarts"]
        if any(c.error is not None for c in cells)
        else []
    )
    if any(cell.paper is not None for cell in cells):
        parts.append("the paper's numbers are in parentheses or in columns of their own")
    if any(cell.within is False for cell in cells):
        parts.append("✗: outside the claimed tolerance")
    return f"{'; '.join(parts).capitalize() if parts else 'n: seeds or restarts'}."


def _table_blocks(reproduction: Reproduction, table: Table) -> list[doc.Block]:
    """Return the table twice, with columns for paper, ours and the verdict on a page and one in a terminal."""
    try:
        keys = [float(row) for row in table.rows]  # 0.5 before 1.000
    except ValueError:
        keys = [float(at) for at in range(len(table.rows))]  # names stay in their order
    names = doc.Column(table.corner, table.rows, 9, is_number=False, keys=keys)
    columns = {name: [table.cell(row, name) for row in table.rows] for name in table.columns}
    compares = any(cell.paper is not None or cell.within is not None for cell in table.cells)
    wide = [names]
    blocks: list[list[doc.Column]] = [[]]
    for name, cells in columns.items():
        wide += _page_columns(name if compares else "", name, cells)
        texts = [_write_with_paper(cell) for cell in cells]
        marks = ["no" if cell and cell.within is False else "" for cell in cells]
        blocks[-1].append(doc.Column(name, texts, 8, marks=marks))
        widths = [max(map(len, (column.heading, *column.cells))) + 3 for column in (names, *blocks[-1])]
        if sum(widths) > TEXT_WIDTH and len(blocks[-1]) > 1:
            blocks.append([blocks[-1].pop()])
    caption = f"{reproduction.title} – {table.title}"
    below = " ".join(part for part in (_describe_counts(table), _describe_claims(table), table.note) if part)
    return [
        *(
            doc.Table(caption if not at else "(continued)", [names, *block], text_only=True)
            for at, block in enumerate(blocks)
        ),
        doc.Table(table.title, wide, page_only=True),
        *([doc.Text(f"{table.title}: {below}", "small", text_only=True)] if below else []),
        *([doc.Text(below, "small", page_only=True)] if below else []),
    ]


def _page_columns(group: str, name: str, cells: Sequence[Cell | None]) -> list[doc.Column]:
    verdicts = [VERDICTS[cell.within if cell else None] for cell in cells]
    papers = [math.nan if cell is None or cell.paper is None else cell.paper for cell in cells]
    ours = [math.nan if cell is None else cell.ours for cell in cells]
    marks = ["no" if mark == "no" else "" for _, mark in verdicts]
    columns = [
        doc.Column("ours" if group else name, [_write(c) for c in cells], keys=ours, marks=marks, group=group)
    ]
    if not all(map(math.isnan, papers)):
        columns.insert(
            0, doc.Column("paper", [_write_paper(cell) for cell in cells], keys=papers, group=group)
        )
    if any(mark for _, mark in verdicts):
        words, marks = [word for word, _ in verdicts], [mark for _, mark in verdicts]
        columns.append(doc.Column("within?", words, is_number=False, marks=marks, group=group))
    return columns


def _write(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell.unit != "%":
        return format_mean(cell.ours, math.nan if cell.error is None else cell.error)
    return f"{cell.ours:.0f}{'' if cell.error is None else f' ± {cell.error:.0f}'} %"


def _write_paper(cell: Cell | None) -> str:
    if cell is None or cell.paper is None:
        return ""
    return f"{cell.paper:.0f} %" if cell.unit == "%" else format_number(cell.paper)


def _write_with_paper(cell: Cell | None) -> str:
    paper = _write_paper(cell)
    outside = " ✗" if cell and cell.within is False else ""
    return f"{_write(cell)}{f' ({paper})' if paper else ''}{outside}"


def _describe_counts(table: Table) -> str:
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


def _describe_claims(table: Table) -> str:
    """Say which tolerance is claimed for which columns and rows."""
    judged = [cell for cell in table.cells if cell.within is not None]
    rows = [row for row in table.rows if any(cell.row == row for cell in judged)]
    columns = [column for column in table.columns if any(cell.column == column for cell in judged)]
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for column in columns:
        for rule in dict.fromkeys(cell.rule for cell in judged if cell.column == column):
            covered = {cell.row for cell in judged if (cell.column, cell.rule) == (column, rule)}
            groups.setdefault((rule, tuple(row for row in rows if row in covered)), []).append(column)
    parts = []
    for (rule, covered), named in groups.items():
        where = f" for {_join(named)}" if len(named) < len(table.columns) else ""
        which = f" in {_name_rows(covered, table.rows)}" if len(covered) < len(rows) else ""
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


def figure_chart(figure: Figure) -> doc.LineChart:
    """Return the curves with bands, or points with bars, of one standard error; crosses mark divergence."""
    look = looks([curve.name for curve in figure.curves])
    series, told = [], []
    for at, curve in enumerate(figure.curves):
        finite = [y for y in curve.y if math.isfinite(y)]
        series += _curve_series(curve, look[curve.name], figure.style == "points", SYMBOLS[at % len(SYMBOLS)])
        ends = (
            (min(finite), max(finite))
            if finite and figure.style == "points"
            else (finite or [math.nan])[:: len(finite) - 1 or 1]
        )
        span = f"from {format_number(ends[0])} to {format_number(ends[-1])}" if finite else "without a number"
        told.append(f"{curve.name} {span}{', diverged' if len(finite) < len(curve.y) else ''}")
    return doc.LineChart(
        name=figure.name,
        caption=figure.title,
        description=f"{figure.y_label} over {figure.x_label}: {'; '.join(told) or 'nothing was measured'}.",
        series=series,
        x_label=figure.x_label,
        y_label=figure.y_label,
        log_x=figure.log_x,
        log_y=figure.log_y,
    )


def _curve_series(curve: Curve, look: Any, points: bool, symbol: str) -> list[doc.Series]:
    """Return what is finite, and crosses: for a line at its last finite point, for points at the upper edge."""
    finite = [at for at, y in enumerate(curve.y) if math.isfinite(y)]
    errors = [e if math.isfinite(e) else 0.0 for e in curve.error or [0.0] * len(curve.y)]
    bars: dict[str, Any] = {}
    if curve.error is not None:
        bars["low"] = [curve.y[at] - errors[at] for at in finite]
        bars["high"] = [curve.y[at] + errors[at] for at in finite]
    style: dict[str, Any] = {"points": True, "symbol": symbol, "color": look["color"]} if points else look
    x, y = [curve.x[at] for at in finite], [curve.y[at] for at in finite]
    drawn = [doc.Series(name=curve.name, x=x, y=y, **bars, **style)] if finite else []
    broken = [(at, math.inf) for at, value in zip(curve.x, curve.y, strict=True) if not math.isfinite(value)]
    if broken and not points:
        broken = [(x[-1], y[-1]) if finite else broken[0]]
    if not broken:
        return drawn
    cross = doc.Series(
        name=curve.name,
        x=[at for at, _ in broken],
        y=[value for _, value in broken],
        color=look["color"],
        points=True,
        symbol="cross",
        in_legend=not finite,
        details=["diverged"] * len(broken),
    )
    return [*drawn, cross]
