"""Describe a curvature report: ‖H‖ of every layer, the learning rates, and what else was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from hessinit.present import document as doc
from hessinit.present.layer_details import conclude_details, detail_sections, spectrum_charts
from hessinit.present.words import (
    begin_sentence,
    call_layer,
    count,
    format_estimate,
    format_number,
    format_ratio,
    format_times,
    join_names,
    shorten,
    unstopped,
    write_pairs,
)
from hessinit.results.curvature_report import (
    EXPLODING_ABOVE,
    FLAT_BELOW,
    SHARP_ABOVE,
    VANISHING_BELOW,
    CurvatureReport,
    LayerCurvature,
)
from hessinit.results.estimates import Estimate

MATRIX_NAMES = {
    "gauss-newton": "Gauss-Newton",
    "hessian": "Exact Hessian",
    "both": "Exact Hessian and Gauss-Newton",
}
ENGINE_NAMES = {"gram": "Gram", "lanczos": "Lanczos"}
ABSENT = {
    **dict.fromkeys(
        ("jacobians", "bounds"), "there are no Jacobian norms; measure them with jacobians=True."
    ),
    **dict.fromkeys(("activations", "idle"), "there are no diagnostics; measure them with diagnostics=True."),
}


def describe_report(report: CurvatureReport) -> doc.Document:
    """Return the document of a curvature report."""
    details, spectra = detail_sections(report), spectrum_charts(report)
    shown = [chart for section in details for chart in section.blocks]
    way = "was not measured; ask for density=True, or top=10 for ten eigenvalues."
    names = [row.name for row in (*report.layers, report.network)]
    return doc.Document(
        title="Curvature report",
        verdict=[conclude(report), *conclude_details(report)],
        numbers=_key_numbers(report),
        tone=_tone(report),
        sections=[_layers_section(report), rate_section(report), *details, _settings_section(report)],
        more_charts=[chart for chart in spectra if chart not in shown],
        absent={**ABSENT, **{f"spectrum:{name}": f"the spectrum of {name} {way}" for name in names}},
    )


def _key_numbers(report: CurvatureReport) -> list[doc.KeyNumber]:
    norm, label = format_number(report.network.norm), "‖H‖ of the network"
    if report.network_measured:
        numbers = [doc.KeyNumber(label, norm, "" if report.network.converged else "not converged")]
    else:
        numbers = [doc.KeyNumber(label, f"≥ {norm}", "not measured: bounded by the layers")]
    if len(report) > 1:
        name = shorten(report.sharpest.name)
        numbers.append(doc.KeyNumber("Sharpest layer", format_number(report.sharpest.norm), name))
    if has_rates(report):
        best, limit = format_number(report.learning_rate, 2), format_number(report.stable_learning_rate, 2)
        numbers.append(doc.KeyNumber("Largest guaranteed decrease", best, "at lr = 1/‖H‖"))
        numbers.append(doc.KeyNumber("Stability limit", limit, "lr = 2/‖H‖"))
    return numbers


def _tone(report: CurvatureReport) -> str:
    verdicts = {row.verdict for row in (*report.layers, report.network)}
    if verdicts & {"vanishing", "exploding"}:
        return "bad"
    if not report.network_measured:
        return "plain"
    return "good" if verdicts == {"ok"} and report.converged else "fair"


def _layers_section(report: CurvatureReport) -> doc.Section:
    caption = "Curvature of every layer, in the order they run, and of the network."
    table = doc.Table(caption, _columns(report), fixed=1, show_caption=False)
    charts = [norms_chart(report)] if report.layers else []
    return doc.Section("Curvature by layer", [*charts, table], "layers")


def _columns(report: CurvatureReport) -> list[doc.Column]:
    rows = (*report.layers, report.network)

    def is_bound(row: LayerCurvature) -> bool:
        return row is report.network and not report.network_measured

    def texts(write: Callable[[LayerCurvature], str]) -> list[str]:
        return ["" if is_bound(row) else write(row) for row in rows]

    names = [" = ".join((row.name, *row.aliases)) for row in rows]
    shapes = [*(str(row.shape) for row in report), f"{report.network.parameters:,}"]
    norms = [f"≥ {format_number(row.norm)}" if is_bound(row) else _write(row.estimate) for row in rows]
    columns = [
        doc.Column("layer", names, 9, is_number=False),
        doc.Column("weight", shapes, 4, is_number=False, keys=[float(row.parameters) for row in rows]),
        doc.Column("‖H‖", norms, 9, keys=[row.norm for row in rows]),
    ]
    if any(row.indefinite for row in rows):
        columns.append(doc.Column("λmin … λmax", texts(_write_ends), 6))
    further = [
        doc.Column("gap", texts(_write_gap), 7),
        doc.Column("per batch", texts(_write_spread), 5),
        doc.Column("trace", texts(lambda row: _write(row.trace)), 3),
        doc.Column("‖H‖F", texts(lambda row: _write(row.frobenius)), 2),
    ]
    # A bound has no verdict: the norm may be larger than a bound that is ok.
    verdicts, order = texts(lambda row: row.verdict), [float(doc.VERDICTS.index(row.verdict)) for row in rows]
    verdict = doc.Column("verdict", verdicts, 8, is_number=False, keys=order, marks=verdicts)
    return [*columns, *(column for column in further if any(column.cells)), verdict]


def _write(estimate: Estimate | None) -> str:
    return "" if estimate is None else format_estimate(estimate)


def _write_ends(row: LayerCurvature) -> str:
    # An eigenvalue within its own error of 0 is 0, as for a matrix without full rank.
    ends = (row.bottom, row.top)
    return " … ".join("0" if one.converged and abs(one.value) <= one.error else _write(one) for one in ends)


def _write_gap(row: LayerCurvature) -> str:
    if row.gap is None or row.approximation is None:
        return ""
    return ("" if row.converged and row.approximation.converged else "~") + format_ratio(row.gap)


def _write_spread(row: LayerCurvature) -> str:
    if row.spread is None or len(row.spread.norms) < 2:
        return ""
    return f"{format_number(row.spread.mean)} ± {format_number(row.spread.standard_error, 2)}"


def norms_chart(report: CurvatureReport) -> doc.LineChart:
    """Return the norms over depth, with the range that counts as ok and the network's norm as a line."""
    bars = [_error_bar(layer) for layer in report]
    series = [
        doc.Series(
            "Gauss-Newton" if report.curvature == "gauss-newton" else "exact Hessian",
            [layer.norm for layer in report],
            low=[low for low, _ in bars],
            high=[high for _, high in bars],
            details=[describe_layer(layer) for layer in report],
        )
    ]
    approximations = [None if row.approximation is None else abs(row.approximation.value) for row in report]
    if any(value is not None for value in approximations):
        series.append(doc.Series("Gauss-Newton", approximations, color="vermilion", hollow=True))
    network = ("" if report.network_measured else "at least ") + format_number(report.network.norm)
    ok = f"ok: {format_number(FLAT_BELOW)} to {format_number(SHARP_ABOVE)}"
    description = (
        f"{MATRIX_NAMES[report.curvature]} norm ‖H‖ of {count(len(report), 'layer')} on a logarithmic axis; "
        f"the network's is {network}. {conclude(report)} The table below has every number."
    )
    return doc.LineChart(
        "norms", "Curvature ‖H‖ of each layer", description, series, "curvature ‖H‖",
        layers=report.names, log_y=True,
        bands=[doc.Band(FLAT_BELOW, SHARP_ABOVE, ok)],
        rules=[doc.Rule(report.network.norm, f"network {network}")],
    )  # fmt: skip


def _error_bar(layer: LayerCurvature) -> tuple[float | None, float | None]:
    """From the smallest to the largest batch where there are several, else the range of the error."""
    if layer.spread is not None and len(layer.spread.norms) > 1:
        return layer.spread.smallest, layer.spread.largest
    low, high = layer.norm - layer.error, layer.norm + layer.error
    is_visible = math.isfinite(high) and high > 1.05 * low
    return (max(low, high * 1e-3), high) if is_visible else (None, None)


def describe_layer(layer: LayerCurvature) -> str:
    """Return shape, verdict and error of a layer, as hovering shows them."""
    parts = [str(layer.shape), layer.verdict]
    if layer.error > 0.005 * abs(layer.norm):
        parts.append(f"± {format_number(layer.error, 2)}")
    return ", ".join(parts if layer.converged else [*parts, "not converged"])


def has_rates(report: CurvatureReport) -> bool:
    """Whether the network's norm, not a bound on it, gives the stable learning rates."""
    return report.network_measured and 0 < report.network.norm < math.inf


def rate_section(report: CurvatureReport, marks: Sequence[doc.Rule] = ()) -> doc.Section:
    """Return the section of the learning rates that the network's norm allows."""
    if not has_rates(report):
        text = f"‖H‖ of the network is {format_number(report.network.norm)}, which sets no learning rate."
        if not report.network_measured and 0 < report.network.norm < math.inf:
            text = bound_rates(report)
        return doc.Section("Learning rate", [doc.Text(text, page_only=True)], "rate")
    caption = "Learning rates of gradient descent with these weights"
    description = " ".join(
        (_limit_rate(report), *(f"{one.label}: {format_number(one.value)}." for one in marks))
    )
    best, limit = report.learning_rate, report.stable_learning_rate
    return doc.Section(
        "Learning rate", [doc.RateLine("rates", caption, description, best, limit, marks)], "rate"
    )


def _settings_section(report: CurvatureReport) -> doc.Section:
    settings = ("curvature", "examples", "batches", "loss", "engine", "tolerance", "seed")
    pairs = write_pairs({name: getattr(report, name) for name in settings} | report.versions)
    notes = [doc.Text(f"Note: {note}", "note") for note in report.notes]
    facts = doc.Facts("Settings and versions", pairs)
    return doc.Section("Measurement", [doc.Text(describe_cost(report), "small"), *notes, facts], "measured")


def describe_cost(report: CurvatureReport) -> str:
    """Return what was measured, by which engine and why, and the time it took."""
    spent = f" in {format_number(report.seconds, 2)} s" if report.seconds is not None else ""
    if report.gradients is not None:
        spent += f" ({format_number(report.gradients, 2)} gradients)"
    engine = ENGINE_NAMES.get(report.engine, report.engine)
    why = f": {unstopped(report.engine_reason)}" if report.engine_reason else ""
    batches = f" in {report.batches} batches" if report.batches > 1 else ""
    return (
        f"{count(len(report), 'layer')}{spent} by the {engine} engine{why}. {MATRIX_NAMES[report.curvature]} "
        f"on {count(report.examples, 'example')}{batches}; loss {format_number(report.loss)}."
    )


def conclude(report: CurvatureReport) -> str:
    """Return how the layers compare, which learning rates that allows, and which numbers to doubt."""
    sentences = (
        *_compare_layers(report.layers),
        *_name_extremes(report.layers),
        _limit_rate(report),
        *_compare_matrices(report.layers, report.network.gap if report.network_measured else None),
        *_name_unconverged(report),
    )
    return " ".join(map(begin_sentence, sentences))


def _compare_layers(layers: Sequence[LayerCurvature]) -> Iterator[str]:
    curved = sorted((row for row in layers if 0 < row.norm < math.inf), key=lambda row: row.norm)
    if not layers:
        yield "No layer was measured."
    elif len(layers) == 1:
        norm = format_number(layers[0].norm)
        yield f"{call_layer(layers[0].name)} has ‖H‖ = {norm} ({layers[0].verdict})."
    elif len(curved) > 1 and curved[-1].norm / curved[0].norm < 1.5:
        every = "Both" if len(layers) == 2 else f"All {len(layers)}"
        which = every if len(curved) == len(layers) else f"{len(curved)} of {len(layers)}"
        yield f"{which} layers are about equally sharp."
    elif len(curved) > 1:
        times = format_times(curved[-1].norm / curved[0].norm)
        yield f"{call_layer(curved[-1].name)} is {times} times sharper than {call_layer(curved[0].name)}."


def _name_extremes(layers: Sequence[LayerCurvature]) -> Iterator[str]:
    def named(is_meant: Callable[[float], bool]) -> list[str]:
        return [call_layer(row.name) for row in layers if is_meant(row.norm)]

    if overflowing := named(lambda norm: not math.isfinite(norm)):
        verb = "is" if len(overflowing) == 1 else "are"
        yield (
            f"‖H‖ of {join_names(overflowing)} {verb} not finite: the numbers overflow. "
            "Initialize with smaller weights, or measure in float64."
        )
    if exploding := named(lambda norm: EXPLODING_ABOVE < norm < math.inf):
        verb = "explodes" if len(exploding) == 1 else "explode"
        yield f"{join_names(exploding)} {verb}: ‖H‖ is above {format_number(EXPLODING_ABOVE)}."
    if vanishing := named(lambda norm: 0 < norm < VANISHING_BELOW):
        verb, change = ("vanishes", "changes") if len(vanishing) == 1 else ("vanish", "change")
        limit = format_number(VANISHING_BELOW)
        yield f"{join_names(vanishing)} {verb} (‖H‖ is below {limit}) and hardly {change} the loss."
    if zero := named(lambda norm: norm == 0):
        yield f"{join_names(zero)} {'has' if len(zero) == 1 else 'have'} no curvature (‖H‖ = 0)."


def _limit_rate(report: CurvatureReport) -> str:
    network = report.network
    is_bound = not report.network_measured and network.error > 0
    if network.norm == 0 and not is_bound:
        return "The network has no curvature, so it sets no limit to the learning rate."
    if not math.isfinite(network.norm):
        return f"The network's ‖H‖ is {format_number(network.norm)}: no learning rate is stable."
    if is_bound:
        return bound_rates(report)
    limit, best = format_number(report.stable_learning_rate, 2), format_number(report.learning_rate, 2)
    # Further parameters make ‖H‖ no smaller: the limit also holds with those that are not measured.
    unstable = f"Gradient descent is unstable above lr = 2/‖H‖ = {limit}"
    if -network.bottom_eigenvalue > network.top_eigenvalue:
        # Along a direction of negative curvature no step is too long; 2/‖H‖ only ends the guarantee.
        unstable = (
            f"The most negative eigenvalue (λ = {format_number(network.bottom_eigenvalue)}) is the largest "
            f"in size: a gradient step is guaranteed to lower the loss up to lr = 2/‖H‖ = {limit}"
        )
    return f"{unstable}; lr = 1/‖H‖ = {best} gives the largest guaranteed decrease."


def bound_rates(report: CurvatureReport) -> str:
    """Return what the layers alone say about the learning rates, where network=False left the network out."""
    network = report.network
    least, highest = format_number(network.norm), format_number(report.stable_learning_rate, 2)
    # An upper bound is the sum of the layers' norms: of all of them, and only where they are known.
    if math.isfinite(network.error) and all(row.converged for row in report.layers):
        most = network.norm + network.error
        return (
            f"The network was not measured (network=False). The layers bound its ‖H‖ between {least} and "
            f"{format_number(most)}, so gradient descent is stable below lr = {format_number(2 / most, 2)} "
            f"and unstable above {highest}."
        )
    return (
        f"The network was not measured (network=False): its ‖H‖ is at least {least}, so 2/‖H‖ is at most "
        f"{highest}. Measure the network to know which learning rates are stable."
    )


def _compare_matrices(layers: Sequence[LayerCurvature], whole: float | None) -> Iterator[str]:
    gaps = [(row.gap, row.name) for row in layers if row.gap is not None and 0 < row.gap < math.inf]
    if not gaps:
        return
    gap, name = max(gaps, key=lambda pair: abs(math.log(pair[0])))
    if abs(gap - 1) >= 0.01:
        yield f"{call_layer(name)}'s exact Hessian is {_gap(gap)} times its Gauss-Newton approximation."
        return
    agree = "The exact Hessian and Gauss-Newton agree within 1 % on every layer"
    if whole is None or not 0 < whole < math.inf or abs(whole - 1) < 0.01:
        yield f"{agree}."
    else:  # layer by layer a ReLU network has no gap; all of it is between the layers
        yield f"{agree}; for the whole network the exact one is {_gap(whole)} times as large."


def _gap(gap: float) -> str:
    return format_times(gap) if abs(gap - 1) >= 0.05 else format_number(gap)


def _name_unconverged(report: CurvatureReport) -> Iterator[str]:
    rows = (*report.layers, report.network) if report.network_measured else report.layers
    has_ends = any(row.indefinite for row in (*report.layers, report.network))
    doubts: list[tuple[str, str]] = []
    for row in rows:
        ends = [row.top, row.bottom] if has_ends else []
        for estimate in (row.estimate, row.approximation, row.trace, row.frobenius, *ends):
            if estimate is not None and not estimate.converged:
                name = "the network" if row is report.network else call_layer(row.name)
                doubts.append((name, unstopped(estimate.reason)))
                break
    if doubts:
        names, reason = join_names([name for name, _ in doubts]), doubts[0][1]
        yield f"Not converged (marked ~): {names}{f'; {reason}' if reason else ''}."
