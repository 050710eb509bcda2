"""What a reproduction claims, over how many seeds, and how much of it holds, in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hessinit.present.words import join_names, printable
from hessinit.results.reproduction import Reproduction, Table

MOST_NAMED = 5


def describe_setting(reproduction: Reproduction) -> str:
    """The data, the variant and the seeds."""
    seeds = len(reproduction.seeds)
    about = stop_sentence(printable(reproduction.about_variant))
    return (
        f"On {printable(reproduction.data)}, {seeds} seed{'' if seeds == 1 else 's'}. "
        f"Variant {printable(reproduction.variant)}: {about}"
    )


def describe_claims(table: Table) -> str:
    """The tolerance claimed for each group of cells, once; empty where nothing is claimed."""
    judged = [cell for cell in table.cells if cell.within is not None]
    rows = [row for row in table.rows if any(cell.row == row for cell in judged)]
    columns = [column for column in table.columns if any(cell.column == column for cell in judged)]
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for column in columns:
        rules: dict[str, list[str]] = {}
        for row in rows:
            for cell in judged:
                if (cell.row, cell.column) == (row, column):
                    rules.setdefault(cell.rule, []).append(row)
        for rule, covered in rules.items():
            groups.setdefault((rule, tuple(covered)), []).append(column)
    parts = []
    for (rule, alike), named in groups.items():
        where = []
        if named != columns or (len(groups) == 1 and len(columns) < len(table.columns)):
            where.append(f"for {_list(named)}")
        if list(alike) != rows:
            where.append(f"in {_name_rows(alike, table.rows)}")
        parts.append(f"{printable(rule)} {' '.join(where)}".rstrip())
    return f"Claimed: {'; '.join(parts)}." if parts else ""


def describe_counts(table: Table) -> str:
    """Over how many seeds or restarts each number is.

    >>> from hessinit.present.reproduction_example import example_reproduction
    >>> [describe_counts(table) for table in example_reproduction().findings.tables]
    ['n = 5.', 'n = 400.']
    """
    by_column = {name: {cell.n for cell in table.cells if cell.column == name} for name in table.columns}
    by_row = {name: {cell.n for cell in table.cells if cell.row == name} for name in table.rows}
    counts = sorted({cell.n for cell in table.cells})
    if len(counts) < 2:
        return f"n = {counts[0]:,}." if counts else ""
    for by_name in (by_column, by_row):
        if all(len(found) < 2 for found in by_name.values()):
            named = {n: [name for name, found in by_name.items() if n in found] for n in counts[::-1]}
            return "n = " + ", ".join(f"{n:,} for {_list(names)}" for n, names in named.items()) + "."
    return f"n = {counts[0]:,} to {counts[-1]:,}."


def explain_numbers(reproductions: Sequence[Reproduction], question: str) -> str:
    """What ±, n and the column called `question` are, as far as they are there."""
    cells = [cell for each in reproductions for table in each.findings.tables for cell in table.cells]
    parts = []
    if any(cell.error is not None for cell in cells):
        parts.append("± is the standard error")
    if cells:
        parts.append("n is how many seeds or restarts a number is taken over")
    if any(cell.within is not None for cell in cells):
        parts.append(f"{question}: whether our number is as near to the paper's as claimed")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def conclude_claims(reproduction: Reproduction) -> str:
    """How many of the claims hold, and which do not."""
    judged = reproduction.judged
    if not judged:
        cells = [cell for table in reproduction.findings.tables for cell in table.cells]
        if any(cell.paper is not None for cell in cells):
            return "No tolerance is claimed here: the paper's numbers are for other data."
        return "No tolerance is claimed here: the paper prints no such numbers."
    if reproduction.within == len(judged):
        which = "The one printed number" if len(judged) == 1 else f"All {len(judged)} printed numbers"
        return f"{which} for which a tolerance is claimed {'is' if len(judged) == 1 else 'are'} within it."
    held = f"{reproduction.within} of the {count(len(judged), 'printed number')}"
    verb = "is" if reproduction.within == 1 else "are"
    return (
        f"{held} for which a tolerance is claimed {verb} within it. Outside: {_name_failing(reproduction)}."
    )


def _name_failing(reproduction: Reproduction) -> str:
    """The cells outside their tolerance, by table and column; the first few of many."""
    named = []
    for table in reproduction.findings.tables:
        for column in table.columns:
            failing = [cell.row for cell in table.cells if cell.column == column and cell.within is False]
            if failing:
                named.append(f"{printable(column)} in {_name_rows(failing, table.rows)}")
    more = [f"and {len(named) - MOST_NAMED} more columns"] if len(named) > MOST_NAMED + 1 else []
    return "; ".join([*named[: MOST_NAMED + (not more)], *more])


def count(many: int, what: str) -> str:
    return f"{many:,} {what}{'' if many == 1 else 's'}"


def stop_sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) or not text else f"{text}."


def _name_rows(covered: Sequence[str], rows: Sequence[str]) -> str:
    """Three or more that follow each other are named by their ends."""
    if len(covered) == 1:
        return f"row {printable(covered[0])}"
    first = rows.index(covered[0])
    if len(covered) > 2 and tuple(rows[first : first + len(covered)]) == tuple(covered):
        return f"rows {printable(covered[0])} to {printable(covered[-1])}"
    return f"rows {_list(covered)}"


def _list(names: Iterable[str]) -> str:
    shown = list(names)
    return join_names(shown, most=len(shown))
