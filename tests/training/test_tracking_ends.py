"""What is said of a training that diverged, and of measurements that there was no time for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from torch import nn

import tiny
from hessinit.present.page.content import LineChart
from hessinit.present.page.tracking import tracking_page, tracking_sections
from hessinit.present.tracking_example import example_tracking
from hessinit.present.tracking_sentences import describe_tracking, find_divergence
from hessinit.results.track_record import Tracking
from hessinit.training.train_and_track import train_and_track


def diverged(*losses: float) -> Tracking:
    whole = example_tracking()
    return replace(whole, points=whole.points[:1], losses=tuple(enumerate(losses, start=1)))


@pytest.mark.parametrize(
    ("losses", "end"),
    [
        ((2.0, 9.0, math.inf), (3, math.inf)),
        ((2.0, math.nan, math.nan), (2, math.nan)),
        ((2.0, math.inf, 3.0), None),  # a step that was skipped, and training went on
        ((2.0, 3.0), None),
        ((), None),
    ],
)
def test_a_training_diverged_where_its_losses_end_in_no_number(losses, end):
    assert str(find_divergence(diverged(*losses))) == str(end)


def test_the_loss_given_to_a_point_counts_where_the_list_was_thinned():
    tracking = diverged(2.0, 3.0)
    last = replace(tracking.points[0], step=7, training_loss=math.inf)
    assert find_divergence(replace(tracking, points=(*tracking.points, last))) == (7, math.inf)


def test_the_verdict_begins_with_the_divergence_and_the_page_is_red():
    tracking = diverged(2.0, 9.0, math.inf)
    assert tracking.verdict.startswith(
        "The training diverged: the loss became inf at step 3. ‖H‖ = 3 at step 0."
    )
    assert tracking_page(tracking).verdict[0] == tracking.verdict
    assert tracking_page(tracking).tone == "bad"
    failed = replace(tracking.points[0], step=3, norm=math.nan, note="no numbers")
    also = replace(tracking, points=(*tracking.points, failed)).verdict
    assert also.endswith("From step 3 on no measurement succeeded.")  # known, not suspected


@pytest.mark.parametrize(
    ("norm", "words"),
    [(math.inf, "‖H‖ was not finite at any measurement."), (math.nan, "No measurement succeeded.")],
)
def test_norms_that_are_no_numbers_are_bad(norm, words):
    tracking = example_tracking()
    points = tuple(replace(point, norm=norm, lr_over_limit=None) for point in tracking.points)
    assert replace(tracking, points=points).verdict == words
    assert tracking_page(replace(tracking, points=points)).tone == "bad"


def test_other_trainings_are_fair_at_the_edge_and_plain_below():
    assert tracking_page(example_tracking()).tone == "fair"
    assert tracking_page(example_tracking(points=5)).tone == "plain"
    assert tracking_page(Tracking(curvature="hessian")).tone == "plain"


def test_measurements_that_were_left_out_are_counted():
    whole = example_tracking()  # 13 points, one every 20 steps
    assert "due" not in describe_tracking(whole)
    few = replace(whole, points=tuple(whole.points[at] for at in (0, 3, 4, 12)))
    assert describe_tracking(few).endswith(
        "Of 13 that were due, one every 20 steps, 9 were left out: they may take 10 % of the time; a share "
        "of 1 measures all."
    )
    assert "due" not in describe_tracking(replace(few, max_overhead=1.0))
    late = replace(whole, points=tuple(replace(point, step=point.step + 7) for point in whole.points[:-1]))
    assert "Of 13 that were due, one every 20 steps, 1 was left out" in describe_tracking(late)


def run(**options: Any) -> Tracking:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(200, 4, generator=generator)
    settings: dict[str, Any] = {"lr": 0.3, "steps": 12, "batch_size": 20, "max_overhead": 1.0, "every": 5}
    data = inputs, (inputs[:, 0] > 0).long()
    return train_and_track(tiny.network(), tiny.LOSS, data, **{**settings, **options})


def test_the_end_is_measured_whatever_the_share():
    assert [point.step for point in run().points] == [0, 5, 10, 12]
    assert [point.step for point in run(steps=10).points] == [0, 5, 10]
    assert [point.step for point in run(max_overhead=1e-9).points] == [0, 12]
    assert "Of 3 that were due, one every 5 steps, 1 was left out" in describe_tracking(
        run(max_overhead=1e-9)
    )


def test_a_training_that_explodes_says_so_first():
    data = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(40, 1)
    tracking = train_and_track(
        nn.Linear(4, 1), nn.MSELoss(), data, lr=1e12, steps=50, every=100, batch_size=20, max_overhead=0.5
    )
    step, loss = tracking.losses[-1]
    assert tracking.verdict.startswith(f"The training diverged: the loss became {loss} at step {step}.")
    assert tracking.points[-1].step == step


def labels(ax: Any) -> list[str]:
    ax.figure.canvas.draw()
    low, high = sorted(ax.get_ylim())
    ticks = zip(ax.get_yticks(), ax.get_yticklabels(), strict=True)
    return [text.get_text() for place, text in ticks if low <= place <= high and text.get_text()]


@pytest.mark.parametrize("largest", [3.0, 40.0, 1e4, 1e12, 1e38])
def test_both_axes_of_the_picture_have_numbers_however_far_they_reach(largest):
    whole = example_tracking()
    grown = [(step, 2.3 * (largest / 2.3) ** (step / 6)) for step in range(7)]
    points = tuple(
        replace(point, norm=21.0 * (largest / 2.3) ** (point.step / 240), lr_over_limit=None, lr=None)
        for point in whole.points
    )
    ax = replace(whole, points=points, losses=(*grown, (7, math.inf))).plot()
    (other,) = (one for one in ax.figure.axes if one is not ax)
    for axis in (ax, other):
        assert 2 <= len(labels(axis)) <= 12
    plt.close("all")


def charts_of(runs: list[tuple[str, Tracking]]) -> list[LineChart]:
    return [
        block
        for section in tracking_sections(runs)
        for block in section.blocks
        if isinstance(block, LineChart)
    ]


def test_the_curves_of_one_run_are_named_by_what_they_show():
    loss, sharpness, edge, _ = charts_of([("training", example_tracking())])
    names = [chart.series[0].name for chart in (loss, sharpness, edge)]
    assert names == ["training loss", "‖H‖", "share of the stable rate"]
    assert loss.description == "The training loss over the steps ends at 0.163."
    assert sharpness.description == "‖H‖ over the steps, from 3 to 20.6. Stable up to 20."
    two = charts_of([("a", example_tracking()), ("b", example_tracking())])
    assert [series.name for series in two[1].series] == ["a", "b"]
    assert two[1].description.startswith("‖H‖ over the steps, a from 3 to 20.6, b from 3")
