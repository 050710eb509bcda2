"""Describe an initialization (norms before and after, the target, the race) and the plan of a scheme."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from hessinit.present import document as doc
from hessinit.present import words as w
from hessinit.present.advice import describe_trial
from hessinit.present.comparison import HEADROOM, loss_charts
from hessinit.present.curvature import (
    conclude,
    describe_cost,
    describe_layer,
    has_rates,
    rate_section,
)
from hessinit.present.layer_details import detail_sections, layer_chart
from hessinit.results.curvature_report import CurvatureReport, LayerCurvature
from hessinit.results.initialization import (
    LEARNED,
    Initialization,
    PlannedWeight,
    SchemePlan,
    Symmetry,
    Trial,
)

SCALED = {
    "all": ", all weights multiplied by one gain",
    "last": ", the last weight scaled",
    "small-output": ", one weight made smaller and the others larger",
    "symmetries": ", scaled along symmetries",
    "none": ", nothing scaled",
}


def describe_initialization(result: Initialization) -> doc.Document:
    """Return the verdict (the rate, the race or the target), tables and charts, and the scheme's plan."""
    reason = f"{w.unstopped(result.reason)}."
    raced = bool(result.trials)
    said = "" if raced or result.target is None else "Met: "
    if not result.converged:
        said = "Not sharpened: " if result.flat_enough else "No winner: " if raced else "Not met: "
    reason = reason if said or raced else reason[:1].upper() + reason[1:]
    target = [] if result.target is None else [describe_target(result)]
    is_other = (
        raced and result.lr is not None and {trial.lr for trial in result.trials} != {result.lr}
    )
    survival = [] if result.survival is None else [describe_trial(result.survival, result.lr)]
    answer = (
        ""
        if not (result.chose_lr or is_other)
        else f"learning rate: {w.format_number(result.lr or 0.0)}"
    )
    measured = result.after or result.before
    after = (
        []
        if result.after is None
        else [conclude(result.after, result.optimizer), *_reconcile(result)]
    )
    was_fitted = bool(after or result.symmetries) and not raced
    return doc.Document(
        title=w.title("Initialization report", measured.versions if measured else None),
        answer=answer if result.learned else reason,
        verdict=[*([f"{said}{reason}"] if result.learned else []), *target, *survival, *after],
        tone="good" if result.converged or result.flat_enough else "fair" if was_fitted else "bad",
        numbers=_key_numbers(result),
        sections=_sections(result),
    )


def _sections(result: Initialization) -> list[doc.Section]:
    after = result.after
    sections = []
    if result.trials:
        sections.append(
            doc.Section("Race", [*_race_chart(result), _trial_table(result.trials)], "race")
        )
    if result.symmetries:
        sections.append(
            doc.Section("Symmetries", _describe_symmetries(result.symmetries), "symmetries")
        )
    if columns := initialization_columns(result):
        caption = "Scale and norm of every layer before and after, and of the network."
        charts = [] if result.before is after is None else [before_and_after_chart(result)]
        heading = "Before and after" if charts else "Scales"
        table = doc.Table(caption, columns, fixed=bool(charts), page_only=not charts)
        sections.append(doc.Section(heading, [*charts, table], "layers"))
    if after is not None:
        marks = [] if result.lr is None else [doc.ReferenceLine(result.lr, "your rate", "blue")]
        if result.before is not None and has_rates(result.before):
            marks.append(
                doc.ReferenceLine(result.before.stable_learning_rate, "stability limit before")
            )
        sections += [rate_section(after, marks), *detail_sections(after)]
    if result.survival is not None:
        description = describe_trial(result.survival, result.lr)
        heading = "Loss of the first steps on this batch"
        charts = _loss_charts("steps", heading, description, {"loss": result.survival})
        sections.append(doc.Section("First steps", charts, "steps"))
    if result.plan is not None and len(result.plan):
        plan = replace(_plan_table(result.plan), show_caption=True, page_only=True)
        sections.append(doc.Section("Scheme", [plan], "scheme"))
    state = "" if result.applied else " Nothing was written, or this is a copy."
    told = [doc.Paragraph(f"{_tell_work(result)}{state}", "small")]
    if after is not None:
        told.append(doc.Paragraph(describe_cost(after), "small", page_only=True))
    settings = ("scheme", "rule", "scaling", "target", "tolerance", "lr", "kappa", "seed")
    facts = doc.Facts("Settings", w.write_pairs({name: getattr(result, name) for name in settings}))
    procedure: list[doc.Block] = [*told, *w.note_paragraphs(result.notes), facts]
    return [*sections, doc.Section("Procedure", procedure, "procedure")]


def _tell_work(result: Initialization) -> str:
    time = w.tell_time(result.seconds, result.gradients)
    if result.trials:
        steps = w.count(sum(trial.steps for trial in result.trials), "training step")
        return (
            f"{w.count(len(result.trials), 'candidate')}, {steps}{time}. Score: the mean loss of the last "
            "third of the steps, on held-out batches where batches repeat."
        )
    scheme = "The given weights" if result.scheme == "keep" else f"Weights drawn by {result.scheme}"
    work = w.count(len(result.measurements), "measurement") if result.measurements else "done"
    return f"{scheme}{SCALED.get(result.scaling or '', '')}; {work}{time}."


def _key_numbers(result: Initialization) -> list[doc.KeyNumber]:
    reports = (("‖H‖ before", result.before), ("‖H‖ after", result.after))
    norms = {
        name: w.format_number(report.network.norm) for name, report in reports if report is not None
    }
    if result.symmetries:
        fitted = result.symmetries[0]
        norms = {
            "‖H‖ before": w.format_number(fitted.norm_before),
            "‖H‖ after": w.format_number(fitted.norm),
        }
    elif _was_not_finite(result):
        norms = {"‖H‖ before": "not finite", **norms}
    note = f"of {_whose(result)}" if result.symmetries else ""
    winner = result.trials[0].name if result.trials and result.converged else None
    rate, target = (
        None if one is None else w.format_number(one) for one in (result.lr, result.target)
    )
    texts = {"Learning rate": rate, "Winner": winner, **norms, "Target": target}
    known = {label: text for label, text in texts.items() if text is not None}
    return [
        doc.KeyNumber(label, text, note if label in norms else "") for label, text in known.items()
    ]


def _was_not_finite(result: Initialization) -> bool:
    """Whether there is no report of the old weights because it failed; else nobody asked for one."""
    return result.before is None and any(note.startswith("before:") for note in result.notes)


def _reconcile(result: Initialization) -> list[str]:
    """Why a rate above the stability limit of a quadratic is meant, where a trial survived it."""
    trial = result.survival or next(iter(result.trials), None)
    after = result.after
    if (
        after is None
        or trial is None
        or not trial.survived
        or result.optimizer != "sgd"
        or not result.lr
    ):
        return []
    if not has_rates(after) or result.lr <= after.stable_learning_rate:
        return []
    why = "the curvature of a network falls in the first steps, and the trial "
    why += "learned" if trial.outcome == LEARNED else "did not diverge"
    return [f"lr {w.format_number(result.lr)} is above that on purpose: {why}."]


def _race_chart(result: Initialization) -> list[doc.LineChart]:
    """Return the losses of all candidates, or of the best one at each learning rate."""
    shown = {trial.name: trial for trial in result.trials}
    caption = "Training loss of each candidate"
    if len(shown) < len(result.trials):
        best = {trial.lr: trial for trial in reversed(result.trials)}
        trials = sorted(best.values(), key=result.trials.index)
        shown = {f"{trial.name}, {w.format_number(trial.lr)}": trial for trial in trials}
        caption = "Training loss of the best candidate at each rate"
    return _loss_charts("race", caption, f"{caption}. {w.unstopped(result.reason)}.", shown)


def _loss_charts(
    name: str, caption: str, told: str, trials: Mapping[str, Trial]
) -> list[doc.LineChart]:
    """Return the losses of as many trials as there are colours; the first one stands out."""
    longest = max(len(trial.losses) for trial in trials.values())
    first = []
    series: list[doc.Series] = []
    for (label, trial), color in zip(trials.items(), ("vermilion", *w.CURVES), strict=False):
        if losses := list(takewhile(math.isfinite, trial.losses)):
            style: dict[str, Any] = {"color": color, "dashed": bool(series)}
            rest = [None] * (longest - len(losses))
            series.append(doc.Series(label, [*losses, *rest], list(range(longest)), **style))
            if not trial.survived:
                series.append(
                    w.crosses(label, losses[-1:], [len(losses) - 1], [trial.reason], **style)
                )
            first.append(losses[0])
    return loss_charts(
        name, caption, told, series, min(first, default=math.inf), HEADROOM["compare"]
    )


def _trial_table(trials: Sequence[Trial]) -> doc.Table:
    marks = ["" if one.survived else "diverged" for one in trials]
    remarks = [one.reason for one in trials]
    if trials[0].survived and trials[0].outcome in ("", LEARNED):
        marks[0], remarks[0] = "best", "won"
    scores = [w.format_number(trial.score) if trial.survived else "–" for trial in trials]
    columns = [
        w.name_column("candidate", [trial.name for trial in trials]),
        doc.Column("lr", [w.format_number(trial.lr) for trial in trials], 7),
        doc.Column("steps", [f"{trial.steps:,}" for trial in trials], 6),
        doc.Column("score", scores, 9, keys=[trial.score for trial in trials], marks=marks),
        w.name_column("remark", remarks, 5, wraps=True),
    ]
    return doc.Table("Candidates of the race, the winner first.", columns)


def _describe_symmetries(symmetries: Sequence[Symmetry]) -> list[doc.Block]:
    factors = [[one.factors[name] for name in one.weights] for one in symmetries]
    columns = [
        w.name_column("block", list(map(_name_block, symmetries))),
        doc.Column("factor", [f"× {w.format_range(some, ' … ')}" for some in factors], 8),
        doc.Column("‖H‖ before", [w.format_number(one.norm_before) for one in symmetries], 7),
        doc.Column("after", [w.format_number(one.norm) for one in symmetries], 9),
    ]
    nearly = "" if all(one.exact for one in symmetries) else ", except those marked nearly"
    explained = (
        "‖H‖ of a block: of its weights together, as the optimizer sees it (preconditioned for Adam). These "
        f"factors do not change what the network computes{nearly}."
    )
    table = doc.Table("Weights that were scaled along symmetries.", columns)
    return [table, doc.Paragraph(explained, "small")]


def _name_block(symmetry: Symmetry) -> str:
    """Name the weights of a block, and the normalizations whose gains make up for their factor."""
    names, gains = (
        list(dict.fromkeys(name.rpartition(".")[0] or name for name in some))
        for some in (
            symmetry.weights,
            (name for name in symmetry.factors if name not in symmetry.weights),
        )
    )
    if symmetry.scale_free:
        return f"{w.count(len(symmetry.weights), 'scale-free weight')}: {w.join_names(names)}"
    against = f" against the gains of {w.join_names(gains)}" if gains else ""
    return f"{w.join_names(names)}{against}{'' if symmetry.exact else ', nearly'}"


def describe_target(result: Initialization) -> str:
    """Return the target norm and where it comes from."""
    rate = "" if result.lr is None else w.format_number(result.lr)
    if result.target is None or (rate and result.kappa is None):
        return "No target."
    target = w.format_number(result.target)
    goal = f"Target: {_whose(result)}'{'' if _whose(result).endswith('s') else 's'} ‖H‖"
    if result.lr is None or result.kappa is None:
        return f"{goal} = {target}."
    if abs(result.target * result.lr / result.kappa - 1) > 1e-6:
        longer = w.format_number(result.kappa / (result.target * result.lr))
        return f"{goal} = κ/({longer}·lr) = {target}; momentum makes steps {longer} times as long."
    return f"{goal} = κ/lr = {w.format_number(result.kappa)}/{rate} = {target}."


def _whose(result: Initialization) -> str:
    if result.scaling == "symmetries":
        return "the scale-free weights"
    return "every layer" if result.rule == "layers" else "the network"


def _names(result: Initialization) -> list[str]:
    """Return the layers in the order they run, as far as that is known."""
    known = [
        name
        for report in (result.after, result.before)
        if report is not None
        for name in report.names
    ]
    return list(dict.fromkeys([*known, *result.scales]))


def _row(report: CurvatureReport | None, name: str) -> LayerCurvature | None:
    if report is None or name == "network":
        return None if report is None else report.network
    return next((row for row in report if name in (row.name, *row.aliases)), None)


def initialization_columns(result: Initialization) -> list[doc.Column]:
    """Return the scale of every layer, and the norms where they were measured; nothing without either."""
    failed = _was_not_finite(result)
    later = "after" if result.before is not None or failed else "‖H‖ after"
    reports = (("‖H‖ before", result.before), (later, result.after))
    shown = [(name, one) for name, one in reports if one is not None or failed]
    rows = [*_names(result), *["network"] * bool(shown)]
    if not shown and all(factor == 1 for factor in result.scales.values()):
        return []

    def norms(report: CurvatureReport | None) -> list[str]:
        found = [_row(report, name) for name in rows]
        texts = ["" if row is None else w.format_estimate(row.estimate) for row in found]
        return texts if report is not None else [*texts[:-1], "not finite"]

    factors = [result.scales.get(name) for name in rows]
    scales = ["" if factor is None else f"× {w.format_number(factor)}" for factor in factors]
    columns = [w.name_column("layer", rows), doc.Column("scale", scales, 8)]
    return [*columns, *(doc.Column(name, norms(one), 8 + (name == later)) for name, one in shown)]


def before_and_after_chart(result: Initialization) -> doc.LineChart:
    """Return every layer's norm before and after, the target's band, and the networks' norms as lines."""
    reports = (("before", result.before, "blue"), ("after", result.after, "vermilion"))
    names = [
        one
        for one in _names(result)
        if any(_row(report, one) is not None for _, report, _ in reports)
    ]
    shown = names or ["network"]  # a report of the network alone has but this point
    series = []
    rules = []
    for label, report, color in reports:
        if report is not None:
            rows = [_row(report, name) for name in shown]
            norms = [None if row is None else row.norm for row in rows]
            details = ["" if row is None else describe_layer(row) for row in rows]
            series.append(
                doc.Series(label, norms, None, color, hollow=label == "before", details=details)
            )
            line = f"network {label} {w.format_number(report.network.norm)}"
            rules.append(doc.ReferenceLine(report.network.norm, line, color))
    told = f"{'; '.join(rule.label for rule in rules)}. {describe_target(result)} The table has every number."
    return layer_chart(
        "norms",
        "‖H‖ before and after",
        told,
        series,
        shown,
        bands=_target_band(result),
        rules=rules if names else [],
    )


def _target_band(result: Initialization) -> list[doc.Band]:
    if result.target is None or not 0 < result.target < math.inf or result.symmetries:
        return []  # no target, or not one of a layer or of the network
    whose = "each layer" if result.rule == "layers" else "the network"
    low = result.target * (1 - result.tolerance)
    high = result.target * (1 + result.tolerance)
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

    def factors(
        heading: str, read: Callable[[PlannedWeight], float], importance: int
    ) -> list[doc.Column]:
        cells = texts(lambda row: f"× {w.format_number(read(row))}")
        return (
            [doc.Column(heading, cells, importance)] if any(read(row) != 1 for row in plan) else []
        )

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
    columns.append(
        doc.Column("std", texts(lambda row: w.format_range(row.std, " … ") or "from data"), 9)
    )
    remarks = list(map(_remark, plan))
    columns += [w.name_column("remark", remarks, 7, wraps=True)] if any(remarks) else []
    return doc.Table(f"Weights drawn by {plan.scheme}.", columns)


def _write_fans(row: PlannedWeight) -> str:
    """Write one pair of numbers, or how many blocks there are of it: `64 → 3 × 64`."""
    inputs, outputs = (w.format_range(fans, " … ", 6) for fans in (row.fan_in, row.fan_out))
    return (
        f"{inputs} → {outputs}"
        if len(row.fan_out) == 1
        else f"{inputs} → {len(row.fan_out)} × {outputs}"
    )


def _remark(row: PlannedWeight) -> str:
    remarks = ["last of a residual branch"] * row.closes_residual + [
        "normalized next"
    ] * row.norm_follows
    return row.unchanged or ", ".join(remarks)
