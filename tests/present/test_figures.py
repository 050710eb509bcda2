"""Matplotlib figures show the numbers of the document, at a paper's size, whatever the numbers are."""

from __future__ import annotations

import math
from typing import Any

import matplotlib as mpl
import pytest

from hessinit.present import describe, draw, to_figure
from hessinit.present.document import HeatMap, LineChart
from hessinit.present.figures import draw_charts, positions
from result_examples import every_block, hostile_report, make_compared, make_layer, make_report, rich_report

mpl.use("Agg")

from matplotlib import pyplot
from matplotlib.figure import Figure


@pytest.fixture(autouse=True)
def close_figures() -> Any:
    yield
    pyplot.close("all")


def same(found: list[float], wanted: list[float | None], is_log: bool) -> bool:
    def shown(value: float | None) -> float:
        is_held = value is not None and math.isfinite(value) and (value > 1e-100 or not is_log)
        return math.nan if value is None or not is_held else value

    return found == pytest.approx([shown(value) for value in wanted], nan_ok=True)


CHARTS = [(rich_report(), one.name) for one in describe(rich_report()).charts] + [(hostile_report(), "norms")]
CHARTS.append((make_compared(), "trials"))


@pytest.mark.parametrize(("result", "name"), CHARTS, ids=[name for _, name in CHARTS])
def test_a_figure_holds_the_numbers_of_the_chart(result: Any, name: str) -> None:
    chart, (axes,) = describe(result).chart(name), draw(result, name)
    axes.figure.canvas.draw()
    if axes.get_legend():  # it hides no data
        assert axes.get_legend().get_window_extent().y0 >= axes.get_window_extent().y1 - 1
    if not isinstance(chart, LineChart):
        return
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    for series in chart.series:
        x, y = lines[series.name]
        assert x == positions(series)
        assert same(y, list(series.y), chart.log_y)
    for rule in chart.rules:
        assert set(lines[rule.label][0 if rule.upright else 1]) == {rule.value}
    assert (axes.get_yscale() == "log") == chart.log_y
    assert (axes.get_xlabel(), axes.get_ylabel()) == (chart.x_label, chart.y_label)


def test_every_block_can_be_drawn_with_hostile_names_and_numbers() -> None:
    charts = every_block().charts
    axes = draw_charts(charts)
    axes[0].figure.canvas.draw()
    heat = next(chart for chart in charts if isinstance(chart, HeatMap))
    (image,) = axes[charts.index(heat)].images
    assert same(image.get_array().filled(math.nan).ravel().tolist(), [2.0, math.nan, 0.1, 0.5], False)
    texts = [text.get_text() for text in axes[charts.index(heat)].texts]
    assert texts == [text for row in heat.texts for text in row]


def test_numbers_that_the_axis_cannot_hold_are_named_at_its_edge_and_names_are_no_mathematics() -> None:
    norms = {"a$_$b": 0.0, "$\\frac$": math.inf, "c": math.nan, "d": 1.0}
    (axes,) = draw(make_report(*(make_layer(name, norm) for name, norm in norms.items())))
    axes.figure.canvas.draw()
    assert [text.get_text() for text in axes.texts] == ["0", "inf", "nan"]
    assert [label.get_text() for label in axes.get_xticklabels()] == list(norms)
    low, high = axes.get_ylim()
    assert low < 1 < 64.5 < high
    widths = [to_figure(report).get_size_inches()[0] for report in (rich_report(), hostile_report())]
    assert widths == [3.5, 7.0]  # of a column and of a page
    assert 10 < len(draw(hostile_report())[0].get_xticklabels()) < 70


def test_several_charts_share_a_figure_and_own_axes_make_none() -> None:
    upper, lower = draw(rich_report(), ["jacobians", "bounds"])
    assert upper.figure is lower.figure
    before, axes = pyplot.get_fignums(), Figure().subplots(2)
    assert draw(rich_report(), ["jacobians", "bounds"], axes) == list(axes)
    assert pyplot.get_fignums() == before
    with pytest.raises(ValueError, match="there are 1 charts for 2 axes; pass one for each"):
        draw(rich_report(), "norms", axes)
