"""Describe an initialization (norms before and after, the target) and the plan of a scheme."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from hessinit.present import document as doc
from hessinit.present import words as w
from hessinit.present.curvature import conclude, describe_cost, describe_layer, has_rates, rate_section
from hessinit.present.layer_details import detail_sections, layer_chart
from hessinit.results.curvature_report import CurvatureReport, LayerCurvature
from hessinit.results.initialization import Initialization, PlannedWeight, SchemePlan

SCALED = {
    "all": ", all weights multiplied by one gain",
    "last": ", the last weight scaled",
    "small-output": ", one weight made smaller and the others larger",
    "none": ", nothing scaled",
}


def describe_initialization(result: Initialization) -> doc.Document:
    """Return whether the target was met, the norms before and after, the rates, and the scheme's plan."""
    met = f"{'Met' if result.converged else 'Not met'}: {w.unstopped(result.reason)}."
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
    table, after = doc.Table(caption, initialization_columns(result), fixed=1), result.after
    sections = [doc.Section("Before and after", [before_and_after_chart(result), table], "layers")]
    if after is not None:
        marks = [] if result.lr is None else [doc.ReferenceLine(result.lr, "your rate", "blue")]
        if result.before is not None and has_rates(result.before):
            marks.append(doc.ReferenceLine(result.before.stable_learning_rate, "stability limit before"))
        sections += [rate_section(after, marks), *detail_sections(after)]
    if result.plan is not None and len(result.plan):
        plan = replace(_plan_table(result.plan), show_caption=True, page_only=True)
        sections.append(doc.Section("Scheme", [plan], "scheme"))
    scheme = "The given weights" if result.scheme == "keep" else f"Weights drawn by {result.scheme}"
    scaled, measured = SCALED.get(result.scaling or "", ""), w.count(len(result.measurements), "measurement")
    state = "" if result.applied else " Nothing was written, or this is a copy."
    texts = [doc.Paragraph(f"{scheme}{scaled}; {measured}{w.tell_time(result.seconds)}.{state}", "small")]
    if after is not None:
        texts.append(doc.Paragraph(describe_cost(after), "small", page_only=True))
    settings = ("scheme", "rule", "scaling", "target", "tolerance", "lr", "kappa", "seed")
    facts = doc.Facts("Settings", w.write_pairs({name: getattr(result, name) for name in settings}))
    procedure: list[doc.Block] = [*texts, *w.note_paragraphs(result.notes), facts]
    return [*sections, doc.Section("Procedure", procedure, "procedure")]


def _key_numbers(result: Initialization) -> list[doc.KeyNumber]:
    numbers = {
        "‖H‖ before": "not finite" if result.before is None else w.format_number(result.before.network.norm),
        "‖H‖ after": "not measured" if result.after is None else w.format_number(result.after.network.norm),
        "Target": w.format_number(result.target),
    }
    if result.lr is not None:
        numbers["Learning rate"] = w.format_number(result.lr)
    return [doc.KeyNumber(label, text) for label, text in numbers.items()]


def describe_target(result: Initialization) -> str:
    """Return the target norm and where it comes from."""
    target = w.format_number(result.target)
    goal = f"Target: {'every layer' if result.rule == 'layers' else 'the network'}'s ‖H‖"
    if result.lr is None:
        return f"{goal} = {target}."
    rate = w.format_number(result.lr)
    if result.kappa is None:
        return f"No target at a learning rate of {rate}."
    if abs(result.target * result.lr / result.kappa - 1) > 1e-6:
        longer = w.format_number(result.kappa / (result.target * result.lr))
        return f"{goal} = κ/({longer}·lr) = {target}; momentum makes steps {longer} times as long."
    return f"{goal} = κ/lr = {w.format_number(result.kappa)}/{rate} = {target}."


def _names(result: Initialization) -> list[str]:
    """Return the layers in the order they run, as far as that is known."""
    known = [name for report in (result.after, result.before) if report is not None for name in report.names]
    return list(dict.fromkeys([*known, *result.scales]))


def _row(report: CurvatureReport | None, name: str) -> LayerCurvature | None:
    if report is None or name == "network":
        return None if report is None else report.network
    return next((row for row in report if name in (row.name, *row.aliases)), None)


def initialization_columns(result: Initialization) -> list[doc.Column]:
    rows = [*_names(result), "network"]

    def norms(report: CurvatureReport | None) -> list[str]:
        found = [_row(report, name) for name in rows]
        texts = ["" if row is None else w.format_estimate(row.estimate) for row in found]
        return texts if report is not None else [*texts[:-1], "not finite"]

    factors = [result.scales.get(name) for name in rows[:-1]]
    scales = ["" if factor is None else f"× {w.format_number(factor)}" for factor in factors]
    return [
        w.name_column("layer", rows),
        doc.Column("scale", [*scales, ""], 8),
        doc.Column("‖H‖ before", norms(result.before), 8),
        doc.Column("after", norms(result.after), 9),
    ]


def before_and_after_chart(result: Initialization) -> doc.LineChart:
    """Return every layer's norm before and after, the target's band, and the networks' norms as lines."""
    reports = (("before", result.before, "blue"), ("after", result.after, "vermilion"))
    names = [one for one in _names(result) if any(_row(report, one) is not None for _, report, _ in reports)]
    shown = names or ["network"]  # a report of the network alone has but this point
    series, rules = [], []
    for label, report, color in reports:
        if report is not None:
            rows = [_row(report, name) for name in shown]
            norms = [None if row is None else row.norm for row in rows]
            details = ["" if row is None else describe_layer(row) for row in rows]
            series.append(doc.Series(label, norms, None, color, hollow=label == "before", details=details))
            line = f"network {label} {w.format_number(report.network.norm)}"
            rules.append(doc.ReferenceLine(report.network.norm, line, color))
    told = f"{'; '.join(rule.label for rule in rules)}. {describe_target(result)} The table has every number."
    lines = {"bands": _target_band(result), "rules": rules if names else []}
    return layer_chart("norms", "‖H‖ before and after", told, series, shown, **lines)


def _target_band(result: Initialization) -> list[doc.Band]:
    if not 0 < result.target < math.inf:
        return []
    whose = "each layer" if result.rule == "layers" else "the network"
    low, high = result.target * (1 - result.tolerance), result.target * (1 + result.tolerance)
    label = f"target for {whose}: {w.format_number(result.target)} ± {w.format_percent(result.tolerance)}"
    return [doc.Band(max(low, result.target / 100), high, label)]


def describe_plan(plan: SchemePlan) -> doc.Document:
    drawn = f", {plan.distribution}" if plan.distribution else ""
    written = sum(not row.unchanged for row in plan)
    rest = f"; {len(plan) - written} unchanged" if written < len(plan) else ""
    verdict = f"{plan.scheme}{drawn}: {w.count(written, 'weight')}{rest}."
    section = doc.Section("Weights", [_plan_table(plan), *w.note_paragraphs(plan.notes)], "weights")
    return doc.Document(title="Scheme", verdict=[verdict], sections=[section])


def _plan_table(plan: SchemePlan) -> doc.Table:
    def texts(write: Callable[[PlannedWeight], str]) -> list[str]:
        return ["" if row.unchanged else write(row) for row in plan]

    def factors(heading: str, read: Callable[[PlannedWeight], float], importance: int) -> list[doc.Column]:
        cells = texts(lambda row: f"× {w.format_number(read(row))}")
        return [doc.Column(heading, cells, importance)] if any(read(row) != 1 for row in plan) else []

    columns = [
        w.name_column("layer", w.name_rows(plan)),
        w.name_column("weight", [str(row.shape) for row in plan], 4),
        w.name_column("fans", texts(_write_fans), 8),
        w.name_column("upstream", texts(lambda row: row.upstream), 5),
    ]
    if plan.scheme in ("backward", "compromise"):
        columns.append(w.name_column("downstream", texts(lambda row: row.downstream), 5))
    columns.append(doc.Column("gain", texts(lambda row: w.format_number(row.gain)), 8))
    columns += factors("dropout", lambda row: row.dropout_factor, 8)
    columns += factors("correction", lambda row: row.variance_correction, 7)
    columns.append(doc.Column("std", texts(lambda row: w.format_range(row.std, " … ") or "from data"), 9))
    remarks = list(map(_remark, plan))
    columns += [w.name_column("remark", remarks, 7, wraps=True)] if any(remarks) else []
    return doc.Table(f"Weights drawn by {plan.scheme}.", columns)


def _write_fans(row: PlannedWeight) -> str:
    """Write one pair of numbers, or how many blocks there are of it: `64 → 3 × 64`."""
    inputs, outputs = (w.format_range(fans, " … ", 6) for fans in (row.fan_in, row.fan_out))
    return f"{inputs} → {outputs}" if len(row.fan_out) == 1 else f"{inputs} → {len(row.fan_out)} × {outputs}"


def _remark(row: PlannedWeight) -> str:
    remarks = ["last of a residual branch"] * row.closes_residual + ["normalized next"] * row.norm_follows
    return row.unchanged or ", ".join(remarks)
