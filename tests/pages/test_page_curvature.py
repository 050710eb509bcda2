"""What the page of a report holds: the report's own numbers, and a section for what was measured."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from page_examples import hostile_report, make_estimate, make_layer, make_report, rich_report

from hessinit.present.example import example_report
from hessinit.present.page.content import DepthChart, Details, LineChart, RateLine, Table, Words
from hessinit.present.page.curvature import curvature_page, curvature_sections
from hessinit.results.estimates import Spread


def blocks_of(report, kind):
    return [
        block for section in curvature_sections(report) for block in section.blocks if isinstance(block, kind)
    ]


def test_the_verdict_is_the_reports_own():
    report = rich_report()
    page = curvature_page(report)
    assert " ".join(page.verdict) == report.verdict
    assert len(page.verdict) == 3
    assert page.footer == "Tolerance 0.001, seed 0, torch 2.13.0."


def test_the_chart_and_the_table_hold_every_norm():
    report = rich_report()
    chart = blocks_of(report, DepthChart)[0]
    assert list(chart.layers) == ["fc1", "fc2", "fc3"]
    assert list(chart.series[0].values) == [0.31, 1.84, 64.0]
    assert [(rule.value, rule.label) for rule in chart.rules] == [(64.5, "network 64.5")]
    assert (chart.bands[0].low, chart.bands[0].high, chart.bands[0].label) == (0.1, 10.0, "ok: 0.1 to 10")
    table = blocks_of(report, Table)[0]
    norms = next(column for column in table.columns if column.heading == "‖H‖")
    assert list(norms.cells) == ["0.31", "1.84", "64", "64.5"]
    assert list(norms.keys) == [0.31, 1.84, 64.0, 64.5]
    assert table.fixed == 1


def test_both_matrices_are_drawn_side_by_side():
    first, second = blocks_of(example_report(), DepthChart)[0].series
    assert (first.name, list(first.values)) == ("exact Hessian", [0.31, 1.84, 64.0])
    assert (second.name, list(second.values), second.hollow) == ("Gauss-Newton", [0.119, 1.62, 64.0], True)


def test_bars_reach_over_the_batches_or_as_far_as_a_visible_error():
    batches = make_layer("a", 2.0, spread=Spread((1.0, 3.0)))
    doubtful = make_layer("b", 2.0, top=replace(make_estimate(2.0, converged=False), error=1.0))
    chart = blocks_of(make_report(batches, doubtful, make_layer("c", 1.0)), DepthChart)[0]
    assert list(chart.series[0].low) == [1.0, 1.0, None]
    assert list(chart.series[0].high) == [3.0, 3.0, None]
    assert chart.series[0].details[1] == "(4, 3), ok, ± 1, not converged"


def test_the_rate_line_has_one_and_two_over_the_norm():
    (line,) = blocks_of(make_report(make_layer("a", 1.0), network=4.0), RateLine)
    assert (line.best, line.stable) == (0.25, 0.5)


@pytest.mark.parametrize("norm", [0.0, math.inf, math.nan])
def test_without_a_usable_norm_words_stand_for_the_rate_line(norm):
    report = make_report(make_layer("a", 1.0), network=norm)
    assert blocks_of(report, RateLine) == []
    assert any("no rate can be drawn" in block.text for block in blocks_of(report, Words))
    assert len(curvature_page(report).numbers) == 1


def test_sections_are_there_for_what_was_measured_and_for_nothing_else():
    plain = make_report(make_layer("a", 1.0))
    assert [section.heading for section in curvature_sections(plain)] == [
        "Curvature by layer", "Learning rate", "How it was measured",
    ]  # fmt: skip
    assert [section.heading for section in curvature_sections(rich_report())] == [
        "Curvature by layer", "Learning rate", "Spectrum", "Jacobian products and bounds",
        "Activations and gradients", "How it was measured",
    ]  # fmt: skip
    anchors = [section.anchor for section in curvature_sections(rich_report())]
    assert len(set(anchors)) == len(anchors)


def test_spectra_hold_the_density_and_the_eigenvalues():
    report = rich_report()
    *densities, eigenvalues = blocks_of(report, LineChart)
    assert [chart.caption for chart in densities] == [
        f"Spectral density: {name}" for name in ("fc3", "fc2", "fc1")
    ]
    assert list(densities[0].series[0].y) == list(report["fc3"].density.values)
    assert [one.name for one in eigenvalues.series] == ["fc3", "fc2", "fc1"]
    assert list(eigenvalues.series[0].y) == [64.0, 32.0, 64.0 / 3]
    assert eigenvalues.log_y


def test_many_densities_are_those_of_the_sharpest():
    density = rich_report()["fc1"].density
    layers = [make_layer(f"l{place}", 1.0 + place, density=density) for place in range(30)]
    report = make_report(*layers)
    captions = [chart.caption for chart in blocks_of(report, LineChart)]
    assert captions == [f"Spectral density: l{place}" for place in range(29, 20, -1)]
    assert "Of 30 densities, those of the sharpest layers." in [
        block.text for block in blocks_of(report, Words)
    ]


def test_a_negative_eigenvalue_takes_a_plain_axis():
    layer = make_layer("a", 2.0, eigenvalues=(make_estimate(2.0), make_estimate(-1.0)))
    (chart,) = blocks_of(make_report(layer), LineChart)
    assert not chart.log_y


def test_jacobian_products_and_their_bounds_are_drawn():
    _, products, bounds, *_ = blocks_of(rich_report(), DepthChart)
    assert [one.name for one in products.series] == ["forward", "backward"]
    assert list(products.series[0].values) == [0.31 / 10, 1.84 / 10, 6.4]
    assert list(products.series[0].high) == [0.31 / 5, 1.84 / 5, 12.8]
    assert [one.name for one in bounds.series] == [
        "Lipschitz product", "paper's bound", "rigorous bound", "Gauss-Newton ‖H‖",
    ]  # fmt: skip
    assert list(bounds.series[2].values) == [3 * 0.31, 3 * 1.84, 192.0]
    assert list(bounds.series[0].values) == [math.inf] * 3


def test_diagnostics_are_drawn_with_shares_on_a_plain_axis():
    *_, sizes, idle = blocks_of(rich_report(), DepthChart)
    assert [list(one.values) for one in sizes.series] == [[1.0, 0.5, 0.2], [0.01, 0.005, 0.002]]
    assert [(one.name, list(one.values)) for one in idle.series] == [("dead units", [25.0] * 3)]
    assert sizes.log
    assert not idle.log


@pytest.mark.parametrize(
    ("norms", "network", "tone"),
    [
        ((1.0, 2.0), 3.0, "good"),
        ((1.0, 20.0), 3.0, "fair"),
        ((1.0, 1e-5), 3.0, "bad"),
        ((math.nan,), 3.0, "bad"),
    ],
)
def test_the_tone_is_that_of_the_worst_layer(norms, network, tone):
    report = make_report(
        *(make_layer(f"l{place}", norm) for place, norm in enumerate(norms)), network=network
    )
    assert curvature_page(report).tone == tone


def test_numbers_that_did_not_converge_are_not_called_good():
    layer = make_layer("a", 1.0, top=make_estimate(1.0, converged=False))
    assert curvature_page(make_report(layer, network=1.0)).tone == "fair"


def test_a_report_without_layers_still_has_a_page():
    page = curvature_page(make_report())
    assert [type(block) for block in page.sections[0].blocks] == [Table]
    assert page.verdict[0].startswith("No layer was measured.")


def test_notes_settings_and_versions_are_told():
    report = hostile_report()
    notes = [block.text for block in blocks_of(report, Words) if block.tone == "note"]
    assert notes == [f"Note: {note}" for note in report.notes]
    (details,) = blocks_of(report, Details)
    assert ("torch", "2.13.0") in list(details.pairs)
