"""What a result of your own is built from: the result classes, the document model, numbers as text.

A subclass of `Result` is a frozen dataclass of plain values with a `KIND`; its `describe()` returns
the `Document` that print, plots, notebooks and pages show.
"""

from __future__ import annotations

import os

from hessinit.present import to_page
from hessinit.present.document import (
    Block,
    Column,
    Document,
    Facts,
    LineChart,
    Numbers,
    Paragraph,
    Section,
    Series,
    Table,
)
from hessinit.present.words import (
    call_layer,
    count,
    crosses,
    format_mean,
    format_number,
    format_range,
    format_ratio,
    format_times,
    join_names,
    looks,
    name_column,
    name_rows,
    note_paragraphs,
    tell_batches,
    tell_time,
    title,
    write_pairs,
)
from hessinit.results.curvature_report import Spread
from hessinit.results.result import ByName, NamedLayer, Result, write_text

__all__ = [
    "Block",
    "ByName",
    "Column",
    "Document",
    "Facts",
    "LineChart",
    "NamedLayer",
    "Numbers",
    "Paragraph",
    "Result",
    "Section",
    "Series",
    "Spread",
    "Table",
    "call_layer",
    "count",
    "crosses",
    "format_mean",
    "format_number",
    "format_range",
    "format_ratio",
    "format_times",
    "join_names",
    "looks",
    "name_column",
    "name_rows",
    "note_paragraphs",
    "tell_batches",
    "tell_time",
    "title",
    "write_page",
    "write_pairs",
]


def write_page(document: Document, path: str | os.PathLike[str]) -> None:
    """Write a document as one web page that loads nothing else."""
    write_text(path, to_page(document))
