"""Documents of tracked runs: the course of the sharpness, its stability limit, divergence and cost."""

from __future__ import annotations

import math
from dataclasses import replace

import matplotlib.pyplot as plt
import pytest

from hessinit.present import describe, draw, to_text
from hessinit.present.document import LineChart, Table
from hessinit.present.track_record import conclude_tracking, find_divergence
from hessinit.results.track_record import Tracking
from result_examples import example_tracking, make_point

INF, NAN = math.inf, math.nan


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
    [((2.0, INF), (2, INF)), ((2.0, NAN, NAN), (2, NAN)), ((2.0, INF, 3.0), None), ((), None)],
)
def test_training_diverged_if_its_losses_end_without_a_finite_one(losses, end):
    tracking = with_points(make_point(0, 3.0), losses=tuple(enumerate(losses, start=1)))
    assert str(find_divergence(tracking)) == str(end)
    assert describe(tracking).tone == ("plain" if end is None else "bad")
    if end:
        said = f"Training diverged: the loss became {end[1]} at step {end[0]}."
        assert conclude_tracking(tracking)[0] == said
    last = make_point(7, 3.0, training_loss=INF)  # counts where the losses were thinned
    assert find_divergence(with_points(last, losses=((1, 2.0),))) == (7, INF)


def test_the_charts_hold_the_numbers_of_the_record():
    tracking = example_tracking()
    found = charts(tracking)
    assert list(found) == ["sharpness", "loss", "limit", "layers"]
    assert list(found["loss"].series[0].y) == [loss for _, loss in tracking.losses]
    assert list(found["sharpness"].series[0].y) == [point.norm for point in tracking.points]
    assert found["sharpness"].rules[0].value == pytest.approx(20.0)  # 2/lr
    assert list(found["limit"].series[0].y) == [point.lr_over_limit for point in tracking.points]
    numbers = {number.label: number.text for number in describe(tracking).numbers}
    assert numbers == {"last ‖H‖": "20.6", "highest lr / limit": "1.03", "spent measuring": "8.7 %"}
    points = [replace(one, lr_over_limit=one.lr_over_limit * (1 + one.step)) for one in tracking.points]
    moving = charts(with_points(*points))["sharpness"]
    assert [(series.name, series.dashed) for series in moving.series][1:] == [("stability limit", True)]
    assert list(moving.series[1].y) == pytest.approx([point.stable_norm for point in points])
    many = {f"layer{number}": float(number + 1) for number in range(30)}
    layers = charts(with_points(*(replace(one, layers=many) for one in tracking.points)))["layers"]
    assert [series.name for series in layers.series] == [f"layer{29 - at}" for at in range(12)]
    assert layers.caption == "‖H‖ of the 12 sharpest of 30 layers"


def test_without_a_rate_there_are_no_columns_of_rates():
    rough = make_point(0, 3.0, converged=False)
    tracking = with_points(rough, make_point(9, NAN, note="gone"), optimizer="", notes=("Step 9: gone",))
    text = to_text(tracking, 80)
    assert text.splitlines()[0].split() == ["step", "loss", "‖H‖"]
    assert all(part in text for part in ("~3", "nan", "Note: Step 9: gone"))


@pytest.mark.parametrize(
    "tracking",
    [
        Tracking(curvature="hessian"),
        with_points(make_point(0, NAN), make_point(1, INF, INF), make_point(2, 0.0, 0.0)),
        with_points(make_point(0, 3.0, layers={"[red]\x1b[2J": 1.0}), notes=("\x07",), losses=((1, NAN),)),
    ],
)
def test_odd_records_are_shown_all_the_same(tracking):
    assert not {"\x1b", "\x07"} & set(to_text(tracking, 100))
    for chart in describe(tracking).charts:
        draw(tracking, chart.name)[0].figure.canvas.draw()
        plt.close("all")


@pytest.mark.parametrize(
    ("norms", "verdict"),  # norms, and ratios to the limit, at the steps 0, 5, 9
    [
        ([], "Nothing was measured."),
        ([(NAN,), (INF,)], "No measurement gave a finite ‖H‖."),
        ([(3.14159,)], "‖H‖ = 3.14 at step 0."),
        ([(8.0,), (2.0,)], "The sharpness ‖H‖ fell, from 8 at step 0 to 2 at step 5."),
        ([(2.0,), (9.0,), (2.1,)],
         "about the same, from 2 at step 0 to 2.1 at step 9, with a peak of 9 at step 5."),
        ([(2.0, 0.1), (4.0, 0.2)],
         "lr stayed below the stability limit of SGD: at most 20 % of it, at step 5."),
        ([(8.0,), (NAN,), (2.0,)], "1 of 3 measurements gave no finite ‖H‖."),
        # the exact Hessian may curve down more than up: ‖H‖ counts that, the limit does not
        ([(30.0, 1.0), (32.0, 1.6), (31.0, 1.24)],
         "was at or above the stability limit (2 to 3 for SGD) at 3 of 3 measurements, first at step 0."),
    ],
)  # fmt: skip
def test_the_verdict_says_how_the_sharpness_changed_and_where_it_met_its_limit(norms, verdict):
    points = [make_point(step, *one) for step, one in zip((0, 5, 9), norms, strict=False)]
    assert conclude_tracking(with_points(*points))[-1].endswith(verdict)


def test_the_crossing_and_the_tone_agree_with_the_points():
    tracking = example_tracking()
    above = [point.step for point in tracking.points if 0.1 * point.norm >= 2]
    said = f"at {len(above)} of 13 measurements, first at step {above[0]}."
    assert conclude_tracking(tracking)[1].endswith(said)
    assert tracking.crossings[0] == above[0]
    failed = with_points(make_point(0, INF), make_point(1, NAN))
    tones = [describe(one).tone for one in (tracking, example_tracking(points=5), failed)]
    assert tones == ["fair", "plain", "bad"]
