"""The documents of a curvature report and of a measurement's plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from hessinit.present import document as doc
from hessinit.present import words as w
from hessinit.present.layer_details import (
    conclude_details,
    detail_sections,
    layer_chart,
    spectrum_charts,
)
from hessinit.results.advice import LearningRateAdvice
from hessinit.results.curvature_report import (
    LEARN_ALL_THE_SAME,
    CurvatureReport,
    LayerCurvature,
    MeasurementPlan,
    OptimizerRates,
)

MATRIX_NAMES = {
    "gauss-newton": "Gauss-Newton",
    "hessian": "Exact Hessian",
    "both": "Exact Hessian and Gauss-Newton",
}
# Of the norm that is shown first; "both" adds Gauss-Newton's beside it.
MATRIX_OF_NORM = {
    "gauss-newton": "Gauss-Newton",
    "hessian": "exact Hessian",
    "both": "exact Hessian",
}
SOUND = (
    "Sound: every layer gets a gradient, the examples stay apart through the depth, and the loss "
    "is not far above that of the best constant output."
)
SOUND_BY_TRIAL = (
    "Sound: a trial on this batch learned, in spite of what a note says of the initial weights."
)
# Layers that differ by more are of different kinds, as an embedding and a query: no scale makes
# them alike.
MOST_TIMES_SHARPER = 1000.0
ENGINE_NAMES = {"gram": "Gram", "lanczos": "Lanczos", "plain": "plain"}
MORE_CHARTS = (
    "measure(…, details=…) adds them: 'top-10' or 'density' the chart 'spectrum:NAME', 'jacobians' "
    "the charts 'jacobians' and 'bounds', 'diagnostics' the chart 'activations'."
)


def describe_report(report: CurvatureReport) -> doc.Document:
    """Return norms and learning rates, the details that were measured, and the cost."""
    details = detail_sections(report)
    shown = [chart for section in details for chart in section.blocks]
    charts = [norms_chart(report)] if report.layers else []
    table = doc.Table(
        "Curvature of every layer and of the network", _layer_columns(report), fixed=1
    )
    pairs = [
        *w.write_fields(
            report, ("curvature", "examples", "batches", "loss", "engine", "tolerance", "seed")
        ),
        *w.write_pairs(report.versions),
    ]
    measured: list[doc.Block] = [
        doc.Paragraph(describe_cost(report), "small"),
        *w.note_paragraphs(report.notes),
        doc.Facts("Settings and versions", pairs),
    ]
    return doc.Document(
        title=w.title("Curvature report", report.versions),
        tone=_tone(report),
        numbers=_key_numbers(report),
        verdict=[*_judge(report), conclude(report), *conclude_details(report)],
        sections=[
            doc.Section("Curvature by layer", [*charts, table], "layers"),
            rate_section(report),
            *details,
            doc.Section("Measurement", measured, "measured"),
        ],
        more_charts=[chart for chart in spectrum_charts(report) if chart not in shown],
        further=MORE_CHARTS,
    )


def _key_numbers(report: CurvatureReport) -> list[doc.KeyNumber]:
    norm = w.format_number(report.network.norm)
    note = w.text_if(not report.network.converged, "not converged")
    if not report.network_measured:
        norm = f"≥ {norm}"
        note = "not measured: bounded by the layers"
    numbers = [doc.KeyNumber("‖H‖ of the network", norm, note)]
    if len(report) > 1:
        sharpest = report.sharpest
        norm = w.format_number(sharpest.norm)
        numbers.append(doc.KeyNumber("Sharpest layer", norm, w.shorten(sharpest.name)))
    rates = report.rates
    if rates is not None:
        limit = w.format_number(rates.stable_learning_rate, 2)
        numbers += [
            doc.KeyNumber("Learning rate", write_rate(rates.learning_rate, 2), rates.optimizer),
            doc.KeyNumber("Stability limit", limit, f"{rates.optimizer} on a quadratic"),
        ]
    elif has_rates(report):
        limit = w.format_number(report.stable_learning_rate, 2)
        note = "plain gradient descent on a quadratic: lr = 2/‖H‖"
        numbers.append(doc.KeyNumber("Stability limit", limit, note))
    return numbers


def write_rate(rate: float, digits: int = 3) -> str:
    """Return an advised rate; "none" where the network did not learn at any."""
    return w.format_number(rate, digits) if 0 < rate < math.inf else "none"


def _tone(report: CurvatureReport) -> str:
    rows = (*report.layers, report.network)
    if report.findings or not all(math.isfinite(row.norm) for row in rows):
        return "bad"
    if report.findings is None:
        return "plain"
    return "good" if report.converged else "fair"


def _layer_columns(report: CurvatureReport) -> list[doc.Column]:
    rows = (*report.layers, report.network)

    def texts(write: Callable[[LayerCurvature], str], bound: str = "") -> list[str]:
        # A bound has but its number: the norm may be larger than a bound that is ok.
        cells = [write(row) for row in report.layers]
        return [*cells, write(report.network) if report.network_measured else bound]

    norms = texts(
        lambda row: w.format_estimate(row.estimate), f"≥ {w.format_number(report.network.norm)}"
    )
    columns = [
        w.name_column("layer", w.name_rows(rows)),
        doc.Column(
            "weight",
            [*(str(row.shape) for row in report), f"{report.network.parameters:,}"],
            4,
            is_number=False,
            keys=[float(row.parameters) for row in rows],
        ),
        doc.Column("‖H‖", norms, 9, keys=[row.norm for row in rows]),
    ]
    if any(row.indefinite for row in rows):
        ends = texts(lambda row: f"{w.format_estimate(row.bottom)} … {w.format_estimate(row.top)}")
        columns.append(doc.Column("λmin … λmax", ends, 6))
    kinds = {
        row.name: [finding.kind for finding in report.findings or () if row.name in finding.layers]
        for row in rows
    }
    findings = texts(lambda row: ", ".join(kinds[row.name]))
    return [
        *columns,
        doc.Column("gap", texts(_write_gap), 7),
        doc.Column("per batch", texts(_write_spread), 5),
        doc.Column("trace", texts(lambda row: w.format_estimate(row.trace)), 3),
        doc.Column("‖H‖F", texts(lambda row: w.format_estimate(row.frobenius)), 2),
        doc.Column(
            "finding",
            findings,
            8,
            is_number=False,
            marks=[w.text_if(finding, "no") for finding in findings],
        ),
    ]


def _write_gap(row: LayerCurvature) -> str:
    if row.gap is None or row.approximation is None:
        return ""
    return w.mark_doubt(w.format_ratio(row.gap), row.converged and row.approximation.converged)


def _write_spread(row: LayerCurvature) -> str:
    if row.spread is None or len(row.spread.norms) < 2:
        return ""
    return w.format_mean(row.spread.mean, row.spread.standard_error)


def norms_chart(report: CurvatureReport) -> doc.LineChart:
    """Return the norms over depth, with the network's norm as a line."""
    low, high = zip(*map(_error_bar, report), strict=True)
    approximations = w.map_known(
        [row.approximation for row in report], lambda norm: abs(norm.value), None
    )
    series = [
        doc.Series(
            MATRIX_OF_NORM[report.curvature],
            [layer.norm for layer in report],
            low=low,
            high=high,
            details=[describe_layer(layer) for layer in report],
        ),
        # Without a number in it, the chart leaves this curve out.
        doc.Series("Gauss-Newton", approximations, color="vermilion", hollow=True),
    ]
    bound = w.text_if(not report.network_measured, "at least ")
    network = f"{bound}{w.format_number(report.network.norm)}"
    return layer_chart(
        "norms",
        "Curvature ‖H‖ of each layer",
        f"{MATRIX_NAMES[report.curvature]} norm ‖H‖ of {w.count(len(report), 'layer')} on a "
        f"logarithmic axis; the network's is {network}. {conclude(report)} The table below has "
        "every number.",
        series,
        report.names,
        rules=[doc.ReferenceLine(report.network.norm, f"network {network}")],
    )


def _error_bar(layer: LayerCurvature) -> tuple[float | None, float | None]:
    """Return the range over the batches, or the range of the error where it is visible."""
    if layer.spread is not None and len(layer.spread.norms) > 1:
        return min(layer.spread.norms), max(layer.spread.norms)
    low = layer.norm - layer.error
    high = layer.norm + layer.error
    if not math.isfinite(high) or high <= 1.05 * low:
        return None, None
    return max(low, high * 1e-3), high


def describe_layer(layer: LayerCurvature) -> str:
    """Return the shape of a layer's weight, and how far to trust its norm."""
    is_visible = layer.error > 0.005 * abs(layer.norm)
    error = w.text_if(is_visible, f", ± {w.format_number(layer.error, 2)}")
    return f"{layer.shape}{error}{w.text_if(not layer.converged, ', not converged')}"


def has_rates(report: CurvatureReport) -> bool:
    """Return whether the network's norm, not a bound on it, gives the stable learning rates."""
    return report.network_measured and 0 < report.network.norm < math.inf


def rate_section(report: CurvatureReport, marks: Sequence[doc.ReferenceLine] = ()) -> doc.Section:
    """Return the learning rates of the optimizer that was named, or of gradient descent."""
    return doc.Section("Learning rate", [_rate_block(report, marks)], "rate")


def _rate_block(report: CurvatureReport, marks: Sequence[doc.ReferenceLine]) -> doc.Block:
    limit = _limit_rate(report)
    if report.rates is not None:
        return optimizer_chart(report.rates, limit)
    norm = report.network.norm
    if has_rates(report):
        caption = "Learning rates of plain gradient descent with these weights"
        labels = [f"{mark.label}: {w.format_number(mark.value)}." for mark in marks]
        return doc.RateLine(
            "rates",
            caption,
            " ".join([limit, *labels]),
            report.learning_rate,
            report.stable_learning_rate,
            marks,
        )
    if 0 < norm < math.inf:
        return doc.Paragraph(_bound_rates(report), page_only=True)
    return doc.Paragraph(
        f"‖H‖ of the network is {w.format_number(norm)}, which sets no learning rate.",
        page_only=True,
    )


def mark_rate(lr: float | None) -> list[doc.ReferenceLine]:
    """Return the mark of the user's own learning rate, where there is one."""
    return [] if lr is None else [doc.ReferenceLine(lr, "your rate", "blue")]


def optimizer_chart(rates: OptimizerRates | LearningRateAdvice, description: str) -> doc.RateLine:
    """Return the line of an optimizer's learning rates, with the user's own."""
    return doc.RateLine(
        "rates",
        f"Learning rates of {rates.optimizer} with these weights",
        description,
        rates.learning_rate,
        rates.stable_learning_rate,
        mark_rate(rates.lr),
        "advised",
        "stability limit",
    )


def describe_cost(report: CurvatureReport) -> str:
    """Return what was measured, by which engine and why, and the time it took."""
    return (
        f"{w.count(len(report), 'layer')}{w.tell_time(report.seconds, report.gradients)} by the "
        f"{ENGINE_NAMES.get(report.engine, report.engine)} "
        f"engine{w.text_if(report.engine_reason, f': {w.unstopped(report.engine_reason)}')}. "
        f"{_tell_data(report)}; loss {w.format_number(report.loss)}."
    )


def _tell_data(measured: CurvatureReport | MeasurementPlan) -> str:
    """Return which matrix is measured on which examples."""
    batches = w.tell_batches(measured.batches)
    return f"{MATRIX_NAMES[measured.curvature]} on {w.count(measured.examples, 'example')}{batches}"


def describe_expected(plan: MeasurementPlan) -> doc.Document:
    """Return what a measurement is expected to cost, and what that is a guess from."""
    steps = f", {w.format_times(plan.training_steps)} times that of a training step"
    step = w.text_if(plan.memory > 2**24, steps)  # beside a tiny model everything is large
    expected = (
        f"About {w.format_number(plan.gradients, 2)} gradients, or "
        f"{w.format_number(plan.seconds, 2)} s, and {w.format_bytes(plan.memory)} of memory{step}. "
        f"By the {ENGINE_NAMES.get(plan.engine, plan.engine)} engine: "
        f"{w.unstopped(plan.engine_reason)}."
    )
    basis = (
        f"{w.count(plan.layers, 'layer')} with {w.count(plan.parameters, 'parameter')}; "
        f"{_tell_data(plan)}, tolerance {plan.tolerance:g}. One gradient took "
        f"{w.format_number(plan.gradient_seconds, 2)} s. Nothing was measured; the measurement "
        "may take a third or three times as much."
    )
    section = doc.Section(
        "Expected cost",
        [*w.note_paragraphs(plan.notes), doc.Facts("Versions", w.write_pairs(plan.versions))],
        "cost",
    )
    return doc.Document(
        title=w.title("Plan of a measurement", plan.versions),
        verdict=[expected, basis],
        sections=[section],
    )


def conclude(report: CurvatureReport, optimizer: str = "") -> str:
    """Return how the layers compare, which rates that allows, and which numbers to doubt.

    The rates are those of plain gradient descent; for another `optimizer` they are left out.
    """
    sentences = [_compare_layers(report.layers), *_name_extremes(report.layers)]
    if optimizer in ("", "sgd"):
        sentences.append(_limit_rate(report))
    if not optimizer and report.rates is None and has_rates(report):
        sentences.append(
            "A network is not a quadratic: advise tries rates, also for momentum and Adam."
        )
    sentences += [_compare_matrices(report), _name_unconverged(report)]
    return " ".join(filter(None, sentences))


def _judge(report: CurvatureReport) -> list[str]:
    if report.findings is None:
        return []
    if report.findings:
        return ["Not sound:", *map(str, report.findings)]
    is_overruled = any(note.endswith(LEARN_ALL_THE_SAME) for note in report.notes)
    return [SOUND_BY_TRIAL if is_overruled else SOUND]


def _compare_layers(layers: Sequence[LayerCurvature]) -> str:
    if not layers:
        return "No layer was measured."
    if len(layers) == 1:
        return f"{w.call_layer(layers[0].name)} has ‖H‖ = {w.format_number(layers[0].norm)}."
    curved = sorted((row for row in layers if 0 < row.norm < math.inf), key=lambda row: row.norm)
    if len(curved) < 2:
        return ""
    ratio = curved[-1].norm / curved[0].norm
    sharpest = w.call_layer(curved[-1].name)
    if ratio < 1.5:
        subject = "The" if len(curved) == len(layers) else f"{len(curved)} of"
        return f"{subject} {len(layers)} layers are about equally sharp."
    if ratio > MOST_TIMES_SHARPER:
        return f"{sharpest} is the sharpest layer, with ‖H‖ = {w.format_number(curved[-1].norm)}."
    return (
        f"{sharpest} is {w.format_times(ratio)} times sharper than {w.call_layer(curved[0].name)}."
    )


def _name_extremes(layers: Sequence[LayerCurvature]) -> Iterator[str]:
    if infinite := [w.call_layer(row.name) for row in layers if not math.isfinite(row.norm)]:
        yield (
            f"‖H‖ of {w.join_names(infinite)} is not finite: the numbers overflow. Initialize with "
            "smaller weights, or measure in float64."
        )
    if flat := [w.call_layer(row.name) for row in layers if row.norm == 0]:
        yield f"‖H‖ of {w.join_names(flat)} is 0: the loss has no curvature there."


def _limit_rate(report: CurvatureReport) -> str:
    network = report.network
    rates = report.rates
    if rates is not None:
        name = rates.optimizer.partition("(betas")[0]
        best = w.mark_doubt(write_rate(rates.learning_rate, 2), rates.converged)
        limit = w.mark_doubt(w.format_number(rates.stable_learning_rate, 2), rates.converged)
        return (
            f"For {name}: learning rate {best}; on a quadratic, unstable above {limit} (advise "
            "tells more)."
        )
    is_bound = not report.network_measured and network.error > 0
    if network.norm == 0 and not is_bound:
        return "The network has no curvature, so it sets no limit to the learning rate."
    if not math.isfinite(network.norm):
        return f"The network's ‖H‖ is {w.format_number(network.norm)}: no learning rate is stable."
    if is_bound:
        return _bound_rates(report)
    limit = w.format_number(report.stable_learning_rate, 2)
    if -network.bottom_eigenvalue > network.top_eigenvalue:
        # Along a direction of negative curvature no step is too long; 2/‖H‖ only ends the
        # guarantee.
        return (
            f"The most negative eigenvalue (λ = {w.format_number(network.bottom_eigenvalue)}) is "
            "the largest in size: on a quadratic, a gradient step is guaranteed to lower the loss "
            f"up to lr = 2/‖H‖ = {limit}."
        )
    # Further parameters make ‖H‖ no smaller: the limit also holds with those that are not measured.
    return (
        "On a quadratic of this curvature, plain gradient descent diverges above "
        f"lr = 2/‖H‖ = {limit}."
    )


def _bound_rates(report: CurvatureReport) -> str:
    network = report.network
    least = w.format_number(network.norm)
    highest = w.format_number(report.stable_learning_rate, 2)
    # An upper bound is the sum of the layers' norms: of all of them, and only where they are known.
    if math.isfinite(network.error) and all(row.converged for row in report.layers):
        most = network.norm + network.error
        return (
            "The network was not measured (network=False). The layers bound its ‖H‖ between "
            f"{least} and {w.format_number(most)}, so on a quadratic gradient descent is stable "
            f"below lr = {w.format_number(2 / most, 2)} and diverges above {highest}."
        )
    limit = w.text_if(network.norm > 0, f", so 2/‖H‖ is at most {highest}")
    return (
        f"The network was not measured (network=False): its ‖H‖ is at least {least}{limit}. "
        "Measure the network to know this limit."
    )


def _compare_matrices(report: CurvatureReport) -> str:
    gaps = [(row.gap, row.name) for row in report if row.gap is not None and 0 < row.gap < math.inf]
    if not gaps:
        return ""
    gap, name = max(gaps, key=lambda pair: abs(math.log(pair[0])))
    if abs(gap - 1) >= 0.01:
        times = w.format_ratio(gap)
        return (
            f"{w.call_layer(name)}'s exact Hessian is {times} times its Gauss-Newton approximation."
        )
    agreed = "The exact Hessian and Gauss-Newton agree within 1 % on every layer"
    gap_of_all = report.network.gap if report.network_measured else None
    if gap_of_all is None or not 0 < gap_of_all < math.inf or abs(gap_of_all - 1) < 0.01:
        return f"{agreed}."
    # Layer by layer a ReLU network has no gap; all of it is between the layers.
    times = w.format_ratio(gap_of_all)
    return f"{agreed}; for the whole network the exact one is {times} times as large."


def _name_unconverged(report: CurvatureReport) -> str:
    rows = (*report.layers, report.network) if report.network_measured else report.layers
    has_ends = any(row.indefinite for row in (*report.layers, report.network))
    doubts: dict[str, str] = {}
    for row in rows:
        ends = [row.top, row.bottom] if has_ends else []
        shown = (row.estimate, row.approximation, row.trace, row.frobenius, *ends)
        reasons = [value.reason for value in shown if value is not None and not value.converged]
        if reasons:
            name = "the network" if row is report.network else w.call_layer(row.name)
            doubts[name] = w.unstopped(reasons[0])
    if not doubts:
        return ""
    reason = next(iter(doubts.values()))
    return (
        f"Not converged (marked ~): {w.join_names(list(doubts))}{w.text_if(reason, f'; {reason}')}."
    )
