from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from hessinit.cli.rates import judge_rate
from hessinit.present.example import example_report
from hessinit.results.curvature_report import ONLY_BOUNDED, CurvatureReport
from hessinit.results.estimates import Estimate


def with_ends(top: float, bottom: float = 0.0) -> CurvatureReport:
    """A report whose network has these largest and smallest eigenvalues."""
    report = example_report()
    ends = {"top": Estimate(top, 0.0, True, "", 1), "bottom": Estimate(bottom, 0.0, True, "", 1)}
    return replace(report, network=replace(report.network, **ends))


@pytest.mark.parametrize(
    ("top", "bottom", "lr", "said"),
    [
        (
            8,
            0,
            0.1,
            "lr·‖H‖ = 0.1·8 = 0.8, below 2: gradient descent in these weights is stable at the start.",
        ),
        (8, 0, 0.25, "lr·‖H‖ = 0.25·8 = 2, at 2: gradient descent in these weights is stable at the start."),
        (
            8,
            0,
            0.5,
            "lr·‖H‖ = 0.5·8 = 4, above 2: gradient descent is unstable at the start. lr = 0.5 is 2 times",
        ),
        (
            1,
            -8,
            0.1,
            "lr·‖H‖ = 0.1·8 = 0.8, below 2: a step in these weights is sure to lower the loss at the start.",
        ),
        (1, -8, 0.5, "lr·‖H‖ = 0.5·8 = 4, above 2: a step as long as this is not sure to lower the loss."),
        (0, 0, 0.1, "lr = 0.1: the curvature is 0, so it sets no limit."),
        (float("inf"), 0, 0.1, "lr = 0.1: the curvature is not finite: no rate is safe from this start."),
    ],
)
def test_a_rate_is_judged_by_what_gradient_descent_does_on_a_quadratic(top, bottom, lr, said):
    assert judge_rate(with_ends(top, bottom), lr, "net.py:problem").startswith(said)


def test_an_unstable_rate_names_the_command_that_helps():
    assert judge_rate(with_ends(8), 0.5, "net.py:problem").endswith(
        "\nNext: hessinit initialize net.py:problem --lr 0.5"
    )


def test_the_command_that_helps_can_be_typed():
    advised = judge_rate(with_ends(8), 0.5, "my nets/it's.py:problem").split("Next: ")[1]
    assert shlex.split(advised) == ["hessinit", "initialize", "my nets/it's.py:problem", "--lr", "0.5"]


def test_next_to_json_the_sentence_goes_to_stderr(run, net):
    result = run("measure", f"{net}:problem", "--lr", "0.1", "--json")
    assert CurvatureReport.from_json(result.stdout).to_json() == result.stdout
    assert "below 2: gradient descent in these weights is stable at the start.\n" in result.stderr


def test_a_rate_that_no_step_can_have_is_refused(run, net):
    for rate in ("0", "-1", "nan", "inf"):
        result = run("measure", f"{net}:problem", "--lr", rate)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "must be a number above 0, such as 0.1." in result.stderr


def test_a_bound_of_the_network_promises_nothing():
    report = example_report()
    bound = replace(report.network.top, converged=False, reason=ONLY_BOUNDED)
    report = replace(report, network=replace(report.network, top=bound))
    said = judge_rate(report, 0.01, "net.py:problem")
    assert said.startswith("The network was not measured (network=False)")
    assert "stable at the start" not in said
