"""The verb `advise`: optimizers as they come, what it leaves alone, what it refuses, what it prints."""

from __future__ import annotations

import copy
import json
import math
import re
from typing import Any

import pytest
import torch
from torch import nn

from hessinit import advise
from hessinit.errors import ConvergenceError, ConvergenceWarning, ProblemError
from hessinit.measurement.measure import measure
from hessinit.present import to_text as render_advice
from tiny import LOSS, batch, network
from zoo.snapshot import differences, snapshot

TIGHT = {"tolerance": 1e-6, "dtype": torch.float64}


def test_gradient_descent_has_the_rates_of_the_report() -> None:
    report = measure(network(), LOSS, batch(), **TIGHT)
    advice = advise(network(), LOSS, batch(), **TIGHT)
    assert advice.learning_rate == pytest.approx(report.learning_rate, rel=1e-9)
    assert advice.stable_learning_rate == pytest.approx(report.stable_learning_rate, rel=1e-9)
    assert (advice.weights, advice.parameters, advice.examples) == (("0", "2"), 35, 6)


def test_the_exact_hessian_is_there_too() -> None:
    report = measure(network(), LOSS, batch(), curvature="hessian", **TIGHT)
    advice = advise(network(), LOSS, batch(), curvature="hessian", **TIGHT)
    assert advice.norm.value == pytest.approx(report.network.norm, rel=1e-6)


INSTANCES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), {}),
    "weight decay": (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.2), {"weight_decay": 0.2}),
    "ignored dampening": (lambda p: torch.optim.SGD(p, lr=0.1, dampening=0.5), {}),
    "momentum": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.7, dampening=0.2),
        {"optimizer": "momentum", "momentum": 0.7, "dampening": 0.2},
    ),
    "nesterov": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.7, nesterov=True),
        {"optimizer": "nesterov", "momentum": 0.7},
    ),
    "adam": (
        lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.99), eps=1e-3),
        {"optimizer": "adam", "betas": (0.8, 0.99), "eps": 1e-3},
    ),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)), {"optimizer": "adamw"}),
    "rmsprop": (
        lambda p: torch.optim.RMSprop(p, lr=0.1, alpha=0.9, momentum=0.5),
        {"optimizer": "rmsprop", "alpha": 0.9, "momentum": 0.5},
    ),
}


@pytest.mark.parametrize("name", INSTANCES)
def test_an_optimizer_is_read_as_the_words_say_it_and_left_as_found(name: str) -> None:
    build, words = INSTANCES[name]
    model = network()
    LOSS(model(batch()[0]), batch()[1]).backward()
    optimizer = build(model.parameters())
    data = batch()
    before, state = snapshot(model, LOSS, data), copy.deepcopy(optimizer.state_dict())
    found = advise(model, LOSS, data, optimizer=optimizer, look_ahead=2)
    assert differences(before, snapshot(model, LOSS, data)) == []
    assert repr(optimizer.state_dict()) == repr(state)
    asked = advise(network(), LOSS, batch(), lr=0.1, look_ahead=2, **words)
    assert found.lr == pytest.approx(0.1)
    alike = {"learning_rate", "stable_learning_rate", "optimizer", "warmup", "norm", "notes"}
    for field in alike:
        assert getattr(found, field) == getattr(asked, field), field


def test_adam_with_decoupled_decay_is_adamw() -> None:
    model = network()
    if "decoupled_weight_decay" not in torch.optim.Adam(model.parameters()).defaults:
        pytest.skip("this torch has no decoupled_weight_decay")
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.1, decoupled_weight_decay=True)
    assert advise(model, LOSS, batch(), optimizer=optimizer).optimizer.startswith("AdamW(")


def test_the_kind_of_decay_is_that_of_the_measured_groups() -> None:
    model = network()
    biases = [one for one in model.parameters() if one.ndim == 1]
    weights = [one for one in model.parameters() if one.ndim == 2]
    groups = [{"params": biases}, {"params": weights, "decoupled_weight_decay": True, "weight_decay": 0.1}]
    advice = advise(model, LOSS, batch(), optimizer=torch.optim.Adam(groups))
    assert advice.optimizer.startswith("AdamW(")


def test_a_scheduler_that_warms_up_hides_no_rate() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e3)
    torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1e-6)
    advice = advise(model, LOSS, batch(), optimizer=optimizer)
    assert advice.lr == 1e3


def test_a_rate_above_the_edge_of_a_sharp_start_wants_a_warmup() -> None:
    model = network()
    with torch.no_grad():
        model[2].weight.mul_(8)
    edge = advise(model, LOSS, batch()).stable_learning_rate
    advice = advise(model, LOSS, batch(), lr=3 * edge)
    assert (advice.warmup.advised, advice.warmup.steps) == (True, 150)
    assert not advise(model, LOSS, batch(), lr=0.9 * edge).warmup.advised


def test_a_rate_far_above_the_edge_of_adam_wants_a_warmup_unless_the_start_is_gentle() -> None:
    sharp = network()
    with torch.no_grad():
        sharp[2].weight.mul_(8)
    seen = []
    for model, gain in ((sharp, 1.0), (network(), 0.1)):
        with torch.no_grad():
            model[2].weight.mul_(gain)
            model[0].weight.mul_(gain)
        norm = measure(model, LOSS, batch()).network.norm
        edge = advise(model, LOSS, batch(), optimizer="adam").stable_learning_rate
        verdict = advise(model, LOSS, batch(), optimizer="adam", lr=2 * edge).warmup
        seen.append(verdict.advised)
        assert verdict.advised == (norm >= 1), norm
        assert ("lower the rate" in verdict.reason) == (norm < 1)
    assert seen == [True, False]


def test_groups_that_agree_on_the_weights_are_one() -> None:
    model = network()
    weights, biases = [[p for p in model.parameters() if p.ndim == n] for n in (2, 1)]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    advice = advise(model, LOSS, batch(), optimizer=torch.optim.SGD(groups, lr=0.1))
    assert advice.optimizer == "SGD(weight_decay=0.1)"


def test_groups_that_differ_are_refused_and_asked_about_one_at_a_time() -> None:
    model = network()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with pytest.raises(ProblemError, match=r"groups 0 and 1 .* step differently \(lr 0.1 and 0.5\)"):
        advise(model, LOSS, batch(), optimizer=optimizer)
    advice = advise(model, LOSS, batch(), optimizer=optimizer, layers=["2"])
    assert (advice.lr, advice.weights) == (0.5, ("2",))


def test_weights_outside_the_optimizer_are_left_out() -> None:
    model = network()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    advice = advise(model, LOSS, batch(), optimizer=optimizer, **TIGHT)
    assert advice.weights == ("2",)
    assert advice.norm.value == pytest.approx(measure(model, LOSS, batch(), **TIGHT)["2"].norm, rel=1e-6)
    assert "1 of 2 weights" in advice.notes[0]


def test_an_optimizer_that_has_stepped_is_noted() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    LOSS(model(batch()[0]), batch()[1]).backward()
    optimizer.step()
    assert "has stepped already" in advise(model, LOSS, batch(), optimizer=optimizer).notes[0]


class Renamed(torch.optim.Adam):
    pass


class Stepping(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def test_a_subclass_counts_if_it_steps_as_its_parent() -> None:
    model = network()
    assert advise(model, LOSS, batch(), optimizer=Renamed(model.parameters())).optimizer.startswith("Adam(")
    with pytest.raises(ProblemError, match="the optimizer is a Stepping, whose steps are not known here"):
        advise(model, LOSS, batch(), optimizer=Stepping(model.parameters()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": "adma"}, "Did you mean 'adam'?"),
        ({"optimizer": torch.optim.Adam}, "Pass an instance, not the class."),
        ({"optimizer": None}, "optimizer is a NoneType; it must be a word such as 'adam'"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum=0.9 means nothing to optimizer='adam'"),
        ({"optimizer": "sgd", "eps": 1e-8}, "eps=1e-08 means nothing to optimizer='sgd'"),
        ({"optimizer": "adam", "betas": 0.9}, "betas=0.9 must be two numbers"),
        ({"optimizer": "adam", "betas": (0.9, 1.0)}, "betas[1]=1.0 must be a number from 0"),
        ({"optimizer": "adam", "eps": -1.0}, "eps=-1.0 must be a finite number"),
        ({"optimizer": "rmsprop", "alpha": 2}, "alpha=2 must be a number from 0"),
        ({"lr": -0.1}, "lr=-0.1 must be a finite number above 0"),
        ({"look_ahead": -1}, "look_ahead=-1 must be a whole number"),
        ({"curvature": "both"}, "curvature='both' is unknown"),
        ({"second_moment": "none"}, "second_moment='none' is unknown"),
        ({"tolerance": 2}, "tolerance=2 must be a relative error"),
        ({"strict": 1}, "strict=1 must be True or False"),
        ({"layers": "fc9"}, "layers='fc9' fits no parameter"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError, match=re.escape(message)):
        advise(network(), LOSS, batch(), **arguments)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: torch.optim.Adagrad(p), "the optimizer is a Adagrad, whose steps are not known here"),
        (lambda p: torch.optim.SGD([torch.zeros(2, 2)]), "holds none of the measured weights"),
        (lambda p: torch.optim.SGD(p, maximize=True), "the optimizer maximizes"),
        (lambda p: torch.optim.RMSprop(p, centered=True), "centered=True"),
        (
            lambda p: torch.optim.SGD([{"params": p[:2]}, {"params": p[2:], "maximize": True}]),
            "maximize False and True",
        ),
        (
            lambda p: torch.optim.RMSprop([{"params": p[:2]}, {"params": p[2:], "centered": True}]),
            "centered False and True",
        ),
    ],
)
def test_optimizers_that_are_not_known_are_refused(build: Any, message: str) -> None:
    model = network()
    with pytest.raises(ProblemError, match=message):
        advise(model, LOSS, batch(), optimizer=build(list(model.parameters())))


def test_settings_beside_an_optimizer_are_refused_but_a_rate_is_welcome() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ProblemError, match="momentum=0.9 was given, and the optimizer has its own"):
        advise(model, LOSS, batch(), optimizer=optimizer, momentum=0.9)
    assert advise(model, LOSS, batch(), optimizer=optimizer, lr=7.0).lr == 7.0


def test_looking_ahead_takes_the_steps_that_torch_takes() -> None:
    advice = advise(network(), LOSS, batch(), optimizer="momentum", look_ahead=3, **TIGHT)
    model = network(dtype=torch.float64)
    weights = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    optimizer = torch.optim.SGD(weights, lr=advice.learning_rate, momentum=0.9)
    given, targets = batch()
    for _ in range(3):
        optimizer.zero_grad()
        LOSS(model(given.double()), targets).backward()
        optimizer.step()
    after = measure(model, LOSS, batch(), **TIGHT)
    assert advice.ahead is not None
    assert advice.ahead.loss == pytest.approx(after.loss, rel=1e-9)
    assert advice.ahead.stable_learning_rate == pytest.approx(3.8 / after.network.norm, rel=1e-6)
    assert advice.ahead.learning_rate == advice.learning_rate


def test_trial_steps_that_overflow_say_so() -> None:
    def cliff(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (5e-7 * output**2 - output + output**60).mean()  # flat at 0, and a wall behind

    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    advice = advise(model, cliff, (torch.ones(1, 1), torch.ones(1, 1)), look_ahead=1)
    assert advice.learning_rate == pytest.approx(1e6, rel=1e-3)
    assert advice.ahead is not None
    assert (advice.ahead.loss, advice.ahead.stable_learning_rate) == (math.inf, 0.0)
    assert "overflow: take a smaller rate" in str(advice)


def test_a_norm_that_did_not_converge_warns_or_raises() -> None:
    hasty: dict[str, Any] = {"optimizer": "adam", "max_iterations": 2, "tolerance": 1e-9}
    with pytest.warns(ConvergenceWarning, match="did not reach tolerance=1e-09"):
        advice = advise(network(), LOSS, batch(), **hasty)
    assert not advice.converged
    assert "~" in str(advice)
    with pytest.raises(ConvergenceError, match="did not reach tolerance=1e-09"):
        advise(network(), LOSS, batch(), strict=True, **hasty)


def test_the_same_seed_gives_the_same_bits() -> None:
    one, two = (advise(network(), LOSS, batch(), optimizer="adam", look_ahead=2) for _ in range(2))
    assert {**one.to_dict(), "seconds": 0} == {**two.to_dict(), "seconds": 0}


def test_advice_is_plain_data_and_prints_a_line_for_each_answer() -> None:
    sharp = network()
    with torch.no_grad():
        sharp[2].weight.mul_(8)
    advice = advise(sharp, LOSS, batch(), optimizer="adam", lr=100.0)
    plain = json.loads(advice.to_json())
    assert plain["kind"] == "hessinit learning-rate advice"
    assert plain["learning_rate"] == advice.learning_rate
    assert plain["warmup"]["advised"] is True
    lines = render_advice(advice, width=400).splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == ["learning rate", "stable up to", "warmup"]
    assert lines[3].startswith(
        "Adam(betas=(0.9, 0.999), eps=1e-08) on 0 and 2 (35 numbers); Gauss-Newton on 6"
    )
    assert lines[4].startswith(
        "Note: Not counted in the network's ‖H‖: 2 trained parameters (0.bias, 2.bias)"
    )
    assert len(lines) == 5
    assert all(len(line) <= 60 for line in render_advice(advice, width=60).splitlines())
    for reason in (advice.learning_rate_reason, advice.stable_reason, advice.warmup.reason):
        assert reason.endswith(".")
        assert ". " not in reason  # one sentence
    assert "Adam" in repr(advice)
    assert advice._repr_html_().startswith("<pre>")


def test_a_flat_loss_sets_no_limit() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    data = torch.zeros(3, 2), torch.zeros(3, 2)
    advice = advise(model, nn.MSELoss(), data)
    assert advice.learning_rate == advice.stable_learning_rate == math.inf
    assert "sets no limit" in advice.learning_rate_reason
    assert json.loads(advice.to_json())["learning_rate"] == "inf"
