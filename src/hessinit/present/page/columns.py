"""The tables of the terminal as tables of a page: the same columns and cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hessinit.present.grid import Column
from hessinit.present.page.content import Table, TableColumn
from hessinit.present.page.tables import DOTS


def make_table(
    columns: Sequence[Column],
    caption: str,
    *,
    fixed: int = 0,
    keys: Mapping[str, Sequence[float | str]] | None = None,
    show_caption: bool = True,
) -> Table:
    """Build a table from columns; `keys` by heading is what to sort by where the text would not do."""
    return Table(
        caption=caption,
        columns=[
            TableColumn(
                heading=column.heading,
                cells=column.cells,
                is_number=column.is_number,
                keys=(keys or {}).get(column.heading),
                marks=column.cells if set(column.cells) <= {*DOTS, ""} and any(column.cells) else None,
            )
            for column in columns
        ],
        fixed=fixed,
        show_caption=show_caption,
    )
