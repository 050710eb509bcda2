"""The documents of reports and initializations: charts, tables, sections and sentences."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hessinit.present import describe
from hessinit.present.document import LineChart, Paragraph, RateLine, Table
from hessinit.present.initialization import explain_choice, initialization_columns
from hessinit.results.curvature_report import CurvatureReport, Diagnostics, LayerCurvature, Spread
from hessinit.results.initialization import Initialization, PlannedWeight, SchemePlan
from result_examples import (
    make_compared,
    make_estimate,
    make_initialization,
    make_layer,
    make_report,
    make_symmetric,
    make_three_layers,
    make_trial,
    rich_report,
)


def chart(result: CurvatureReport | Initialization, name: str) -> LineChart:
    found = describe(result).chart(name)
    assert isinstance(found, LineChart)
    return found


def values(found: LineChart) -> dict[str, list[float | None]]:
    return {one.name: list(one.y) for one in found.series}


def test_the_chart_and_the_table_hold_every_norm() -> None:
    document = describe(rich_report())
    norms = chart(rich_report(), "norms")
    assert norms.layers == ("fc1", "fc2", "fc3")
    assert values(norms) == {"Gauss-Newton": [0.31, 1.84, 64.0]}
    assert [(rule.value, rule.label) for rule in norms.rules] == [(64.5, "network 64.5")]
    assert not norms.bands  # no range of norms is right for every network
    table = next(block for block in document.blocks if isinstance(block, Table))
    column = next(column for column in table.columns if column.heading == "‖H‖")
    assert list(column.cells) == ["0.31", "1.84", "64", "64.5"]
    assert column.keys == [0.31, 1.84, 64.0, 64.5]
    assert table.fixed == 1
    assert len(document.verdict) == 3
    line = document.chart("rates")
    assert isinstance(line, RateLine)
    assert (line.best, line.stable) == (1 / 64.5, 2 / 64.5)
    layer = make_layer("a", 2.0, curvature="hessian", approximation=make_estimate(-1.0))
    exact, approximate = chart(make_report(layer, curvature="both"), "norms").series
    assert (exact.name, list(exact.y), exact.hollow) == ("exact Hessian", [2.0], False)
    assert (approximate.name, list(approximate.y), approximate.hollow) == ("Gauss-Newton", [1.0], True)


def test_bars_reach_over_the_batches_or_the_error_where_it_is_visible() -> None:
    batches = make_layer("a", 2.0, spread=Spread((1.0, 3.0)))
    doubtful = make_layer("b", 2.0, top=make_estimate(2.0, 1.0, converged=False))
    (series,) = chart(make_report(batches, doubtful, make_layer("c", 1.0)), "norms").series
    assert (series.low, series.high) == ((1.0, 1.0, None), (3.0, 3.0, None))
    assert series.details[1] == "(4, 3), ± 1, not converged"


def test_without_a_usable_norm_a_sentence_replaces_the_rate_line() -> None:
    for norm in (0.0, math.inf, math.nan):
        document = describe(make_report(make_layer(), network=norm))
        texts = [block.text for block in document.blocks if isinstance(block, Paragraph)]
        assert any("sets no learning rate" in text for text in texts)
    with pytest.raises(ValueError, match="no chart 'rates' here; there are: 'norms'.*details=.*'jacob"):
        document.chart("rates")


def test_spectra_hold_the_density_and_the_eigenvalues_and_a_page_shows_the_sharpest() -> None:
    density = rich_report()["fc1"].density
    (drawn,) = chart(rich_report(), "spectrum:fc3").series
    assert (drawn.x, drawn.y) == (density.grid, list(density.values))
    listed = make_layer("a", 2.0, eigenvalues=(make_estimate(2.0), make_estimate(1.0)))
    ranks = chart(make_report(listed), "spectrum:a")
    assert (values(ranks), ranks.log_y) == ({"eigenvalues": [2.0, 1.0]}, True)
    document = describe(make_report(*(make_layer(f"l{n}", 1.0 + n, density=density) for n in range(30))))
    shown = [one.name for one in document.blocks if isinstance(one, LineChart) and one.name != "norms"]
    assert shown == [f"spectrum:l{place}" for place in range(29, 20, -1)]
    assert document.chart("spectrum:l3") in document.more_charts


def test_jacobian_norms_and_bounds_are_drawn() -> None:
    jacobians, bounds = chart(rich_report(), "jacobians"), chart(rich_report(), "bounds")
    assert values(jacobians)["forward"] == [0.031, pytest.approx(0.184), 6.4]
    assert jacobians.series[0].high == [0.062, 0.368, 12.8]
    assert values(bounds) == {
        "paper's bound": [0.155, 0.92, 32.0],
        "rigorous bound": [3 * 0.31, 3 * 1.84, 192.0],
        "Gauss-Newton ‖H‖": [0.31, 1.84, 64.0],
    }
    assert describe(rich_report()).verdict[1] == (
        "The rigorous bound is 3 times ‖H‖: no layer is above its bound. fc1, fc2 and fc3 are above the "
        "paper's bound, which omits biases and f(0)."
    )
    sizes = values(chart(rich_report(), "activations"))
    assert list(sizes.values()) == [[1.0, 0.5, 0.2], [0.01, 0.005, 0.002]]


def diagnosed(name: str, **numbers: object) -> LayerCurvature:
    usual = {"activation": "relu", "activation_std": 1.0, "gradient_std": 0.01}
    return make_layer(name, diagnostics=Diagnostics(**{**usual, **numbers}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        ([diagnosed("a", dead=0.05)], "No layer has 10 % dead units, 25 % saturated entries or activations"),
        ([diagnosed("a", dead=0.3), diagnosed("b", dead=0.2)],
         "Up to 30 % of the units are dead on this batch in a and b."),
        ([diagnosed("a", saturated=0.6)], "Up to 60 % of the entries are saturated in a."),
        ([diagnosed("a", weight_gradient_norm=0.0)], "a gets no gradient from this batch."),
        ([diagnosed("0"), diagnosed("1", activation_std=1e-3)],
         "Layer 0's activations are 1000 times as large as Layer 1's."),
    ],
)  # fmt: skip
def test_diagnostics_say_what_is_wrong(layers: list[LayerCurvature], sentence: str) -> None:
    assert describe(make_report(*layers)).verdict[1].startswith(sentence)


def test_the_tone_is_that_of_the_judgement() -> None:
    doubtful = make_layer("a", 1.0, top=make_estimate(1.0, converged=False))
    for norm in (1e-5, 20.0, 1e5):  # whatever the norm
        assert describe(make_report(make_layer("b", norm), network=3.0, findings=())).tone == "good"
    assert describe(make_report(make_layer("b", math.nan), findings=())).tone == "bad"
    assert describe(make_three_layers()).tone == "bad"
    assert describe(make_report(make_layer())).tone == "plain"
    assert describe(make_report(doubtful, network=1.0, findings=())).tone == "fair"


def test_an_initialization_has_before_after_and_target_in_one_chart() -> None:
    found = chart(make_initialization(), "norms")
    assert values(found) == {"before": [0.31, 1.84, 64.0], "after": [12.4, 11.04, 12.8]}
    (band,) = found.bands
    assert (band.low, band.high, band.label) == (19.0, 21.0, "target for the network: 20 ± 5 %")
    assert [rule.label for rule in found.rules] == ["network before 64.5", "network after 20.2"]
    layers = chart(make_initialization(rule="layers"), "norms")
    assert layers.bands[0].label == "target for each layer: 20 ± 5 %"
    numbers = [(one.label, one.text) for one in describe(make_initialization()).numbers]
    assert numbers[:2] == [("Learning rate", "0.1"), ("‖H‖ before", "64.5")]
    assert [describe(make_initialization(converged=one)).tone for one in (True, False)] == ["good", "fair"]


def test_the_target_is_explained_and_the_rate_line_has_the_rate_and_the_limit_before() -> None:
    for changes, sentence in (
        ({"lr": None}, "Target: the network's ‖H‖ = 20."),
        ({"rule": "layers"}, "Target: every layer's ‖H‖ = κ/lr = 2/0.1 = 20."),
        ({"target": 2.0}, "κ/(10·lr) = 2; momentum makes steps 10 times as long."),
    ):
        assert describe(make_initialization(**changes)).verdict[1].endswith(sentence)
    line = describe(make_initialization()).chart("rates")
    assert isinstance(line, RateLine)
    assert [mark.label for mark in line.marks] == ["your rate", "stability limit before"]
    assert [mark.value for mark in line.marks] == pytest.approx([0.1, 2 / 64.5])


def test_reports_of_the_network_alone_are_one_point_and_those_that_failed_none() -> None:
    alone = {"before": make_report(), "after": make_report(network=20.0), "scales": {}}
    found = chart(make_initialization(**alone), "norms")
    assert (found.layers, found.rules) == (["network"], [])
    assert values(found) == {"before": [64.5], "after": [20.0]}
    failed = {"before": None, "notes": ("before: the old weights are not finite.",)}
    for target in (20.0, math.nan, math.inf):
        found = describe(make_initialization(**failed, after=None, target=target, converged=False))
        assert [one.text for one in found.numbers][:2] == ["0.1", "not finite"]
        assert found.tone == "bad"
    columns = initialization_columns(make_initialization(**failed, after=None))
    assert [column.heading for column in columns] == ["layer", "scale", "‖H‖ before"]
    column = initialization_columns(make_initialization(**failed))[2]
    assert (column.heading, column.cells) == ("‖H‖ before", ["", "", "", "not finite"])
    unmeasured = initialization_columns(make_initialization(before=None))
    assert [column.heading for column in unmeasured] == ["layer", "scale", "‖H‖ after"]


def test_trials_are_a_table_and_a_chart_in_which_the_chosen_weights_stand_out() -> None:
    document, found = describe(make_compared()), chart(make_compared(), "trials")
    assert values(found)["your weights"] == pytest.approx([2.4, 2.3, 2.2, 2.1, 2.0, 1.9])
    assert [(one.name, one.dashed) for one in found.series] == [("hessinit", False), ("your weights", True)]
    assert document.charts[0] == found  # of a picture, too
    assert document.sections[0].heading == "Trials"
    assert ("Weights", "hessinit") in [(one.label, one.text) for one in document.numbers]
    many = chart(make_compared(searched=(0.05, 0.2)), "trials")
    names = ["hessinit, 0.1", "your weights, 0.05", "your weights, 0.2"]
    assert list(dict.fromkeys(one.name for one in many.series)) == names
    assert [one.dashed for one in many.series] == [False, True, True, True]
    assert [one.name for one in many.series if one.points] == names[2:]  # the cross of a divergence


def test_the_reason_of_a_choice_says_how_both_starts_ended() -> None:
    new, own = make_trial("hessinit", 6, 0.25), make_trial("your weights", 6, 1.9)
    led = "the new weights were chosen: they came to 0.25 in 6 trial steps on fresh mini-batches, your own "
    assert explain_choice((new, own), True, "met") == f"{led}to 1.9. The new ones: met"
    lost = make_trial("your weights", 6, math.nan)
    assert explain_choice((new, lost), True, "met") == f"{led}diverged at step 7. The new ones: met"
    kept = (
        "your own weights were kept: they came to 1.9 in 6 trial steps on halves of this batch, the new ones "
    )
    worse, lost = replace(new, score=2.0), replace(lost, name="hessinit")
    assert explain_choice((own, worse), False, "met") == f"{kept}to 2. The new ones: met"
    assert explain_choice((own, lost), False, "met") == f"{kept}diverged at step 7. The new ones: met"


def test_own_weights_that_ended_higher_were_kept_for_want_of_a_clear_lead() -> None:
    trials = make_trial("your weights", 6, 0.26), make_trial("hessinit", 6, 0.25)
    assert "your own weights were kept: they came to 0.26 in" in explain_choice(trials, True, "met")
    assert "the new ones to 0.25, no clear lead. The new" in explain_choice(trials, True, "met")


def test_where_no_weights_survive_the_rate_at_which_the_old_ones_do_is_told() -> None:
    lost = make_trial("your weights", 3, math.nan), make_trial("hessinit", 0, math.nan, losses=())
    old = {"lr": 0.05, "survival": make_trial("present weights", 24, 2.4, lr=0.05), "target": None}
    document = describe(make_compared(trials=lost, converged=False, reason="none survived", **old))
    assert document.answer == "learning rate: 0.05"
    stayed = "24 trial steps on this batch at lr 0.05: the loss stayed at 2.4."
    assert document.verdict == ["Not met: none survived.", stayed]
    assert document.tone == "bad"
    assert all(one.label != "Weights" for one in document.numbers)
    assert document.chart("trials")
    none_began = tuple(replace(trial, losses=(math.nan,)) for trial in lost)
    assert [one.name for one in describe(make_compared(trials=none_began)).charts] == []


def test_the_survival_test_is_a_sentence_and_a_chart_that_a_picture_can_show() -> None:
    for trial, end in (
        (make_trial("", 24, 3.1, lr=0.125), "at lr 0.125, 1.25 times yours: the loss rose from 2.4 to 3.1."),
        (make_trial("", 3, math.nan), "on this batch at lr 0.1: diverged at step 4."),
    ):
        document = describe(make_symmetric(survival=trial))
        assert document.verdict[2].endswith(end)
        assert [one.name for one in document.charts] == ["steps"]


def test_symmetries_that_are_not_exact_are_marked_and_key_numbers_are_those_of_the_block() -> None:
    result = make_symmetric()
    nearly = tuple(replace(one, exact=one.scale_free) for one in result.symmetries)
    table, text = describe(make_symmetric(symmetries=nearly)).sections[0].blocks
    assert isinstance(table, Table)
    assert isinstance(text, Paragraph)
    assert table.columns[0].cells[1] == "13 against the gains of 9, nearly"
    assert text.text.endswith("what the network computes, except those marked nearly.")
    numbers = {one.label: (one.text, one.note) for one in describe(result).numbers}
    assert numbers["‖H‖ after"] == ("30", "of the scale-free weights")


def test_the_plan_and_what_else_was_measured_have_sections() -> None:
    weight = PlannedWeight(name="fc1", shape=(16, 64), fan_in=(64.0,), fan_out=(16.0,), std=(0.125,))
    plan = SchemePlan(scheme="lecun", layers=(weight,))
    result = replace(make_initialization(), after=rich_report(), plan=plan)
    sections = {section.heading: section for section in describe(result).sections}
    assert list(sections) == [
        "Before and after", "Learning rate", "Spectrum", "Jacobian norms and bounds",
        "Activations and gradients", "Scheme", "Procedure",
    ]  # fmt: skip
    (table,) = sections["Scheme"].blocks
    assert isinstance(table, Table)
    assert table.shown[-1].cells == ["0.125"]
