"""The rates of gradient descent against runs of torch.optim.SGD on a quadratic, and when to warm up."""

from __future__ import annotations

import math
import re

import pytest
import torch

from hessinit.errors import ProblemError
from hessinit.results.advice import Descent, judge_warmup
from hessinit.results.curvature_report import Estimate
from result_examples import make_three_layers

DESCENTS = [
    Descent(), Descent(momentum=0.9), Descent(momentum=0.9, nesterov=True), Descent(weight_decay=0.5),
    Descent(momentum=0.9, weight_decay=0.2),
]  # fmt: skip


def exactly(value: float) -> Estimate:
    return Estimate(value, 0.0, True, "known", 1)


def run(descent: Descent, lr: float, curvature: float, constant: float, steps: int) -> list[float]:
    """The lengths of torch's steps from 1 on ½·curvature·w² + constant·w."""
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
    more = {"nesterov": descent.nesterov, "weight_decay": descent.weight_decay}
    optimizer = torch.optim.SGD([weight], lr, descent.momentum, **more)
    places = [1.0]
    for _ in range(steps):
        weight.grad = curvature * weight.detach() + constant
        optimizer.step()
        places.append(weight.item())
    return [before - after for before, after in zip(places, places[1:], strict=False)]


@pytest.mark.parametrize("descent", DESCENTS, ids=str)
def test_the_stability_limit_is_where_torch_has_it(descent: Descent) -> None:
    limit = descent.stability_limit(descent.norm(exactly(4.0), exactly(0.01)).value)
    assert abs(run(descent, 0.99 * limit, 4.0, 0.0, 2000)[-1]) < 1e-3
    assert abs(run(descent, 1.01 * limit, 4.0, 0.0, 2000)[-1]) > 1e3


@pytest.mark.parametrize("descent", [one for one in DESCENTS if not one.weight_decay], ids=str)
def test_under_a_constant_gradient_no_step_of_torch_is_longer_than_the_best_one(descent: Descent) -> None:
    steps = run(descent, descent.best(4.0), 0.0, 1.0, 400)
    assert max(steps) == pytest.approx(1 / 4.0, rel=1e-9)
    assert steps[-1] == pytest.approx(descent.best(4.0) * descent.lasting, rel=1e-9)


def test_the_norm_with_weight_decay_is_of_both_ends() -> None:
    assert Descent(weight_decay=0.5).norm(exactly(2.0), exactly(-3.0)).value == 2.5
    assert Descent(weight_decay=0.5).norm(exactly(1.0), exactly(-3.0)).value == 2.5
    for descent in (Descent(), Descent(momentum=0.9)):
        assert descent.best(0.0) == descent.stability_limit(0.0) == math.inf
        assert descent.best(math.inf) == descent.stability_limit(math.inf) == 0.0


def test_a_report_advises_on_gradient_descent() -> None:
    report = make_three_layers()
    plain = report.advice()
    rates = plain.learning_rate, plain.stable_learning_rate
    assert rates == (report.learning_rate, report.stable_learning_rate)
    assert (plain.weights, plain.notes, plain.converged) == (report.names, (), True)
    heavy = report.advice("momentum", momentum=0.8, lr=1.0)
    assert heavy.stable_learning_rate == pytest.approx(3.6 / report.network.norm)
    assert heavy.learning_rate == pytest.approx(0.2 / report.network.norm)
    assert (heavy.warmup.advised, heavy.lr) == (True, 1.0)
    assert report.advice("nesterov").optimizer == "SGD(momentum=0.9, nesterov)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": "adam"}, "a report cannot advise on 'adam'"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, "a report cannot advise on SGD ("),
        ({"optimizer": "nestrov"}, "Did you mean 'nesterov'?"),
        ({"momentum": 0.9}, "momentum=0.9 and optimizer='sgd' do not go together"),
        ({"optimizer": "momentum", "momentum": 1.0}, "momentum=1.0 must be a number from 0"),
        ({"optimizer": "nesterov", "momentum": 0.0}, "needs a momentum above 0"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0 must be a finite number, 0 or more"),
        ({"lr": 0.0}, "lr=0.0 must be a finite number above 0"),
        ({"lr": True}, "lr=True must be a finite number above 0"),
    ],
)
def test_a_report_refuses_what_makes_no_sense(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ProblemError, match=re.escape(message)):
        make_three_layers().advice(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lr", "stable", "flat", "steps", "reason"),
    [
        (0.1, 0.1, False, 0, "lr = 0.1 is stable"),
        (None, 0.1, False, 0, "lr = 0.05 is stable"),
        (0.2, 0.1, False, 100, "lr = 0.2 is 2 times the stable learning rate; smaller first steps"),
        (1.0, 0.1, False, 500, "more than a warmup usually makes up for"),
        (1e9, 0.1, False, 2000, "more than a warmup"),
        (0.2, 0.1, True, 0, "too flat for a warmup to help: lower the learning rate"),
        (0.2, 0.0, False, 0, "No learning rate is stable"),
        (3.0, math.inf, False, 0, "sets no limit"),
    ],
)
def test_a_warmup_is_for_rates_above_the_stability_limit(
    lr: float | None, stable: float, flat: bool, steps: int, reason: str
) -> None:
    warmup = judge_warmup(lr, 0.05, stable, flat=flat)
    assert (warmup.advised, warmup.steps) == (steps > 0, steps)
    assert reason in warmup.reason
