"""The page of reproductions: how much of the paper holds, then each experiment beside the printed numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from hessinit.present.page.content import Block, Details, Page, Section, Table, TableColumn, Words
from hessinit.present.page.reproduction_charts import figure_chart
from hessinit.present.page.reproduction_tables import QUESTION, table_blocks
from hessinit.present.reproduction_sentences import conclude_claims, count, describe_setting, explain_numbers
from hessinit.present.reproduction_summary import anchors, in_order, summarize
from hessinit.present.words import format_number, join_names, printable
from hessinit.results.reproduction import Reproduction
from hessinit.results.result import Plain


def reproductions_page(reproductions: Sequence[Reproduction], unreadable: Sequence[str] = ()) -> Page:
    """All that the page shows, as plain data; `unreadable` names records that could not be read."""
    if not reproductions:
        raise ValueError("reproductions is empty; give at least one to show.")
    ordered = in_order(reproductions)
    several = len(ordered) > 1
    places = anchors(ordered)
    return Page(
        title="The paper, reproduced" if several else printable(ordered[0].title),
        verdict=[summarize(ordered), *_name_unreadable(unreadable)],
        sections=[
            *([_overview(ordered, places)] if several else []),
            *(_section(each, place, several) for each, place in zip(ordered, places, strict=True)),
        ],
        footer="" if several else f"Made by revision {printable(ordered[0].revision)}.",
    )


def _name_unreadable(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    verb, what = ("is", "a whole record") if len(names) == 1 else ("are", "whole records")
    return [
        f"{join_names(list(names))} {verb} left out: not {what} of this version. Run the experiment again."
    ]


def _overview(ordered: Sequence[Reproduction], places: Sequence[str]) -> Section:
    titles = [printable(each.title).partition(": ") for each in ordered]
    shares = [each.within / len(each.judged) if each.judged else float("nan") for each in ordered]
    table = Table(
        caption="All experiments",
        show_caption=False,
        columns=[
            TableColumn(
                heading="experiment",
                cells=[name for name, _, _ in titles],
                is_number=False,
                keys=[float(place) for place in range(len(ordered))],
                links=[f"#{place}" for place in places],
            ),
            TableColumn(heading="about", cells=[about for _, _, about in titles], is_number=False),
            TableColumn(heading="data", cells=[printable(each.data) for each in ordered], is_number=False),
            TableColumn(
                heading="variant", cells=[printable(each.variant) for each in ordered], is_number=False
            ),
            TableColumn(heading="seeds", cells=[str(len(each.seeds)) for each in ordered]),
            TableColumn(
                heading="within / claimed",
                cells=[f"{each.within} / {len(each.judged)}" if each.judged else "–" for each in ordered],
                keys=shares,
            ),
        ],
    )
    explanation = Words(text=explain_numbers(ordered, QUESTION), tone="small")
    return Section(heading="All experiments", blocks=[table, explanation])


def _section(reproduction: Reproduction, anchor: str, several: bool) -> Section:
    findings = reproduction.findings
    found: list[Block] = [Words(text=printable(sentence)) for sentence in findings.sentences]
    explanation = "" if several else explain_numbers([reproduction], QUESTION)
    return Section(
        heading=printable(reproduction.title) if several else "The experiment",
        subtitle=f"{printable(reproduction.data)}, {printable(reproduction.variant)}" if several else "",
        anchor=anchor,
        blocks=[
            Words(text=describe_setting(reproduction)),
            *(block for table in findings.tables for block in table_blocks(table)),
            *([Words(text=explanation, tone="small")] if explanation else []),
            *(figure_chart(figure) for figure in findings.figures),
            *([Words(text="What was found", tone="heading"), *found] if found else []),
            Words(text=conclude_claims(reproduction), tone="strong"),
            *_details("Configuration", reproduction.configuration),
            *_details("Data, seeds, versions, hardware", record_pairs(reproduction)),
        ],
    )


def write_pairs(values: Mapping[str, Plain]) -> list[tuple[str, str]]:
    """Names and values as text."""
    return [
        (
            printable(name.replace("_", " ")),
            printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)),
        )
        for name, value in values.items()
    ]


def record_pairs(reproduction: Reproduction) -> dict[str, Plain]:
    """Where the numbers come from."""
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


def _details(summary: str, values: Mapping[str, Plain]) -> list[Details]:
    return [Details(summary=summary, pairs=write_pairs(values))] if values else []
