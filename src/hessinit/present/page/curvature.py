"""What the page of a curvature report holds, a section for each thing that was measured."""

from __future__ import annotations

import math

from hessinit.present.columns import build_columns
from hessinit.present.diagnostics_sentences import conclude_diagnostics
from hessinit.present.page.columns import make_table
from hessinit.present.page.content import (
    Band,
    Block,
    DepthChart,
    DepthSeries,
    Details,
    KeyNumber,
    Page,
    RateLine,
    RateMark,
    Rule,
    Section,
    Words,
)
from hessinit.present.page.diagnostics import diagnostics_section
from hessinit.present.page.products import products_section
from hessinit.present.page.spectra import spectrum_section
from hessinit.present.products_columns import conclude_products
from hessinit.present.sentences import MATRIX_NAMES, bound_rates, conclude, describe_cost
from hessinit.present.words import format_number, printable, shorten
from hessinit.results.curvature_report import FLAT_BELOW, SHARP_ABOVE, CurvatureReport, LayerCurvature

VERDICTS = ("vanishing", "flat", "ok", "sharp", "exploding")


def curvature_page(report: CurvatureReport) -> Page:
    """The report's verdict, its numbers, and how they were measured."""
    sentences = (conclude(report), conclude_products(report), conclude_diagnostics(report))
    return Page(
        title="Curvature report",
        verdict=[sentence for sentence in sentences if sentence],
        numbers=key_numbers(report),
        tone=judge_tone(report),
        sections=curvature_sections(report),
        footer=describe_origin(report),
    )


def curvature_sections(report: CurvatureReport) -> list[Section]:
    """The norms, the learning rate, and what else was asked for."""
    further = (spectrum_section(report), products_section(report), diagnostics_section(report))
    return [
        layers_section(report),
        rate_section(report),
        *(section for section in further if section is not None),
        measuring_section(report),
    ]


def key_numbers(report: CurvatureReport) -> list[KeyNumber]:
    """The few that decide: how sharp the network is, where, and which rates that allows."""
    numbers = [_network_number(report)]
    if len(report) > 1:
        sharpest = report.sharpest
        numbers.append(
            KeyNumber(
                label="Sharpest layer",
                text=format_number(sharpest.norm),
                note=shorten(printable(sharpest.name)),
            )
        )
    if has_rates(report):
        best, stable = report.learning_rate, report.stable_learning_rate
        best_text, stable_text = format_number(best, 2), format_number(stable, 2)
        numbers += [
            KeyNumber(label="Best guaranteed rate", text=best_text, note="1/‖H‖, for these weights"),
            KeyNumber(label="Stable below", text=stable_text, note="2/‖H‖, for these weights"),
        ]
    return numbers


def _network_number(report: CurvatureReport) -> KeyNumber:
    label, text = "‖H‖ of the network", format_number(report.network.norm)
    if not report.network_measured:
        return KeyNumber(label=label, text=f"≥ {text}", note="not measured: bounded by the layers")
    return KeyNumber(label=label, text=text, note="" if report.network.converged else "not converged")


def judge_tone(report: CurvatureReport) -> str:
    """Bad with a layer at either extreme, good when all are in the band and every number can be trusted."""
    words = {row.verdict for row in (*report.layers, report.network)}
    if words & {"vanishing", "exploding"}:
        return "bad"
    if not report.network_measured:
        return "plain"
    return "good" if words == {"ok"} and report.converged else "fair"


def layers_section(report: CurvatureReport) -> Section:
    """Every layer's norm over depth, and the table."""
    rows = (*report.layers, report.network)
    keys = {
        "‖H‖": [row.norm for row in rows],
        "weight": [float(row.parameters) for row in rows],
        "verdict": [float(VERDICTS.index(row.verdict)) for row in rows],
    }
    table = make_table(
        build_columns(report, whole_names=True),
        "Curvature of every layer, in the order they run, and of the network.",
        fixed=1,
        keys=keys,
        show_caption=False,
    )
    blocks: list[Block] = [norms_chart(report)] if report.layers else []
    return Section(heading="Curvature by layer", anchor="layers", blocks=[*blocks, table])


def norms_chart(report: CurvatureReport) -> DepthChart:
    """The norms over depth, the band that counts as ok, and the network's norm as a line."""
    main = "Gauss-Newton" if report.curvature == "gauss-newton" else "exact Hessian"
    bars = [_reach(layer) for layer in report]
    series = [
        DepthSeries(
            name=main,
            values=[layer.norm for layer in report],
            low=[low for low, _ in bars],
            high=[high for _, high in bars],
            details=[describe_layer(layer) for layer in report],
        )
    ]
    approximations = [None if row.approximation is None else abs(row.approximation.value) for row in report]
    if any(value is not None for value in approximations):
        series.append(DepthSeries(name="Gauss-Newton", values=approximations, color="vermilion", hollow=True))
    network = ("" if report.network_measured else "at least ") + format_number(report.network.norm)
    return DepthChart(
        caption="How sharp each layer is",
        description=(
            f"{MATRIX_NAMES[report.curvature]} norm ‖H‖ of {len(report)} layers on a logarithmic axis; "
            f"the network's is {network}. {conclude(report)} The table below has every number."
        ),
        layers=list(report.names),
        series=series,
        y_label="curvature ‖H‖",
        bands=[Band(low=FLAT_BELOW, high=SHARP_ABOVE, label=_ok_label())],
        rules=[Rule(value=report.network.norm, label=f"network {network}")],
    )


def rate_section(report: CurvatureReport, marks: tuple[RateMark, ...] = ()) -> Section:
    """The learning rates that the network's norm allows."""
    if not has_rates(report):
        norm = report.network.norm
        text = f"‖H‖ of the network is {format_number(norm)}, so no rate can be drawn."
        if not report.network_measured and 0 < norm < math.inf:
            text = bound_rates(report)
        return Section(heading="Learning rate", anchor="rate", blocks=[Words(text=text)])
    best, stable = format_number(report.learning_rate, 2), format_number(report.stable_learning_rate, 2)
    line = RateLine(
        caption="Which learning rates gradient descent can take from here",
        description=(
            f"Best guaranteed at 1/‖H‖ = {best}, stable below 2/‖H‖ = {stable}."
            + "".join(f" {mark.label}: {format_number(mark.value)}." for mark in marks)
        ),
        best=report.learning_rate,
        stable=report.stable_learning_rate,
        marks=marks,
    )
    return Section(heading="Learning rate", anchor="rate", blocks=[line])


def measuring_section(report: CurvatureReport) -> Section:
    """By which engine, on how many examples, at what cost, and what to know."""
    pairs = [
        ("curvature", MATRIX_NAMES[report.curvature]),
        ("examples", f"{report.examples:,}"),
        ("batches", str(report.batches)),
        ("loss", format_number(report.loss)),
        ("engine", report.engine),
        ("tolerance", format_number(report.tolerance)),
        ("seed", str(report.seed)),
        *report.versions.items(),
    ]
    return Section(
        heading="How it was measured",
        anchor="measured",
        blocks=[
            Words(text=describe_cost(report), tone="small"),
            *(Words(text=f"Note: {note}", tone="note") for note in report.notes),
            Details(summary="Settings and versions", pairs=pairs),
        ],
    )


def describe_origin(report: CurvatureReport) -> str:
    """Tolerance, seed and versions, in a line."""
    versions = "".join(f", {name} {version}" for name, version in report.versions.items())
    return f"Tolerance {format_number(report.tolerance)}, seed {report.seed}{versions}."


def describe_layer(layer: LayerCurvature) -> str:
    """What hovering adds to a layer's norm: shape, verdict, and how far to trust it."""
    parts = [str(layer.shape), layer.verdict]
    if layer.error > 0.005 * abs(layer.norm):
        parts.append(f"± {format_number(layer.error, 2)}")
    if not layer.converged:
        parts.append("not converged")
    return ", ".join(parts)


def has_rates(report: CurvatureReport) -> bool:
    """Whether the network's norm, not a bound of it, says which rates are stable."""
    return report.network_measured and 0 < report.network.norm < math.inf


def _reach(layer: LayerCurvature) -> tuple[float | None, float | None]:
    """From the smallest to the largest batch where there are several, else as far as the error reaches."""
    if layer.spread is not None and len(layer.spread.norms) > 1:
        return layer.spread.smallest, layer.spread.largest
    low, high = layer.norm - layer.error, layer.norm + layer.error
    visible = math.isfinite(high) and high > 1.05 * low
    return (max(low, high * 1e-3), high) if visible else (None, None)


def _ok_label() -> str:
    return f"ok: {format_number(FLAT_BELOW)} to {format_number(SHARP_ABOVE)}"
