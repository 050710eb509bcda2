from __future__ import annotations

import math

import pytest
from report_examples import make_estimate, make_layer, make_report, make_three_layers


def test_a_layer_is_found_by_name_alias_and_position():
    report = make_report(make_layer("embed", aliases=("head",)), make_layer("fc", 2.0))
    assert report["embed"] is report["head"] is report[0] is report[-2]
    assert [layer.name for layer in report] == ["embed", "fc"] == list(report.names)
    assert len(report) == 2
    assert "head" in report
    assert report["fc"] in report
    assert "network" not in report


def test_an_unknown_name_is_answered_with_the_nearest_ones():
    with pytest.raises(KeyError, match=r"no layer is called 'fc4'\. Did you mean .*'fc1'.*\?"):
        make_three_layers()["fc4"]
    with pytest.raises(KeyError, match=r"Did you mean 'fc3'\?"):
        make_report(make_layer("fc3"), make_layer("convolution"))["fc3.weight"]


def test_a_name_unlike_any_is_answered_with_all_of_them():
    with pytest.raises(
        KeyError, match=r"no layer is called 'encoder'\. The layers are 'fc1', 'fc2', 'fc3'\."
    ):
        make_three_layers()["encoder"]


def test_a_position_beyond_the_last_layer_is_an_index_error():
    with pytest.raises(IndexError, match="out of range"):
        make_three_layers()[3]


@pytest.mark.parametrize(
    ("norm", "best", "stable"), [(64.0, 1 / 64, 2 / 64), (0.0, math.inf, math.inf), (math.inf, 0.0, 0.0)]
)
def test_the_learning_rates_are_one_and_two_over_the_network_norm(norm, best, stable):
    report = make_report(network=norm)
    assert (report.learning_rate, report.stable_learning_rate) == (best, stable)


def test_a_nan_norm_gives_nan_rates():
    assert math.isnan(make_report(network=math.nan).learning_rate)


def test_the_sharpest_and_flattest_are_by_norm_and_nan_is_sharpest():
    report = make_three_layers()
    assert (report.sharpest.name, report.flattest.name) == ("fc3", "fc1")
    broken = make_report(make_layer("a", math.nan), make_layer("b", math.inf), make_layer("c", 1.0))
    assert (broken.sharpest.name, broken.flattest.name) == ("a", "c")


def test_without_layers_none_is_the_sharpest():
    with pytest.raises(ValueError, match="the report has no layers"):
        make_report().sharpest


def test_a_report_has_converged_when_every_norm_has():
    doubtful = make_estimate(1.0, converged=False)
    assert make_three_layers().converged
    assert not make_report(make_layer(top=doubtful)).converged
    assert not make_report(make_layer(approximation=doubtful)).converged
    assert not make_report(network=make_layer("network", top=doubtful)).converged


def test_a_misspelt_curvature_is_answered_with_the_choices():
    with pytest.raises(ValueError, match=r"curvature='bth' is unknown; choose from .* Did you mean 'both'\?"):
        make_report(curvature="bth")


def test_the_short_form_fits_a_prompt():
    expected = "<CurvatureReport of 3 layers: curvature='gauss-newton', network.norm=64.5>"
    assert repr(make_three_layers()) == expected
