from __future__ import annotations

import math
import statistics

import pytest
from report_examples import make_estimate, make_layer

from hessinit.results.curvature_report import LayerCurvature, judge
from hessinit.results.estimates import Density, Spread

inf, nan = math.inf, math.nan


@pytest.mark.parametrize(
    ("norm", "verdict"),
    [
        (0.0, "vanishing"),
        (0.00099, "vanishing"),
        (0.001, "flat"),
        (0.099, "flat"),
        (0.1, "ok"),
        (10.0, "ok"),
        (10.01, "sharp"),
        (1000.0, "sharp"),
        (1000.1, "exploding"),
        (inf, "exploding"),
        (nan, "exploding"),
    ],
)
def test_a_verdict_changes_exactly_at_its_threshold(norm, verdict):
    assert judge(norm) == verdict
    assert make_layer(norm=norm).verdict == verdict


def test_the_norm_is_the_end_that_is_larger_in_absolute_value():
    layer = make_layer(top=make_estimate(3.0, 0.1, products=5), bottom=make_estimate(-4.0, 0.2, products=2))
    assert (layer.norm, layer.error, layer.products) == (4.0, 0.2, 7)
    assert (layer.top_eigenvalue, layer.bottom_eigenvalue) == (3.0, -4.0)
    assert layer.converged
    assert layer.reason == "residual below tolerance"


def test_an_uncertain_end_that_cannot_win_leaves_the_norm_converged():
    layer = make_layer(top=make_estimate(10.0, 0.01), bottom=make_estimate(-1.0, 5.0, converged=False))
    assert layer.converged
    assert layer.error == 0.01


def test_an_uncertain_end_that_could_win_leaves_the_norm_uncertain():
    layer = make_layer(top=make_estimate(10.0, 0.01), bottom=make_estimate(-9.0, 5.0, converged=False))
    assert not layer.converged
    assert layer.norm + layer.error == 14.0
    assert "raise max_products" in layer.reason


@pytest.mark.parametrize("ends", [(nan, -3.0), (3.0, nan), (nan, nan)])
def test_a_nan_at_either_end_is_a_nan_norm(ends):
    layer = make_layer(top=make_estimate(ends[0]), bottom=make_estimate(ends[1]))
    assert math.isnan(layer.norm)
    assert layer.verdict == "exploding"


@pytest.mark.parametrize(
    ("exact", "approximate", "gap"),
    [(5.2, 2.0, 2.6), (0.0, 0.0, 1.0), (1.0, 0.0, inf), (0.0, 2.0, 0.0), (inf, 2.0, inf), (1.0, inf, 0.0)],
)
def test_the_gap_is_exact_over_approximate(exact, approximate, gap):
    layer = make_layer(norm=exact, curvature="hessian", approximation=make_estimate(approximate))
    assert layer.gap == pytest.approx(gap)


@pytest.mark.parametrize(("exact", "approximate"), [(nan, 0.0), (nan, 1.0), (inf, inf), (1.0, nan)])
def test_a_gap_that_means_nothing_is_nan(exact, approximate):
    assert math.isnan(make_layer(norm=exact, approximation=make_estimate(approximate)).gap)


def test_there_is_no_gap_without_an_approximation():
    assert make_layer().gap is None


@pytest.mark.parametrize(
    ("bottom", "error", "indefinite"),
    [(-0.5, 0.0, True), (-0.005, 0.0, False), (-0.5, 0.6, False), (0.5, 0.0, False)],
)
def test_a_layer_is_indefinite_when_it_curves_down_beyond_doubt(bottom, error, indefinite):
    assert make_layer(norm=1.0, bottom=make_estimate(bottom, error)).indefinite is indefinite


def test_parameters_counts_the_weights():
    assert make_layer(shape=(10, 3, 5, 5)).parameters == 750


def test_layers_with_a_nan_are_equal_to_their_copies_and_hash_alike():
    one, same, other = (make_layer(norm=float(text)) for text in ("nan", "nan", "inf"))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != "fc1"


def test_a_misspelt_curvature_is_answered_with_the_choices():
    with pytest.raises(ValueError, match=r"'hessain' is unknown; choose from .*Did you mean 'hessian'\?"):
        make_layer(curvature="hessain")


def test_fields_are_given_by_name_so_that_top_and_bottom_cannot_be_swapped():
    with pytest.raises(TypeError, match="positional"):
        LayerCurvature("fc1", (), (4, 3), "hessian", make_estimate(1.0), make_estimate(0.0))


def test_a_spread_agrees_with_the_statistics_module():
    norms = (0.3, 1.7, 0.9, 4.1)
    spread = Spread(norms)
    assert spread.mean == pytest.approx(statistics.fmean(norms), rel=1e-15)
    assert spread.standard_deviation == pytest.approx(statistics.stdev(norms), rel=1e-14)
    assert spread.standard_error == pytest.approx(statistics.stdev(norms) / 2, rel=1e-14)
    assert (spread.smallest, spread.largest) == (0.3, 4.1)


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_a_spread_is_right_at_any_scale(scale):
    spread = Spread((1.0 * scale, 2.0 * scale, 3.0 * scale))
    assert spread.mean / scale == pytest.approx(2.0)
    assert spread.standard_deviation / scale == pytest.approx(1.0)


def test_one_batch_says_nothing_of_the_spread():
    assert Spread((2.0,)).mean == 2.0
    assert math.isnan(Spread((2.0,)).standard_error)


def test_a_spread_carries_norms_that_are_not_finite():
    assert Spread((1.0, inf)).mean == inf
    assert Spread((1.0, inf)).largest == inf
    assert math.isnan(Spread((1.0, nan)).smallest)
    assert math.isnan(Spread((1.0, inf)).standard_deviation)


def test_an_empty_spread_is_refused():
    with pytest.raises(ValueError, match="at least one batch"):
        Spread(())


def test_a_density_whose_lists_do_not_match_is_refused():
    with pytest.raises(ValueError, match="nodes has 2 numbers and weights has 1"):
        Density(nodes=(1.0, 2.0), weights=(1.0,), grid=(), values=(), error=0.0, probes=1, steps=2)
