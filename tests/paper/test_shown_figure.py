from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex

from hessinit.present.reproduction_example import example_reproduction
from hessinit.present.reproduction_figure import draw_figure, draw_figure_apart
from hessinit.results.reproduction import Curve, Figure


@pytest.fixture(autouse=True)
def _no_open_figures():
    yield
    pyplot.close("all")


def make_figure(*curves: Curve, **changes: Any) -> Figure:
    given: dict[str, Any] = {"name": "f", "title": "A figure", "x_label": "step", "y_label": "loss"}
    return Figure(curves=curves, **{**given, **changes})


def make_curve(name: str = "a", y: tuple[float, ...] = (3.0, 2.0, 1.0), **changes: Any) -> Curve:
    return Curve(**{"name": name, "x": tuple(map(float, range(1, len(y) + 1))), "y": y, **changes})


def crosses(ax: Axes) -> list[tuple[float, float]]:
    lines = [line for line in ax.lines if line.get_marker() == "X"]
    return [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in lines]


def labels(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_a_line_goes_through_its_numbers_with_a_band_of_one_standard_error():
    ax = draw_figure(make_figure(make_curve(error=(0.5, 0.25, 0.125)), make_curve("b")))
    assert ax.lines[0].get_xydata().tolist() == [[1, 3], [2, 2], [3, 1]]
    band = ax.collections[0].get_paths()[0].vertices
    heights = {x: sorted({y for at, y in band.tolist() if at == x}) for x in (1.0, 2.0, 3.0)}
    assert (heights[1.0][0], heights[1.0][-1]) == (2.5, 3.5)
    assert (heights[3.0][0], heights[3.0][-1]) == (0.875, 1.125)
    assert labels(ax) == ["a", "b"]
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title(loc="left")) == ("step", "loss", "A figure")


@pytest.mark.parametrize("end", [math.inf, math.nan, 1e300])
def test_a_line_that_diverges_ends_in_a_cross_where_its_numbers_end(end):
    ax = draw_figure(make_figure(make_curve(y=(3.0, 2.0, end, end)), make_curve("b"), log_y=True))
    assert crosses(ax) == [(2.0, 2.0)]
    assert labels(ax) == ["a", "b", "diverged"]
    assert ax.get_ylim()[1] < 10


def test_a_line_without_any_number_has_its_cross_at_the_upper_edge():
    ax = draw_figure(make_figure(make_curve(y=(math.inf,) * 3), make_curve("b")))
    (cross,) = [line for line in ax.lines if line.get_marker() == "X"]
    assert crosses(ax) == [(1.0, 1.0)]
    assert cross.get_transform() == ax.get_xaxis_transform()


def test_a_zero_on_a_logarithmic_axis_is_a_gap_and_no_divergence():
    ax = draw_figure(make_figure(make_curve(y=(3.0, 0.0, 1.0)), log_y=True))
    assert np.isnan(ax.lines[0].get_ydata()).tolist() == [False, True, False]
    assert crosses(ax) == []


def test_points_have_bars_and_a_cross_for_each_that_diverged():
    curve = Curve(name="16", x=(0.01, 1.0, 100.0), y=(5.0, 4.0, math.inf), error=(0.5, 0.25, math.nan))
    other = Curve(name="64", x=(0.1, 0.0), y=(4.5, 4.4))
    ax = draw_figure(make_figure(curve, other, log_x=True, style="points"))
    assert ax.get_xscale() == "log"
    assert {line.get_linestyle() for line in ax.lines} == {"None"}
    assert crosses(ax) == [(100.0, 1.0)]
    (bars, _) = [each for each in ax.collections if isinstance(each, LineCollection)]
    assert [segment.tolist() for segment in bars.get_segments()][:2] == [
        [[0.01, 4.5], [0.01, 5.5]],
        [[1.0, 3.75], [1.0, 4.25]],
    ]
    assert labels(ax) == ["16", "64", "diverged"]


def test_eight_curves_are_told_apart_by_colour_or_stroke_and_by_marker():
    names = ["3", "1", "0.3", "0.1", "0.03", "0.01", "0.001", "hessinit"]
    ax = draw_figure(make_figure(*(make_curve(name) for name in names)))
    looks = [(to_hex(line.get_color()), line.get_linestyle()) for line in ax.lines]
    assert len(set(looks)) == 8
    assert len({line.get_marker() for line in ax.lines}) == 8
    assert ax.lines[-1].get_linewidth() > ax.lines[0].get_linewidth()


@pytest.mark.parametrize(
    "title", ["short", "Skip-gram, negative sampling: norm at the start and training loss"]
)
@pytest.mark.parametrize("place", [0, 1])
def test_the_legend_lies_above_the_data_and_all_is_inside_the_paper(place, title):
    canvas = draw_figure_apart(replace(example_reproduction().findings.figures[place], title=title))
    canvas.draw_without_rendering()
    (ax,) = canvas.axes
    legend, heading = ax.get_legend().get_window_extent(), ax._left_title.get_window_extent()
    assert legend.y0 > ax.get_window_extent().y1
    assert legend.y1 <= heading.y0
    assert heading.y1 <= canvas.bbox.y1
    assert heading.x1 <= canvas.bbox.x1
    assert legend.x1 <= canvas.bbox.x1
    assert canvas.get_figwidth() == 3.5


def test_a_figure_apart_leaves_pyplot_alone_and_may_go_without_a_title(tmp_path):
    figure = example_reproduction().findings.figures[0]
    canvas = draw_figure_apart(figure, titled=False)
    canvas.savefig(tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    assert pyplot.get_fignums() == []
    assert canvas.axes[0].get_title(loc="left") == ""


def test_plot_draws_the_figure_that_is_named_on_the_axes_given():
    example = example_reproduction()
    _, ax = pyplot.subplots()
    assert example.plot("word2vec-softmax", ax) is ax
    assert ax.get_xlabel() == "‖H‖ of the network at the start"
    assert example.plot().get_xlabel() == "step"
    with pytest.raises(ValueError, match="figure='figure-9' is none of figure-1, word2vec-softmax"):
        example.plot("figure-9")
    bare = replace(example, findings=replace(example.findings, figures=()))
    with pytest.raises(ValueError, match="table-4-mnist has no figure"):
        bare.plot()


@pytest.mark.parametrize("hostile", ["$\\frac$", "$x^$", "\x1b[2J"])
def test_names_that_look_like_mathematics_or_controls_are_drawn_as_they_are(tmp_path, hostile):
    figure = make_figure(
        make_curve(hostile), make_curve("b"), title=hostile, x_label=hostile, y_label=hostile
    )
    canvas = draw_figure_apart(figure)
    canvas.savefig(tmp_path / "f.svg")
    assert labels(canvas.axes[0])[0] == hostile.replace("\x1b", "\\x1b")


@pytest.mark.parametrize("style", ["lines", "points"])
@pytest.mark.parametrize("curves", [(), (make_curve(y=()),), (make_curve(y=(math.nan,)),)])
def test_a_figure_with_nothing_to_draw_is_empty_axes(curves, style):
    canvas = draw_figure_apart(make_figure(*curves, log_x=True, log_y=True, style=style))
    canvas.draw_without_rendering()
    drawn = [line for line in canvas.axes[0].get_lines() if np.isfinite(line.get_ydata()).any()]
    assert len(drawn) == sum(len(curve.y) for curve in curves)  # nothing, or the cross of what diverged
