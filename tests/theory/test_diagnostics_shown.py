"""Diagnostics as data, as a table, in sentences and as a picture."""

from __future__ import annotations

import json
import math
from typing import Any

import matplotlib as mpl
import pytest

mpl.use("Agg")

from matplotlib import pyplot
from matplotlib.figure import Figure

from hessinit.present.diagnostics_columns import diagnostics_columns
from hessinit.present.diagnostics_figure import draw_diagnostics
from hessinit.present.diagnostics_sentences import conclude_diagnostics
from hessinit.results.curvature_report import CurvatureReport, Diagnostics, LayerCurvature, read_diagnostics
from hessinit.results.estimates import Estimate
from hessinit.results.result import to_plain

NOTHING_WRONG = (
    "No layer has 10 % dead units; behind activations, sizes stay within a factor of 100 over the depth."
)


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


def make_diagnostics(**changes: Any) -> Diagnostics:
    fields = {"activation": "relu", "activation_mean": 0.4, "activation_std": 0.6, "preactivation_std": 1.0}
    fields |= {"gradient_mean": 0.0, "gradient_std": 1e-3, "weight_gradient_norm": 0.1, "dead": 0.0}
    return Diagnostics(**{**fields, **changes})


def make_layer(name: str, diagnostics: Diagnostics | None) -> LayerCurvature:
    end = Estimate(1.0, 0.0, True, "")
    return LayerCurvature(
        name=name, shape=(4, 3), curvature="gauss-newton", top=end, bottom=end, diagnostics=diagnostics
    )


def make_report(*rows: Diagnostics | None) -> CurvatureReport:
    layers = tuple(make_layer(f"fc{at}", row) for at, row in enumerate(rows, 1))
    return CurvatureReport(
        layers=layers,
        network=make_layer("network", None),
        curvature="gauss-newton",
        loss=1.0,
        examples=8,
        tolerance=1e-3,
        seed=0,
        engine="gram",
    )


def test_diagnostics_survive_json() -> None:
    one = make_diagnostics(gradient_std=math.inf, dead=None, pairs=256, correlation=0.1, reason="why")
    text = json.dumps(to_plain(one), allow_nan=False)
    assert read_diagnostics(json.loads(text)) == one
    assert math.isnan(read_diagnostics(to_plain(make_diagnostics(dead=math.nan))).dead)


def test_a_table_shows_what_there_is() -> None:
    report = make_report(
        make_diagnostics(dead=0.613, correlation=0.21, correlated=0.4),
        Diagnostics(reason="the forward does not use it"),
        make_diagnostics(activation="", dead=None),
    )
    shown = {column.heading: column.cells for column in diagnostics_columns(report)}
    assert shown == {
        "layer": ("fc1", "fc2", "fc3"),
        "activation": ("relu", "–", "–"),
        "mean": ("0.4", "", "0.4"),
        "std": ("0.6", "", "0.6"),
        "std before": ("1", "", ""),
        "grad mean": ("0", "", "0"),
        "grad std": ("0.001", "", "0.001"),
        "dead": ("61 %", "", ""),
        "corr": ("0.21", "", ""),
        "dependent": ("40 %", "", ""),
    }


def test_a_report_without_diagnostics_has_no_such_table_and_no_such_sentence() -> None:
    assert diagnostics_columns(make_report(None, None)) == []
    assert conclude_diagnostics(make_report(None, None)) == ""


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{"dead": 0.613}, {"dead": 0.05}], "fc1: 61 % of its ReLUs are dead on this batch."),
        (
            [{"dead": 0.2}, {"dead": 0.3}],
            "fc2: 30 % of its ReLUs are dead on this batch; 10 % or more in 1 other layer.",
        ),
        (
            [{"activation": "tanh", "dead": None, "saturated": 0.5}],
            "fc1: 50 % of its tanh entries are saturated.",
        ),
        ([{"gradient_std": 1e-6}, {}], "fc2's gradients are 1000 times as large as fc1's."),
        ([{}, {"weight_gradient_norm": 0.0}], "fc2 gets no gradient: it cannot learn from this batch."),
        (
            [{}, {"activation": "", "activation_std": 1e3, "dead": None}],
            NOTHING_WRONG,
        ),
    ],
)
def test_the_verdict_names_what_is_wrong(rows: list[dict[str, Any]], sentence: str) -> None:
    assert conclude_diagnostics(make_report(*[make_diagnostics(**row) for row in rows])) == sentence


def test_a_verdict_is_at_most_two_sentences() -> None:
    rows = [make_diagnostics(dead=0.5, activation_std=1.0), make_diagnostics(activation_std=1e4)]
    rows += [make_diagnostics(weight_gradient_norm=0.0)]
    assert conclude_diagnostics(make_report(*rows)) == (
        "fc3 gets no gradient: it cannot learn from this batch. "
        "fc1: 50 % of its ReLUs are dead on this batch."
    )


def test_a_picture_has_two_lines_and_a_bar_for_each_layer() -> None:
    rows = [make_diagnostics(dead=0.25, gradient_std=10.0**-at) for at in range(4)]
    axes = draw_diagnostics(make_report(*rows))
    axes.figure.canvas.draw()
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert lines == {"activation std": [0.6] * 4, "gradient std": [1, 0.1, 0.01, 0.001]}
    assert axes.get_yscale() == "log"
    assert axes.get_ylabel() == "standard deviation"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["fc1", "fc2", "fc3", "fc4"]
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert sorted(legend) == ["activation std", "dead units", "gradient std"]
    (bars,) = [other for other in axes.figure.axes if other is not axes]
    assert [bar.get_height() for bar in bars.patches] == [0.25] * 4
    # The bars end where the lines begin.
    _, top = axes.transData.transform((0, 1e-3))
    _, tallest = bars.transData.transform((0, 1.0))
    assert tallest <= top


@pytest.mark.parametrize("size", [0.0, math.inf, math.nan])
def test_a_size_that_a_log_axis_cannot_hold_is_named(size: float) -> None:
    axes = draw_diagnostics(make_report(make_diagnostics(), make_diagnostics(gradient_std=size)))
    axes.figure.canvas.draw()
    assert str(size).replace("0.0", "0") in [text.get_text() for text in axes.texts]


def test_a_picture_on_the_users_axes_makes_no_figure() -> None:
    axes = Figure().add_subplot()
    before = pyplot.get_fignums()
    assert draw_diagnostics(make_report(make_diagnostics(), Diagnostics()), axes) is axes
    assert pyplot.get_fignums() == before


def test_a_picture_of_extremes_is_drawn() -> None:
    rows = [make_diagnostics(activation_std=1e-100, gradient_std=1e100)]
    axes = draw_diagnostics(make_report(*rows))
    axes.figure.canvas.draw()
    low, high = axes.get_ylim()
    assert low <= 1e-100 < 1e100 <= high


@pytest.mark.parametrize("rows", [[], [None]])
def test_a_picture_of_nothing_is_refused(rows: list[Diagnostics | None]) -> None:
    with pytest.raises(ValueError, match=r"no diagnostics to draw.*diagnostics=True"):
        draw_diagnostics(make_report(*rows))
