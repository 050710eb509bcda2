from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace

import pytest
import torch

from hessinit import CurvatureReport, measure
from hessinit.cli.measure import judge_rate
from hessinit.results.curvature_report import ONLY_BOUNDED
from result_examples import make_estimate, make_three_layers

from .conftest import without_seconds


def same(shown: str, report: CurvatureReport) -> bool:
    return bool(without_seconds(json.loads(shown)) == without_seconds(report.to_dict()))


def test_json_is_exactly_what_the_library_measures_with_the_fourth_value_s_keywords(run, net):
    assert same(run("measure", "net.py:problem", "--json").stdout, measure(*net.problem()))
    model, loss, batch, keywords = net.with_keywords()
    result = run("measure", "net.py:with_keywords", "--json")
    assert same(result.stdout, measure(model, loss, batch, **keywords))
    assert json.loads(result.stdout)["curvature"] == "both"


def test_options_win_over_the_fourth_value(run, net):
    options = "--curvature hessian --layers 1,2 --tolerance 1e-5 --seed 7 --jacobians --diagnostics"
    result = run("measure", "net.py:with_keywords", "--json", *options.split())
    model, loss, batch, keywords = net.with_keywords()
    chosen = {"curvature": "hessian", "layers": ["1", "2"], "tolerance": 1e-5, "seed": 7}
    expected = measure(model, loss, batch, **{**keywords, **chosen}, jacobians=True, diagnostics=True)
    assert same(result.stdout, expected)
    assert (expected.names, expected.tolerance, expected.seed) == (("1", "2"), 1e-5, 7)
    assert expected.layers[0].jacobians is not None


def test_a_list_option_takes_commas_and_may_be_repeated(run):
    for options in (["--layers", "0,2*"], ["--layers", "0", "--layers", "2*"], ["--layers", " 0 , 2"]):
        result = run("measure", "net.py:problem", "--json", *options)
        assert [layer["name"] for layer in json.loads(result.stdout)["layers"]] == ["0", "2"]


def test_the_same_command_repeats_itself_and_another_seed_does_not(run):
    first, again, other = (run("measure", "net.py:drawn", "--json", "--seed", seed) for seed in (1, 1, 2))
    norms = [CurvatureReport.from_json(result.stdout).network.norm for result in (first, again, other)]
    assert norms[0] == norms[1] != norms[2]


def test_device_and_threads_are_taken(run):
    result = run("measure", "net.py:problem", "--json", "--device", "cpu", "--threads", "1")
    assert json.loads(result.stdout)["versions"]["device"] == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_model_and_the_batch_go_to_the_device(run):
    result = run("measure", "net.py:problem", "--json", "--device", "cuda")
    assert json.loads(result.stdout)["versions"]["device"].startswith("cuda")


def test_not_converging_prints_the_report_and_ends_with_1(run):
    result = run("measure", "net.py:unfinished")
    assert result.exit_code == 1
    assert "~" in result.stdout
    assert result.stderr == "Not converged: the report marks what did not reach tolerance 0.001.\n"
    strict = run("measure", "net.py:strictly_unfinished")
    assert (strict.exit_code, strict.stdout) == (1, "")
    assert strict.stderr.startswith("Not converged: ")
    assert "did not reach tolerance=0.001" in strict.stderr


# A learning rate beside the curvature


def with_extremes(top: float, bottom: float = 0.0) -> CurvatureReport:
    report = make_three_layers()
    extremes = {"top": make_estimate(top), "bottom": make_estimate(bottom)}
    return replace(report, network=replace(report.network, **extremes))


def descend(top: float, bottom: float, lr: float) -> tuple[bool, bool]:
    """Whether gradient descent on ½(top·x² + bottom·y²) stays bounded along x, and a step lowers it."""
    x, y = 1.0, 1.0
    before = top * x**2 + bottom * y**2
    one = top * (x * (1 - lr * top)) ** 2 + bottom * (y * (1 - lr * bottom)) ** 2
    return abs((1 - lr * top) ** 50) <= 1 + 1e-9, one <= before


@pytest.mark.parametrize(
    ("top", "bottom", "lr", "said"),
    [
        (8, 0, 0.1, "lr·‖H‖ = 0.1·8 = 0.8, below 2: gradient descent in these weights is stable at init"),
        (8, 0, 0.25, "lr·‖H‖ = 0.25·8 = 2, at 2: gradient descent in these weights is stable at init"),
        (8, 0, 0.5, "lr·‖H‖ = 0.5·8 = 4, above 2: gradient descent is unstable at initialization. lr = 0.5"),
        (1, -8, 0.1, "lr·‖H‖ = 0.1·8 = 0.8, below 2: a gradient step in these weights lowers the loss at in"),
        (1, -8, 0.5, "lr·‖H‖ = 0.5·8 = 4, above 2: a gradient step of this length is not guaranteed to low"),
    ],
)
def test_a_rate_is_judged_by_what_gradient_descent_does_on_a_quadratic(top, bottom, lr, said):
    text = judge_rate(with_extremes(top, bottom), lr, "net.py:problem")
    assert text.startswith(said)
    stable, lower = descend(top, bottom, lr)
    assert ("unstable" not in text) == stable
    assert lower or "lowers the loss" not in text


def test_no_promise_is_made_without_a_finite_curvature():
    assert judge_rate(with_extremes(0), 0.1, "net.py:problem").startswith("lr = 0.1: the curvature is 0")
    infinite = judge_rate(with_extremes(math.inf), 0.1, "net.py:problem")
    assert infinite.startswith("lr = 0.1: the curvature is not finite")
    report = make_three_layers()
    bound = replace(report.network.top, converged=False, reason=ONLY_BOUNDED)
    bounded = judge_rate(replace(report, network=replace(report.network, top=bound)), 0.01, "net.py:problem")
    assert "not measured" in bounded
    for said in (infinite, bounded):
        assert "gradient descent" not in said


def test_an_unstable_rate_names_the_command_that_helps_and_it_can_be_typed():
    advised = judge_rate(with_extremes(8), 0.5, "my nets/it's.py:problem").split("Next: ")[1]
    assert shlex.split(advised) == ["hessinit", "initialize", "my nets/it's.py:problem", "--lr", "0.5"]


def test_next_to_json_the_sentence_goes_to_stderr(run):
    result = run("measure", "net.py:regression", "--lr", "0.1", "--json")
    assert CurvatureReport.from_json(result.stdout).to_json() == result.stdout
    assert result.stderr == (
        "lr·‖H‖ = 0.1·12.5 = 1.25, below 2: gradient descent in these weights is stable at initialization.\n"
    )
