from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_examples import make_layer, make_report, make_three_layers

from hessinit.results.curvature_report import CurvatureReport, LayerCurvature
from hessinit.results.estimates import Density, Estimate, Spread

any_float = st.floats(allow_nan=True, allow_infinity=True)
# Names too may be anything: lone surrogates, "inf", control characters.
any_text = st.text(st.characters(), max_size=8) | st.sampled_from(
    ["inf", "nan", "\ud800", "\x1b[2J", "[red]"]
)
floats = st.lists(any_float, max_size=4).map(tuple)
estimates = st.builds(Estimate, any_float, any_float, st.booleans(), any_text, st.integers(0, 10**6))
spreads = st.builds(Spread, st.lists(any_float, min_size=1, max_size=4).map(tuple))
densities = st.builds(
    lambda rule, curve, error: Density(rule, rule, curve, curve, error, 4, 9), floats, floats, any_float
)
layers = st.builds(
    LayerCurvature,
    name=any_text,
    aliases=st.lists(any_text, max_size=2).map(tuple),
    shape=st.lists(st.integers(1, 10**6), max_size=4).map(tuple),
    curvature=st.sampled_from(["gauss-newton", "hessian"]),
    top=estimates,
    bottom=estimates,
    approximation=st.none() | estimates,
    trace=st.none() | estimates,
    frobenius=st.none() | estimates,
    eigenvalues=st.lists(estimates, max_size=2).map(tuple),
    density=st.none() | densities,
    spread=st.none() | spreads,
    engine=any_text,
    engine_reason=any_text,
)
reports = st.builds(
    CurvatureReport,
    layers=st.lists(layers, max_size=3).map(tuple),
    network=layers,
    curvature=st.sampled_from(["gauss-newton", "hessian", "both"]),
    loss=any_float,
    examples=st.integers(1, 10**9),
    batches=st.integers(1, 9),
    tolerance=any_float,
    seed=st.integers(-(2**63), 2**63),
    engine=any_text,
    engine_reason=any_text,
    seconds=st.none() | any_float,
    gradients=st.none() | any_float,
    notes=st.lists(any_text, max_size=2).map(tuple),
    versions=st.dictionaries(any_text, any_text, max_size=2),
)


@given(reports)
@settings(max_examples=60, deadline=None)
def test_every_report_comes_back_equal_from_strict_json(report):
    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    text = report.to_json()
    json.loads(text, parse_constant=refuse)
    back = CurvatureReport.from_json(text)
    assert back == report
    assert hash(back) == hash(report)
    assert back.to_json() == text


@given(reports)
@settings(max_examples=60, deadline=None)
def test_every_report_can_be_printed_and_shown(report):
    assert "network" in str(make_report(*report.layers, network=1.0))
    assert str(report)
    assert report._repr_html_().startswith("<div")
    assert report.verdict
    assert not report.learning_rate < 0


def test_every_bit_of_a_number_survives():
    report = make_report(make_layer(norm=0.1 + 0.2), network=5e-324)
    back = CurvatureReport.from_json(report.to_json())
    assert back["fc1"].norm.hex() == (0.1 + 0.2).hex()
    assert back.network.norm == 5e-324


def test_a_whole_number_in_a_float_field_still_comes_back_equal():
    report = make_report(make_layer(norm=3), loss=2)
    assert CurvatureReport.from_json(report.to_json()) == report


def test_reports_that_differ_in_one_number_are_not_equal():
    assert make_report(make_layer(norm=1.0)) != make_report(make_layer(norm=1.0 + 2**-52))
    assert make_report(loss=math.nan) != make_report(loss=math.inf)
    assert make_report() != 3


def test_the_plain_form_names_its_kind_and_schema():
    plain = make_three_layers().to_dict()
    assert (plain["kind"], plain["schema"]) == ("hessinit curvature report", CurvatureReport.schema)
    assert plain["layers"][2]["top"]["value"] == 64.0


def test_keys_from_elsewhere_are_ignored():
    report = make_three_layers()
    plain = report.to_dict()
    plain["colour"] = "green"
    plain["layers"][0]["colour"] = "green"
    assert CurvatureReport.from_dict(plain) == report


def test_a_value_that_is_not_plain_data_is_refused_when_saved():
    with pytest.raises(TypeError, match=r"cannot hold .* a complex; it holds plain data"):
        make_report(loss=1j).to_json()
