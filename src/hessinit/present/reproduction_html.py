"""Reproductions in a notebook and as a page. `python -m hessinit.present.reproduction_html` prints a page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from hessinit.present.html import templates
from hessinit.present.inline_svg import draw_inline
from hessinit.present.numbers import format_number, printable
from hessinit.present.reproduction_cells import WITHIN, column_texts
from hessinit.present.reproduction_sentences import (
    conclude_claims,
    count,
    describe_claims,
    describe_counts,
    explain_numbers,
    stop_sentence,
)
from hessinit.present.reproduction_summary import anchors, in_order, summarize
from hessinit.report.json_form import Plain
from hessinit.report.reproduction import Reproduction, Table

QUESTION = "within?"
# How the verdict looks and is read aloud: shape and colour differ.
MARKS = {WITHIN[True]: ("✓", "yes"), WITHIN[False]: ("✗", "no")}


def render_reproduction_fragment(reproduction: Reproduction) -> str:
    """Write the tables and what was found as a piece of HTML, for a notebook cell; names are escaped."""
    section = _describe(reproduction, "reproduction", pictures=[])
    explanation = explain_numbers([reproduction], QUESTION)
    return _render("reproduction_fragment.html.j2", section=section, explanation=explanation)


def render_reproductions_page(reproductions: Sequence[Reproduction]) -> str:
    """Write one page that loads nothing, light or dark: a summary, then each experiment with its pictures."""
    if not reproductions:
        raise ValueError("reproductions is empty; give at least one to show.")
    ordered = in_order(reproductions)
    sections = [
        _describe(reproduction, anchor, _draw_pictures(reproduction, anchor))
        for reproduction, anchor in zip(ordered, anchors(ordered), strict=True)
    ]
    title = sections[0]["title"] if len(sections) == 1 else "The paper, reproduced"
    return _render(
        "reproduction_page.html.j2",
        title=title,
        summary=summarize(ordered),
        explanation=explain_numbers(ordered, QUESTION),
        sections=sections,
    )


def _render(template: str, **values: Any) -> str:
    return templates().get_template(template).render(marks=MARKS, question=QUESTION, **values)


def _draw_pictures(reproduction: Reproduction, anchor: str) -> list[tuple[str, Markup]]:
    from hessinit.present.reproduction_figure import draw_figure_apart

    return [
        (printable(figure.title), draw_inline(draw_figure_apart(figure, titled=False), f"{anchor}-{place}"))
        for place, figure in enumerate(reproduction.findings.figures)
    ]


def _describe(reproduction: Reproduction, anchor: str, pictures: list[tuple[str, Markup]]) -> dict[str, Any]:
    """All that a template shows of one experiment, as text."""
    claimed = len(reproduction.judged)
    return {
        "anchor": anchor,
        "title": printable(reproduction.title),
        "data": printable(reproduction.data),
        "reading": printable(reproduction.reading),
        "about": stop_sentence(printable(reproduction.about_reading)),
        "seeds": len(reproduction.seeds),
        "claimed": claimed,
        "within": reproduction.within,
        "tables": [_describe_table(table) for table in reproduction.findings.tables],
        "pictures": pictures,
        "sentences": [printable(sentence) for sentence in reproduction.findings.sentences],
        "conclusion": conclude_claims(reproduction),
        "configuration": _pairs(reproduction.configuration),
        "record": _pairs(_record(reproduction)),
    }


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


def _record(reproduction: Reproduction) -> dict[str, Plain]:
    seeds = reproduction.seeds
    is_range = len(seeds) > 2 and seeds == tuple(range(seeds[0], seeds[0] + len(seeds)))
    return {
        "data": reproduction.source,
        "seeds": f"{seeds[0]} to {seeds[-1]}" if is_range else ", ".join(map(str, seeds)),
        "work": f"{count(len(reproduction.results), 'job')}, "
        f"{format_number(reproduction.seconds)} s on one core each",
        "revision": reproduction.revision,
        **reproduction.versions,
        **reproduction.hardware,
    }


def _pairs(values: Mapping[str, Plain]) -> list[tuple[str, str]]:
    return [
        (
            printable(name.replace("_", " ")),
            printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)),
        )
        for name, value in values.items()
    ]


if __name__ == "__main__":
    import sys

    from hessinit.present.reproduction_example import example_reproduction

    sys.stdout.write(render_reproductions_page([example_reproduction()]))
