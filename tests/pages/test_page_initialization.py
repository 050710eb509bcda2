"""What the page of an initialization holds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from page_examples import make_report, rich_report

from hessinit.present.initialization_example import example_initialization
from hessinit.present.page.content import DepthChart, LineChart, RateLine, Table, Words
from hessinit.present.page.initialization import initialization_page, initialization_sections
from hessinit.present.page.render import render_page
from hessinit.results.initialization import PlannedWeight, SchemePlan


def first(result, kind):
    found = [block for section in initialization_sections(result) for block in section.blocks]
    return next(block for block in found if isinstance(block, kind))


def test_before_and_after_are_in_one_chart_with_the_targets_band():
    result = example_initialization()
    chart = first(result, DepthChart)
    assert [(one.name, [round(value, 9) for value in one.values]) for one in chart.series] == [
        ("before", [0.31, 1.84, 64.0]),
        ("after", [12.4, 11.04, 12.8]),
    ]
    (band,) = chart.bands
    assert (band.low, band.high, band.label) == (19.0, 21.0, "target for the network: 20 ± 5 %")
    assert [rule.label for rule in chart.rules] == ["network before 64.5", "network after 20.2"]
    assert "The network's ‖H‖ was 64.5 and is 20.2." in chart.description


def test_the_verdict_says_whether_the_target_was_met():
    result = example_initialization()
    page = initialization_page(result)
    assert page.verdict[:2] == [
        "Met: ‖H‖ = 20.2 is within 5 % of the target.",
        "Target: the network's ‖H‖ = κ/lr = 2/0.1 = 20.",
    ]
    assert page.tone == "good"
    assert [(one.label, one.text, one.note) for one in page.numbers] == [
        ("‖H‖ before", "64.5", ""),
        ("‖H‖ after", "20.2", ""),
        ("Target", "20", ""),
        ("Learning rate", "0.1", "lr·‖H‖ = 2.02"),
    ]
    assert initialization_page(replace(result, converged=False)).tone == "fair"


def test_the_rate_line_has_the_users_rate_and_the_limit_before():
    result = example_initialization()
    line = first(result, RateLine)
    assert (line.best, line.stable) == (pytest.approx(1 / 20.2), pytest.approx(2 / 20.2))
    assert [(mark.label, mark.value) for mark in line.marks] == [
        ("your rate", 0.1), ("stable before", pytest.approx(2 / 64.5)),
    ]  # fmt: skip


def test_a_rate_beyond_the_limit_is_explained_and_one_below_it_is_not():
    def notes(result):
        return [
            block.text
            for section in initialization_sections(result)
            for block in section.blocks
            if isinstance(block, Words) and block.tone == "note"
        ]

    result = example_initialization()
    assert notes(result)[0].startswith("The rate of 0.1 is beyond 2/‖H‖ here.")
    assert notes(replace(result, lr=0.01)) == []


def test_the_search_is_drawn_look_by_look():
    chart = first(example_initialization(), LineChart)
    assert (list(chart.series[0].x), list(chart.series[0].y)) == ([1, 2], [9.3, 20.2])
    assert chart.series[0].details[1] == f"loss 2.34, gain × {math.exp(0.191):.2f}"


def test_layers_rule_has_a_target_for_each_layer():
    chart = first(replace(example_initialization(), rule="layers"), DepthChart)
    assert chart.bands[0].label == "target for each layer: 20 ± 5 %"


def test_reports_of_the_network_alone_are_drawn_as_its_one_point():
    result = replace(
        example_initialization(), before=make_report(), after=make_report(network=20.0), scales={}
    )
    chart = first(result, DepthChart)
    assert list(chart.layers) == ["network"]
    assert [list(one.values) for one in chart.series] == [[64.5], [20.0]]
    assert chart.rules == []


@pytest.mark.parametrize("target", [20.0, math.nan, math.inf])
def test_a_start_that_was_not_finite_and_a_result_that_was_not_measured_have_a_page(target):
    result = replace(example_initialization(), before=None, after=None, target=target, converged=False)
    page = initialization_page(result)
    assert page.tone == "bad"
    assert [one.text for one in page.numbers][:2] == ["not finite", "–"]
    assert "not finite" in render_page(page)


def test_the_plan_and_what_else_was_measured_have_sections():
    weight = PlannedWeight(name="fc1", shape=(16, 64), fan_in=(64.0,), fan_out=(16.0,), std=(0.125,))
    plan = SchemePlan(scheme="lecun", layers=(weight,))
    result = replace(example_initialization(), after=rich_report(), plan=plan, notes=("a note",))
    sections = {section.heading: section for section in initialization_sections(result)}
    assert list(sections) == [
        "Before and after", "Learning rate", "The search", "Spectrum", "Jacobian products and bounds",
        "Activations and gradients", "The start", "How it was done",
    ]  # fmt: skip
    (table,) = sections["The start"].blocks
    assert isinstance(table, Table)
    assert table.columns[-1].cells == ("0.125",)
