"""What the page of an initialization holds: norms before and after, the rate it was made for, the search."""

from __future__ import annotations

import math
from dataclasses import replace

from hessinit.present.initialization_sentences import (
    conclude_initialization,
    describe_target,
    describe_work,
)
from hessinit.present.initialization_table import initialization_columns, names_in_order, row_of
from hessinit.present.page.columns import make_table
from hessinit.present.page.content import (
    Band,
    Block,
    DepthChart,
    DepthSeries,
    Details,
    KeyNumber,
    LineChart,
    LineSeries,
    Page,
    RateMark,
    Rule,
    Section,
    Words,
)
from hessinit.present.page.curvature import describe_layer, describe_origin, has_rates, rate_section
from hessinit.present.page.diagnostics import diagnostics_section
from hessinit.present.page.products import products_section
from hessinit.present.page.spectra import spectrum_section
from hessinit.present.plan_table import plan_columns
from hessinit.present.sentences import conclude, describe_cost
from hessinit.present.words import format_number, format_ratio, printable
from hessinit.results.curvature_report import CurvatureReport
from hessinit.results.initialization import Initialization


def initialization_page(result: Initialization) -> Page:
    """Whether the target was met, what changed, and what the network is like now."""
    verdict = [conclude_initialization(result), describe_target(result)]
    if result.after is not None:
        verdict.append(conclude(result.after))
    return Page(
        title="Initialization report",
        verdict=verdict,
        numbers=_key_numbers(result),
        tone="good" if result.converged else "fair" if result.after is not None else "bad",
        sections=initialization_sections(result),
        footer="" if result.after is None else describe_origin(result.after),
    )


def initialization_sections(result: Initialization) -> list[Section]:
    """Before and after, the rate, the search, and what else was measured of the new weights."""
    sections = [_before_and_after(result)]
    if result.after is not None:
        sections.append(_rate_section(result, result.after))
    if len(result.measurements) > 1:
        sections.append(_search_section(result))
    if result.after is not None:
        of_after = (
            spectrum_section(result.after),
            products_section(result.after),
            diagnostics_section(result.after),
        )
        sections += [section for section in of_after if section is not None]
    if result.plan is not None and len(result.plan):
        table = make_table(plan_columns(result.plan), f"What {result.plan.scheme} gives each weight.")
        sections.append(Section(heading="The start", anchor="start", blocks=[table]))
    return [*sections, _working_section(result)]


def _before_and_after(result: Initialization) -> Section:
    names = names_in_order(result)
    columns = initialization_columns(result, names)
    table = make_table(
        columns,
        "Scale and norm of every layer before and after, and of the network.",
        fixed=1,
        show_caption=False,
    )
    return Section(
        heading="Before and after", anchor="layers", blocks=[before_and_after_chart(result), table]
    )


def before_and_after_chart(result: Initialization) -> DepthChart:
    """Every layer's norm before and after over depth, the target's band, and the networks' norms as lines."""
    reports = (("before", result.before, "vermilion"), ("after", result.after, "blue"))
    names = [
        name
        for name in names_in_order(result)
        if any(row_of(report, name) is not None for _, report, _ in reports)
    ]
    alone = not names  # reports that hold the network alone: it is the one point there is
    shown = names or ["network"]
    series = []
    for label, report, color in reports:
        rows = [row_of(report, name) for name in shown]
        if any(row is not None for row in rows):
            series.append(
                DepthSeries(
                    name=label,
                    values=[None if row is None else row.norm for row in rows],
                    color=color,
                    hollow=label == "before",
                    details=["" if row is None else describe_layer(row) for row in rows],
                )
            )
    rules = [
        Rule(
            value=report.network.norm,
            label=f"network {label} {format_number(report.network.norm)}",
            color=color,
        )
        for label, report, color in reports
        if report is not None and not alone
    ]
    return DepthChart(
        caption="‖H‖ before and after",
        description=" ".join(
            (_compare_networks(result), describe_target(result), "The table below has every number.")
        ),
        layers=shown,
        series=series,
        y_label="curvature ‖H‖",
        bands=_target_band(result),
        rules=rules,
    )


def _compare_networks(result: Initialization) -> str:
    before = "not finite" if result.before is None else format_number(result.before.network.norm)
    after = "not measured" if result.after is None else format_number(result.after.network.norm)
    return f"The network's ‖H‖ was {before} and is {after}."


def _target_band(result: Initialization) -> list[Band]:
    if not 0 < result.target < math.inf:
        return []
    whose = "each layer" if result.rule == "layers" else "the network"
    share = format_number(100 * result.tolerance)
    low, high = result.target * (1 - result.tolerance), result.target * (1 + result.tolerance)
    label = f"target for {whose}: {format_number(result.target)} ± {share} %"
    return [Band(low=max(low, result.target / 100), high=high, label=label)]


def _key_numbers(result: Initialization) -> list[KeyNumber]:
    numbers = [
        KeyNumber(label="‖H‖ before", text=_network(result.before) or "not finite"),
        KeyNumber(label="‖H‖ after", text=_network(result.after) or "–"),
        KeyNumber(label="Target", text=format_number(result.target)),
    ]
    if result.lr is not None:
        note = ""
        if result.after is not None and has_rates(result.after):
            note = f"lr·‖H‖ = {format_ratio(result.lr * result.after.network.norm)}"
        numbers.append(KeyNumber(label="Learning rate", text=format_number(result.lr), note=note))
    return numbers


def _network(report: CurvatureReport | None) -> str:
    return "" if report is None else format_number(report.network.norm)


def _rate_section(result: Initialization, after: CurvatureReport) -> Section:
    section = rate_section(after, _rate_marks(result))
    if result.lr is None or not has_rates(after) or result.lr <= after.stable_learning_rate:
        return section
    words = Words(
        text=(
            f"The rate of {format_number(result.lr)} is beyond 2/‖H‖ here. On a quadratic, gradient descent "
            "would be unstable; plain networks may begin there, as their curvature falls in the first steps."
        ),
        tone="note",
    )
    return replace(section, blocks=[*section.blocks, words])


def _rate_marks(result: Initialization) -> tuple[RateMark, ...]:
    marks = []
    if result.lr is not None:
        marks.append(RateMark(value=result.lr, label="your rate", color="blue"))
    if result.before is not None and has_rates(result.before):
        limit = result.before.stable_learning_rate
        marks.append(RateMark(value=limit, label="stable before", color="grey"))
    return tuple(marks)


def _search_section(result: Initialization) -> Section:
    looks = result.measurements
    what = {look.layer for look in looks}
    whose = "the network's" if what == {"network"} else "the farthest layer's"
    details = [
        f"loss {format_number(look.loss)}"
        + ("" if look.t is None else f", gain × {format_number(math.exp(look.t))}")
        + ("" if what == {"network"} else f", {printable(look.layer)}")
        for look in looks
    ]
    chart = LineChart(
        caption=f"How the target was found: {whose} ‖H‖ at each measurement",
        description=(
            f"{len(looks)} measurements, from ‖H‖ = {format_number(looks[0].norm)} to "
            f"{format_number(looks[-1].norm)}. {describe_target(result)}"
        ),
        series=[
            LineSeries(
                name="‖H‖",
                x=list(range(1, len(looks) + 1)),
                y=[look.norm for look in looks],
                details=details,
            )
        ],
        x_label="measurement",
        y_label="curvature ‖H‖",
        log_y=True,
        bands=_target_band(result),
    )
    return Section(heading="The search", anchor="search", blocks=[chart])


def _working_section(result: Initialization) -> Section:
    blocks: list[Block] = [Words(text=describe_work(result), tone="small")]
    if result.after is not None:
        blocks.append(Words(text=describe_cost(result.after), tone="small"))
    blocks += [Words(text=f"Note: {note}", tone="note") for note in result.notes]
    pairs = [
        ("scheme", result.scheme),
        ("rule", result.rule),
        ("moved", result.scaling or "–"),
        ("target", format_number(result.target)),
        ("tolerance", format_number(result.tolerance)),
        ("learning rate", "–" if result.lr is None else format_number(result.lr)),
        ("κ", "–" if result.kappa is None else format_number(result.kappa)),
        ("seed", str(result.seed)),
    ]
    return Section(
        heading="How it was done",
        anchor="done",
        blocks=[*blocks, Details(summary="Settings", pairs=pairs)],
    )
