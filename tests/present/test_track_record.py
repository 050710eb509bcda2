"""Documents of tracked runs: the course of the sharpness, its stability limit, divergence and cost."""

from __future__ import annotations

import math
from dataclasses import replace

import matplotlib.pyplot as plt
import pytest

from hessinit.present import describe, draw, to_text
from hessinit.present.document import LineChart, Table
from hessinit.present.track_record import conclude_tracking, find_divergence, step_charts
from hessinit.results.track_record import Tracking
from result_examples import example_tracking, make_point


def with_points(*points, **changes) -> Tracking:
    return replace(example_tracking(), points=points, **changes)


def charts(tracking: Tracking) -> dict[str, LineChart]:
    return {chart.name: chart for chart in describe(tracking).charts}


def test_many_points_are_thinned_in_a_terminal_and_on_the_page_all_are_there():
    tracking = example_tracking(points=101)
    assert "20 of 101 measurements are shown; .points has all." in to_text(tracking, 100)
    tables = [block for block in describe(tracking).blocks if isinstance(block, Table)]
    assert [len(table.columns[0].cells) for table in tables] == [20, 101]
    assert (tables[0].columns[0].cells[0], tables[0].columns[0].cells[-1]) == ("0", "2000")


@pytest.mark.parametrize(
    ("losses", "end"),
    [
        ((2.0, 9.0, math.inf), (3, math.inf)),
        ((2.0, math.nan, math.nan), (2, math.nan)),
        ((2.0, math.inf, 3.0), None),  # a step was skipped, and training went on
        ((), None),
    ],
)
def test_training_diverged_if_its_losses_end_without_a_finite_one(losses, end):
    tracking = with_points(make_point(0, 3.0), losses=tuple(enumerate(losses, start=1)))
    assert str(find_divergence(tracking)) == str(end)
    assert describe(tracking).tone == ("plain" if end is None else "bad")
    if end:
        assert (
            conclude_tracking(tracking)[0] == f"Training diverged: the loss became {end[1]} at step {end[0]}."
        )


def test_the_charts_hold_the_numbers_of_the_record():
    tracking = example_tracking()
    found = charts(tracking)
    assert list(found) == ["sharpness", "loss", "limit", "layers"]
    assert list(found["loss"].series[0].y) == [loss for _, loss in tracking.losses]
    assert list(found["sharpness"].series[0].y) == [point.norm for point in tracking.points]
    assert found["sharpness"].rules[0].value == pytest.approx(20.0)  # 2/lr
    assert list(found["limit"].series[0].y) == [point.lr_over_limit for point in tracking.points]
    assert [series.name for series in found["layers"].series] == ["fc3", "fc2", "fc1"]
    assert found["sharpness"].description == "Over the steps: ‖H‖ 3 to 20.6."
    numbers = {number.label: number.text for number in describe(tracking).numbers}
    assert numbers == {"last ‖H‖": "20.6", "highest lr / limit": "1.03", "spent measuring": "8.7 %"}


def test_a_limit_that_moves_is_a_curve():
    points = [
        replace(one, lr_over_limit=one.lr_over_limit * (1 + one.step)) for one in example_tracking().points
    ]
    found = charts(with_points(*points))["sharpness"]
    assert [(series.name, series.dashed) for series in found.series] == [
        ("‖H‖", False),
        ("stability limit", True),
    ]
    assert list(found.series[1].y) == pytest.approx([point.stable_norm for point in points])
    assert not found.rules


def test_two_runs_are_drawn_together():
    found = step_charts([("default", example_tracking(speed=0.2)), ("hessinit", example_tracking())])
    assert [[series.name for series in chart.series] for chart in found] == [["default", "hessinit"]] * 3
    assert len({series.color for series in found[0].series}) == 2


def test_of_many_layers_the_sharpest_are_drawn():
    many = {f"layer{number}": float(number + 1) for number in range(30)}
    points = [replace(one, layers=many) for one in example_tracking().points]
    found = charts(with_points(*points))["layers"]
    assert [series.name for series in found.series] == [f"layer{29 - at}" for at in range(12)]
    assert found.caption == "‖H‖ of the 12 sharpest of 30 layers"


def test_without_a_rate_there_are_no_columns_of_rates():
    tracking = with_points(make_point(0, 3.0), make_point(9, math.nan, note="gone"), optimizer="")
    text = to_text(replace(tracking, notes=("Step 9: gone",)), 80)
    assert text.splitlines()[0].split() == ["step", "loss", "‖H‖"]
    assert "limit" not in text
    assert "nan" in text
    assert "Note: Step 9: gone" in text
    rough = to_text(with_points(make_point(0, 3.0, converged=False, note="in eval mode")), 80)
    assert "~3" in rough


@pytest.mark.parametrize(
    "tracking",
    [
        Tracking(curvature="hessian"),
        with_points(make_point(0, math.nan), make_point(1, math.inf, math.inf), make_point(2, 0.0, 0.0)),
        with_points(
            make_point(0, 3.0, layers={"[red]\x1b[2J": 1.0}), notes=("\x07",), losses=((1, math.nan),)
        ),
    ],
)
def test_odd_records_are_shown_all_the_same(tracking):
    assert not {"\x1b", "\x07"} & set(to_text(tracking, 100))
    for chart in describe(tracking).charts:
        draw(tracking, chart.name)[0].figure.savefig("/dev/null", format="png")
        plt.close("all")


@pytest.mark.parametrize(
    ("norms", "verdict"),  # norms, and ratios to the limit, at the steps 0, 5, 9
    [
        ([], "Nothing was measured."),
        ([(math.nan,), (math.inf,)], "No measurement gave a finite ‖H‖."),
        ([(3.14159,)], "‖H‖ = 3.14 at step 0."),
        ([(8.0,), (2.0,)], "The sharpness ‖H‖ fell, from 8 at step 0 to 2 at step 5."),
        ([(2.0,), (9.0,), (2.1,)],
         "about the same, from 2 at step 0 to 2.1 at step 9, with a peak of 9 at step 5."),
        ([(2.0, 0.1), (4.0, 0.2)],
         "lr stayed below the stability limit of SGD: at most 20 % of it, at step 5."),
        ([(8.0,), (math.nan,), (2.0,)], "1 of 3 measurements gave no finite ‖H‖."),
        # the exact Hessian may curve down more than up: ‖H‖ counts that, the limit does not
        ([(30.0, 1.0), (32.0, 1.6), (31.0, 1.24)],
         "was at or above the stability limit (2 to 3 for SGD) at 3 of 3 measurements, first at step 0."),
    ],
)  # fmt: skip
def test_the_verdict_says_how_the_sharpness_changed_and_where_it_met_its_limit(norms, verdict):
    points = [make_point(step, *one) for step, one in zip((0, 5, 9), norms, strict=False)]
    assert conclude_tracking(with_points(*points))[-1].endswith(verdict)


def test_the_crossing_the_tone_and_the_divergence_agree_with_the_points():
    tracking = example_tracking()
    above = [point.step for point in tracking.points if 0.1 * point.norm >= 2]
    said = conclude_tracking(tracking)[1]
    assert said.endswith(f"at {len(above)} of 13 measurements, first at step {above[0]}.")
    assert tracking.crossings[0] == above[0]
    last = make_point(7, 3.0, training_loss=math.inf)  # counts where the losses were thinned
    assert find_divergence(with_points(last, losses=((1, 2.0),))) == (7, math.inf)
    failed = with_points(make_point(0, math.inf), make_point(1, math.nan))
    tones = [describe(one).tone for one in (tracking, example_tracking(points=5), failed)]
    assert tones == ["fair", "plain", "bad"]
