"""A reproduced table for a page: paper, ours and whether it is within, for every column."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hessinit.present.page.content import Block, Table, TableColumn, Words
from hessinit.present.reproduction_cells import WITHIN, CellText, ColumnText, column_texts
from hessinit.present.reproduction_sentences import describe_claims, describe_counts
from hessinit.present.words import printable
from hessinit.results.reproduction import Cell
from hessinit.results.reproduction import Table as Reproduced

QUESTION = "within?"
# Shape, colour and word differ: none of them alone says it.
VERDICTS = {WITHIN[True]: ("✓ yes", "yes"), WITHIN[False]: ("✗ no", "no"), WITHIN[None]: ("", "")}


def table_blocks(table: Reproduced) -> list[Block]:
    """The table, and below it over how many seeds it is and what is claimed."""
    rows = [printable(row) for row in table.rows]
    columns = [
        TableColumn(heading=printable(table.corner), cells=rows, is_number=False, keys=_row_keys(rows))
    ]
    texts = column_texts(table)
    groups = any(text.has_paper or text.has_claim for text in texts)
    for name, text in zip(table.columns, texts, strict=True):
        columns += _columns(text, [table.cell(row, name) for row in table.rows], groups)
    below = [describe_counts(table), describe_claims(table), printable(table.note)]
    words = " ".join(part for part in below if part)
    return [
        Table(caption=printable(table.title), columns=columns),
        *([Words(text=words, tone="small")] if words else []),
    ]


def _columns(text: ColumnText, cells: Sequence[Cell | None], groups: bool) -> list[TableColumn]:
    verdicts = [VERDICTS[cell.within] for cell in text.cells]
    outside = ["no" if mark == "no" else "" for _, mark in verdicts]
    found = []
    group = text.name if groups else ""
    if text.has_paper:
        found.append(
            TableColumn(
                heading="paper",
                group=group,
                cells=[cell.paper for cell in text.cells],
                keys=[math.nan if cell is None or cell.paper is None else cell.paper for cell in cells],
            )
        )
    found.append(
        TableColumn(
            heading="ours" if groups else text.name,
            group=group,
            cells=[_write(cell) for cell in text.cells],
            keys=[math.nan if cell is None else cell.ours for cell in cells],
            marks=outside,
        )
    )
    if text.has_claim:
        found.append(
            TableColumn(
                heading=QUESTION,
                group=group,
                cells=[word for word, _ in verdicts],
                is_number=False,
                marks=[mark for _, mark in verdicts],
            )
        )
    return found


def _row_keys(rows: Sequence[str]) -> list[float | str]:
    """By the number where every name is one (0.5 before 1.000), else as they stand: their order says more."""
    try:
        return [float(row) for row in rows]
    except ValueError:
        return [float(place) for place in range(len(rows))]


def _write(cell: CellText) -> str:
    error = f" ± {cell.error}" if cell.error else ""
    return f"{cell.ours}{error}{f' {cell.unit}' if cell.unit else ''}"
