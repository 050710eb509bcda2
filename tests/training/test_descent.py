"""The formulas for gradient descent against runs of torch.optim.SGD on quadratics, and what is refused."""

from __future__ import annotations

import math
import re

import pytest
import torch
from stability import SPECTRUM, edge

from hessinit.training.optimizer_rules import build_optimizer
from hessinit.errors import ProblemError
from hessinit.present.example import example_report
from hessinit.results.advice import Descent, LookAhead, judge_warmup, named_descent, warmup_steps
from hessinit.results.estimates import Estimate

NORM = float(SPECTRUM.max())
DESCENTS = [
    Descent(),
    Descent(momentum=0.5),
    Descent(momentum=0.9),
    Descent(momentum=0.9, dampening=0.9),
    Descent(momentum=0.6, dampening=0.3),
    Descent(momentum=0.5, nesterov=True),
    Descent(momentum=0.9, nesterov=True),
    Descent(weight_decay=0.5),
    Descent(momentum=0.9, weight_decay=0.2),
]


def exactly(value: float) -> Estimate:
    return Estimate(value, 0.0, True, "known", 1)


@pytest.mark.parametrize("descent", DESCENTS, ids=str)
def test_the_edge_of_stability_is_where_torch_has_it(descent: Descent) -> None:
    norm = descent.norm(exactly(NORM), exactly(0.01)).value
    found = edge(lambda weights, lr: build_optimizer(descent, weights, lr))
    assert found == pytest.approx(descent.edge(norm), rel=0.01)


@pytest.mark.parametrize("descent", [d for d in DESCENTS if not d.weight_decay], ids=str)
def test_under_a_steady_gradient_no_step_of_torch_is_longer_than_the_best_one(descent: Descent) -> None:
    weights = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = build_optimizer(descent, [weights], descent.best(4.0))
    steps = []
    for _ in range(400):
        before = weights.item()
        weights.grad = torch.ones_like(weights)
        optimizer.step()
        steps.append(before - weights.item())
    assert max(steps) == pytest.approx(1 / 4.0, rel=1e-9)
    assert steps[-1] == pytest.approx(descent.best(4.0) * descent.lasting, rel=1e-9)
    assert steps[0] == pytest.approx(descent.best(4.0) * descent.first, rel=1e-9)


def test_the_norm_with_weight_decay_looks_at_both_ends() -> None:
    assert Descent(weight_decay=0.5).norm(exactly(2.0), exactly(-3.0)).value == 2.5
    assert Descent(weight_decay=0.5).norm(exactly(1.0), exactly(-3.0)).value == 2.5
    loose = Estimate(-1.9, 0.5, False, "stopped", 3)
    found = Descent().norm(exactly(2.0), loose)
    assert (found.value, found.converged, found.reason, found.products) == (2.0, False, "stopped", 4)
    assert found.error == pytest.approx(0.4)


def test_a_report_advises_on_gradient_descent() -> None:
    report = example_report()
    plain = report.advice()
    assert plain.learning_rate == report.learning_rate
    assert plain.stable_learning_rate == report.stable_learning_rate
    assert plain.weights == report.names
    heavy = report.advice("momentum", momentum=0.8, lr=1.0)
    assert heavy.stable_learning_rate == pytest.approx(3.6 / report.network.norm)
    assert heavy.learning_rate == pytest.approx(0.2 / report.network.norm)
    assert heavy.warmup.advised
    assert heavy.lr == 1.0
    assert report.advice("nesterov").optimizer == "SGD(momentum=0.9, nesterov)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": "adam"}, "a report cannot advise on 'adam'"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, "a report cannot advise on 'SGD'"),
        ({"optimizer": "nestrov"}, "Did you mean 'nesterov'?"),
        ({"momentum": 0.9}, "momentum=0.9 and optimizer='sgd' do not go together"),
        ({"dampening": 0.1}, "dampening=0.1 and optimizer='sgd' do not go together"),
        ({"optimizer": "momentum", "momentum": 1.0}, "momentum=1.0 must be a number from 0"),
        ({"optimizer": "momentum", "momentum": "0.9"}, "momentum='0.9' must be a number from 0"),
        ({"optimizer": "momentum", "dampening": -0.1}, "dampening=-0.1 must be a number from 0"),
        ({"optimizer": "nesterov", "momentum": 0.0}, "needs a momentum above 0 and no dampening"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0 must be a finite number, 0 or more"),
        ({"lr": 0.0}, "lr=0.0 must be a finite number above 0"),
        ({"lr": True}, "lr=True must be a finite number above 0"),
        ({"lr": math.inf}, "lr=inf must be a finite number above 0"),
    ],
)
def test_a_report_refuses_what_makes_no_sense(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ProblemError, match=re.escape(message)):
        example_report().advice(**arguments)  # type: ignore[arg-type]


def test_a_flat_network_sets_no_limit_and_an_overflowing_one_allows_nothing() -> None:
    flat, over = Descent(momentum=0.9), Descent()
    assert flat.best(0.0) == flat.edge(0.0) == math.inf
    assert over.best(math.inf) == over.edge(math.inf) == 0.0


def test_warmup_is_for_rates_above_the_edge() -> None:
    assert not judge_warmup(0.1, 0.05, 0.1).advised
    above = judge_warmup(0.2, 0.05, 0.1)
    assert (above.advised, above.steps) == (True, 100)
    assert "lr = 0.2 is 2 times the stable rate" in above.reason
    assert "more than a warmup usually makes up for" in judge_warmup(1.0, 0.05, 0.1).reason
    assert not judge_warmup(None, 0.05, 0.1).advised
    assert judge_warmup(None, 0.0, 0.0).reason.startswith("No rate is safe")
    assert "sets no limit" in judge_warmup(3.0, math.inf, math.inf).reason
    assert warmup_steps(1.001) == 51


def test_a_gentle_start_has_no_sharpness_to_shed() -> None:
    verdict = judge_warmup(0.2, 0.05, 0.1, gentle=True)
    assert not verdict.advised
    assert "lower the rate" in verdict.reason


def test_a_quick_fall_of_the_curvature_makes_room_for_a_warmup() -> None:
    def after(stable: float) -> LookAhead:
        return LookAhead(steps=5, learning_rate=0.05, loss=1.0, stable_learning_rate=stable)

    assert judge_warmup(None, 0.05, 0.1, after(0.3)).steps == 150
    assert "from 0.1 to 0.3" in judge_warmup(None, 0.05, 0.1, after(0.3)).reason
    assert not judge_warmup(None, 0.05, 0.1, after(0.19)).advised
    assert not judge_warmup(None, 0.05, 0.1, after(0.01)).advised


def test_words_have_torchs_usual_momentum() -> None:
    assert named_descent("momentum", None, None, None) == Descent(momentum=0.9)
    assert named_descent("sgd", None, None, 0.1) == Descent(weight_decay=0.1)
