"""A tracking as text, picture, page and JSON."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from hessinit.present.page.content import HeatMap, LineChart, Table
from hessinit.present.page.render import render_page
from hessinit.present.page.tracking import tracking_page, tracking_sections
from hessinit.present.tracking_example import example_tracking
from hessinit.present.tracking_table import render_tracking
from hessinit.results.track_record import TrackedPoint, Tracking

AT_100 = """\
 step    loss   training loss    lr    ‖H‖   lr·‖H‖   of the edge   sharpest layer
───────────────────────────────────────────────────────────────────────────────────
    0     2.3                   0.1      3      0.3          0.15   fc3
   60    1.18            1.21   0.1   6.68    0.668          0.33   fc3
  120   0.606           0.619   0.1   14.9     1.49          0.74   fc3
  180   0.311           0.318   0.1   19.5     1.95          0.98   fc3
  240    0.16           0.163   0.1   20.6     2.06          1.03   fc3

The network sharpened from 3 at step 0 to 20.6 at step 240. lr·‖H‖ reached the edge of stability (2
for SGD) at step 240; 1 of 5 measurements was at or beyond it.
5 measurements of Gauss-Newton on 256 examples took 3.3 % of 3 s."""

AT_60 = """\
 step    loss    lr    ‖H‖   lr·‖H‖   of the edge
──────────────────────────────────────────────────
    0     2.3   0.1      3      0.3          0.15
  120   0.606   0.1   14.9     1.49          0.74
  240    0.16   0.1   20.6     2.06          1.03

The network sharpened from 3 at step 0 to 20.6 at step 240.
lr·‖H‖ reached the edge of stability (2 for SGD) at step
240; 1 of 3 measurements was at or beyond it.
3 measurements of Gauss-Newton on 256 examples took 2 % of 3
s.
Left out of 60 columns: sharpest layer, training loss."""


def some(every: int) -> Tracking:
    whole = example_tracking()
    return replace(whole, points=whole.points[::every], every=20 * every)


@pytest.mark.parametrize(("every", "width", "text"), [(3, 100, AT_100), (6, 60, AT_60)])
def test_the_table_and_the_verdict_are_these(every: int, width: int, text: str) -> None:
    assert render_tracking(some(every), width) == text


def test_many_points_are_thinned_and_the_text_says_so() -> None:
    text = render_tracking(example_tracking(points=101), 80)
    assert "20 of 101 measurements are shown; .points has all." in text
    rows = [line for line in text.splitlines() if "0.1 " in line and "measure" not in line]
    assert len(rows) == 20
    assert rows[0].split()[0] == "0"
    assert rows[-1].split()[0] == "2000"


def test_without_a_rate_there_are_no_columns_of_rates() -> None:
    points = [
        replace(point, lr=None, lr_times_norm=None, lr_over_limit=None, layers={}, training_loss=None)
        for point in example_tracking().points
    ]
    text = render_tracking(replace(example_tracking(), points=tuple(points), optimizer=""), 80)
    assert text.splitlines()[0].split() == ["step", "loss", "‖H‖"]
    assert "edge" not in text


def point(step: int, norm: float, edge: float | None = None, note: str = "") -> TrackedPoint:
    return TrackedPoint(
        step=step, seconds=1.0, measuring_seconds=0.1, loss=1.0, lr=None if edge is None else 0.1, norm=norm,
        error=0.0, converged=math.isfinite(norm), stable_learning_rate=0.1 / edge if edge else math.inf,
        lr_over_limit=edge, note=note,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("points", "verdict"),
    [
        ([], "Nothing was measured."),
        ([point(0, math.nan, note="no weights")], "No measurement succeeded."),
        ([point(0, 3.14159)], "‖H‖ = 3.14 at step 0."),
        ([point(0, 8.0), point(9, 2.0)], "The network flattened from 8 at step 0 to 2 at step 9."),
        (
            [point(0, 2.0), point(5, 9.0), point(9, 2.1)],
            "The sharpness stayed, from 2 at step 0 to 2.1 at step 9, with a peak of 9 at step 5.",
        ),
        (
            [point(0, 2.0, 0.1), point(9, 4.0, 0.2)],
            (
                "The network sharpened from 2 at step 0 to 4 at step 9. For the measured weights the rate "
                "stayed below the edge of stability of SGD: at most 20 % of it, at step 9."
            ),
        ),
        (
            [point(0, 8.0), point(3, math.nan, note="x"), point(9, 2.0)],
            "The network flattened from 8 at step 0 to 2 at step 9. 1 of 3 measurements failed.",
        ),
        (
            [point(0, 8.0), point(3, math.nan, note="x"), point(9, math.nan, note="x")],
            "‖H‖ = 8 at step 0. From step 3 on no measurement succeeded; the training may have diverged.",
        ),
        (
            [point(0, 30.0, 1.5), point(9, 40.0, 2.0)],
            (
                "The network sharpened from 30 at step 0 to 40 at step 9. At every measurement lr·‖H‖ was "
                "at or beyond the edge of stability (2 for SGD)."
            ),
        ),
        (  # the exact Hessian may curve down more than up: ‖H‖ counts that, the edge does not
            [point(0, 30.0, 1.0), point(5, 32.0, 1.6), point(9, 31.0, 1.24)],
            (
                "The sharpness stayed, from 30 at step 0 to 31 at step 9. At every measurement lr·‖H‖ was "
                "at or beyond the edge of stability (2 to 3 for SGD)."
            ),
        ),
    ],
)
def test_the_verdict_says_what_became_of_the_sharpness(points: list[TrackedPoint], verdict: str) -> None:
    assert replace(example_tracking(), points=tuple(points)).verdict == verdict


def test_a_nan_is_shown_with_its_reason() -> None:
    tracking = replace(
        example_tracking(),
        points=(point(0, 3.0, 0.1), point(1, math.nan, note="gone")),
        notes=("Step 1: gone",),
    )
    text = render_tracking(tracking, 80)
    assert "nan" in text
    assert "Note: Step 1: gone" in text
    assert tracking == Tracking.from_json(tracking.to_json())


@pytest.mark.parametrize(
    ("points", "labels"),
    [
        ([point(0, 3.0, 0.1), point(9, 4.0, 0.9)], ["‖H‖ at the end", "closest to the edge"]),
        ([point(0, 30.0, 1.5), point(9, 40.0, 2.0)], ["‖H‖ at the end", "farthest beyond the edge"]),
        ([point(0, 3.0, 0.1), point(9, math.nan)], ["‖H‖ last measured", "closest to the edge"]),
    ],
)
def test_the_numbers_on_top_of_the_page_say_what_they_are(
    points: list[TrackedPoint], labels: list[str]
) -> None:
    page = tracking_page(replace(example_tracking(), points=tuple(points)))
    assert [number.label for number in page.numbers] == [*labels, "measuring"]


def test_a_remark_does_not_hide_that_a_norm_is_rough() -> None:
    rough = replace(point(0, 3.0, note="in eval mode"), converged=False)
    assert "~3" in render_tracking(replace(example_tracking(), points=(rough,)), 80)


def test_names_cannot_steer_a_terminal_or_a_page() -> None:
    nasty = {"<script>alert(1)</script>": 1.0, "[red]\x1b[2J": 2.0}
    tracking = replace(
        example_tracking(name="<b>"), points=(replace(point(0, 3.0), layers=nasty),), notes=("<i>\x07",)
    )
    assert "\x1b" not in render_tracking(tracking, 100)
    assert "[red]" in render_tracking(tracking, 100)
    page = render_page(tracking_page(tracking))
    assert "<script>alert" not in page
    assert "<b>" not in page
    assert "<i>" not in tracking._repr_html_()


def test_reports_open_without_torch(tmp_path: Path) -> None:
    example_tracking().save(tmp_path / "t.json")
    script = (
        "import sys\nfrom hessinit.results.track_record import Tracking\n"
        "tracking = Tracking.load('t.json')\nstr(tracking); tracking.to_html('t.html')\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    assert "Curvature through training" in (tmp_path / "t.html").read_text()


def test_the_picture_has_the_sharpness_its_limit_and_the_loss() -> None:
    tracking = example_tracking()
    ax = tracking.plot()
    sharpness, limit = ax.get_lines()
    assert list(sharpness.get_xdata()) == [point.step for point in tracking.points]
    assert list(sharpness.get_ydata()) == [point.norm for point in tracking.points]
    assert list(limit.get_ydata()) == pytest.approx([20.0] * 13)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["‖H‖", "stable up to 20", "loss"]
    (other,) = (one for one in ax.figure.axes if one is not ax)
    assert len(other.get_lines()[0].get_xdata()) == len(tracking.losses)
    ax.figure.savefig("/dev/null", format="png")  # every warning of matplotlib would be an error
    plt.close("all")


def test_a_picture_is_drawn_where_it_is_asked_for_and_of_odd_points() -> None:
    _, ax = plt.subplots()
    odd = (point(0, math.nan), point(1, math.inf, math.inf), point(2, 0.0, 0.0))
    tracking = replace(example_tracking(), points=odd, losses=((1, math.nan),))
    assert tracking.plot(ax=ax) is ax
    ax.figure.savefig("/dev/null", format="png")
    replace(tracking, points=()).plot().figure.savefig("/dev/null", format="png")
    plt.close("all")


def test_the_page_has_loss_sharpness_edge_layers_and_all_points() -> None:
    tracking = example_tracking()
    page = tracking_page(tracking)
    charts = [block for section in page.sections for block in section.blocks if isinstance(block, LineChart)]
    loss, sharpness, edge, layers = charts
    assert len(loss.series[0].x) == len(tracking.losses)
    assert list(sharpness.series[0].y) == [point.norm for point in tracking.points]
    assert sharpness.rules[0].value == pytest.approx(20.0)
    assert list(edge.series[0].y) == [point.lr_over_limit for point in tracking.points]
    assert edge.rules[0].value == 1.0
    assert [series.name for series in layers.series] == ["fc1", "fc2", "fc3"]
    (table,) = (block for section in page.sections for block in section.blocks if isinstance(block, Table))
    assert all(len(column.cells) == 13 for column in table.columns)
    assert page.verdict[0] == tracking.verdict
    assert len(render_page(page)) < 2_000_000


def test_runs_stand_side_by_side_in_one_chart() -> None:
    runs = [("default", example_tracking(speed=0.2)), ("hessinit", example_tracking())]
    sections = tracking_sections(runs)
    charts = [block for section in sections for block in section.blocks if isinstance(block, LineChart)]
    assert [series.name for series in charts[0].series] == ["default", "hessinit"]
    assert len({series.color for series in charts[1].series}) == 2
    assert [chart.caption for chart in charts[3:]] == [
        "‖H‖ of each layer: default",
        "‖H‖ of each layer: hessinit",
    ]


def test_a_limit_that_moves_is_a_line_of_its_own() -> None:
    points = [
        replace(one, lr_over_limit=(one.lr_over_limit or 0) * (1 + one.step))
        for one in example_tracking().points
    ]
    (section, *_) = tracking_sections([("run", replace(example_tracking(), points=tuple(points)))])
    sharpness = section.blocks[1]
    assert isinstance(sharpness, LineChart)
    assert [series.name for series in sharpness.series] == ["‖H‖", "stable up to"]
    assert not sharpness.rules


def test_many_layers_are_a_map() -> None:
    many = {f"layer{number}": float(number + 1) for number in range(30)}
    points = tuple(replace(one, layers=many) for one in example_tracking(points=90).points)
    sections = tracking_sections([("run", replace(example_tracking(), points=points))])
    (chart,) = (block for section in sections for block in section.blocks if isinstance(block, HeatMap))
    assert len(chart.rows) == 30
    assert len(chart.columns) == 40
    render_page(tracking_page(replace(example_tracking(), points=points)))


def test_an_empty_tracking_is_shown_too() -> None:
    empty = Tracking(curvature="hessian")
    assert "Nothing was measured." in str(empty)
    render_page(tracking_page(empty))
    assert repr(empty) == "<Tracking of 0 points: overhead 0 %>"
