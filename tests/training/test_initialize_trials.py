"""`initialize_` never hands out weights that blow up, and a race on the user's data decides."""

from __future__ import annotations

import copy
import math
import statistics
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from digit_problem import LOSS
from torch import Tensor, nn

from calls import call
from hessinit import Fit, advise
from hessinit.digits import load_digits
from hessinit.errors import ConvergenceError, ConvergenceWarning, ProblemError
from hessinit.results.initialization import Trial
from hessinit.training import weight_trials
from hessinit.training.initialize import RACE, initialize_
from hessinit.training.weight_trials import read_race_data
from zoo.snapshot import differences, snapshot


def digits(examples: int) -> tuple[Tensor, Tensor]:
    images, labels = load_digits()
    return images[:examples], labels[:examples]


BATCH, DATA = digits(64), digits(800)
OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr),
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9),
    "adam": lambda parameters, lr: torch.optim.Adam(parameters, lr),
}


def normalized() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [part for width in (64, 16) for part in (nn.Linear(width, 16), nn.BatchNorm1d(16), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(16, 10))


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))


def train(model: nn.Module, batches: Any, lr: float, optimizer: str = "sgd", loss: Any = LOSS) -> list[float]:
    """The loss before every step, by a loop of its own; the model is trained in place."""
    stepper, losses = OPTIMIZERS[optimizer](model.parameters(), lr), []
    for inputs, targets in batches:
        stepper.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        stepper.step()
        losses.append(value.item())
    return losses


def values(model: nn.Module) -> list[Tensor]:
    return [one.detach().clone() for one in model.parameters()]


def same(first: Iterable[Tensor], second: Iterable[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.filterwarnings("ignore::hessinit.errors.ConvergenceWarning")
@pytest.mark.parametrize("examples", [64, 128])
def test_deep_gelu_chains_do_not_blow_up_on_their_batch(examples: int) -> None:
    torch.manual_seed(0)
    hidden = [part for _ in range(29) for part in (nn.Linear(64, 64), nn.GELU())]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.GELU(), *hidden, nn.Linear(64, 10))
    batch = digits(examples)
    result = initialize_(model, LOSS, batch, lr=0.1)
    assert result.survival is not None
    assert (result.survival.survived, result.survival.steps) == (True, 24)
    losses = train(model, [batch] * 24, 0.1)
    assert statistics.median(losses[-8:]) < 1.1 * math.log(10)
    assert "old weights" not in result.reason


def test_the_old_weights_return_with_a_rate_that_they_survive() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 1))  # a quadratic: no weights make it flatter
    batch, old = (BATCH[0], BATCH[1].float().unsqueeze(1)), values(model)
    with pytest.warns(ConvergenceWarning, match="the old weights were put back"):
        result = initialize_(model, nn.MSELoss(), batch, lr=3.0)
    with pytest.raises(ConvergenceError, match="the old weights were put back"):
        initialize_(model, nn.MSELoss(), batch, lr=3.0, fit=Fit(strict=True))
    assert same(model.parameters(), old)
    assert (result.converged, result.scheme, set(result.scales.values())) == (False, "keep", {1.0})
    assert "the old weights were put back; they survive at lr = 0.0" in result.reason
    assert result.survival is not None
    assert result.survival.lr == 1.25 * result.lr < 3.0
    rates = result.lr, 4 * result.lr
    slow, fast = (train(copy.deepcopy(model), [batch] * 24, lr, loss=nn.MSELoss()) for lr in rates)
    assert slow[-1] < slow[0] < fast[-1]


@pytest.mark.parametrize(
    ("survivors", "kappa", "end"),
    [
        ([3, 4, 4], 2.0, "at 1.25 times the rate the loss blew up whatever κ, so this rate is near the edge"),
        ([1, 3, 3, 2], 2.0, "survive 3 of 4 trials of 48 steps at lr = 0.1, so this rate is at the edge"),
        ([1, 0, 1], None, "at lr = 0.1 the loss blew up in most trials, so the old weights were put back"),
    ],
    ids=["all orders", "some orders", "few orders"],
)
def test_weights_that_blow_up_above_the_rate_are_tried_in_several_orders(
    survivors: list[int], kappa: float | None, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights that survive most orders are written, the sharpest of these; and what failed is told."""
    orders = iter([order < count for count in survivors for order in range(4)])

    def fake(setup: Any, batch: Any, lr: float, steps: int, halves_only: bool = False) -> Trial:
        survived = next(orders, False) if halves_only else lr < 0.1
        losses = (2.3,) * (steps - 1) + (1.0 if survived else math.nan,)
        outcome = "learned" if survived else "diverged"
        return Trial(
            name="fake", lr=lr, steps=steps, score=1.0, survived=survived, losses=losses, outcome=outcome
        )

    monkeypatch.setattr(weight_trials, "try_weights", fake)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = initialize_(plain(), LOSS, BATCH, lr=0.1, fit=Fit(scaling="last"))
    assert result.kappa == kappa
    assert end in result.reason
    assert end in " ".join(str(result).split())
    is_safe = kappa is not None and 4 in survivors
    assert (result.converged, [warning.category for warning in caught]) == (
        is_safe,
        [] if is_safe else [ConvergenceWarning],
    )
    assert [trial.survived for trial in result.orders].count(True) == (max(survivors) if kappa else 0)
    assert result.survival.survived


def test_weights_that_learn_in_the_first_trial_are_not_tried_again() -> None:
    result = initialize_(plain(), LOSS, BATCH, lr=0.1)
    assert (result.survival.outcome, result.orders) == ("learned", ())


@pytest.mark.filterwarnings("ignore::hessinit.errors.ConvergenceWarning")
def test_that_no_order_learns_is_told() -> None:
    result = initialize_(normalized(), LOSS, BATCH, lr=1e-6)
    assert [trial.outcome for trial in result.orders] == ["did not learn"] * 4
    assert "none of 4 trials of 48 steps at lr = 1e-06 learned anything" in result.reason


@pytest.mark.filterwarnings("ignore::hessinit.errors.ConvergenceWarning")
def test_a_race_after_failed_trials_is_run_at_the_given_rate() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 1))  # a quadratic: no weights make it flatter
    batch = BATCH[0], BATCH[1].float().unsqueeze(1)
    result = initialize_(model, nn.MSELoss(), batch, lr=3.0, data=[batch] * 3, fit=Fit(trial_steps=6))
    assert {trial.lr for trial in result.trials} == {3.0}
    assert (result.converged, result.scheme) == (False, "keep")
    assert "none of" in result.reason


def test_the_winner_of_a_race_leaves_its_initial_weights() -> None:
    model, own = normalized(), values(normalized())
    model[1].weight.grad = torch.ones_like(model[1].weight)
    before, told = snapshot(model, LOSS, DATA), []
    result = initialize_(model, LOSS, BATCH, lr=0.1, data=DATA, progress=told.append)
    first, second, *_ = result.trials
    assert result.converged
    won = f"{first.name} won the race of {len(result.trials)}: score {first.score:.3g}"
    assert result.reason.startswith(won)
    assert {"hessinit", "lsuv", "orthogonal", "your weights"} < {one.name for one in result.trials}
    assert (first.steps, first.survived) == (48, True)
    assert first.score < second.score + RACE.handicap * (math.log(10) - second.score)
    assert (told[-1].done, told[-1].total, told[-1].unit) == (len(told), len(told), "steps")
    assert sum(one.steps for one in result.trials) == len(told)
    # The weights that are there train as the trial did.
    data, copied = read_race_data(DATA, BATCH, 48), copy.deepcopy(model)
    losses = train(copied, [(one.inputs, one.targets) for one in data.batches], 0.1)
    assert first.losses == pytest.approx(losses, rel=1e-4)
    assert (first.name.partition(",")[0], result.scaling) == ("hessinit", "symmetries")
    again = normalized()
    assert initialize_(again, LOSS, BATCH, lr=0.1, data=DATA).trials == result.trials
    assert same(model.parameters(), again.parameters())
    changed = differences(before, snapshot(model, LOSS, DATA))
    assert all(key.startswith("state of") and "running" not in key for key in changed)
    result.undo()
    assert same(model.parameters(), own)
    assert differences(before, snapshot(model, LOSS, DATA)) == []


def test_your_own_weights_can_win() -> None:
    model = normalized()
    train(model, [DATA] * 60, 0.5)
    own = values(model)
    result = initialize_(model, LOSS, BATCH, lr=0.03, data=DATA, fit=Fit(trial_steps=12))
    assert result.trials[0].name == "your weights"
    assert same(model.parameters(), own)
    assert (result.converged, result.scheme, result.scaling) == (True, "keep", "none")
    assert set(result.scales.values()) == {1.0}
    assert result.survival is None  # that was a trial of other weights


def test_what_was_asked_for_is_not_told_as_a_change() -> None:
    result = initialize_(normalized(), LOSS, BATCH, lr=0.03, fit=Fit(scaling="last", residual="small"))
    assert result.survival is not None
    assert result.survival.survived
    assert "since without" not in result.reason


def test_an_optimizer_may_be_a_function() -> None:
    def build(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr, momentum=0.8)

    rules: list[dict[str, Any]] = [{"optimizer": build}, {"optimizer": "momentum", "momentum": 0.8}]
    model = lambda: nn.Sequential(nn.Dropout(0.1), *normalized())  # noqa: E731
    options: Any = {"lr": 0.05, "data": DATA}
    result, named = (call(initialize_, model(), LOSS, BATCH, **options, **rule) for rule in rules)
    assert result.trials == named.trials
    assert (result.optimizer, result.lr) == ("momentum", 0.05)
    alone = initialize_(normalized(), LOSS, BATCH, lr=0.05, optimizer=build)
    assert (alone.optimizer, alone.target) == ("momentum", pytest.approx(alone.kappa * 0.2 / 0.05))


def test_one_batch_tells_who_learns_and_the_fitted_weights_win() -> None:
    result = initialize_(normalized(), LOSS, BATCH, lr=0.1, data=[BATCH], fit=Fit(trial_steps=6))
    assert "The race had one batch: it tells which candidates learn, not which learns best." in result.notes
    winner = result.trials[0]
    assert (winner.name, winner.outcome, result.converged) == ("hessinit", "learned", True)
    # From the rate that the curvature suggests downwards: the lowest one would always survive.
    suggested = initialize_(normalized(), LOSS, BATCH, lr="auto").lr
    auto = initialize_(normalized(), LOSS, BATCH, lr="auto", data=[BATCH], fit=Fit(trial_steps=6))
    assert auto.chose_lr
    assert auto.trials[0].outcome == "learned"
    assert suggested / 4 < auto.lr < 2 * suggested


def test_a_rate_above_the_limit_of_a_quadratic_is_explained_in_one_sentence() -> None:
    result = initialize_(normalized(), LOSS, BATCH, lr=0.1, fit=Fit(report=True))
    assert result.after.stable_learning_rate < 0.1 < result.survival.lr
    limit = "On a quadratic of this curvature, plain gradient descent diverges above lr = 2/‖H‖ = "
    why = "is above that on purpose: the curvature of a network falls in the first steps, and the trial "
    shown = " ".join(str(result).split())
    assert limit in shown
    assert shown.index(f"{why}learned.") > shown.index(limit)
    idle = replace(result.survival, outcome="did not learn")
    assert f"{why}did not diverge." in replace(result, survival=idle).verdict
    # A scheme that won a race has no other trial.
    won = replace(result.survival, name="orthogonal")
    assert f"{why}learned." in replace(result, survival=None, trials=(won,)).verdict
    assert "on purpose" not in replace(result, lr=result.after.stable_learning_rate).verdict
    assert "on purpose" not in replace(result, survival=None).verdict


def hopeless() -> nn.Sequential:
    """Thirty sigmoid layers: every example gives the same output, whatever the weights."""
    torch.manual_seed(0)
    hidden = [part for _ in range(30) for part in (nn.Linear(64, 64), nn.Sigmoid())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, 10))


@pytest.mark.parametrize(
    ("lr", "data"),
    [("auto", DATA), (0.01, DATA), ("auto", [BATCH]), (0.01, [BATCH]), ("auto", None)],
    ids=["auto", "race", "auto on one batch", "race on one batch", "auto without data"],
)
def test_at_chance_level_nobody_wins_and_nothing_is_written(lr: Any, data: Any) -> None:
    model = hopeless()
    before = snapshot(model, LOSS, DATA)
    with pytest.warns(ConvergenceWarning, match="Nothing learned in trials of up to"):
        result = initialize_(model, LOSS, BATCH, lr=lr, data=data, optimizer="adamw", fit=Fit(trial_steps=3))
    assert differences(before, snapshot(model, LOSS, DATA)) == []
    assert (result.learned, result.converged, result.applied) == (False, False, False)
    assert (result.lr, result.scheme) == (None if lr == "auto" else lr, "keep")
    assert not any(trial.outcome == "learned" for trial in result.trials)
    first = " ".join(str(result).partition("\n\n")[0].split())
    assert first.startswith("Nothing learned in trials of up to ")
    assert "and nothing was written. What may help: normalization layers, residual connections" in first
    assert "won" not in str(result).split()
    assert "inf" not in str(result).split()
    with pytest.raises(ValueError, match="there are no weights to save"):
        result.save_weights("never.safetensors")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"data": DATA}, "data= asks for a race, which trains at a learning rate; pass lr="),
    ({"data": DATA, "target": 2.0}, "pass lr="),
    ({"data": iter([BATCH]), "lr": 0.1}, "can be read only once"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_bad_races_are_refused_before_any_work(options: dict[str, Any], message: str) -> None:
    def forward(model: nn.Module, images: Tensor) -> Tensor:
        raise AssertionError("the model was called")

    model = normalized()
    before = snapshot(model, LOSS, DATA)
    with pytest.raises(ProblemError, match=message):
        call(initialize_, model, LOSS, BATCH, forward=forward, **options)
    assert differences(before, snapshot(model, LOSS, DATA)) == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_with_data_the_rate_is_raced_too(optimizer: str) -> None:
    model, own = normalized(), normalized()
    result = initialize_(model, LOSS, BATCH, lr="auto", data=DATA, optimizer=optimizer)
    rates, winner = sorted({one.lr for one in result.trials}), result.trials[0]
    assert (result.lr, result.converged, winner.steps) == (winner.lr, True, 192)
    assert len(rates) == 5
    assert 90 < rates[-1] / rates[0] < 110
    data = read_race_data(DATA, BATCH, 192)

    def score(model: nn.Module, rate: float) -> float:
        """The mean loss on the held-out batches over the last third of the same steps."""
        found, stepper = [], OPTIMIZERS[optimizer](model.parameters(), rate)
        for batch in data.batches:
            stepper.zero_grad()
            LOSS(model(batch.inputs), batch.targets).backward()
            stepper.step()
            with torch.no_grad():
                found.append([LOSS(model(one.inputs), one.targets).item() for one in data.held_out])
        return statistics.fmean(map(statistics.fmean, found[128:]))

    best = min(score(copy.deepcopy(own), rate) for rate in rates)
    assert score(model, winner.lr) < 1.1 * best


@pytest.mark.parametrize("limit", [math.inf, "the best one's rate", 0.0])
def test_the_best_rate_that_survives_a_trial_is_taken(limit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are tried a little above their rates; if none survives, the best one of the race stays."""
    options = {"lr": "auto", "data": DATA, "trial_steps": 12}
    best, *others = call(initialize_, normalized(), LOSS, BATCH, **options).trials
    limit = best.lr if isinstance(limit, str) else limit

    def survives(setup: Any, batch: Any, lr: float, steps: int) -> Trial:
        return replace(best, lr=lr, survived=lr / 1.25 < limit)

    monkeypatch.setattr(weight_trials, "try_weights", survives)
    model = normalized()
    result = call(initialize_, model, LOSS, BATCH, **options)
    finalists = [best, *(one for one in others if one.steps == best.steps and one.survived)]
    expected = next((one for one in finalists if one.lr < limit), best)
    assert (result.lr, result.trials[0]) == (expected.lr, expected)
    assert len(set(result.trials)) == 1 + len(others)
    passed = finalists[: finalists.index(expected)]
    reasons = [one.reason for one in result.trials[1 : 1 + len(passed)]]
    assert reasons == ["blew up in a trial at 1.25 times the rate"] * len(passed)
    assert ("but blew up in a trial" in result.reason) == bool(passed)
    direct, limit = normalized(), math.inf
    if expected.name == "hessinit":
        initialize_(direct, LOSS, BATCH, lr=expected.lr)
    assert same(model.parameters(), direct.parameters())


def test_a_rate_that_teaches_nothing_is_lowered_where_the_rate_is_free() -> None:
    """The curvature of flat weights allows a rate at which they die; `advise` trains them at a lower one."""
    images, digits = load_digits()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    problem = model, nn.functional.cross_entropy, (images[:64], digits[:64])
    found = initialize_(*problem, lr="auto", progress=False, fit=Fit(scheme="keep"))
    advised = advise(*problem).learning_rate
    assert found.survival.outcome == "learned"
    assert advised / 4 <= found.lr <= 4 * advised
    assert f"κ/lr = {found.kappa:.3g}/{found.lr:.3g} = {found.target:.3g}" in str(found)
