"""Reproductions in a notebook and as a page. `python -m hessinit.present.reproduction_html` prints a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hessinit.present.html import templates
from hessinit.present.page.reproduction import record_pairs, write_pairs
from hessinit.present.page.reproduction_tables import QUESTION
from hessinit.present.reproduction_cells import WITHIN, column_texts
from hessinit.present.reproduction_sentences import (
    conclude_claims,
    describe_claims,
    describe_counts,
    describe_setting,
    explain_numbers,
)
from hessinit.present.words import printable
from hessinit.results.reproduction import Reproduction, Table

# How the verdict looks and is read aloud: shape and colour differ.
MARKS = {WITHIN[True]: ("✓", "yes"), WITHIN[False]: ("✗", "no")}


def render_reproduction_fragment(reproduction: Reproduction) -> str:
    """Write the tables and what was found as a piece of HTML, for a notebook cell; names are escaped."""
    return (
        templates()
        .get_template("reproduction_fragment.html.j2")
        .render(
            title=printable(reproduction.title),
            setting=describe_setting(reproduction),
            tables=[_describe_table(table) for table in reproduction.findings.tables],
            sentences=[printable(sentence) for sentence in reproduction.findings.sentences],
            conclusion=conclude_claims(reproduction),
            configuration=write_pairs(reproduction.configuration),
            record=write_pairs(record_pairs(reproduction)),
            explanation=explain_numbers([reproduction], QUESTION),
            marks=MARKS,
            question=QUESTION,
        )
    )


def render_reproductions_page(reproductions: Sequence[Reproduction], unreadable: Sequence[str] = ()) -> str:
    """Write one page that loads nothing: a summary, then each experiment; `unreadable` is named in it."""
    from hessinit.present.page.render import render_page
    from hessinit.present.page.reproduction import reproductions_page

    return render_page(reproductions_page(reproductions, unreadable))


def _describe_table(table: Table) -> dict[str, Any]:
    columns = column_texts(table)
    below = [describe_counts(table), describe_claims(table), printable(table.note)]
    return {
        "title": printable(table.title),
        "corner": printable(table.corner),
        "rows": [printable(row) for row in table.rows],
        "columns": columns,
        "compares": any(column.has_paper or column.has_claim for column in columns),
        "below": " ".join(part for part in below if part),
    }


if __name__ == "__main__":
    import sys

    from hessinit.present.reproduction_example import example_reproduction

    sys.stdout.write(render_reproductions_page([example_reproduction()]))
