"""Describe an initialization (norms before and after, the target, the search) and the plan of a scheme."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from hessinit.present import document as doc
from hessinit.present.curvature import conclude, describe_cost, describe_layer, has_rates, rate_section
from hessinit.present.layer_details import detail_sections
from hessinit.present.words import count, format_estimate, format_number, format_ratio, unstopped, write_pairs
from hessinit.results.curvature_report import CurvatureReport, LayerCurvature
from hessinit.results.initialization import Initialization, PlannedWeight, SchemePlan

SCALED = {
    "all": ", all weights multiplied by one gain",
    "last": ", the last weight scaled",
    "small-output": ", one weight made smaller and the others larger",
    "none": ", nothing scaled",
}


def describe_initialization(result: Initialization) -> doc.Document:
    """Return the document of an initialization."""
    met = f"{'Met' if result.converged else 'Not met'}: {unstopped(result.reason)}."
    after = [] if result.after is None else [conclude(result.after)]
    return doc.Document(
        title="Initialization report",
        verdict=[met, describe_target(result), *after],
        numbers=_key_numbers(result),
        tone="good" if result.converged else "fair" if after else "bad",
        sections=_sections(result),
    )


def _sections(result: Initialization) -> list[doc.Section]:
    caption = "Scale and norm of every layer before and after, and of the network."
    table = doc.Table(caption, initialization_columns(result), fixed=1, show_caption=False)
    sections = [doc.Section("Before and after", [before_and_after_chart(result), table], "layers")]
    if result.after is not None:
        sections.append(_rate_section(result, result.after))
    if len(result.measurements) > 1:
        sections.append(doc.Section("Search", [_search_chart(result)], "search"))
    if result.after is not None:
        sections += detail_sections(result.after)
    if result.plan is not None and len(result.plan):
        plan = doc.Table(f"Weights drawn by {result.plan.scheme}.", plan_columns(result.plan), page_only=True)
        sections.append(doc.Section("Scheme", [plan], "scheme"))
    texts = [doc.Text(_describe_work(result), "small")]
    if result.after is not None:
        texts.append(doc.Text(describe_cost(result.after), "small", page_only=True))
    texts += [doc.Text(f"Note: {note}", "note") for note in result.notes]
    settings = ("scheme", "rule", "scaling", "target", "tolerance", "lr", "kappa", "seed")
    facts = doc.Facts("Settings", write_pairs({name: getattr(result, name) for name in settings}))
    return [*sections, doc.Section("Procedure", [*texts, facts], "procedure")]


def _network_norms(result: Initialization) -> tuple[str, str]:
    before = "not finite" if result.before is None else format_number(result.before.network.norm)
    return before, "not measured" if result.after is None else format_number(result.after.network.norm)


def _key_numbers(result: Initialization) -> list[doc.KeyNumber]:
    before, after = _network_norms(result)
    numbers = [doc.KeyNumber("‖H‖ before", before), doc.KeyNumber("‖H‖ after", after)]
    numbers.append(doc.KeyNumber("Target", format_number(result.target)))
    if result.lr is not None:
        note = ""
        if result.after is not None and has_rates(result.after):
            note = f"lr·‖H‖ = {format_ratio(result.lr * result.after.network.norm)}"
        numbers.append(doc.KeyNumber("Learning rate", format_number(result.lr), note))
    return numbers


def describe_target(result: Initialization) -> str:
    """Return the target norm and where it comes from."""
    what = "every layer's ‖H‖" if result.rule == "layers" else "the network's ‖H‖"
    target = format_number(result.target)
    if result.lr is None:
        return f"Target: {what} = {target}."
    rate = format_number(result.lr)
    if result.kappa is None:
        return f"No target at a learning rate of {rate}."
    kappa = format_number(result.kappa)
    if abs(result.target * result.lr / result.kappa - 1) > 1e-6:
        longer = format_number(result.kappa / (result.target * result.lr), 3)
        formula = f"κ/({longer}·lr) = {kappa}/({longer}·{rate})"
        return f"Target: {what} = {formula} = {target}; momentum makes steps {longer} times as long."
    return f"Target: {what} = κ/lr = {kappa}/{rate} = {target}."


def _describe_work(result: Initialization) -> str:
    spent = f" in {format_number(result.seconds, 2)} s" if result.seconds is not None else ""
    scheme = "The given weights" if result.scheme == "keep" else f"Weights drawn by {result.scheme}"
    state = "" if result.applied else " Nothing was written, or this is a copy."
    scaled, measured = SCALED.get(result.scaling or "", ""), count(len(result.measurements), "measurement")
    return f"{scheme}{scaled}; {measured}{spent}.{state}"


def _names(result: Initialization) -> list[str]:
    """The layers in the order they run, as far as that is known."""
    known = [name for report in (result.after, result.before) if report is not None for name in report.names]
    return list(dict.fromkeys([*known, *result.scales]))


def _row(report: CurvatureReport | None, name: str) -> LayerCurvature | None:
    if report is None or name == "network":
        return None if report is None else report.network
    return next((row for row in report if name in (row.name, *row.aliases)), None)


def initialization_columns(result: Initialization) -> list[doc.Column]:
    """Return scale, norm before and norm after of every layer, and of the network last."""
    rows = [*_names(result), "network"]

    def norms(report: CurvatureReport | None) -> list[str]:
        found = [_row(report, name) for name in rows]
        texts = ["" if row is None else format_estimate(row.estimate) for row in found]
        return texts if report is not None else [*texts[:-1], "not finite"]

    factors = [result.scales.get(name) for name in rows[:-1]]
    scales = ["" if factor is None else f"× {format_number(factor)}" for factor in factors]
    return [
        doc.Column("layer", rows, 9, is_number=False),
        doc.Column("scale", [*scales, ""], 8),
        doc.Column("‖H‖ before", norms(result.before), 8),
        doc.Column("after", norms(result.after), 9),
    ]


def before_and_after_chart(result: Initialization) -> doc.LineChart:
    """Return every layer's norm before and after, the target's band, and the networks' norms as lines."""
    reports = (("before", result.before, "vermilion"), ("after", result.after, "blue"))
    names = [one for one in _names(result) if any(_row(report, one) is not None for _, report, _ in reports)]
    shown = names or ["network"]  # a report of the network alone has but this point
    series, rules = [], []
    for label, report, color in reports:
        if report is None:
            continue
        rows = [_row(report, name) for name in shown]
        norms = [None if row is None else row.norm for row in rows]
        details = ["" if row is None else describe_layer(row) for row in rows]
        series.append(doc.Series(label, norms, None, color, hollow=label == "before", details=details))
        norm = report.network.norm
        rules.append(doc.Rule(norm, f"network {label} {format_number(norm)}", color))
    before, after = _network_norms(result)
    description = (
        f"The network's ‖H‖ was {before} and is {after}. {describe_target(result)} The table below has every "
        "number."
    )
    return doc.LineChart(
        "norms", "‖H‖ before and after", description, series, "curvature ‖H‖", layers=shown, log_y=True,
        bands=_target_band(result), rules=rules if names else [],
    )  # fmt: skip


def _target_band(result: Initialization) -> list[doc.Band]:
    if not 0 < result.target < math.inf:
        return []
    whose = "each layer" if result.rule == "layers" else "the network"
    low, high = result.target * (1 - result.tolerance), result.target * (1 + result.tolerance)
    percent = format_number(100 * result.tolerance)
    label = f"target for {whose}: {format_number(result.target)} ± {percent} %"
    return [doc.Band(max(low, result.target / 100), high, label)]


def _rate_section(result: Initialization, after: CurvatureReport) -> doc.Section:
    marks = [] if result.lr is None else [doc.Rule(result.lr, "your rate", "blue")]
    if result.before is not None and has_rates(result.before):
        marks.append(doc.Rule(result.before.stable_learning_rate, "stability limit before"))
    section = rate_section(after, marks)
    if result.lr is None or not has_rates(after) or result.lr <= after.stable_learning_rate:
        return section
    above = (
        f"lr = {format_number(result.lr)} is above 2/‖H‖. On a quadratic, gradient descent would be "
        "unstable; plain networks can be trained from there: their curvature falls in the first steps."
    )
    return replace(section, blocks=[*section.blocks, doc.Text(above, "note", page_only=True)])


def _search_chart(result: Initialization) -> doc.LineChart:
    found = result.measurements
    is_network = {one.layer for one in found} == {"network"}
    whose = "the network's ‖H‖" if is_network else "‖H‖ of the layer farthest from the target"
    details = [
        f"loss {format_number(one.loss)}"
        + ("" if one.t is None else f", gain × {format_number(math.exp(one.t))}")
        + ("" if is_network else f", {one.layer}")
        for one in found
    ]
    norms = [one.norm for one in found]
    series = doc.Series("‖H‖", norms, range(1, len(found) + 1), details=details)
    description = (
        f"{len(found)} measurements, from ‖H‖ = {format_number(norms[0])} to {format_number(norms[-1])}. "
        f"{describe_target(result)}"
    )
    return doc.LineChart(
        "search", f"Search: {whose} at each measurement", description, [series], "curvature ‖H‖",
        "measurement", log_y=True, bands=_target_band(result),
    )  # fmt: skip


def describe_plan(plan: SchemePlan) -> doc.Document:
    """Return the document of a scheme's plan."""
    drawn = f", {plan.distribution}" if plan.distribution else ""
    written = sum(not row.unchanged for row in plan)
    rest = f"; {len(plan) - written} unchanged" if written < len(plan) else ""
    verdict = f"{plan.scheme}{drawn}: {count(written, 'weight')}{rest}."
    table = doc.Table(f"Weights drawn by {plan.scheme}.", plan_columns(plan), show_caption=False)
    notes = [doc.Text(f"Note: {note}", "note") for note in plan.notes]
    section = doc.Section("Weights", [table, *notes], "weights")
    return doc.Document(title="Scheme", verdict=[verdict], sections=[section])


def plan_columns(plan: SchemePlan) -> list[doc.Column]:
    """Return the columns that say something about this plan, a row for each weight."""

    def texts(write: Callable[[PlannedWeight], str]) -> list[str]:
        return ["" if row.unchanged else write(row) for row in plan]

    def words(heading: str, cells: Sequence[str], importance: int, *, wraps: bool = False) -> doc.Column:
        return doc.Column(heading, cells, importance, is_number=False, wraps=wraps)

    def factors(heading: str, read: Callable[[PlannedWeight], float], importance: int) -> list[doc.Column]:
        cells = texts(lambda row: f"× {format_number(read(row))}")
        return [doc.Column(heading, cells, importance)] if any(read(row) != 1 for row in plan) else []

    columns = [
        words("layer", [" = ".join((row.name, *row.aliases)) for row in plan], 9),
        words("weight", [str(row.shape) for row in plan], 4),
        words("fans", texts(_write_fans), 8),
        words("upstream", texts(lambda row: row.upstream), 5),
    ]
    if plan.scheme in ("backward", "compromise"):
        columns.append(words("downstream", texts(lambda row: row.downstream), 5))
    columns.append(doc.Column("gain", texts(lambda row: format_number(row.gain)), 8))
    columns += factors("dropout", lambda row: row.dropout_factor, 8)
    columns += factors("correction", lambda row: row.variance_correction, 7)
    columns.append(doc.Column("std", texts(lambda row: _write_range(row.std) if row.std else "from data"), 9))
    remarks = [row.unchanged or _remark(row) for row in plan]
    return [*columns, words("remark", remarks, 7, wraps=True)] if any(remarks) else columns


def _write_fans(row: PlannedWeight) -> str:
    """One pair of numbers, or how many blocks there are of it: `64 → 3 × 64`."""
    inputs, outputs = _write_range(row.fan_in, _write_count), _write_range(row.fan_out, _write_count)
    return f"{inputs} → {outputs}" if len(row.fan_out) == 1 else f"{inputs} → {len(row.fan_out)} × {outputs}"


def _write_range(numbers: Sequence[float], write: Callable[[float], str] = format_number) -> str:
    low, high = write(min(numbers)), write(max(numbers))
    return low if low == high else f"{low} … {high}"


def _write_count(number: float) -> str:
    return str(int(number)) if number.is_integer() else format_number(number)


def _remark(row: PlannedWeight) -> str:
    remarks = ["last of a residual branch"] * row.closes_residual + ["normalized next"] * row.norm_follows
    return ", ".join(remarks)
