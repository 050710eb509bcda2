"""network=False: the layers bound the network, and nothing is promised that a bound cannot promise."""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from hessinit.measurement.measure import measure
from hessinit.present import describe, to_page
from hessinit.present.document import Table
from hessinit.results.curvature_report import ONLY_BOUNDED, CurvatureReport
from result_examples import make_estimate, make_layer, make_report


def measured(network: bool, curvature: str = "gauss-newton", layers: str | None = None) -> CurvatureReport:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    batch = torch.randn(16, 6).double(), torch.arange(16) % 3
    return measure(model, nn.CrossEntropyLoss(), batch, network=network, curvature=curvature, layers=layers)


def test_the_bounds_hold_for_the_network_as_measured():
    bounded, whole = measured(network=False), measured(network=True)
    found = re.search(
        r"not measured \(network=False\)\. The layers bound its ‖H‖ between (\S+) and (\S+), so gradient "
        r"descent is stable below lr = (\S+) and unstable above (\S+)\.( |$)",
        bounded.verdict,
    )
    assert found is not None, bounded.verdict
    least, most, stable, unstable = map(float, found.groups()[:4])
    assert least < whole.network.norm < most
    assert stable < whole.stable_learning_rate < unstable
    assert "guaranteed" not in bounded.verdict
    assert "guaranteed" in whole.verdict


def test_an_indefinite_network_is_bounded_on_one_side():
    bounded, whole = measured(network=False, curvature="hessian"), measured(network=True, curvature="hessian")
    assert bounded.network.norm <= whole.network.norm
    limit = f"{bounded.stable_learning_rate:.2g}"
    assert f"so 2/‖H‖ is at most {limit}. Measure the network" in bounded.verdict
    assert "guaranteed" not in bounded.verdict
    assert "unstable above" not in bounded.verdict


def test_what_was_asked_for_converged_and_a_layer_that_did_not_is_named():
    report = measured(network=False)
    for one in (report, CurvatureReport.from_json(report.to_json())):
        assert (one.network_measured, one.converged, one == report) == (False, True, True)
    assert "Not converged" not in report.verdict
    assert measured(network=True).network_measured
    loose = replace(report.layers[0], top=make_estimate(report.layers[0].norm, 1.0, converged=False))
    doubtful = replace(report, layers=(loose, *report.layers[1:]))
    assert not doubtful.converged
    assert "Not converged (marked ~): Layer 0;" in doubtful.verdict
    assert "its ‖H‖ is at least" in doubtful.verdict


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_the_only_layer_is_the_network(curvature):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = measured(network=False, curvature=curvature, layers="2")
    assert (report.network_measured, report.converged, report.network.shape) == (True, True, (64,))
    assert report.network.norm == report["2"].norm
    assert "guaranteed" in report.verdict


def test_the_table_and_the_page_show_a_bound_and_no_verdict_on_it():
    report = measured(network=False)
    document = describe(report)
    table = next(block for block in document.blocks if isinstance(block, Table))
    columns = {column.heading: column.cells for column in table.columns}
    assert columns["‖H‖"][-1] == f"≥ {report.network.norm:.3g}"
    assert columns["verdict"][-1] == ""
    assert [number.label for number in document.numbers] == ["‖H‖ of the network", "Sharpest layer"]
    assert document.numbers[0].note == "not measured: bounded by the layers"
    assert document.tone != "good"
    text = to_page(report)
    assert "guaranteed" not in text.split("<footer>")[0].split("<main", 1)[1]
    assert '<span class="dot ok">' in text


@pytest.mark.parametrize(
    ("norm", "error", "sentence"),
    [
        (0.0, math.inf, "its ‖H‖ is at least 0, so 2/‖H‖ is at most inf."),
        (0.0, 0.0, "The network has no curvature, so it sets no limit"),
        (math.inf, 1.0, "The network's ‖H‖ is inf: no learning rate is stable."),
        (0.6, 0.2, "The layers bound its ‖H‖ between 0.6 and 0.8, so gradient descent is stable below "),
    ],
)
def test_bounds_at_the_ends(norm, error, sentence):
    top = replace(make_estimate(norm, error, converged=False), reason=ONLY_BOUNDED)
    network = make_layer("network", shape=(24,), top=top)
    report = make_report(make_layer("a", norm), make_layer("b", norm), network=network)
    assert sentence in report.verdict
    assert "<main" in to_page(report)
