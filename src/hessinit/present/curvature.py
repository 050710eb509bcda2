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

MATRIX_NAMES = {"gauss-newton": "Gauss-Newton", "hessian": "Exact Hessian"}
MATRIX_NAMES["both"] = "Exact Hessian and Gauss-Newton"
SOUND = (
    "Sound: every layer gets a gradient, the examples stay apart through the depth, and the loss is not far "
    "above that of the best constant output."
)
SOUND_BY_TRIAL = (
    "Sound: a trial on this batch learned, in spite of what a note says of the initial weights."
)
# Layers that differ by more are of different kinds, as an embedding and a query: no scale makes
# them alike.
MOST_TIMES_SHARPER = 1000.0
ENGINE_NAMES = {"gram": "Gram", "lanczos": "Lanczos"}
MORE_CHARTS = (
    "measure(…, top=10) or density=True adds 'spectrum:NAME', jacobians=True 'jacobians' and 'bounds', "
    "diagnostics=True 'activations'."
)


def describe_report(report: CurvatureReport) -> doc.Document:
    """Return the norms by layer, the learning rates they allow, what else was measured, and its cost."""
    details = detail_sections(report)
    spectra = spectrum_charts(report)
    shown = [chart for section in details for chart in section.blocks]
    table = doc.Table("Curvature of every layer and of the network", _columns(report), fixed=1)
    layers: list[doc.Block] = [norms_chart(report), table] if report.layers else [table]
    settings = ("curvature", "examples", "batches", "loss", "engine", "tolerance", "seed")
    pairs = w.write_pairs({name: getattr(report, name) for name in settings} | report.versions)
    cost = doc.Paragraph(describe_cost(report), "small")
    facts = doc.Facts("Settings and versions", pairs)
    measured: list[doc.Block] = [cost, *w.note_paragraphs(report.notes), facts]
    return doc.Document(
        title=w.title("Curvature report", report.versions),
        tone=_tone(report),
        numbers=_key_numbers(report),
        verdict=[*_judge(report), conclude(report), *conclude_details(report)],
        sections=[
            doc.Section("Curvature by layer", layers, "layers"),
            rate_section(report),
            *details,
            doc.Section("Measurement", measured, "measured"),
        ],
        more_charts=[chart for chart in spectra if chart not in shown],
        further=MORE_CHARTS,
    )


def _key_numbers(report: CurvatureReport) -> list[doc.KeyNumber]:
    norm = w.format_number(report.network.norm)
    note = "" if report.network.converged else "not converged"
    if not report.network_measured:
        norm = f"≥ {norm}"
        note = "not measured: bounded by the layers"
    numbers = [doc.KeyNumber("‖H‖ of the network", norm, note)]
    if len(report) > 1:
        norm = w.format_number(report.sharpest.norm)
        name = w.shorten(report.sharpest.name)
        numbers.append(doc.KeyNumber("Sharpest layer", norm, name))
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
    if report.findings or not all(
        math.isfinite(row.norm) for row in (*report.layers, report.network)
    ):
        return "bad"
    return "plain" if report.findings is None else "good" if report.converged else "fair"


def _columns(report: CurvatureReport) -> list[doc.Column]:
    rows = (*report.layers, report.network)

    def texts(write: Callable[[LayerCurvature], str]) -> list[str]:
        # A bound has but its number: the norm may be larger than a bound that is ok.
        return [write(row) for row in rows[:-1]] + [
            write(rows[-1]) if report.network_measured else ""
        ]

    shapes = [*(str(row.shape) for row in report), f"{report.network.parameters:,}"]
    norms = texts(lambda row: w.format_estimate(row.estimate))
    norms[-1] = norms[-1] or f"≥ {w.format_number(report.network.norm)}"
    columns = [
        w.name_column("layer", w.name_rows(rows)),
        doc.Column(
            "weight", shapes, 4, is_number=False, keys=[float(row.parameters) for row in rows]
        ),
        doc.Column("‖H‖", norms, 9, keys=[row.norm for row in rows]),
    ]
    if any(row.indefinite for row in rows):
        ends = texts(lambda row: f"{w.format_estimate(row.bottom)} … {w.format_estimate(row.top)}")
        columns.append(doc.Column("λmin … λmax", ends, 6))
    further = [
        doc.Column("gap", texts(_write_gap), 7),
        doc.Column("per batch", texts(_write_spread), 5),
        doc.Column("trace", texts(lambda row: w.format_estimate(row.trace)), 3),
        doc.Column("‖H‖F", texts(lambda row: w.format_estimate(row.frobenius)), 2),
    ]
    kinds = texts(
        lambda row: ", ".join(one.kind for one in report.findings or () if row.name in one.layers)
    )
    marks = ["no" if one else "" for one in kinds]
    further.append(doc.Column("finding", kinds, 8, is_number=False, marks=marks))
    return [*columns, *(column for column in further if any(column.cells))]


def _write_gap(row: LayerCurvature) -> str:
    if row.gap is None or row.approximation is None:
        return ""
    return ("" if row.converged and row.approximation.converged else "~") + w.format_ratio(row.gap)


def _write_spread(row: LayerCurvature) -> str:
    if row.spread is None or len(row.spread.norms) < 2:
        return ""
    return w.format_mean(row.spread.mean, row.spread.standard_error)


def norms_chart(report: CurvatureReport) -> doc.LineChart:
    """Return the norms over depth, with the network's norm as a line."""
    low, high = zip(*map(_error_bar, report), strict=True)
    name = "Gauss-Newton" if report.curvature == "gauss-newton" else "exact Hessian"
    norms = [layer.norm for layer in report]
    details = [describe_layer(layer) for layer in report]
    series = [doc.Series(name, norms, low=low, high=high, details=details)]
    approximations = [
        None if row.approximation is None else abs(row.approximation.value) for row in report
    ]
    if any(value is not None for value in approximations):
        series.append(doc.Series("Gauss-Newton", approximations, color="vermilion", hollow=True))
    network = ("" if report.network_measured else "at least ") + w.format_number(
        report.network.norm
    )
    description = (
        f"{MATRIX_NAMES[report.curvature]} norm ‖H‖ of {w.count(len(report), 'layer')} on a logarithmic "
        f"axis; the network's is {network}. {conclude(report)} The table below has every number."
    )
    return layer_chart(
        "norms",
        "Curvature ‖H‖ of each layer",
        description,
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
    is_visible = math.isfinite(high) and high > 1.05 * low
    return (max(low, high * 1e-3), high) if is_visible else (None, None)


def describe_layer(layer: LayerCurvature) -> str:
    pieces = [str(layer.shape)]
    if layer.error > 0.005 * abs(layer.norm):
        pieces.append(f"± {w.format_number(layer.error, 2)}")
    return ", ".join(pieces if layer.converged else [*pieces, "not converged"])


def has_rates(report: CurvatureReport) -> bool:
    """Return whether the network's norm, not a bound on it, gives the stable learning rates."""
    return report.network_measured and 0 < report.network.norm < math.inf


def rate_section(report: CurvatureReport, marks: Sequence[doc.ReferenceLine] = ()) -> doc.Section:
    """Return the section of the learning rates: of the optimizer that was named, or of gradient descent."""
    if report.rates is not None:
        return doc.Section(
            "Learning rate", [optimizer_chart(report.rates, _limit_rate(report))], "rate"
        )
    if not has_rates(report):
        text = f"‖H‖ of the network is {w.format_number(report.network.norm)}, which sets no learning rate."
        if not report.network_measured and 0 < report.network.norm < math.inf:
            text = _bound_rates(report)
        return doc.Section("Learning rate", [doc.Paragraph(text, page_only=True)], "rate")
    caption = "Learning rates of plain gradient descent with these weights"
    told = " ".join(
        (_limit_rate(report), *(f"{one.label}: {w.format_number(one.value)}." for one in marks))
    )
    best = report.learning_rate
    limit = report.stable_learning_rate
    return doc.Section(
        "Learning rate", [doc.RateLine("rates", caption, told, best, limit, marks)], "rate"
    )


def optimizer_chart(rates: OptimizerRates | LearningRateAdvice, told: str) -> doc.RateLine:
    """Return the line of an optimizer's learning rates, with the user's own."""
    marks = [] if rates.lr is None else [doc.ReferenceLine(rates.lr, "your rate", "blue")]
    return doc.RateLine(
        "rates",
        f"Learning rates of {rates.optimizer} with these weights",
        told,
        rates.learning_rate,
        rates.stable_learning_rate,
        marks,
        "advised",
        "stability limit",
    )


def describe_cost(report: CurvatureReport) -> str:
    """Return what was measured, by which engine and why, and the time it took."""
    engine = ENGINE_NAMES.get(report.engine, report.engine)
    why = f": {w.unstopped(report.engine_reason)}" if report.engine_reason else ""
    return (
        f"{w.count(len(report), 'layer')}{w.tell_time(report.seconds, report.gradients)} by the {engine} "
        f"engine{why}. {MATRIX_NAMES[report.curvature]} on {w.count(report.examples, 'example')}"
        f"{w.tell_batches(report.batches)}; loss {w.format_number(report.loss)}."
    )


def describe_expected(plan: MeasurementPlan) -> doc.Document:
    """Return what a measurement is expected to cost, and what that is a guess from."""
    engine = ENGINE_NAMES.get(plan.engine, plan.engine)
    # Beside a tiny model everything is large.
    step = f", {w.format_times(plan.training_steps)} times that of a training step" * (
        plan.memory > 2**24
    )
    expected = (
        f"About {w.format_number(plan.gradients, 2)} gradients, or {w.format_number(plan.seconds, 2)} s, and "
        f"{w.format_bytes(plan.memory)} of memory{step}. By the {engine} engine: "
        f"{w.unstopped(plan.engine_reason)}."
    )
    what = (
        f"{w.count(plan.layers, 'layer')} with {w.count(plan.parameters, 'parameter')}; "
        f"{MATRIX_NAMES[plan.curvature]} on {w.count(plan.examples, 'example')}{w.tell_batches(plan.batches)}"
        f", tolerance {plan.tolerance:g}. One gradient took {w.format_number(plan.gradient_seconds, 2)} s. "
        "Nothing was measured; the measurement may take a third or three times as much."
    )
    facts = doc.Facts("Versions", w.write_pairs(plan.versions))
    section = doc.Section("Expected cost", [*w.note_paragraphs(plan.notes), facts], "cost")
    title = w.title("Plan of a measurement", plan.versions)
    return doc.Document(title=title, verdict=[expected, what], sections=[section])


def conclude(report: CurvatureReport, optimizer: str = "") -> str:
    """Return how the layers compare, which learning rates that allows, and which numbers to doubt.

    Only those of plain gradient descent are known: others are left out if `optimizer` is another
    one.
    """
    limit = [_limit_rate(report)] if optimizer in ("", "sgd") else []
    if not optimizer and report.rates is None and has_rates(report):
        limit.append(
            "A network is not a quadratic: advise tries rates, also for momentum and Adam."
        )
    sentences = (
        *_compare_layers(report.layers),
        *_name_extremes(report.layers),
        *limit,
        *_compare_matrices(report.layers, report.network.gap if report.network_measured else None),
        *_name_unconverged(report),
    )
    return " ".join(sentences)


def _judge(report: CurvatureReport) -> list[str]:
    if report.findings is None:
        return []
    if report.findings:
        return ["Not sound:", *map(str, report.findings)]
    is_overruled = any(note.endswith(LEARN_ALL_THE_SAME) for note in report.notes)
    return [SOUND_BY_TRIAL if is_overruled else SOUND]


def _compare_layers(layers: Sequence[LayerCurvature]) -> Iterator[str]:
    curved = sorted((row for row in layers if 0 < row.norm < math.inf), key=lambda row: row.norm)
    if not layers:
        yield "No layer was measured."
    elif len(layers) == 1:
        yield f"{w.call_layer(layers[0].name)} has ‖H‖ = {w.format_number(layers[0].norm)}."
    elif len(curved) > 1 and curved[-1].norm / curved[0].norm < 1.5:
        which = "The" if len(curved) == len(layers) else f"{len(curved)} of"
        yield f"{which} {len(layers)} layers are about equally sharp."
    elif len(curved) > 1 and curved[-1].norm / curved[0].norm > MOST_TIMES_SHARPER:
        norm = w.format_number(curved[-1].norm)
        yield f"{w.call_layer(curved[-1].name)} is the sharpest layer, with ‖H‖ = {norm}."
    elif len(curved) > 1:
        times = w.format_times(curved[-1].norm / curved[0].norm)
        yield f"{w.call_layer(curved[-1].name)} is {times} times sharper than {w.call_layer(curved[0].name)}."


def _name_extremes(layers: Sequence[LayerCurvature]) -> Iterator[str]:
    overflow = "is not finite: the numbers overflow. Initialize with smaller weights, or measure in float64"
    cases: list[tuple[str, Callable[[float], bool]]] = [
        (overflow, lambda norm: not math.isfinite(norm)),
        ("is 0: the loss has no curvature there", lambda norm: norm == 0),
    ]
    for said, is_meant in cases:
        if found := [w.call_layer(row.name) for row in layers if is_meant(row.norm)]:
            yield f"‖H‖ of {w.join_names(found)} {said}."


def _limit_rate(report: CurvatureReport) -> str:
    network = report.network
    rates = report.rates
    if rates is not None:
        doubt = "" if rates.converged else "~"
        best = doubt + write_rate(rates.learning_rate, 2)
        limit = doubt + w.format_number(rates.stable_learning_rate, 2)
        name = rates.optimizer.partition("(betas")[0]
        return f"For {name}: learning rate {best}; on a quadratic, unstable above {limit} (advise tells more)."
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
            f"The most negative eigenvalue (λ = {w.format_number(network.bottom_eigenvalue)}) is the largest "
            f"in size: on a quadratic, a gradient step is guaranteed to lower the loss up to lr = 2/‖H‖ = "
            f"{limit}."
        )
    # Further parameters make ‖H‖ no smaller: the limit also holds with those that are not measured.
    return f"On a quadratic of this curvature, plain gradient descent diverges above lr = 2/‖H‖ = {limit}."


def _bound_rates(report: CurvatureReport) -> str:
    network = report.network
    least = w.format_number(network.norm)
    highest = w.format_number(report.stable_learning_rate, 2)
    # An upper bound is the sum of the layers' norms: of all of them, and only where they are known.
    if math.isfinite(network.error) and all(row.converged for row in report.layers):
        most = network.norm + network.error
        return (
            f"The network was not measured (network=False). The layers bound its ‖H‖ between {least} and "
            f"{w.format_number(most)}, so on a quadratic gradient descent is stable below lr = "
            f"{w.format_number(2 / most, 2)} and diverges above {highest}."
        )
    return (
        f"The network was not measured (network=False): its ‖H‖ is at least {least}"
        + f", so 2/‖H‖ is at most {highest}" * (network.norm > 0)
        + ". Measure the network to know this limit."
    )


def _compare_matrices(layers: Sequence[LayerCurvature], whole: float | None) -> Iterator[str]:
    gaps = [(row.gap, row.name) for row in layers if row.gap is not None and 0 < row.gap < math.inf]
    if not gaps:
        return
    gap, name = max(gaps, key=lambda pair: abs(math.log(pair[0])))
    if abs(gap - 1) >= 0.01:
        times = w.format_ratio(gap)
        yield f"{w.call_layer(name)}'s exact Hessian is {times} times its Gauss-Newton approximation."
        return
    agreed = "The exact Hessian and Gauss-Newton agree within 1 % on every layer"
    if whole is None or not 0 < whole < math.inf or abs(whole - 1) < 0.01:
        yield f"{agreed}."
    else:  # layer by layer a ReLU network has no gap; all of it is between the layers
        yield f"{agreed}; for the whole network the exact one is {w.format_ratio(whole)} times as large."


def _name_unconverged(report: CurvatureReport) -> Iterator[str]:
    rows = (*report.layers, report.network) if report.network_measured else report.layers
    has_ends = any(row.indefinite for row in (*report.layers, report.network))
    doubts: dict[str, str] = {}
    for row in rows:
        ends = [row.top, row.bottom] if has_ends else []
        shown = (row.estimate, row.approximation, row.trace, row.frobenius, *ends)
        if reasons := [
            w.unstopped(one.reason) for one in shown if one is not None and not one.converged
        ]:
            doubts["the network" if row is report.network else w.call_layer(row.name)] = reasons[0]
    if doubts:
        reason = next(iter(doubts.values()))
        yield f"Not converged (marked ~): {w.join_names(list(doubts))}{f'; {reason}' if reason else ''}."
