from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest

from calls import measure
from hessinit import CurvatureReport, LearningRateAdvice, Problem, advise, load, plan
from hessinit.cli.measure import tell_rate
from hessinit.results.curvature_report import ONLY_BOUNDED
from hessinit.training.assert_sound import Judgement
from hessinit.training.loop import read_data
from result_examples import make_estimate, make_three_layers

from .conftest import refused, without_seconds


def same(shown: str, report: CurvatureReport) -> bool:
    return bool(without_seconds(json.loads(shown)) == without_seconds(report.to_dict()))


def test_json_is_exactly_what_the_library_measures_with_the_fourth_value_s_keywords(run, net):
    assert same(run("measure", "net.py:problem", "--json").stdout, measure(*net.problem()))
    model, loss, batch, keywords = net.with_keywords()
    result = run("measure", "net.py:with_keywords", "--json")
    assert same(result.stdout, measure(model, loss, batch, **keywords))
    assert json.loads(result.stdout)["curvature"] == "both"


def test_a_dry_run_says_what_it_would_cost_and_measures_nothing(run, net):
    shown = json.loads(run("measure", "net.py:problem", "--dry-run", "--json", "--save", "p.json").stdout)
    expected = plan(*net.problem())
    assert without_seconds(shown) == without_seconds(expected.to_dict())
    assert run("show", "p.json").stdout.startswith("About ")
    told = "Error: --lr 0.1 is judged by ‖H‖, which --dry-run does not measure; leave out one of them.\n"
    assert refused(run("measure", "net.py:problem", "--dry-run", "--lr", 0.1)) == told


def test_options_win_over_the_fourth_value(run, net):
    options = "--curvature hessian --layers 1,2 --tolerance 1e-5 --seed 7 --jacobians --diagnostics"
    result = run("measure", "net.py:with_keywords", "--json", *options.split())
    model, loss, batch, keywords = net.with_keywords()
    chosen = {"curvature": "hessian", "layers": ["1", "2"], "tolerance": 1e-5, "seed": 7}
    expected = measure(model, loss, batch, **{**keywords, **chosen}, details=["jacobians", "diagnostics"])
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
    assert "did not reach --tolerance 0.001" in strict.stderr


def with_extremes(top: float, bottom: float = 0.0) -> CurvatureReport:
    report = make_three_layers()
    extremes = {"top": make_estimate(top), "bottom": make_estimate(bottom)}
    return replace(report, network=replace(report.network, **extremes))


def shown(result) -> str:
    return " ".join(result.stdout.split())


# On net.py:mirrored gradient descent is stable up to 2/12.5 = 0.16; a constant output has a loss of 9, too.
@pytest.mark.parametrize(
    ("lr", "product", "ending", "helps"),
    [
        (0.1, "1.25", "the loss fell from 9 to ", False),
        (0.159, "1.99", "the loss fell from 9 to ", False),
        (0.165, "2.06", "diverged by step 32.", True),
        (0.5, "6.25", "diverged by step ", True),
        (1e-9, "1.3e-08", "the loss stayed at 9, not below that of a constant output.", False),
    ],
)
def test_a_rate_is_judged_by_a_trial_beside_the_limit_of_a_quadratic(run, lr, product, ending, helps):
    result = run("measure", "net.py:mirrored", "--lr", lr)
    text = shown(result)
    assert f"lr·‖H‖ = {product}; on a quadratic, plain gradient descent is stable up to 2. " in text
    assert re.search(rf"\d+ trial steps on this batch at lr \S+: {re.escape(ending)}", text), text
    assert result.stdout.endswith(f"Next: hessinit initialize net.py:mirrored --lr {lr:g}\n") == helps
    assert (abs(1 - lr * 12.5) > 1) == helps  # the trial does as a quadratic
    assert ("rate too high" in text or "the loss rose" in text) == helps, text


def test_a_norm_without_a_limit_is_not_turned_into_a_rate():
    for top, product in ((0, "0"), (math.inf, "inf")):
        text = tell_rate(0.1, "n.py:p", Judgement(with_extremes(top)))
        assert text == f"lr·‖H‖ = {product}; on a quadratic, plain gradient descent is stable up to 2."


def test_a_norm_that_was_only_bounded_judges_nothing_and_next_to_json_the_sentence_goes_to_stderr(run):
    report = make_three_layers()
    bound = replace(report.network.top, converged=False, reason=ONLY_BOUNDED)
    bounded = replace(report, network=replace(report.network, top=bound))
    text = tell_rate(0.01, "n.py:p", Judgement(bounded))
    assert text == "lr = 0.01: the network's ‖H‖ was not measured, only bounded (network=False)."
    result = run("measure", "net.py:regression", "--lr", "0.1", "--json")
    assert CurvatureReport.from_json(result.stdout).to_json() == result.stdout
    assert result.stderr.startswith("lr·‖H‖ = 1.25; ")


# The optimizer. Closed form of net.py:regression: H has the norm 12.5, so that SGD with momentum μ is stable
# up to (2 + 2μ)/12.5.


@pytest.mark.parametrize(
    ("arguments", "stable", "lr"),
    [
        ("net.py:regression", 2 / 12.5, None),
        ("net.py:regression --optimizer momentum --lr 0.3", 3.8 / 12.5, 0.3),
        ("net.py:regression --optimizer nesterov", 3.8 / 2.8 / 12.5, None),
        ("net.py:regression --optimizer net.py:half_momentum", 3 / 12.5, 0.2),
        ("net.py:regression --optimizer net.py:half_momentum --lr 0.1", 3 / 12.5, 0.1),
        ("net.py:with_optimizer", 3 / 12.5, 0.2),
        ("net.py:with_optimizer --optimizer sgd", 2 / 12.5, None),
    ],
)
def test_advise_reads_the_optimizer_of_the_option_or_of_the_problem(run, arguments, stable, lr):
    result = run("advise", *arguments.split(), "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    advice = LearningRateAdvice.from_json(result.stdout)
    assert (advice.stable_learning_rate, advice.lr) == (pytest.approx(stable, rel=1e-6), lr)


def test_advise_says_the_learning_rate_first_and_draws_it(run, folder):
    command = ["advise", "net.py:problem", "--optimizer", "adamw"]
    first, second, *_ = run(*command, "--html", "a.html", "--picture", "a.png").stdout.splitlines()
    number = LearningRateAdvice.from_json(run(*command, "--json").stdout).learning_rate
    assert (first, second) == (f"learning rate: {number:.3g}", "")
    assert f"<strong>{first}</strong>" in (folder / "a.html").read_text(encoding="utf-8")
    assert (folder / "a.png").exists()


@pytest.mark.parametrize(("options", "steps"), [("", None), ("--steps 5000", 5000)])
def test_advise_is_exactly_the_library_s_on_mini_batches_of_the_data(run, net, options, steps):
    command = ["advise", "net.py:problem", "--batch-size", "4", "--optimizer", "momentum", *options.split()]
    shown = run(*command, "--json", "--seed", "3").stdout
    advice = LearningRateAdvice.from_json(shown)
    assert advice.examples == 4
    assert max(trial.steps for trial in advice.trials) == {None: 65, 5000: 97}[steps]
    assert "on fresh mini-batches" in advice.learning_rate_reason
    model, loss, data = net.problem()
    first = read_data(data, 4, 1).initial_batch(3)
    problem = Problem(model, loss, (first.inputs, first.targets), seed=3)
    expected = advise(problem, data=data, steps=steps, optimizer="momentum")
    assert without_seconds(json.loads(shown)) == without_seconds(expected.to_dict())


@pytest.mark.parametrize("options", ["", "--optimizer net.py:half_momentum"])
def test_measure_shows_the_rates_of_the_optimizer_instead_of_gradient_descent_s(run, folder, options):
    problem = "net.py:regression" if options else "net.py:with_optimizer"
    result = run("measure", problem, *options.split(), "--html", "r.html", "--save", "r.json")
    assert result.exit_code == 0
    rate = load("r.json").rates.learning_rate
    rates = f"For SGD(momentum=0.5): learning rate {rate:.2g}; on a quadratic, unstable above 0.24"
    assert rates in shown(result)
    # Its own rate is judged.
    assert re.search(r"\d+ trial steps on this batch at lr 0\.2: the loss fell from 9\.75 to", shown(result))
    page = (folder / "r.html").read_text(encoding="utf-8")
    assert "Learning rates of SGD(momentum=0.5) with these weights" in page
    assert "radient descent" not in result.stdout + page.partition("<script")[0]
    assert load("r.json").rates.stable_learning_rate == pytest.approx(0.24)
    assert "on a quadratic, unstable above 0.24" in shown(run("show", "r.json"))


def test_without_an_optimizer_the_rates_are_of_plain_gradient_descent_and_adam_is_mentioned(run, folder):
    text = shown(run("measure", "net.py:regression", "--html", "r.html"))
    assert "of this curvature, plain gradient descent diverges above lr = 2/‖H‖ = 0.16." in text
    assert "A network is not a quadratic: advise tries rates, also for momentum and Adam." in text
    page = (folder / "r.html").read_text(encoding="utf-8")
    assert "Learning rates of plain gradient descent with these weights" in page


COMMANDS = {
    "track": "--lr 0.01 --steps 10",
    "initialize": "--lr 0.03 --trial-steps 24",
    "compare": "--steps 20 --seeds 1 --workers 1 --schemes default --learning-rates 0.03",
    "sweep": "--steps 20 --seeds 1 --workers 1 --stds 0.5 --learning-rate 0.03",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_trains_takes_adamw_and_a_function(run, command):
    for optimizer, read in (("adamw", "adamw"), ("net.py:half_momentum", "momentum")):
        options = f"{COMMANDS[command]} --batch-size 4 --optimizer {optimizer} --json"
        result = run(command, "net.py:problem", *options.split())
        assert result.exit_code == 0, result.output
        assert read in json.loads(result.stdout)["optimizer"].lower()
