"""network=False: the layers bound the network, and nothing is promised that a bound cannot promise."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from hessinit import Problem
from hessinit.measurement.measure import measure
from hessinit.present import describe
from hessinit.present.document import Table
from hessinit.results.curvature_report import ONLY_BOUNDED, CurvatureReport
from result_examples import make_estimate, make_layer, make_report


def measured(network: bool, curvature: str = "gauss-newton", layers: str | None = None) -> CurvatureReport:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    batch = torch.randn(16, 6).double(), torch.arange(16) % 3
    problem = Problem(model, nn.CrossEntropyLoss(), batch, layers=layers)
    return measure(problem, network=network, curvature=curvature)


def test_the_bounds_hold_for_the_network_as_measured():
    bounded, whole = measured(network=False), measured(network=True)
    numbers = re.findall(r"(?:between|and|lr =|above) (\d\S*?)[,.]?(?= |$)", bounded.verdict)
    least, most, stable, unstable = map(float, numbers)
    assert least < whole.network.norm < most
    assert stable < whole.stable_learning_rate < unstable
    words, texts = "on a quadratic gradient descent is stable below", (bounded.verdict, whole.verdict)
    promised = [text.count(words) for text in texts]
    assert promised == [1, 0]
    limit = f"plain gradient descent diverges above lr = 2/‖H‖ = {whole.stable_learning_rate:.2g}."
    assert limit in whole.verdict
    assert not any("guaranteed" in report.verdict for report in (bounded, whole))
    assert (bounded.network_measured, bounded.converged) == (False, True)
    loose = replace(bounded.layers[0], top=make_estimate(bounded.layers[0].norm, 1.0, converged=False))
    doubtful = replace(bounded, layers=(loose, *bounded.layers[1:]))
    assert "its ‖H‖ is at least" in doubtful.verdict  # an upper bound needs every layer's norm
    assert "Not converged (marked ~): Layer 0;" in doubtful.verdict


def test_an_indefinite_network_is_bounded_on_one_side_and_the_only_layer_is_the_network():
    bounded, whole = measured(network=False, curvature="hessian"), measured(network=True, curvature="hessian")
    assert bounded.network.norm <= whole.network.norm
    limit = f"{bounded.stable_learning_rate:.2g}"
    assert f"so 2/‖H‖ is at most {limit}. Measure the network" in bounded.verdict
    assert "guaranteed" not in bounded.verdict
    report = measured(network=False, curvature="hessian", layers="2")
    assert (report.network_measured, report.network.norm) == (True, report["2"].norm)


def test_the_table_shows_a_bound():
    report = measured(network=False)
    document = describe(report)
    table = next(block for block in document.blocks if isinstance(block, Table))
    columns = {column.heading: column.cells for column in table.columns}
    assert columns["‖H‖"][-1] == f"≥ {report.network.norm:.3g}"
    assert [number.label for number in document.numbers] == ["‖H‖ of the network", "Sharpest layer"]


@pytest.mark.parametrize(
    ("norm", "error", "sentence"),
    [
        (0.0, math.inf, "its ‖H‖ is at least 0. Measure the network to know this limit."),
        (0.0, 0.0, "The network has no curvature, so it sets no limit"),
        (math.inf, 1.0, "The network's ‖H‖ is inf: no learning rate is stable."),
        (
            0.6,
            0.2,
            "between 0.6 and 0.8, so on a quadratic gradient descent is stable below lr = 2.5 and diverges",
        ),
    ],
)
def test_bounds_at_the_ends(norm, error, sentence):
    top = replace(make_estimate(norm, error, converged=False), reason=ONLY_BOUNDED)
    network = make_layer("network", shape=(24,), top=top)
    assert sentence in make_report(make_layer("a", norm), make_layer("b", norm), network=network).verdict
