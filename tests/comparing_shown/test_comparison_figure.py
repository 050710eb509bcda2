from __future__ import annotations

import math
from dataclasses import replace

import matplotlib as mpl
import pytest
from shown_examples import make_comparison, make_run, make_sweep, make_two_starts

mpl.use("Agg")

from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hessinit.present.comparison_colours import strokes
from hessinit.present.comparison_curves import curve_of
from hessinit.present.comparison_example import example_comparison, example_sweep
from hessinit.present.comparison_figure import draw_comparison


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


def texts(axes):
    return [text.get_text() for text in axes.texts]


def line(axes, label):
    (found,) = [line for line in axes.lines if line.get_label() == label]
    return found


def crosses(axes):
    return [line for line in axes.lines if line.get_marker() == "X"]


def test_the_map_has_a_cell_for_each_start_and_rate_with_its_loss_and_curvature():
    axes = make_two_starts().plot_heatmap()
    axes.figure.canvas.draw()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["lsuv", "he"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.1", "1"]
    cells = {(round(text.get_position()[0]), round(text.get_position()[1] - 0.1)): [] for text in axes.texts}
    for text in axes.texts:
        cells[round(text.get_position()[0]), round(text.get_position()[1] - 0.1)].append(text.get_text())
    assert cells == {
        (0, 0): ["1.50", "0.4"],
        (1, 0): ["0.550", "4"],
        (0, 1): ["1.10", "0.4"],
        (1, 1): ["diverged 1/2", "4"],
    }


def test_lower_losses_are_darker_and_what_diverged_is_hatched():
    axes = make_two_starts().plot_heatmap()
    cells = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    filled = {
        (round(cell.get_x() + 0.48), round(cell.get_y() + 0.47)): sum(cell.get_facecolor()[:3])
        for cell in cells
        if cell.get_facecolor()[3] == 1
    }
    assert filled[1, 0] < filled[0, 1] < filled[0, 0]
    (hatched,) = [cell for cell in cells if cell.get_hatch()]
    assert (round(hatched.get_x() + 0.48), round(hatched.get_y() + 0.47)) == (1, 1)
    framed = [cell for cell in cells if cell.get_linewidth() > 0]
    assert {(round(cell.get_x() + 0.48), round(cell.get_y() + 0.47)) for cell in framed} == {(0, 1), (1, 0)}


@pytest.mark.parametrize(
    "losses",
    [
        {("a", 0.1): (math.inf,)},
        {("a", 0.1): (None,)},
        {("a", 0.1): (1.0,)},
        {("a", 0.1): (0.0,), ("b", 0.1): (1.0,)},
        {("a", 0.1): (-3.0,), ("b", 0.1): (1.0,)},
        {("a", 0.1): (1e-300,), ("b", 0.1): (1.0,)},
        {(r"$\frac$", 0.1): (1.0,), ("b", 0.1): (math.nan,)},
    ],
)
def test_extremes_are_drawn_all_the_same(losses):
    comparison = make_comparison(losses)
    heatmap, curves = comparison.plot_heatmap(), comparison.plot_losses()[0]
    for figure in (heatmap.figure, curves.figure, draw_comparison(comparison)):
        figure.canvas.draw()
        assert len(figure.axes) >= 1
    assert [label.get_text() for label in heatmap.get_xticklabels()] == ["0.1"]


def test_curves_are_medians_over_seeds_with_a_band_and_one_panel_for_each_rate():
    axes = make_two_starts().plot_losses()
    assert [ax.get_title(loc="left") for ax in axes] == ["lr 0.1", "lr 1"]
    assert list(line(axes[0], "he").get_ydata()) == pytest.approx([2.0, 1.1])
    assert list(line(axes[0], "he").get_xdata()) == [0.5, 1.5]
    (band,) = [
        band
        for band in axes[0].collections
        if {round(y, 3) for y in band.get_paths()[0].vertices[:, 1]} == {2.0, 1.0, 1.2}
    ]
    assert band.get_alpha() < 0.3
    assert axes[0].get_ylim() == axes[1].get_ylim()


def test_seeds_that_break_off_are_crossed_and_counted_and_not_averaged():
    (axes,) = make_two_starts().plot_losses(learning_rate=1.0)
    assert list(line(axes, "he").get_ydata()) == [2.0, 0.9]  # the seed that reached the end
    (cross,) = crosses(axes)
    assert cross.get_color() == line(axes, "he").get_color()
    assert cross.get_ydata()[0] == axes.get_ylim()[1]  # it left at the top
    assert "1/2" in texts(axes)
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["lsuv", "he", "diverged"]


def test_where_no_seed_reaches_the_end_the_line_goes_as_far_as_all_do():
    runs = [
        make_run("a", 1.0, seed, math.inf, losses=losses)
        for seed, losses in enumerate([(2.0, 4.0, math.inf), (2.0, 6.0, 9.0, math.nan)])
    ]
    curve = curve_of(runs, 20)
    assert (curve.median, curve.low, curve.high) == ((2.0, 5.0), (2.0, 4.0), (2.0, 6.0))
    assert (curve.stopped.step, curve.stopped.loss, curve.stopped.seeds) == (2.5, 9.0, 2)


def test_where_all_seeds_break_off_the_cross_is_on_their_line_at_the_top():
    runs = [make_run("a", 1.0, 0, math.inf, losses=(2.0, 4.0, 20.0, math.inf)), make_run("b", 1.0, 0, 4.5)]
    comparison = make_comparison({("a", 1.0): (math.inf,), ("b", 1.0): (4.5,)}, runs=tuple(runs))
    (axes,) = comparison.plot_losses()
    cross = next(cross for cross in crosses(axes) if cross.get_color() == line(axes, "a").get_color())
    top = axes.get_ylim()[1]
    assert 4.5 < top < 20
    # Between the second point, (1.5, 4), and the third, (2.5, 20).
    assert cross.get_xdata()[0] == pytest.approx(1.5 + (top - 4) / 16)
    assert cross.get_ydata()[0] == pytest.approx(top)


def test_seeds_that_rise_and_come_to_the_end_are_crossed_there():
    (axes,) = make_comparison({("a", 0.1): (1.0, 1.0), ("b", 0.1): (2.0, 3.0)}).plot_losses()
    (cross,) = crosses(axes)
    assert (cross.get_xdata()[0], cross.get_ydata()[0]) == (1.5, 2.5)
    assert "1/2" in texts(axes)
    assert "diverged" in [text.get_text() for text in axes.get_legend().get_texts()]


@pytest.mark.parametrize(("optimizer", "drawn"), [("sgd", True), ("momentum", False), ("adam", False)])
def test_the_edge_of_stability_is_drawn_for_plain_descent_only(optimizer, drawn):
    swept = replace(make_sweep({0.1: (1.0,)}, {0.1: 8.0}), optimizer=optimizer)
    _, norms = swept.plot_losses()
    assert ("lr·‖H‖ = 2" in texts(norms)) is drawn


@pytest.mark.parametrize("name", ["he", "h" * 90])
@pytest.mark.parametrize("rates", [1, 2, 3, 4, 6])
def test_no_text_leaves_the_picture(name, rates):
    losses = {(start, 0.1 * (rate + 1)): (1.0,) for start in (name, "b") for rate in range(rates)}
    comparison = make_comparison(losses)
    for figure in (comparison.plot_heatmap().figure, comparison.plot_losses()[0].figure):
        figure.canvas.draw()
        written = [ax.title for ax in figure.axes] + [ax._left_title for ax in figure.axes]
        written += [text for ax in figure.axes if ax.get_legend() for text in ax.get_legend().get_texts()]
        for text in filter(lambda text: text.get_text(), written):
            assert text.get_window_extent().x1 <= figure.bbox.x1 + 1, text.get_text()


def test_the_legend_of_a_sweep_of_twelve_fits():
    stds = [0.01 * number for number in range(1, 13)]
    curves, _ = make_sweep(dict.fromkeys(stds, (1.0,)), dict.fromkeys(stds, 1.0)).plot_losses()
    curves.figure.canvas.draw()
    assert curves.get_legend().get_window_extent().y0 >= -1


@pytest.mark.parametrize(("steps", "middles"), [(20, (0.5, 1.5)), (200, (2.0, 6.0)), (120, (1.5, 4.5))])
def test_points_stand_in_the_middle_of_their_chunks(steps, middles):
    assert curve_of([make_run("a", 0.1, 0, 1.0)], steps).steps == middles


def test_the_users_axes_are_used_and_counted():
    comparison = make_two_starts()
    axes = Figure().subplots(1, 2)
    before = pyplot.get_fignums()
    assert comparison.plot_losses(axes=axes) == tuple(axes)
    single = Figure().add_subplot()
    assert comparison.plot_heatmap(ax=single) is single
    assert pyplot.get_fignums() == before
    with pytest.raises(ValueError, match="axes holds 1 axes; 2 are drawn, so give 2, or None."):
        comparison.plot_losses(axes=[single])
    with pytest.raises(ValueError, match="learning_rate=0.7 was not tried; choose from 0.1, 1.0."):
        comparison.plot_losses(learning_rate=0.7)


def test_a_sweep_is_drawn_as_curves_and_as_loss_over_curvature():
    comparison = make_sweep(
        {1.0: (math.inf, 50.0), 0.1: (1.0, 1.2), 0.01: (1.9, 1.9)}, {1.0: 80.0, 0.1: 8.0, 0.01: 0.2}
    )
    curves, norms = comparison.plot_losses()
    curves.figure.canvas.draw()
    assert [text.get_text() for text in curves.get_legend().get_texts()] == ["1", "0.1", "0.01"]
    points = {round(float(dot.get_xdata()[0]), 9): float(dot.get_ydata()[0]) for dot in norms.lines
              if dot.get_marker() == "o"}  # fmt: skip
    assert points == pytest.approx({0.8: 1.1, 0.02: 1.9})
    (cross,) = crosses(norms)
    assert cross.get_xdata()[0] == pytest.approx(8.0)
    with pytest.raises(ValueError, match=r"a sweep has one learning rate, .*plot_losses\(\) draws"):
        comparison.plot_heatmap()


def test_a_sweep_without_norms_says_so():
    comparison = make_comparison(
        {("std 0.1", 0.1): (1.0,)},
        kind="sweep",
        stds=(0.1,),
        runs=(make_run("std 0.1", 0.1, 0, 1.0, norms=None),),
    )
    _, norms = comparison.plot_losses()
    assert "‖H‖ was not measured" in texts(norms)


def test_twelve_starts_are_told_apart():
    names = [f"start {number}" for number in range(10)] + ["hessinit", "start 1+warmup"]
    looks = strokes(names)
    assert len({(look.color, str(look.linestyle)) for look in looks.values()}) == 12


@pytest.mark.parametrize("made_up", [example_comparison(), example_sweep()])
def test_the_whole_picture_needs_no_window(made_up):
    before = pyplot.get_fignums()
    draw_comparison(made_up).canvas.draw()
    assert pyplot.get_fignums() == before


def test_no_text_of_the_map_lies_over_another():
    figure = draw_comparison(example_comparison())
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.subfigs[0].axes[0].texts]
    for at, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:at])
