"""Every picture in a paper's column: 3.3 inches wide, nothing cut off, no text below 6 points."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import matplotlib as mpl
import pytest
import torch
from torch import nn

mpl.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from hessinit.measurement.measure import measure
from hessinit.present.comparison_example import example_comparison, example_sweep
from hessinit.present.initialization_example import example_initialization
from hessinit.present.reproduction_example import example_reproduction
from hessinit.results.curvature_report import CurvatureReport

COLUMN = 3.3  # inches
SMALLEST = 6.0  # points


@pytest.fixture(scope="module")
def report() -> CurvatureReport:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    batch = torch.randn(16, 6), torch.randint(3, (16,))
    return measure(
        model, nn.CrossEntropyLoss(), batch, curvature="both", jacobians=True, diagnostics=True, density=True,
        top=4,
    )  # fmt: skip


PICTURES: dict[str, tuple[int, Callable[[CurvatureReport, list[Axes]], Any]]] = {
    "norms": (1, lambda report, axes: report.plot(None, *axes)),
    "jacobians": (2, lambda report, axes: report.plot_jacobians(axes)),
    "diagnostics": (1, lambda report, axes: report.plot_diagnostics(*axes)),
    "density": (1, lambda report, axes: report.plot_spectrum("2", *axes)),
    "eigenvalues": (1, lambda report, axes: _without_density(report).plot_spectrum("network", *axes)),
    "initialization": (1, lambda report, axes: example_initialization().plot(None, *axes)),
    "comparison": (1, lambda report, axes: example_comparison().plot(None, *axes)),
    "losses": (1, lambda report, axes: example_comparison().plot_losses(0.3, axes)),
    "sweep": (1, lambda report, axes: example_sweep().plot(None, *axes)),
    "sweep's losses": (2, lambda report, axes: example_sweep().plot_losses(axes=axes)),
    "reproduction": (1, lambda report, axes: example_reproduction().plot("figure-1", *axes)),
    "points": (1, lambda report, axes: example_reproduction().plot("word2vec-softmax", *axes)),
}


def _without_density(report: CurvatureReport) -> CurvatureReport:
    return replace(report, network=replace(report.network, density=None))


def _written(figure: Figure) -> list[Text]:
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return [text for text in texts if text.get_window_extent().width > 0]


@pytest.mark.parametrize("name", PICTURES)
def test_it_is_legible_in_a_column_on_axes_of_the_users(report, name):
    panels, draw = PICTURES[name]
    figure = Figure(figsize=(COLUMN, 2.4 * panels), layout="constrained")
    axes = [figure.add_subplot(panels, 1, place + 1) for place in range(panels)]
    returned = draw(report, axes)
    assert (list(returned) if isinstance(returned, tuple) else [returned]) == axes
    figure.draw_without_rendering()
    written = _written(figure)
    assert len(written) > 5
    assert min(text.get_fontsize() for text in written) >= SMALLEST
    ticks = {id(label) for ax in figure.axes for label in (*ax.get_xticklabels(), *ax.get_yticklabels())}
    for text in written:
        place = text.get_window_extent()
        if id(text) in ticks and not _is_shown(text, figure):
            continue  # matplotlib keeps labels of ticks beyond the ends
        assert place.x0 >= -1, text.get_text()
        assert place.x1 <= figure.bbox.x1 + 1, text.get_text()
        assert place.y0 >= -1, text.get_text()
        assert place.y1 <= figure.bbox.y1 + 1, text.get_text()


def _is_shown(label: Text, figure: Figure) -> bool:
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks() + axis.get_minor_ticks():
                if label in (tick.label1, tick.label2):
                    return low <= tick.get_loc() <= high
    return True


@pytest.mark.parametrize("name", ["norms", "jacobians", "diagnostics", "initialization", "density"])
def test_its_legend_hides_no_data(report, name):
    panels, draw = PICTURES[name]
    figure = Figure(figsize=(COLUMN, 2.4 * panels), layout="constrained")
    axes = [figure.add_subplot(panels, 1, place + 1) for place in range(panels)]
    draw(report, axes)
    figure.draw_without_rendering()
    for ax in axes:
        legend = ax.get_legend().get_window_extent()
        for line in ax.lines:
            marks = line.get_transform().transform(line.get_xydata())
            hidden = [(x, y) for x, y in marks if legend.contains(x, y) and math.isfinite(y)]
            assert not hidden, line.get_label()


def test_no_cell_of_the_map_is_wider_than_its_place():
    figure = Figure(figsize=(COLUMN, 2.8), layout="constrained")
    axes = example_comparison().plot(ax=figure.add_subplot())
    figure.draw_without_rendering()
    width = axes.transData.transform((1, 0))[0] - axes.transData.transform((0, 0))[0]
    assert len(axes.texts) > 20
    for text in axes.texts:
        assert text.get_window_extent().width <= width + 0.5, text.get_text()  # 3.9 measures coarsely
    assert "✗ 3/3" in [text.get_text() for text in axes.texts]
    assert "✗\u00a0diverged" in axes.get_title(loc="left")


def test_a_comparison_and_a_sweep_have_one_picture_to_reach_for():
    compared, swept = example_comparison().plot(), example_sweep().plot()
    assert compared.get_xlabel() == "learning rate"
    assert swept.get_xlabel() == "lr·‖H‖ at the start"
    assert [text.get_text() for text in swept.get_legend().get_texts()] == [
        "1",
        "0.5",
        "0.1",
        "0.05",
        "0.005",
    ]
    pyplot.close("all")


def test_the_upper_axes_of_the_products_name_the_layers_when_they_are_the_users(report):
    upper, lower = report.plot_jacobians(Figure().subplots(1, 2))
    assert [label.get_text() for label in upper.get_xticklabels()] == list(report.names)
    assert upper.get_xlim() == lower.get_xlim()
