"""The document of reproduced experiments: our numbers beside the paper's, and which claims hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

from hessinit import reporting
from hessinit_paper.reproduction import Curve, PaperCell, PaperFigure, PaperTable, Reproduction

ORDER = ("table-1", "table-2", "table-3", "table-4", "table-5", "word2vec")
DATA_OF_THE_PAPER = ("mnist", "cifar-10", "wikipedia")
SYMBOLS = ("circle", "square", "diamond", "triangle")


def describe_reproductions(reproductions: Sequence[Reproduction]) -> reporting.Document:
    """Return how many claims hold, and every experiment: tables beside the paper's, and figures."""
    if not reproductions:
        raise ValueError("reproductions is empty; give at least one to show.")
    ordered = in_order(reproductions)
    if len(ordered) == 1:
        return reporting.Document(
            title=ordered[0].title,
            verdict=[_conclude(ordered[0])],
            sections=[_section(ordered[0], 0, several=False)],
            footer=f"Revision {ordered[0].revision}.",
        )
    numbered = enumerate(ordered)
    sections = [_section(reproduction, number, several=True) for number, reproduction in numbered]
    return reporting.Document(
        title="The paper, reproduced",
        verdict=[summarize(ordered)],
        sections=[_overview(ordered), *sections],
    )


def in_order(reproductions: Sequence[Reproduction]) -> list[Reproduction]:
    """Return them in the order of the paper, its own data and the default variant first."""

    def position(reproduction: Reproduction) -> tuple[int, bool, bool, str]:
        number = [*ORDER, reproduction.experiment].index(reproduction.experiment)
        is_other_data = reproduction.data not in DATA_OF_THE_PAPER
        return number, not reproduction.judged, is_other_data, reproduction.name

    return sorted(reproductions, key=position)


def summarize(reproductions: Sequence[Reproduction]) -> str:
    """Return how many claims hold; of several variants of an experiment the first one counts."""
    judged = [reproduction for reproduction in in_order(reproductions) if reproduction.judged]
    first = {reproduction.experiment: reproduction for reproduction in reversed(judged)}
    if not first:
        return "No tolerance is claimed for these numbers: the paper's are for other data."
    summary = _count_claims(list(first.values()))
    if len(judged) > len(first):
        summary += " Of several variants of an experiment, the first one is counted."
    return summary


def _count_claims(reproductions: Sequence[Reproduction]) -> str:
    claimed = sum(len(reproduction.judged) for reproduction in reproductions)
    within = sum(reproduction.within for reproduction in reproductions)
    numbers = reporting.count(claimed, "printed number")
    verb = "is" if within == 1 else "are"
    return f"{within} of {numbers} with a claimed tolerance {verb} within it."


def _conclude(reproduction: Reproduction) -> str:
    if not reproduction.judged:
        reason = "the paper prints no such numbers"
        if _has_printed_numbers(reproduction):
            reason = "the paper's numbers are for other data"
        return f"No tolerance is claimed here: {reason}."
    conclusion = _count_claims([reproduction])
    outside = [
        f"{cell.column} in row {cell.row}" for cell in reproduction.judged if not cell.within
    ]
    if outside:
        conclusion += f" Outside: {reporting.join_names(outside, 5)}."
    return conclusion


def _has_printed_numbers(reproduction: Reproduction) -> bool:
    cells = [cell for table in reproduction.findings.tables for cell in table.cells]
    return any(cell.paper is not None for cell in cells)


def _overview(ordered: Sequence[Reproduction]) -> reporting.Section:
    counts = [(reproduction.within, len(reproduction.judged)) for reproduction in ordered]
    shares = [within / claimed if claimed else math.nan for within, claimed in counts]
    texts = [f"{within} / {claimed}" if claimed else "–" for within, claimed in counts]
    titles = reporting.name_column("experiment", [reproduction.title for reproduction in ordered])
    seeds = [str(len(reproduction.seeds)) for reproduction in ordered]
    columns = [
        replace(titles, keys=list(map(float, range(len(ordered))))),
        reporting.name_column("data", [reproduction.data for reproduction in ordered], 7),
        reporting.name_column("variant", [reproduction.variant for reproduction in ordered], 6),
        reporting.Column("seeds", seeds, 3),
        reporting.Column("within / claimed", texts, 8, keys=shares),
    ]
    return reporting.Section("All experiments", [reporting.Table("All experiments", columns)])


def _section(reproduction: Reproduction, number: int, *, several: bool) -> reporting.Section:
    """Return the tables, figures and sentences of an experiment, and its record below them."""
    findings = reproduction.findings
    title = reproduction.title
    if several:
        title += f" ({reproduction.data}, {reproduction.variant})"
    seeds = reporting.count(len(reproduction.seeds), "seed")
    setting = (
        f"On {reproduction.data}, {seeds}. Variant {reproduction.variant}: "
        f"{reproduction.about_variant.rstrip('.')}."
    )
    blocks: list[reporting.Block] = [reporting.Paragraph(setting)]
    for table in findings.tables:
        is_first = table is findings.tables[0]
        blocks += _table_blocks(table, f"{title} – {table.title}" if is_first else table.title)
    legend = "±: the standard error over n seeds or restarts."
    if _has_printed_numbers(reproduction):
        legend += " In parentheses: the paper's number; ✗: outside the claimed tolerance."
    blocks += [reporting.Paragraph(legend, "small"), *map(figure_chart, findings.figures)]
    blocks += map(reporting.Paragraph, findings.sentences)
    if several:
        blocks.append(reporting.Paragraph(_conclude(reproduction), "strong"))
    if reproduction.configuration:
        configuration = reporting.write_pairs(reproduction.configuration)
        blocks.append(reporting.Facts("Configuration", configuration))
    blocks.append(_record(reproduction))
    heading = title if several else "The experiment"
    return reporting.Section(heading, blocks, f"experiment-{number}")


def _record(reproduction: Reproduction) -> reporting.Facts:
    jobs = reporting.count(len(reproduction.results), "job")
    seconds = reporting.format_number(reproduction.seconds)
    record = {
        "data": reproduction.source,
        "seeds": ", ".join(map(str, reproduction.seeds)),
        "work": f"{jobs}, {seconds} s on one core each",
        "revision": reproduction.revision,
        **reproduction.versions,
        **reproduction.hardware,
    }
    return reporting.Facts("Data, seeds, versions, hardware", reporting.write_pairs(record))


def _table_blocks(table: PaperTable, title: str) -> list[reporting.Block]:
    """Return the table for pages, the same for terminals in pieces that fit, and what it claims."""
    try:
        keys = [float(row) for row in table.rows]  # 0.5 before 1.000
    except ValueError:
        keys = list(map(float, range(len(table.rows))))  # names stay in their order
    names = replace(reporting.name_column(table.corner, table.rows), keys=keys)
    columns = [_column(table, name) for name in table.columns]
    blocks: list[reporting.Block] = []
    caption = title
    for piece in _pieces(names, columns):
        blocks.append(reporting.Table(caption, piece, show_caption=True, text_only=True))
        caption = "(continued)"
    on_page = reporting.Table(table.title, [names, *columns], show_caption=True, page_only=True)
    return [*blocks, on_page, reporting.Paragraph(f"{table.title}: {_claims(table)}", "small")]


def _pieces(
    names: reporting.Column, columns: Sequence[reporting.Column]
) -> list[list[reporting.Column]]:
    """Divide the columns over tables of up to 96 characters, each with the names of the rows."""
    pieces = [[names]]
    for column in columns:
        together = [*pieces[-1], column]
        widths = [max(map(len, (shown.heading, *shown.cells))) + 3 for shown in together]
        if sum(widths) > 96 and len(pieces[-1]) > 1:
            pieces.append([names])
        pieces[-1].append(column)
    return pieces


def _column(table: PaperTable, name: str) -> reporting.Column:
    cells = [table.cell(row, name) for row in table.rows]
    marks = ["no" if cell and cell.within is False else "" for cell in cells]
    return reporting.Column(
        name, [_write_cell(cell) if cell else "" for cell in cells], 8, marks=marks
    )


def _claims(table: PaperTable) -> str:
    """Return over how many seeds the numbers are, the tolerances claimed, and the table's note."""
    counts = reporting.format_range([cell.n for cell in table.cells])
    rules = Counter(cell.rule for cell in table.cells if cell.within is not None)
    claims = [f"{rule} ({reporting.count(number, 'number')})" for rule, number in rules.items()]
    seeds = f"n = {counts}." if counts else ""
    claimed = f"Claimed: {'; '.join(claims)}." if claims else ""
    return " ".join(filter(None, (seeds, claimed, table.note)))


def _write_cell(cell: PaperCell) -> str:
    write = _write_percentage if cell.unit == "%" else _write_number
    text = write(cell)
    return f"{text} ✗" if cell.within is False else text


def _write_percentage(cell: PaperCell) -> str:
    text = f"{cell.ours:.0f}"
    if cell.error is not None:
        text += f" ± {reporting.format_number(cell.error, 1 if cell.error < 10 else 2)}"
    paper = "" if cell.paper is None else f" ({cell.paper:.0f} %)"
    return f"{text} %{paper}"


def _write_number(cell: PaperCell) -> str:
    text = reporting.format_number(cell.ours)
    if cell.error is not None:
        text = reporting.format_mean(cell.ours, cell.error)
    return text if cell.paper is None else f"{text} ({reporting.format_number(cell.paper)})"


def figure_chart(figure: PaperFigure) -> reporting.LineChart:
    """Return the curves, or points, with one standard error; crosses mark divergence."""
    are_points = figure.style == "points"
    looks = reporting.looks([curve.name for curve in figure.curves])
    series = []
    descriptions = []
    for number, curve in enumerate(figure.curves):
        color, is_dashed = looks[curve.name]
        drawn = replace(_draw_curve(curve, color), dashed=is_dashed)
        if are_points:
            symbol = SYMBOLS[number % len(SYMBOLS)]
            drawn = replace(drawn, points=True, symbol=symbol, dashed=False)
        series.append(drawn)
        diverged = [x for x, y in zip(curve.x, curve.y, strict=True) if not math.isfinite(y)]
        descriptions.append(_describe_curve(curve.name, drawn.y, bool(diverged)))
        if diverged:
            crossed = diverged if are_points else diverged[:1]  # where the line ends
            infinite = [math.inf] * len(crossed)
            details = ["diverged"] * len(crossed)
            series.append(reporting.crosses(curve.name, infinite, crossed, color, details=details))
    ends = "; ".join(descriptions) or "nothing was measured"
    return reporting.LineChart(
        figure.name,
        figure.title,
        f"{figure.y_label} over {figure.x_label}: {ends}.",
        series,
        figure.y_label,
        figure.x_label,
        log_x=figure.log_x,
        log_y=figure.log_y,
    )


def _draw_curve(curve: Curve, color: str) -> reporting.Series:
    """Return the finite points of a curve with a band of one standard error."""
    is_finite = list(map(math.isfinite, curve.y))
    x = list(compress(curve.x, is_finite))
    y = list(compress(curve.y, is_finite))
    series = reporting.Series(curve.name, y, x, color=color)
    if not curve.error:
        return series
    errors = compress(curve.error, is_finite)
    bars = [
        (value, error if math.isfinite(error) else 0.0)
        for value, error in zip(y, errors, strict=True)
    ]
    low = [value - error for value, error in bars]
    high = [value + error for value, error in bars]
    return replace(series, low=low, high=high)


def _describe_curve(name: str, y: reporting.Numbers, diverged: bool) -> str:
    """Return the text alternative of a curve: its first and its last value."""
    description = f"{name} "
    if y:
        ends = [reporting.format_number(value) for value in (y[0], y[-1]) if value is not None]
        description += f"from {ends[0]} to {ends[1]}"
    return f"{description}, diverged" if diverged else description
