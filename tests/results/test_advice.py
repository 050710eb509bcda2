"""The rates of gradient descent against torch.optim.SGD on a quadratic, and what is said of a warmup."""

from __future__ import annotations

import math
import re

import pytest
import torch

from hessinit.errors import ProblemError
from hessinit.present.words import format_number
from hessinit.results.advice import Descent
from hessinit.results.curvature_report import Estimate
from hessinit.results.initialization import Trial
from hessinit.training.advise import try_warmup
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
    assert (heavy.warmup.advised, heavy.warmup.trials, heavy.lr) == (False, (), 1.0)  # a report tries nothing
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


NORM = make_three_layers().network.norm


@pytest.mark.parametrize(
    ("lr", "reason"),
    [
        (None, "The trials of the learning rate went without."),
        (0.5 / NORM, "is not above the advised rate; a warmup was not tried."),
        (1.0 / NORM, "is not above the advised rate; a warmup was not tried."),
        (1.01 / NORM, "is above the advised rate; whether a warmup helps there was not tried."),
        (100 / NORM, "is above the advised rate; whether a warmup helps there was not tried."),
    ],
)
def test_a_report_says_of_a_warmup_only_that_none_was_tried(lr: float | None, reason: str) -> None:
    warmup = make_three_layers().advice(lr=lr).warmup
    assert (warmup.advised, warmup.steps, warmup.trials) == (False, 0, ())
    assert warmup.reason.endswith(reason)
    assert lr is None or warmup.reason.startswith(f"lr = {format_number(lr)} ")


def trial(score: float) -> Trial:
    """A trial that ends at this loss; nan: it diverged."""
    survived = not math.isnan(score)
    return Trial(name="trial", lr=0.4, steps=96, score=score, survived=survived, losses=(2.3,) * 96)


@pytest.mark.parametrize(
    ("without", "warmed", "said"),
    [
        (1.5, 1.2, "ended at 1.2, one without ended at 1.5: it helps."),
        (math.nan, 1.2, "ended at 1.2, one without diverged: it helps."),
        (1.2, 1.5, "ended at 1.5, one without ended at 1.2: it does not help."),
        (1.2, math.nan, "diverged, one without ended at 1.2: it does not help."),
        (math.nan, math.nan, "diverged, one without diverged: lower the learning rate."),
    ],
)
def test_two_trials_decide_on_a_warmup(without: float, warmed: float, said: str) -> None:
    asked: list[tuple[float, int, int]] = []

    class Setting:
        def train(self, lr: float, *, steps: int, warmup: int = 0) -> Trial:
            asked.append((lr, steps, warmup))
            return trial(warmed if warmup else without)

    found = try_warmup(Setting(), 0.4)  # type: ignore[arg-type]
    assert asked == [(0.4, 96, 0), (0.4, 96, 32)]
    assert found.advised == said.endswith("it helps.")
    assert (found.steps, len(found.trials)) == (32 * found.advised, 2)
    assert found.reason == f"At lr = 0.4 a trial of 96 steps with 32 of warmup {said}"
