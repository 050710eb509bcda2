"""The plain data and the picture."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import matplotlib as mpl
import pytest

from hessinit.present.example import example_report
from hessinit.present.products_figure import draw_products
from hessinit.results.curvature_report import CurvatureReport, JacobianBounds, no_products, read_products
from hessinit.results.estimates import Estimate
from hessinit.results.result import to_plain

mpl.use("Agg")

from matplotlib import pyplot
from matplotlib.figure import Figure


def estimate(value: float, converged: bool = True) -> Estimate:
    return Estimate(value, 0.0, converged, "exact", 3)


def products(**changes: Any) -> JacobianBounds:
    fields: dict[str, Any] = {
        "forward": estimate(1.5),
        "forward_largest": 2.0,
        "backward": estimate(0.5),
        "backward_largest": 0.75,
        "activation": 1.0,
        "paper_bound": 300.0,
        "rigorous_bound": 200.0,
        "lipschitz_bound": 1e6,
    }
    return JacobianBounds(**{**fields, **changes})


@pytest.mark.parametrize(
    "row",
    [
        products(),
        products(forward=None, forward_largest=None, paper_bound=None, reason="no start"),
        products(lipschitz_bound=math.inf, note="the batch counts as one"),
        no_products("the forward does not use this weight"),
    ],
)
def test_products_survive_a_trip_through_strict_json(row: JacobianBounds) -> None:
    text = json.dumps(to_plain(row), allow_nan=False)
    assert read_products(json.loads(text)) == row


def test_products_have_converged_when_both_have() -> None:
    assert products().converged
    assert not products(backward=estimate(1.0, converged=False)).converged
    assert products(forward=None).converged


def with_products(rows: list[JacobianBounds | None]) -> CurvatureReport:
    report = example_report()
    layers = [replace(layer, jacobians=row) for layer, row in zip(report.layers, rows, strict=True)]
    return replace(report, layers=tuple(layers))


@pytest.fixture(autouse=True)
def _close_figures() -> Any:
    yield
    pyplot.close("all")


def drawn(axes: Any, label: str) -> list[float]:
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return list(line.get_ydata())


def test_the_picture_has_the_products_above_and_the_bounds_below() -> None:
    upper, lower = draw_products(with_products([products(), products(rigorous_bound=150.0), products()]))
    assert drawn(upper, "forward") == [1.5] * 3
    assert drawn(upper, "backward") == [0.5] * 3
    assert drawn(upper, "1") == [1.0, 1.0]
    assert drawn(lower, "rigorous bound") == [200.0, 150.0, 200.0]
    assert drawn(lower, "paper's bound") == [300.0] * 3
    assert drawn(lower, "Lipschitz product") == [1e6] * 3
    assert drawn(lower, "exact ‖H‖") == [layer.norm for layer in example_report()]
    assert drawn(lower, "Gauss-Newton ‖H‖") == [layer.approximation.value for layer in example_report()]
    assert upper.get_yscale() == lower.get_yscale() == "log"
    assert [label.get_text() for label in lower.get_xticklabels()] == list(example_report().names)
    markers = [(line.get_marker(), line.get_markerfacecolor()) for line in lower.lines]
    assert len(set(markers)) == len(markers)
    bars = [collection.get_segments()[0][:, 1].tolist() for collection in upper.collections]
    assert bars == [[1.5, 2.0]] * 3 + [[0.5, 0.75]] * 3


def test_missing_numbers_leave_gaps_and_missing_bounds_no_line() -> None:
    rows = [products(lipschitz_bound=None), no_products("unknown"), None]
    upper, lower = draw_products(with_products(rows))
    assert [math.isnan(value) for value in drawn(upper, "forward")] == [False, True, True]
    assert [math.isnan(value) for value in drawn(lower, "rigorous bound")] == [False, True, True]
    assert "Lipschitz product" not in [line.get_label() for line in lower.lines]


def test_a_bound_beyond_the_axis_is_marked_at_its_edge() -> None:
    _, lower = draw_products(with_products([products(lipschitz_bound=math.inf), products(), products()]))
    marks = [line for line in lower.lines if list(line.get_ydata()) == [0.97]]
    assert [line.get_xdata()[0] for line in marks] == [0]
    assert all(math.isfinite(edge) for edge in lower.get_ylim())


def test_the_picture_may_go_on_the_users_axes() -> None:
    axes = Figure().subplots(2)
    before = pyplot.get_fignums()
    upper, lower = draw_products(with_products([products()] * 3), axes)
    assert (upper, lower) == tuple(axes)
    assert pyplot.get_fignums() == before


def test_a_report_without_products_says_how_to_get_them() -> None:
    with pytest.raises(ValueError, match=r"no Jacobian products to draw; .*jacobians=True"):
        draw_products(with_products([None] * 3))
