from __future__ import annotations

import math
from dataclasses import replace

import pytest
from shown_examples import make_comparison, make_run, make_sweep, make_two_starts

from hessinit.present.comparison_example import example_comparison, example_sweep
from hessinit.present.page.comparison import comparison_page
from hessinit.present.page.content import (
    DepthChart,
    Details,
    HeatMap,
    LineChart,
    LineSeries,
    Page,
    Table,
    Words,
)
from hessinit.present.page.render import render_page

LINES = "Lines are medians over seeds, bands reach from the least to the largest"


def blocks(page: Page, kind: type) -> list:
    return [block for section in page.sections for block in section.blocks if isinstance(block, kind)]


def chart(page: Page, caption: str) -> LineChart:
    (found,) = [block for block in blocks(page, LineChart) if block.caption.startswith(caption)]
    return found


def line(found: LineChart, name: str) -> LineSeries:
    (one,) = [series for series in found.series if series.name == name and series.symbol == "circle"]
    return one


def crosses(found: LineChart) -> list[LineSeries]:
    return [series for series in found.series if series.symbol == "cross"]


def test_the_map_has_the_loss_of_each_start_at_each_rate_and_none_of_what_diverged():
    (found,) = blocks(comparison_page(make_two_starts()), HeatMap)
    assert (found.rows, found.columns) == (["lsuv", "he"], ["0.1", "1"])
    assert found.values[0] == pytest.approx([1.5, 0.55])
    assert found.values[1][0] == pytest.approx(1.1)
    assert math.isnan(found.values[1][1])
    assert found.texts == [["1.50", "0.550"], ["1.10", "✗ 1/2"]]
    assert found.marked == [[False, True], [True, False]]
    assert found.details[0][1] == "± 0.05 over 2 seeds; lr·‖H‖ = 4 at the start"
    assert found.details[1][1] == "1 of 2 seeds diverged; lr·‖H‖ = 4 at the start"
    assert found.caption.endswith("✗: diverged")
    assert found.description.endswith("Lowest at lr 0.1: he; lr 1: lsuv.")


def test_a_curve_is_the_median_over_seeds_with_their_range():
    losses = [(2.0, 1.0), (2.0, 1.2), (2.0, 1.9)]
    runs = tuple(make_run("a", 0.1, seed, each[1], losses=each) for seed, each in enumerate(losses))
    comparison = make_comparison({("a", 0.1): (1.0, 1.2, 1.9)}, runs=runs)
    curve = line(chart(comparison_page(comparison), "lr 0.1"), "a")
    assert (curve.x, curve.y) == ([0.5, 1.5], [2.0, 1.2])
    assert (curve.low, curve.high) == ([2.0, 1.0], [2.0, 1.9])
    assert curve.details == ["2 to 2", "1 to 1.9"]


def test_seeds_that_diverge_are_a_cross_that_says_how_many():
    found = chart(comparison_page(make_two_starts()), "lr 1")
    assert line(found, "he").y == [2.0, 0.9]  # the seed that reached the end
    (cross,) = crosses(found)
    assert (cross.name, cross.details, cross.in_legend) == ("he", ["1 of 2 seeds diverges"], False)
    assert cross.y == [found.y_range[1]]  # it left at the top


def test_charts_of_all_rates_share_their_axes():
    page = comparison_page(make_two_starts())
    ranges = {(found.x_range, found.y_range) for found in (chart(page, rate) for rate in ("lr 0.1", "lr 1"))}
    assert len(ranges) == 1
    assert next(iter(ranges))[0] == (0.0, 20)


def test_a_line_that_explodes_ends_where_it_leaves_the_chart():
    runs = [make_run("a", 1.0, 0, math.inf, losses=(2.0, 4.0, 20.0, math.inf)), make_run("b", 1.0, 0, 4.5)]
    comparison = make_comparison({("a", 1.0): (math.inf,), ("b", 1.0): (4.5,)}, runs=tuple(runs))
    found = chart(comparison_page(comparison), "lr 1")
    top = found.y_range[1]
    assert 4.5 < top < 20
    # Between the second point, (1.5, 4), and the third, (2.5, 20).
    assert line(found, "a").x == pytest.approx([0.5, 1.5, 1.5 + (top - 4) / 16])
    assert line(found, "a").y == pytest.approx([2.0, 4.0, top])


def test_each_start_is_shown_at_its_own_best_rate_where_these_differ():
    different = make_comparison(
        {("he", 0.1): (1.0,), ("he", 1.0): (1.5,), ("lsuv", 0.1): (1.4,), ("lsuv", 1.0): (0.5,)}
    )
    found = chart(comparison_page(different), "Each start at its own best rate")
    assert [series.name for series in found.series] == ["lsuv, lr 1", "he, lr 0.1"]
    alike = make_comparison(
        {("he", 0.1): (1.0,), ("he", 1.0): (1.5,), ("lsuv", 0.1): (0.4,), ("lsuv", 1.0): (0.5,)}
    )
    assert all("best rate" not in each.caption for each in blocks(comparison_page(alike), LineChart))


def test_curvature_at_the_start_stands_beside_the_edge_of_plain_descent():
    found = chart(comparison_page(make_two_starts()), "‖H‖ of the network")
    assert line(found, "he").y == [4.0, 4.0]
    assert line(found, "he").details == ["lr·‖H‖ = 0.4", "lr·‖H‖ = 4"]
    assert line(found, "stable below this: 2/lr").y == [20.0, 2.0]
    adam = chart(comparison_page(replace(make_two_starts(), optimizer="adam")), "‖H‖ of the network")
    assert [series.name for series in adam.series] == ["lsuv", "he"]
    (depth,) = blocks(comparison_page(make_two_starts()), DepthChart)
    assert (depth.layers, [list(series.values) for series in depth.series]) == (
        ["fc1", "fc2"],
        [[3.0, 1.0]] * 2,
    )


def test_warmup_changes_no_weights_so_its_curvature_is_not_drawn_twice():
    comparison = make_comparison({("he", 0.1): (1.0,), ("he+warmup", 0.1): (0.9,)})
    (depth,) = blocks(comparison_page(comparison), DepthChart)
    assert [series.name for series in depth.series] == ["he"]


def test_the_table_sorts_by_the_numbers_behind_its_texts_and_marks_best_and_diverged():
    (table,) = blocks(comparison_page(make_two_starts()), Table)
    by_heading = {column.heading: column for column in table.columns}
    assert list(by_heading) == ["start", "lr 0.1", "lr 1", "‖H‖", "best lr"]
    assert by_heading["lr 1"].keys == pytest.approx([0.55, math.nan], nan_ok=True)
    assert by_heading["lr 1"].marks == ["best", "diverged"]
    assert by_heading["best lr"].keys == [1.0, 0.1]
    assert by_heading["‖H‖"].keys == [4.0, 4.0]


@pytest.mark.parametrize("measured", [True, False])
def test_every_column_of_a_sweep_has_keys(measured):
    swept = make_sweep({0.1: (1.0,), 1.0: (math.inf,)}, {0.1: 8.0, 1.0: 80.0})
    if not measured:
        swept = replace(swept, runs=tuple(replace(run, norms=None) for run in swept.runs))
    (table,) = blocks(comparison_page(swept), Table)
    keys = {column.heading: list(column.keys) for column in table.columns}
    expected = {"std": [0.1, 1.0], "loss after 20 steps": pytest.approx([1.0, math.nan], nan_ok=True)}
    if measured:
        expected |= {"fc1": [4.0, 40.0], "network": [8.0, 80.0], "lr·‖H‖": pytest.approx([0.8, 8.0])}
    assert keys == expected


def test_a_sweep_goes_from_the_std_over_the_curvature_to_the_loss():
    swept = make_sweep({1.0: (math.inf, 0.5), 0.1: (1.0, 1.2)}, {1.0: 80.0, 0.1: 8.0})
    page = comparison_page(swept)
    norms = chart(page, "‖H‖ at the start, over the std")
    assert (line(norms, "network").x, line(norms, "network").y) == ([0.1, 1.0], [8.0, 80.0])
    assert line(norms, "fc1").y == [4.0, 40.0]
    assert [rule.value for rule in norms.rules] == [20.0]
    for caption, places in (
        ("Final loss, over the std", (1.0, 0.1)),
        ("Final loss, over lr·‖H‖", (8.0, 0.8)),
    ):
        found = chart(page, caption)
        trained = line(found, "std 0.1")
        assert trained.x == pytest.approx([places[1]])
        assert (*trained.y, *trained.low, *trained.high) == pytest.approx((1.1, 1.0, 1.2))  # ± 0.1
        (cross,) = crosses(found)
        assert (cross.x, cross.y) == (pytest.approx([places[0]]), [math.inf])
        assert cross.details == ["1 of 2 seeds diverged"]
    assert [(rule.value, rule.upright) for rule in chart(page, "Final loss, over lr·‖H‖").rules] == [
        (2.0, True)
    ]


def test_many_layers_of_a_sweep_are_shown_over_depth():
    bare = make_sweep({0.1: (1.0,), 1.0: (1.5,)}, {0.1: 8.0, 1.0: 80.0})
    names = [f"layer.{number}" for number in range(9)]
    runs = [
        replace(run, norms={**{name: 2.0 * at for at, name in enumerate(names)}, "network": 8.0})
        for run in bare.runs
    ]
    page = comparison_page(replace(bare, runs=tuple(runs)))
    (depth,) = blocks(page, DepthChart)
    assert list(depth.layers) == names
    assert list(depth.series[0].values) == [2.0 * at for at in range(9)]
    assert [series.name for series in chart(page, "‖H‖ at the start, over the std").series] == ["network"]


@pytest.mark.parametrize(
    "losses",
    [
        {("a", 0.1): (math.inf,)},
        {("a", 0.1): (None,)},
        {("a", 0.1): (1.0,)},
        {("a", 0.1): (0.0,), ("b", 0.1): (1.0,)},
        {("a", 0.1): (-3.0,), ("b", 0.1): (1.0,)},
        {("a", 0.1): (1e-300,), ("b", 0.1): (1.0,)},
        {("", 0.1): (1.0,), ("b", 0.1): (math.nan,)},
    ],
)
def test_extremes_have_a_page_all_the_same(losses):
    comparison = make_comparison(losses)
    page = comparison_page(comparison)
    trains = any(comparison.trains(start, 0.1) for start in comparison.schemes)
    assert bool(page.numbers) == trains
    assert render_page(page).count("<section") == len(page.sections) >= 2


def test_key_numbers_are_those_of_the_lowest_loss():
    compared, swept = comparison_page(make_two_starts()), comparison_page(example_sweep())
    assert [(number.label, number.text, number.note) for number in compared.numbers] == [
        ("lowest loss", "lsuv", "at lr 1"),
        ("final loss", "0.550 ± 0.050", ""),
        ("lr·‖H‖ at the start", "4", ""),
    ]
    assert (swept.numbers[0].label, swept.numbers[0].text) == ("lowest loss at std", "0.5")


@pytest.mark.parametrize("made_up", [example_comparison(), example_sweep()])
def test_the_verdict_comes_first_and_every_chart_is_told_in_words(made_up):
    page = comparison_page(made_up)
    assert page.verdict[0].endswith(".")
    assert page.footer == "Seeds 0, 1, 2, hessinit example."
    for found in [*blocks(page, LineChart), *blocks(page, HeatMap), *blocks(page, DepthChart)]:
        assert found.description.endswith(".")
        assert found.caption
    assert any(words.text.startswith("5 st") for words in blocks(page, Words))


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ((1.0,), ""),
        ((math.inf,), "A cross is where a run diverges."),
        ((1.0, 1.1), f"{LINES}."),
        (
            (1.0, math.inf),
            f"{LINES}; a cross is where seeds diverge.",
        ),
    ],
)
def test_lines_bands_and_crosses_are_explained_where_there_are_any(losses, words):
    comparison = make_comparison({("a", 0.1): losses, ("b", 0.1): (1.0,) * len(losses)})
    (section,) = [each for each in comparison_page(comparison).sections if each.heading == "Loss curves"]
    assert [block.text for block in section.blocks if isinstance(block, Words)] == [words][: bool(words)]


def test_settings_are_there_to_unfold():
    settings = {"model": "Sequential", "curvature_at_start": True, "forward": None}
    (details,) = blocks(comparison_page(replace(make_two_starts(), settings=settings)), Details)
    assert details.pairs == [("model", "Sequential"), ("curvature at start", "true")]
