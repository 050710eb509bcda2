"""What follows from the stored numbers, against closed forms: norms, rates, spreads, lookups."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest

from hessinit.results.curvature_report import Estimate, Spread
from hessinit_paper.quadratic_forms import QuadraticForm
from result_examples import (
    POINT,
    REPRODUCTION,
    TRACKING,
    make_estimate,
    make_layer,
    make_report,
    make_three_layers,
)

inf, nan = math.inf, math.nan


@pytest.mark.parametrize(
    ("top", "bottom", "norm", "error", "converged"),
    [
        ((3.0, 0.1, True), (-4.0, 0.2, True), 4.0, 0.2, True),
        ((10.0, 0.01, True), (-1.0, 5.0, False), 10.0, 0.01, True),  # cannot be the larger one
        ((10.0, 0.01, True), (-9.0, 5.0, False), 10.0, 4.0, False),  # could be
        ((inf, 0.5, True), (-9.0, nan, False), inf, 0.5, False),
        ((nan, 0.0, True), (-3.0, 0.0, True), nan, 0.0, True),
        ((3.0, 0.0, True), (nan, 0.0, True), nan, 0.0, True),
    ],
)
def test_the_norm_is_the_end_that_is_larger_in_absolute_value(top, bottom, norm, error, converged) -> None:
    layer = make_layer(top=make_estimate(*top, products=5), bottom=make_estimate(*bottom, products=2))
    found = (layer.norm, layer.error, layer.products, layer.converged)
    assert found == pytest.approx((norm, error, 7, converged), nan_ok=True)
    assert ("raise max_iterations" in layer.reason) == (not converged)
    assert (layer.top_eigenvalue, layer.bottom_eigenvalue) == pytest.approx((top[0], bottom[0]), nan_ok=True)


def test_the_gap_is_exact_over_approximate_and_signs_are_judged_beyond_their_error() -> None:
    for exact, approximate, gap in (
        (5.2, 2.0, 2.6), (0.0, 0.0, 1.0), (1.0, 0.0, inf), (0.0, 2.0, 0.0), (inf, 2.0, inf), (1.0, inf, 0.0),
        (nan, 0.0, nan), (nan, 1.0, nan), (inf, inf, nan), (1.0, nan, nan),
    ):  # fmt: skip
        layer = make_layer(norm=exact, curvature="hessian", approximation=make_estimate(approximate))
        assert layer.gap == pytest.approx(gap, nan_ok=True)
    assert make_layer().gap is None
    for value, error, relative in ((-2.0, 0.5, 0.25), (0.0, 0.0, 0.0), (0.0, 0.1, inf)):
        assert Estimate(value, error, True, "").relative_error == relative
    for bottom, error, wanted in ((-0.5, 0, True), (-0.005, 0, False), (-0.5, 0.6, False), (0.5, 0, False)):
        assert make_layer(norm=1.0, bottom=make_estimate(bottom, error)).indefinite is wanted
    with pytest.raises(ValueError, match=r"curvature='bth' is unknown; choose from .* Did you mean 'both'\?"):
        make_report(curvature="bth")


def test_a_spread_agrees_with_the_statistics_module_at_any_scale() -> None:
    norms = (0.3, 1.7, 0.9, 4.1)
    for scale in (1.0, 2.0**-990, 2.0**990):
        spread = Spread(tuple(scale * norm for norm in norms))
        assert spread.mean / scale == pytest.approx(statistics.fmean(norms), rel=1e-15)
        assert spread.standard_deviation / scale == pytest.approx(statistics.stdev(norms), rel=1e-14)
        assert spread.standard_error / scale == pytest.approx(statistics.stdev(norms) / 2, rel=1e-14)
    assert Spread((1.0, inf)).mean == inf
    unknown = Spread((2.0,)).standard_error, Spread((1.0, nan)).mean, Spread((1.0, inf)).standard_deviation
    assert all(map(math.isnan, unknown))


def test_crossings_count_a_return_to_the_limit_only_after_falling_below_it() -> None:
    ratios = [0.5, 1.0, 1.2, 0.95, 1.1, nan, 0.8, None, 1.3]
    points = tuple(replace(POINT, step=step, lr_over_limit=ratio) for step, ratio in enumerate(ratios))
    assert replace(TRACKING, points=points).crossings == (1, 8)
    assert (TRACKING.overhead, replace(TRACKING, spent=0.25).overhead) == (0.1, 0.25)
    stable = POINT.stable_norm, points[0].stable_norm, points[7].stable_norm
    assert stable == pytest.approx((20, 60, nan), nan_ok=True)


def test_quadratic_forms_and_reproductions_summarize_their_rows() -> None:
    numbers = {"exact": (3.0, 0.0, 1.0), "theorem1": (2.0, 0.0, 0.0), "length": (1.0, 2.0, 0.0)}
    form = QuadraticForm(name="a", shape=(2, 2), **numbers)
    assert (form.error_to_approximation, form.error_to_exact) == ((0.5, 0.0, inf), (1 / 3, 0.0, 1.0))
    assert (form.ratio, form.within(0.5), form.within(0.4, "exact")) == (2.0, 2 / 3, 2 / 3)
    assert form.rayleigh == pytest.approx((3.0, 0.0, nan), nan_ok=True)
    with pytest.raises(ValueError, match="rtol=-1 must be a relative error, 0 or more"):
        form.within(-1)
    with pytest.raises(ValueError, match="relative_to='exat' is unknown; .*Did you mean 'exact'"):
        form.within(1, "exat")
    assert (len(REPRODUCTION.judged), REPRODUCTION.within) == (6, 5)


def test_a_layer_is_found_by_name_alias_and_position_and_an_unknown_one_is_answered() -> None:
    report = make_report(make_layer("embed", aliases=("head",)), make_layer("fc", 2.0))
    assert report["embed"] is report["head"] is report[0] is report[-2]
    assert [layer.name for layer in report] == ["embed", "fc"] == list(report.names)
    assert [name in report for name in ("head", report["fc"], "network")] == [True, True, False]
    with pytest.raises(KeyError, match=r"no layer is called 'fc4'; `names` lists them\. Did you mean 'fc"):
        make_three_layers()["fc4"]


def test_a_report_sums_up_its_layers() -> None:
    for norm, inverse in ((64.0, 1 / 64), (0.0, inf), (inf, 0.0), (nan, nan)):
        rates = make_report(network=norm).learning_rate, make_report(network=norm).stable_learning_rate
        assert rates == pytest.approx((inverse, 2 * inverse), nan_ok=True)
    report = make_three_layers()
    assert (report.sharpest.name, report.flattest.name, report.converged) == ("fc3", "fc1", True)
    broken = make_report(make_layer("a", nan), make_layer("b", inf), make_layer("c", 1.0))
    assert (broken.sharpest.name, broken.flattest.name) == ("a", "c")
    doubtful = make_estimate(1.0, converged=False)
    assert not make_report(make_layer(top=doubtful)).converged
    assert not make_report(make_layer(approximation=doubtful)).converged
    assert not make_report(network=make_layer("network", top=doubtful)).converged
