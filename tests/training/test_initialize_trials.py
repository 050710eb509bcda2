"""`initialize_` never hands out weights that blow up, and trials choose between new ones and the user's."""

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
from hessinit.measurement.loss_range import UNKNOWN, LossRange
from hessinit.results.initialization import OURS, YOURS, Trial
from hessinit.training import weight_trials
from hessinit.training.initialize import initialize_
from hessinit.training.rate_search import SEARCH
from hessinit.training.trial import lead_of
from hessinit.training.trial_data import read_trial_data
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


def test_a_rate_that_teaches_nothing_is_told_and_no_order_is_tried() -> None:
    with pytest.warns(ConvergenceWarning, match="not 4e\\+06"):
        result = initialize_(normalized(), LOSS, BATCH, lr=1e-6)
    assert (result.survival.survived, result.survival.outcome, result.orders) == (True, "did not learn", ())
    assert "24 trial steps on this batch at lr 1.2e-06, 1.25 times yours: the loss" in str(result)


def test_data_do_not_save_a_rate_at_which_no_weights_survive() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 1))  # a quadratic: no weights make it flatter
    batch = BATCH[0], BATCH[1].float().unsqueeze(1)
    with pytest.warns(ConvergenceWarning, match="at lr = 3 the loss blew up in most trials"):
        result = initialize_(model, nn.MSELoss(), batch, lr=3.0, data=[batch] * 3, fit=Fit(trial_steps=6))
    assert (result.converged, result.scheme, result.trials) == (False, "keep", ())
    assert result.survival.survived
    assert result.lr < 3.0


def test_the_better_start_leaves_its_initial_weights() -> None:
    model, own = normalized(), values(normalized())
    model[1].weight.grad = torch.ones_like(model[1].weight)
    before, told = snapshot(model, LOSS, DATA), []
    result = initialize_(model, LOSS, BATCH, lr=0.1, data=DATA, progress=told.append, steps=300)
    better, other = result.trials
    assert (result.converged, better.name, other.name) == (True, "hessinit", "your weights")
    assert (better.steps, better.survived, other.steps) == (48, True, 48)
    assert better.score < other.score
    assert f"{better.score:.3g} in 48 trial steps on fresh mini-batches, your own to {other.score:.3g}" in (
        result.reason
    )
    assert (told[-1].done, told[-1].total, told[-1].unit) == (len(told), len(told), "steps")
    assert better.steps + other.steps == len(told)
    # Both train as the trials did, by a loop of its own; the first loss is that of the whole batch.
    data = read_trial_data(DATA, BATCH, 48)
    for start, trial in ((model, better), (normalized(), other)):
        losses = train(copy.deepcopy(start), [(one.inputs, one.targets) for one in data.batches], 0.1)
        assert trial.losses[1:] == pytest.approx(losses[1:], rel=1e-4)
    again = normalized()
    assert initialize_(again, LOSS, BATCH, lr=0.1, data=DATA, steps=300).trials == result.trials
    assert same(model.parameters(), again.parameters())
    changed = differences(before, snapshot(model, LOSS, DATA))
    assert all(key.startswith("state of") and "running" not in key for key in changed)
    result.undo()
    assert same(model.parameters(), own)
    assert differences(before, snapshot(model, LOSS, DATA)) == []


def test_weights_that_are_good_already_stay() -> None:
    model = normalized()
    train(model, [DATA] * 60, 0.5)
    own = values(model)
    result = initialize_(model, LOSS, BATCH, lr=0.03, data=DATA, fit=Fit(trial_steps=12))
    assert [trial.name for trial in result.trials] == ["your weights", "hessinit"]
    assert result.trials[0].score < 0.1
    assert same(model.parameters(), own)
    assert (result.converged, result.scheme, result.scaling) == (True, "keep", "none")
    assert set(result.scales.values()) == {1.0}
    assert result.survival is None  # that was a trial of other weights


def dead() -> nn.Sequential:
    """All hidden units are 0, and so are all gradients but those of the last bias."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    for parameter in model[1].parameters():
        nn.init.zeros_(parameter)
    return model


def deep() -> nn.Sequential:
    """Torch's own draw: in each of these layers the signal falls to less than half."""
    torch.manual_seed(0)
    hidden = [part for _ in range(18) for part in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), *hidden, nn.Linear(32, 10))


@pytest.mark.parametrize(
    ("build", "optimizer", "lr", "data"),
    [
        (dead, "sgd", 0.1, DATA), (dead, "momentum", "auto", DATA), (deep, "sgd", 0.01, DATA),
        (deep, "adam", 0.003, DATA), (deep, "adam", 0.003, None),
    ],
    ids=["dead", "dead, auto", "deep", "deep, adam", "deep, adam, on halves of the batch"],
)  # fmt: skip
def test_new_weights_replace_a_start_that_does_not_learn(
    build: Callable[[], nn.Module], optimizer: str, lr: Any, data: Any
) -> None:
    model, old = build(), build()
    result = initialize_(model, LOSS, BATCH, lr=lr, data=data, optimizer=optimizer)
    assert [trial.name for trial in result.trials[:2]] == ["hessinit", "your weights"]
    assert [trial.outcome for trial in result.trials[:2]] == ["learned", "did not learn"]
    assert (result.converged, result.scheme) == (True, "lsuv")
    losses = [train(start, [BATCH] * 120, result.lr, optimizer) for start in (model, old)]
    ends = [statistics.fmean(each[-40:]) for each in losses]
    assert ends[0] < 0.9 * math.log(10) < 0.99 * ends[1]


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_the_rate_is_searched_for_the_user_s_own_weights_and_both_starts_are_tried_at_it(
    optimizer: str,
) -> None:
    model, own, told = normalized(), normalized(), []
    result = initialize_(
        model, LOSS, BATCH, lr="auto", data=DATA, optimizer=optimizer, steps=300, progress=told.append
    )
    chosen, other, *search = result.trials
    assert result.chose_lr
    assert {chosen.name, other.name} == {"hessinit", "your weights"}
    assert {trial.name for trial in search} == {"your weights"}
    assert chosen.lr == other.lr == result.lr
    assert chosen.steps == other.steps == 48
    assert {trial.lr / result.lr for trial in search} >= {0.5, 2.0}
    assert [state.done for state in told] == list(range(1, len(told) + 1))  # of all trials together
    assert len(told) >= sum(trial.steps for trial in result.trials)
    data = read_trial_data(DATA, BATCH, 48)

    def score(rate: float) -> float:
        """The mean loss on the held-out batches over the last third of the same steps."""
        found, trained = [], copy.deepcopy(own)
        stepper = OPTIMIZERS[optimizer](trained.parameters(), rate)
        for batch in data.batches:
            stepper.zero_grad()
            LOSS(trained(batch.inputs), batch.targets).backward()
            stepper.step()
            with torch.no_grad():
                found.append([LOSS(trained(one.inputs), one.targets).item() for one in data.held_out])
        return statistics.fmean(map(statistics.fmean, found[32:]))

    half = score(result.lr / 2)
    assert score(result.lr) < half + SEARCH.tie * (chosen.losses[0] - half)
    lead = chosen.score - other.score
    assert lead < (0 if chosen.name == "hessinit" else 0.01 * math.log(10))


def scored(score: float, outcome: str = "learned", first: float = 2.5) -> Trial:
    return Trial(name="", lr=0.1, steps=2, score=score, survived=True, losses=(first, score), outcome=outcome)


def test_a_lead_is_a_part_of_the_fall_below_a_constant_output() -> None:
    ten = LossRange(constant=2.3, free=0.0)
    assert lead_of(scored(1.2), scored(1.3), ten) == pytest.approx(0.1 / 1.1)
    assert lead_of(scored(1.3), scored(1.2), ten) == pytest.approx(-0.1 / 1.1)
    assert lead_of(scored(1.2), scored(1.3), UNKNOWN) == pytest.approx(0.1 / 1.3)  # from the first loss
    idle = scored(1.2, "did not learn")
    assert lead_of(scored(1.3), idle, ten) == math.inf
    assert lead_of(idle, scored(1.3), ten) == -math.inf
    assert lead_of(idle, idle, ten) == 0
    # On held-out batches nobody got below a constant output, though the others were learned by heart.
    assert lead_of(scored(2.9), scored(2.4), ten) == lead_of(scored(2.4), scored(2.9), ten) == 0


def head_times(factor: float) -> nn.Sequential:
    model = normalized()
    with torch.no_grad():
        for parameter in model[7].parameters():
            parameter.mul_(factor)
    return model


def output(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(BATCH[0])


@pytest.mark.parametrize(("optimizer", "lr"), [("sgd", 1.0), ("momentum", 0.05), ("adamw", 0.01)])
def test_normalized_networks_keep_what_they_compute(optimizer: str, lr: float) -> None:
    model, old = normalized(), normalized()
    result = initialize_(model, LOSS, BATCH, lr=lr, optimizer=optimizer)
    assert (result.converged, result.scheme, result.scaling) == (True, "keep", "symmetries")
    assert float((output(model) - output(old)).norm() / output(old).norm()) < 1e-3
    moved = {name for block in result.symmetries for name in block.factors}
    assert {"1.weight", "4.weight"} <= moved
    for name, parameter in model.named_parameters():
        before = old.get_parameter(name)
        factor = parameter.norm() / before.norm() if before.any() else 1.0
        assert torch.allclose(parameter, factor * before, rtol=1e-4)
        assert (name in moved) or torch.equal(parameter, before)
    assert not torch.equal(model.get_parameter("1.weight"), old.get_parameter("1.weight"))


@pytest.mark.parametrize(("optimizer", "lr"), [("sgd", 0.1), ("momentum", 0.05), ("adamw", 0.01)])
def test_normalized_networks_whose_output_is_loud_are_drawn_anew(optimizer: str, lr: float) -> None:
    model = head_times(100.0)
    assert LOSS(output(model), BATCH[1]) > 10 * math.log(10)
    result = initialize_(model, LOSS, BATCH, lr=lr, optimizer=optimizer)
    assert (result.converged, result.scheme, result.scaling) == (True, "lsuv", "symmetries")
    assert LOSS(output(model), BATCH[1]) < 1.5 * math.log(10)
    cosines = nn.functional.cosine_similarity(model[1].weight, normalized()[1].weight).abs()
    assert cosines.max() < 0.9
    kept = head_times(100.0)
    assert initialize_(kept, LOSS, BATCH, lr=lr, optimizer=optimizer, fit=Fit(scheme="keep")).scheme == "keep"


def test_normalized_networks_that_do_not_learn_are_drawn_anew() -> None:
    model = normalized()
    nn.init.zeros_(model[4].weight)  # its BatchNorm divides by next to nothing
    result = initialize_(model, LOSS, BATCH, lr=0.1)
    assert (result.converged, result.scheme, result.survival.outcome) == (True, "lsuv", "learned")
    assert model[4].weight.all()
    losses = train(model, [BATCH] * 40, 0.1)
    assert losses[-1] < 0.5 * losses[0]


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


@pytest.mark.parametrize(("lr", "optimizer"), [(0.1, "sgd"), ("auto", "momentum"), (0.01, "adam")])
def test_one_batch_of_data_is_as_good_as_none(lr: Any, optimizer: str) -> None:
    models = plain(), plain()
    alone = initialize_(models[0], LOSS, BATCH, lr=lr, optimizer=optimizer)
    result = initialize_(models[1], LOSS, BATCH, lr=lr, optimizer=optimizer, data=[BATCH], steps=3000)
    assert "data= holds one batch, so trials took halves of the batch that was measured." in result.notes
    assert same(models[0].parameters(), models[1].parameters())
    assert (result.lr, result.survival, result.trials) == (alone.lr, alone.survival, alone.trials)
    # Only where nothing was fitted are the new weights compared with the user's own.
    assert {trial.name for trial in result.trials} == ({OURS, YOURS} if optimizer == "adam" else set())


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
    # Weights that were kept after a trial on the data have no other one.
    kept = replace(result.survival, name="your weights")
    assert f"{why}learned." in replace(result, survival=None, trials=(kept,)).verdict
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
    ids=["auto", "a rate", "auto on one batch", "a rate on one batch", "auto without data"],
)
def test_at_chance_level_no_start_is_chosen_and_nothing_is_written(lr: Any, data: Any) -> None:
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
    assert "chosen" not in str(result).split()
    assert "inf" not in str(result).split()
    with pytest.raises(ValueError, match="there are no weights to save"):
        result.save_weights("never.safetensors")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"data": DATA}, "data= asks for trials, which train at a learning rate; pass lr="),
    ({"data": DATA, "target": 2.0}, "pass lr="),
    ({"data": iter([BATCH]), "lr": 0.1}, "can be read only once"),
    ({"data": DATA, "lr": 0.1, "steps": 0}, "steps=0 must be a whole number, 1 or more"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_trials_that_cannot_be_made_are_refused_before_any_work(
    options: dict[str, Any], message: str
) -> None:
    def forward(model: nn.Module, images: Tensor) -> Tensor:
        raise AssertionError("the model was called")

    model = normalized()
    before = snapshot(model, LOSS, DATA)
    with pytest.raises(ProblemError, match=message):
        call(initialize_, model, LOSS, BATCH, forward=forward, **options)
    assert differences(before, snapshot(model, LOSS, DATA)) == []


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
