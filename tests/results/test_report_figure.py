from __future__ import annotations

import math

import matplotlib as mpl
import pytest
from report_examples import make_estimate, make_layer, make_report, make_three_layers

from hessinit.results.estimates import Spread

mpl.use("Agg")

from matplotlib import pyplot
from matplotlib.figure import Figure


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


def lines(axes, label):
    return [line for line in axes.lines if line.get_label() == label]


def legend(axes):
    return {text.get_text() for text in axes.get_legend().get_texts()}


def test_a_plot_has_a_point_for_each_layer_and_labelled_axes():
    axes = make_three_layers().plot()
    (points,) = lines(axes, "Gauss-Newton")
    assert list(points.get_ydata()) == [0.31, 1.84, 64.0]
    assert axes.get_yscale() == "log"
    assert axes.get_ylabel() == "curvature ‖H‖"
    assert axes.get_xlabel() == "layer, in the order they run"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["fc1", "fc2", "fc3"]
    (network,) = lines(axes, "network")
    assert set(network.get_ydata()) == {64.5}
    assert legend(axes) == {"ok: 0.1 to 10", "network", "Gauss-Newton"}


def test_exact_and_approximate_norms_have_markers_of_their_own():
    layers = [
        make_layer(name, 2.0, curvature="hessian", approximation=make_estimate(1.0))
        for name in ("a", "b", "c", "d")
    ]
    axes = make_report(*layers, curvature="both").plot()
    (exact,), (approximate,) = lines(axes, "exact Hessian"), lines(axes, "Gauss-Newton")
    assert list(exact.get_ydata()) == [2.0] * 4
    assert list(approximate.get_ydata()) == [1.0] * 4
    assert exact.get_marker() != approximate.get_marker()


def test_a_plot_on_the_users_axes_makes_no_figure():
    axes = Figure().add_subplot()
    before = pyplot.get_fignums()
    assert make_three_layers().plot(ax=axes) is axes
    assert pyplot.get_fignums() == before


@pytest.mark.parametrize(
    ("norm", "marker", "height"), [(0.0, "v", 0.03), (math.inf, "^", 0.97), (math.nan, "^", 0.97)]
)
def test_norms_a_log_axis_cannot_hold_stand_at_its_edge_and_are_named(norm, marker, height):
    axes = make_report(make_layer("a", 1.0), make_layer("b", norm), network=norm).plot()
    (edge,) = [line for line in axes.lines if line.get_marker() == marker]
    assert (edge.get_xdata()[0], edge.get_ydata()[0]) == (1, height)
    assert str(norm).replace("0.0", "0") in [text.get_text() for text in axes.texts]
    axes.figure.canvas.draw()


@pytest.mark.parametrize(
    "norms", [[], [0.0], [math.nan, math.inf], [1e-100, 1e100], [1e-300, 1e300], [5e-324]]
)
def test_a_plot_of_nothing_or_of_extremes_still_shows_the_band(norms):
    axes = make_report(*[make_layer(f"l{at}", norm) for at, norm in enumerate(norms)], network=0.0).plot()
    axes.figure.canvas.draw()
    low, high = axes.get_ylim()
    assert low < 0.1
    assert high > 10


def test_the_range_over_batches_is_drawn_and_so_is_a_large_error():
    ranged = make_report(make_layer("a", 2.0, spread=Spread((1.0, 2.0, 4.0)))).plot()
    (bar,) = ranged.collections
    assert bar.get_segments()[0][:, 1].tolist() == [1.0, 4.0]
    assert "range over batches" in legend(ranged)
    uncertain = make_report(make_layer("a", top=make_estimate(2.0, 1.5))).plot()
    assert uncertain.collections[0].get_segments()[0][:, 1].tolist() == [0.5, 3.5]
    assert "error" in legend(uncertain)


def test_labels_of_many_long_names_do_not_overlap():
    names = [f"encoder.layers.{at}.self_attn.out_proj_of_a_very_long_name" for at in range(300)]
    axes = make_report(*[make_layer(name) for name in names]).plot()
    axes.figure.canvas.draw()
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert len(boxes) > 20
    assert all(left.x1 <= right.x0 for left, right in zip(boxes, boxes[1:], strict=False))
    texts = [label.get_text() for label in axes.get_xticklabels()]
    assert len(set(texts)) == len(texts)


def test_a_dollar_in_a_name_is_not_mathematics():
    axes = make_report(make_layer(r"$\frac$"), make_layer("b")).plot()
    axes.figure.canvas.draw()
    assert axes.get_xticklabels()[0].get_text() == r"$\frac$"
