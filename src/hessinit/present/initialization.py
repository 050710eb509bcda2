"""Describe an initialization (norms before and after, target, trials) and a scheme's plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from hessinit.present import document as doc
from hessinit.present import words as w
from hessinit.present.advice import describe_trial
from hessinit.present.comparison import loss_charts
from hessinit.present.curvature import (
    conclude,
    describe_cost,
    describe_layer,
    has_rates,
    mark_rate,
    rate_section,
)
from hessinit.present.layer_details import detail_sections, layer_chart
from hessinit.results.curvature_report import CurvatureReport, LayerCurvature
from hessinit.results.initialization import (
    LEARNED,
    OURS,
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
    """Return the verdict (rate, trials or target), tables and charts, and the scheme's plan."""
    verdict = [_tell_outcome(result)]
    answer = ""
    is_other = bool(result.trials) and {trial.lr for trial in result.trials} != {result.lr}
    if result.lr is not None and (result.chose_lr or is_other):
        answer = f"learning rate: {w.format_number(result.lr)}"
    if not result.learned:
        answer = verdict.pop()
    if result.target is not None:
        verdict.append(describe_target(result))
    if result.survival is not None:
        verdict.append(describe_trial(result.survival, result.lr))
    if result.after is not None:
        verdict += [conclude(result.after, result.optimizer), *_reconcile(result)]
    measured = result.after or result.before
    return doc.Document(
        title=w.title("Initialization report", measured.versions if measured else None),
        answer=answer,
        verdict=verdict,
        tone=_tone(result),
        numbers=_key_numbers(result),
        sections=_sections(result),
    )


def _tell_outcome(result: Initialization) -> str:
    reason = f"{w.unstopped(result.reason)}."
    if not result.learned:
        return reason
    if result.flat_enough:
        return f"Not sharpened: {reason}"
    if not result.converged:
        return f"Not met: {reason}"
    if result.trials or result.target is None:
        return f"{reason[:1].upper()}{reason[1:]}"
    return f"Met: {reason}"


def _tone(result: Initialization) -> str:
    if result.converged or result.flat_enough:
        return "good"
    was_fitted = (result.after is not None or result.symmetries) and not result.trials
    return "fair" if was_fitted else "bad"


def _sections(result: Initialization) -> list[doc.Section]:
    return doc.filled(
        doc.Section("Trials", _trial_blocks(result), "trials"),
        doc.Section("Symmetries", _symmetry_blocks(result.symmetries), "symmetries"),
        _layer_section(result),
        *_sections_after(result),
        doc.Section("First steps", _survival_charts(result), "steps"),
        doc.Section("Scheme", _scheme_blocks(result.plan), "scheme"),
        doc.Section("Procedure", _procedure_blocks(result), "procedure"),
    )


def _layer_section(result: Initialization) -> doc.Section:
    columns = initialization_columns(result)
    caption = "Scale and norm of every layer before and after, and of the network."
    if result.before is not None or result.after is not None:
        return doc.Section(
            "Before and after",
            [before_and_after_chart(result), doc.Table(caption, columns, fixed=1)],
            "layers",
        )
    return doc.Section(
        "Scales", [doc.Table(caption, columns, page_only=True)] * bool(columns), "layers"
    )


def _sections_after(result: Initialization) -> list[doc.Section]:
    if result.after is None:
        return []
    marks = mark_rate(result.lr)
    if result.before is not None and has_rates(result.before):
        marks.append(
            doc.ReferenceLine(result.before.stable_learning_rate, "stability limit before")
        )
    return [rate_section(result.after, marks), *detail_sections(result.after)]


def _survival_charts(result: Initialization) -> list[doc.LineChart]:
    if result.survival is None:
        return []
    description = describe_trial(result.survival, result.lr)
    return _trial_charts(
        "steps", "Loss of the first steps on this batch", description, {"loss": result.survival}
    )


def _scheme_blocks(plan: SchemePlan | None) -> list[doc.Block]:
    return [replace(_plan_table(plan), show_caption=True, page_only=True)] if plan else []


def _procedure_blocks(result: Initialization) -> list[doc.Block]:
    state = w.text_if(not result.applied, " Nothing was written, or this is a copy.")
    blocks: list[doc.Block] = [doc.Paragraph(f"{_tell_work(result)}{state}", "small")]
    if result.after is not None:
        blocks.append(doc.Paragraph(describe_cost(result.after), "small", page_only=True))
    settings = ("scheme", "rule", "scaling", "target", "tolerance", "lr", "kappa", "seed")
    return [
        *blocks,
        *w.note_paragraphs(result.notes),
        doc.Facts("Settings", w.write_fields(result, settings)),
    ]


def _tell_work(result: Initialization) -> str:
    time = w.tell_time(result.seconds, result.gradients)
    if result.trials:
        return (
            f"{w.count(len(result.trials), 'trial')}, "
            f"{w.count(sum(trial.steps for trial in result.trials), 'training step')}{time}. "
            "Score: the mean loss of the last third of the steps, on held-out batches where "
            "batches repeat."
        )
    scheme = "The given weights" if result.scheme == "keep" else f"Weights drawn by {result.scheme}"
    work = w.count(len(result.measurements), "measurement") if result.measurements else "done"
    return f"{scheme}{SCALED.get(result.scaling or '', '')}; {work}{time}."


def _key_numbers(result: Initialization) -> list[doc.KeyNumber]:
    before, after = w.map_known(
        (result.before, result.after), lambda report: w.format_number(report.network.norm), ""
    )
    note = ""
    if result.symmetries:
        before = w.format_number(result.symmetries[0].norm_before)
        after = w.format_number(result.symmetries[0].norm)
        note = f"of {_whose(result)}"
    elif _was_not_finite(result):
        before = "not finite"
    rate, target = w.map_known((result.lr, result.target), w.format_number, "")
    winner = result.trials[0].name if result.trials and result.converged else ""
    numbers = [
        doc.KeyNumber("Learning rate", rate),
        doc.KeyNumber("Weights", winner),
        doc.KeyNumber("‖H‖ before", before, note),
        doc.KeyNumber("‖H‖ after", after, note),
        doc.KeyNumber("Target", target),
    ]
    return [number for number in numbers if number.text]


def _was_not_finite(result: Initialization) -> bool:
    """Return whether the old weights have no report because measuring them failed."""
    return result.before is None and any(note.startswith("before:") for note in result.notes)


def _reconcile(result: Initialization) -> list[str]:
    """Return why a rate above the stability limit is meant, where a trial survived it."""
    after = result.after
    trial = result.survival or next(iter(result.trials), None)
    if after is None or trial is None or not trial.survived or not result.lr:
        return []
    is_above = has_rates(after) and result.lr > after.stable_learning_rate
    if result.optimizer != "sgd" or not is_above:
        return []
    end = "learned" if trial.outcome == LEARNED else "did not diverge"
    reason = f"the curvature of a network falls in the first steps, and the trial {end}"
    return [f"lr {w.format_number(result.lr)} is above that on purpose: {reason}."]


def _trial_blocks(result: Initialization) -> list[doc.Block]:
    """Return the losses of the two starts, or of the best one at each rate, and the table."""
    if not result.trials:
        return []
    best = {trial.lr: trial for trial in reversed(result.trials)}
    shown = {trial.name: trial for trial in result.trials[:2]}
    caption = "Training loss from either weights"
    if len(best) > 1:
        rates = sorted(best, key=lambda lr: (lr != result.trials[0].lr, lr))
        shown = {f"{best[lr].name}, {w.format_number(lr)}": best[lr] for lr in rates}
        caption = "Training loss at each rate"
    description = f"{caption}. {w.unstopped(result.reason)}."
    return [*_trial_charts("trials", caption, description, shown), _trial_table(result.trials)]


def _trial_charts(
    name: str, caption: str, description: str, trials: Mapping[str, Trial]
) -> list[doc.LineChart]:
    """Return the losses of as many trials as there are colours; the first one stands out."""
    longest = max(len(trial.losses) for trial in trials.values())
    first_losses = []
    series: list[doc.Series] = []
    for (label, trial), color in zip(trials.items(), ("vermilion", *w.CURVES), strict=False):
        if losses := list(takewhile(math.isfinite, trial.losses)):
            look = (color, bool(series))
            padded = [*losses, *[None] * (longest - len(losses))]
            series.append(doc.Series(label, padded, list(range(longest)), *look))
            if not trial.survived:
                last = len(losses) - 1
                series.append(w.crosses(label, losses[-1:], [last], *look, [trial.reason]))
            first_losses.append(losses[0])
    return loss_charts(name, caption, description, series, first_losses)


def _trial_table(trials: Sequence[Trial]) -> doc.Table:
    marks = [w.text_if(not trial.survived, "diverged") for trial in trials]
    remarks = [trial.reason for trial in trials]
    if trials[0].survived and trials[0].outcome in ("", LEARNED):
        marks[0] = "best"
        remarks[0] = "chosen"
    scores = [w.format_number(trial.score) if trial.survived else "–" for trial in trials]
    columns = [
        w.name_column("weights", [trial.name for trial in trials]),
        doc.Column("lr", [w.format_number(trial.lr) for trial in trials], 7),
        doc.Column("steps", [f"{trial.steps:,}" for trial in trials], 6),
        doc.Column("score", scores, 9, keys=[trial.score for trial in trials], marks=marks),
        w.name_column("remark", remarks, 5, wraps=True),
    ]
    return doc.Table("Trials: those at the chosen rate, then those of the search for it.", columns)


def explain_choice(trials: Sequence[Trial], is_fresh: bool, fit: str) -> str:
    """Return which start was better and by how much, and how the new weights were fitted."""
    source = "fresh mini-batches" if is_fresh else "halves of this batch"
    chosen, other = trials
    choice = "your own weights were kept"
    name = "the new ones"
    if chosen.name == OURS:
        choice = "the new weights were chosen"
        name = "your own"
    score = f"{w.format_number(chosen.score)} in {w.count(chosen.steps, 'trial step')}"
    end = w.unstopped(other.reason)
    if other.survived:
        unclear = w.text_if(other.score < chosen.score, ", no clear lead")
        end = f"to {w.format_number(other.score)}{unclear}"
    return f"{choice}: they came to {score} on {source}, {name} {end}. The new ones: {fit}"


def _symmetry_blocks(symmetries: Sequence[Symmetry]) -> list[doc.Block]:
    if not symmetries:
        return []
    factors = [
        w.format_range([block.factors[name] for name in block.weights], " … ")
        for block in symmetries
    ]
    columns = [
        w.name_column("block", list(map(_name_block, symmetries))),
        doc.Column("factor", [f"× {factor}" for factor in factors], 8),
        doc.Column("‖H‖ before", [w.format_number(block.norm_before) for block in symmetries], 7),
        doc.Column("after", [w.format_number(block.norm) for block in symmetries], 9),
    ]
    is_exact = all(block.exact for block in symmetries)
    return [
        doc.Table("Weights that were scaled along symmetries.", columns),
        doc.Paragraph(
            "‖H‖ of a block: of its weights together, as the optimizer sees it (preconditioned for "
            "Adam). These factors do not change what the network computes"
            f"{w.text_if(not is_exact, ', except those marked nearly')}.",
            "small",
        ),
    ]


def _name_block(symmetry: Symmetry) -> str:
    """Name the weights of a block, and the normalizations whose gains make up for their factor."""
    weights = w.join_names(_modules(symmetry.weights))
    if symmetry.scale_free:
        return f"{w.count(len(symmetry.weights), 'scale-free weight')}: {weights}"
    nearly = w.text_if(not symmetry.exact, ", nearly")
    gains = _modules([name for name in symmetry.factors if name not in symmetry.weights])
    if not gains:
        return f"{weights}{nearly}"
    return f"{weights} against the gains of {w.join_names(gains)}{nearly}"


def _modules(parameters: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[0] or name for name in parameters))


def describe_target(result: Initialization) -> str:
    """Return the target norm and where it comes from."""
    if result.target is None or (result.lr is not None and result.kappa is None):
        return "No target."
    target = w.format_number(result.target)
    owner = _whose(result)
    goal = f"Target: {owner}'{w.text_if(not owner.endswith('s'), 's')} ‖H‖"
    if result.lr is None or result.kappa is None:
        return f"{goal} = {target}."
    if abs(result.target * result.lr / result.kappa - 1) > 1e-6:
        times = w.format_number(result.kappa / (result.target * result.lr))
        return f"{goal} = κ/({times}·lr) = {target}; momentum makes steps {times} times as long."
    return (
        f"{goal} = κ/lr = {w.format_number(result.kappa)}/{w.format_number(result.lr)} = {target}."
    )


def _whose(result: Initialization) -> str:
    if result.scaling == "symmetries":
        return "the scale-free weights"
    return "every layer" if result.rule == "layers" else "the network"


def _layer_names(result: Initialization) -> list[str]:
    """Return the layers in the order they run, as far as that is known."""
    reports = [report for report in (result.after, result.before) if report is not None]
    measured = [name for report in reports for name in report.names]
    return list(dict.fromkeys([*measured, *result.scales]))


def _rows(report: CurvatureReport, names: Sequence[str]) -> list[LayerCurvature | None]:
    """Return the rows of these layers; None for a layer that the report does not have."""
    rows = {name: row for row in reversed(report.layers) for name in (row.name, *row.aliases)}
    rows["network"] = report.network
    return [rows.get(name) for name in names]


def initialization_columns(result: Initialization) -> list[doc.Column]:
    """Return the scale of every layer, and its norms where they were measured.

    Without either there are no columns.
    """
    has_before = result.before is not None or _was_not_finite(result)
    has_norms = has_before or result.after is not None
    if not has_norms and all(factor == 1 for factor in result.scales.values()):
        return []
    names = [*_layer_names(result), *["network"] * has_norms]
    scales = w.map_known(
        [result.scales.get(name) for name in names],
        lambda factor: f"× {w.format_number(factor)}",
        "",
    )
    columns = [w.name_column("layer", names), doc.Column("scale", scales, 8)]
    if result.before is not None:
        columns.append(_norm_column("‖H‖ before", result.before, names, 8))
    elif has_before:
        columns.append(doc.Column("‖H‖ before", [*[""] * (len(names) - 1), "not finite"], 8))
    if result.after is not None:
        heading = f"{w.text_if(not has_before, '‖H‖ ')}after"
        columns.append(_norm_column(heading, result.after, names, 9))
    return columns


def _norm_column(
    heading: str, report: CurvatureReport, names: Sequence[str], importance: int
) -> doc.Column:
    return doc.Column(
        heading,
        w.map_known(_rows(report, names), lambda row: w.format_estimate(row.estimate), ""),
        importance,
    )


def before_and_after_chart(result: Initialization) -> doc.LineChart:
    """Return every layer's norm before and after, the target's band, and the networks' norms."""
    reports = [
        (label, report, color)
        for label, report, color in (
            ("before", result.before, "blue"),
            ("after", result.after, "vermilion"),
        )
        if report is not None
    ]
    names = [
        name for name in _layer_names(result) if any(name in report for _, report, _ in reports)
    ]
    shown = names or ["network"]  # a report of the network alone has but this point
    series = []
    rules = []
    for label, report, color in reports:
        rows = _rows(report, shown)
        norms = w.map_known(rows, lambda row: row.norm, None)
        details = w.map_known(rows, describe_layer, "")
        series.append(
            doc.Series(label, norms, None, color, hollow=(label == "before"), details=details)
        )
        network = f"network {label} {w.format_number(report.network.norm)}"
        rules.append(doc.ReferenceLine(report.network.norm, network, color))
    networks = "; ".join(rule.label for rule in rules)
    return layer_chart(
        "norms",
        "‖H‖ before and after",
        f"{networks}. {describe_target(result)} The table has every number.",
        series,
        shown,
        bands=_target_band(result),
        rules=rules if names else [],
    )


def _target_band(result: Initialization) -> list[doc.Band]:
    if result.target is None or not 0 < result.target < math.inf or result.symmetries:
        return []  # no target, or not one of a layer or of the network
    owner = "each layer" if result.rule == "layers" else "the network"
    target = w.format_number(result.target)
    label = f"target for {owner}: {target} ± {w.format_percent(result.tolerance)}"
    low = max(result.target * (1 - result.tolerance), result.target / 100)
    return [doc.Band(low, result.target * (1 + result.tolerance), label)]


def describe_plan(plan: SchemePlan) -> doc.Document:
    """Return what the scheme does to each weight."""
    distribution = w.text_if(plan.distribution, f", {plan.distribution}")
    unchanged = sum(bool(row.unchanged) for row in plan)
    exceptions = w.text_if(unchanged, f"; {unchanged} unchanged")
    drawn = w.count(len(plan) - unchanged, "weight")
    verdict = f"{plan.scheme}{distribution}: {drawn}{exceptions}."
    section = doc.Section("Weights", [_plan_table(plan), *w.note_paragraphs(plan.notes)], "weights")
    return doc.Document(title="Scheme", verdict=[verdict], sections=[section])


def _plan_table(plan: SchemePlan) -> doc.Table:
    def texts(write: Callable[[PlannedWeight], str], is_shown: bool = True) -> list[str]:
        return [w.text_if(is_shown and not row.unchanged, write(row)) for row in plan]

    def factors(read: Callable[[PlannedWeight], float]) -> list[str]:
        return texts(
            lambda row: f"× {w.format_number(read(row))}", any(read(row) != 1 for row in plan)
        )

    depends_on_readers = plan.scheme in ("backward", "compromise")
    columns = [
        w.name_column("layer", w.name_rows(plan)),
        w.name_column("weight", [str(row.shape) for row in plan], 4),
        w.name_column("fans", texts(_write_fans), 8),
        w.name_column("upstream", texts(lambda row: row.upstream), 5),
        w.name_column("downstream", texts(lambda row: row.downstream, depends_on_readers), 5),
        doc.Column("gain", texts(lambda row: w.format_number(row.gain)), 8),
        doc.Column("dropout", factors(lambda row: row.dropout_factor), 8),
        doc.Column("correction", factors(lambda row: row.variance_correction), 7),
        doc.Column("std", texts(lambda row: w.format_range(row.std, " … ") or "from data"), 9),
        w.name_column("remark", list(map(_remark, plan)), 7, wraps=True),
    ]
    return doc.Table(f"Weights drawn by {plan.scheme}.", columns)


def _write_fans(row: PlannedWeight) -> str:
    """Write one pair of numbers, or how many blocks there are of it: `64 → 3 × 64`."""
    inputs, outputs = (w.format_range(fans, " … ", 6) for fans in (row.fan_in, row.fan_out))
    return f"{inputs} → {w.text_if(len(row.fan_out) != 1, f'{len(row.fan_out)} × ')}{outputs}"


def _remark(row: PlannedWeight) -> str:
    remarks = ["last of a residual branch"] * row.closes_residual
    remarks += ["normalized next"] * row.norm_follows
    return row.unchanged or ", ".join(remarks)
