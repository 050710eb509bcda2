from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest

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


def test_a_dry_run_says_what_it_would_cost_and_measures_nothing(run, net):
    plan = json.loads(run("measure", "net.py:problem", "--dry-run", "--json", "--save", "p.json").stdout)
    expected = measure(*net.problem(), plan=True)
    assert without_seconds(plan) == without_seconds(expected.to_dict())
    assert run("show", "p.json").stdout.startswith("About ")
    refused = run("measure", "net.py:problem", "--dry-run", "--lr", 0.1)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr == (
        "Error: --lr 0.1 is judged by ‖H‖, which --dry-run does not measure; leave out one of them.\n"
    )


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


@pytest.mark.parametrize(
    ("top", "lr", "said"),
    [
        (8, 0.1, "lr·‖H‖ = 0.8; on a quadratic, gradient descent is stable up to 2. lr = 0.1 is stable"),
        (8, 0.25, "lr·‖H‖ = 2; .*lr = 0.25 is stable"),
        (
            8,
            0.5,
            "lr·‖H‖ = 4; .*lr = 0.5 is 2 times the stable .*\nNext: hessinit initialize n.py:p --lr 0.5",
        ),
        (0, 0.1, "lr·‖H‖ = 0; .*The curvature is 0, so it sets no limit"),
        (math.inf, 0.1, "lr·‖H‖ = inf; .*No learning rate is stable"),
    ],
)
def test_a_rate_is_judged_by_what_gradient_descent_does_on_a_quadratic(top, lr, said):
    text = judge_rate(with_extremes(top), lr, "n.py:p")
    assert re.match(said, text), text
    assert (abs((1 - lr * top) ** 50) <= 1 + 1e-9) == ("Next: " not in text)  # 50 steps on ½·top·x²


def test_a_norm_that_was_only_bounded_judges_nothing_and_next_to_json_the_sentence_goes_to_stderr(run):
    report = make_three_layers()
    bound = replace(report.network.top, converged=False, reason=ONLY_BOUNDED)
    bounded = judge_rate(replace(report, network=replace(report.network, top=bound)), 0.01, "n.py:p")
    assert bounded == "lr = 0.01: the network's ‖H‖ was not measured, only bounded (network=False)."
    result = run("measure", "net.py:regression", "--lr", "0.1", "--json")
    assert CurvatureReport.from_json(result.stdout).to_json() == result.stdout
    assert result.stderr.startswith("lr·‖H‖ = 1.25; ")
