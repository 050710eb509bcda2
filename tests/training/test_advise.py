"""The verb `advise`: stability limits against runs of torch's own optimizers and dense fp64 matrices."""

from __future__ import annotations

import copy
import itertools
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hessinit
from adamw_truth import dense_adamw_limit
from calls import call
from dense import dense_curvature, in_double
from hessinit import ConvergenceError, ConvergenceWarning, ProblemError, Training, advise, measure
from hessinit.curvature.preconditioner import AdamRule
from hessinit.problem.batches import read_batches
from hessinit.results.advice import Descent
from hessinit.training.trial import TrainingSetup, prepare_trials
from tiny import LOSS, Net, batch, inputs, labels, network
from zoo import PROBLEMS, Problem
from zoo.snapshot import differences, snapshot
from zoo.truth import true_matrices

TIGHT: dict[str, Any] = {"tolerance": 1e-6, "dtype": torch.float64}
MEASURED: dict[str, Any] = {**TIGHT, "trial_steps": 0}
SPECTRUM = torch.tensor([0.01, 0.3, 1.0, 2.5], dtype=torch.float64)
SECOND_MOMENT = torch.tensor([0.02, 1.5, 0.7, 0.4], dtype=torch.float64)
FIXED = 1 - 1e-13  # a β₂ that leaves v where it is

RULES = [
    Descent(), Descent(momentum=0.9), Descent(momentum=0.5, nesterov=True),
    Descent(momentum=0.9, weight_decay=0.2), AdamRule(beta2=FIXED), AdamRule(beta1=0.5, beta2=FIXED, eps=0.1),
    AdamRule(beta2=FIXED, weight_decay=0.3, decoupled=True),
]  # fmt: skip


def build(rule: Descent | AdamRule, weights: Tensor, lr: float) -> torch.optim.Optimizer:
    decay = rule.weight_decay
    if isinstance(rule, Descent):
        momentum, nesterov = rule.momentum, rule.nesterov
        return torch.optim.SGD([weights], lr, momentum=momentum, nesterov=nesterov, weight_decay=decay)
    kind = torch.optim.AdamW if rule.decoupled else torch.optim.Adam
    return kind([weights], lr, betas=(rule.beta1, rule.beta2), eps=rule.eps, weight_decay=decay)


def grows(rule: Descent | AdamRule, lr: float) -> bool:
    """Whether ½ Σ λ w² is larger after 600 steps of torch's optimizer than after 200."""
    weights = torch.full_like(SPECTRUM, 1e-3).requires_grad_()
    optimizer = build(rule, weights, lr)
    if isinstance(rule, AdamRule):  # a long past, so that its mean of squares stays as it is
        weights.grad = torch.zeros_like(weights)
        optimizer.step()
        with torch.no_grad():
            weights.fill_(1e-3)
        optimizer.state[weights]["step"] = torch.tensor(1e9, dtype=torch.float64)
        optimizer.state[weights]["exp_avg_sq"].copy_(SECOND_MOMENT.square() * (1 - rule.beta2**1e9))
    early = math.inf
    for step in range(600):
        weights.grad = SPECTRUM * weights.detach()
        optimizer.step()
        # Not too far, or squared gradients would move even a fixed second moment.
        if not float(weights.detach().abs().max()) < 100:
            return True
        early = float(weights.detach().abs().max()) if step == 200 else early
    return float(weights.detach()[-1].abs()) > early  # the slow directions shrink; the fast one may grow


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_torch_leaves_stability_at_the_limit(rule: Descent | AdamRule) -> None:
    if isinstance(rule, Descent):
        limit = rule.stability_limit(2.5 + rule.weight_decay)
    else:
        limit = rule.stability_limit(float((SPECTRUM / (SECOND_MOMENT + rule.eps)).max()))
    assert not grows(rule, 0.99 * limit)
    assert grows(rule, 1.01 * limit)


@pytest.mark.parametrize("rule", [replace(rule, weight_decay=0.0) for rule in RULES[:5]], ids=str)
def test_along_a_constant_gradient_no_step_is_longer_than_one_over_the_norm(rule: Descent | AdamRule) -> None:
    rule = rule if isinstance(rule, Descent) else AdamRule(beta1=0.8, beta2=0.9, eps=0.0)
    weights = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = build(rule, weights, rule.best(4.0))
    steps = []
    for _ in range(400):
        before = weights.item()
        weights.grad = torch.ones_like(weights)
        optimizer.step()
        steps.append(before - weights.item())
    assert max(steps) == pytest.approx(1 / 4, rel=1e-6)


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
def test_gradient_descent_has_the_rates_of_the_report(curvature: str) -> None:
    report = call(measure, network(), LOSS, batch(), curvature=curvature, **TIGHT)
    advice = call(advise, network(), LOSS, batch(), curvature=curvature, **MEASURED)
    assert advice.norm.value == pytest.approx(report.network.norm, rel=1e-6)
    assert advice.learning_rate == pytest.approx(report.learning_rate, rel=1e-6)
    assert advice.stable_learning_rate == pytest.approx(2 / report.network.norm, rel=1e-6)
    assert (advice.weights, advice.parameters, advice.examples) == (("0", "2"), 35, 6)
    heavy = report.advice("momentum", momentum=0.8, lr=100.0)
    assert heavy.stable_learning_rate == pytest.approx(3.6 / report.network.norm)
    assert heavy.learning_rate == pytest.approx(0.2 / report.network.norm)


NAMES = {"linear_regression", "mlp_one_example", "mlp_relu", "mlp_gelu", "mlp_wide_output_few_examples"}
CONVOLUTIONS = [p.name for p in PROBLEMS if p.name.startswith("conv")][:2]
CHOSEN = [p for p in PROBLEMS if p.name in {*NAMES, *CONVOLUTIONS} and p.forward is None and not p.options]


def second_moments(model: nn.Module, loss: Any, data: Any, times: bool = False) -> tuple[Tensor, Tensor]:
    """The gradient and Adam's second moments in fp64: of each batch, at least the noise of its eight parts.

    `times`: the loss is a sum, so one of several batches, or of several parts, counts as often.
    """

    def gradient(given: Tensor, targets: Tensor) -> Tensor:
        double = in_double(model)
        weights = [p for p in double.parameters() if p.ndim >= 2 and p.requires_grad]
        value = in_double(loss)(double(in_double(given)), in_double(targets))
        found = torch.autograd.grad(value, weights, materialize_grads=True)
        return torch.cat([part.flatten() for part in found])

    pairs = [data] if isinstance(data, tuple) else list(data)
    total, mean, square, noise = sum(len(targets) for _, targets in pairs), 0.0, 0.0, 0.0
    for given, targets in pairs:
        count, share = min(8, len(targets)), len(targets) / total
        parts = torch.stack([gradient(given[k::count], targets[k::count]) for k in range(count)])
        whole, parts = gradient(given, targets) * len(pairs) ** times, parts * (len(pairs) * count) ** times
        mean, square = mean + share * whole, square + share * whole.square()
        noise = noise + share * parts.var(0) / count if count > 1 else math.nan
    return mean, torch.fmax(square, torch.as_tensor(noise))


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian"])
@pytest.mark.parametrize("problem", CHOSEN, ids=str)
def test_adams_norm_and_first_step_are_the_dense_ones(problem: Problem, curvature: str) -> None:
    assert len(CHOSEN) >= 6
    matrix = true_matrices(problem, curvature).network
    model, loss, data = problem.build()
    gradient, square = second_moments(model, loss, data)
    moves, eps = square > 0, 1e-4
    root = torch.zeros_like(square)
    root[moves] = (square[moves].sqrt() + eps) ** -0.5
    truth = float(torch.linalg.eigvalsh(root[:, None] * matrix * root).abs().max())
    step = gradient / (gradient.abs() + eps)
    bend = float(step @ matrix @ step)
    first = float(gradient @ step) / bend if bend > 0 else math.inf
    options = {"optimizer": Training("adam", settings={"eps": eps}), "curvature": curvature, **MEASURED}
    advice = call(advise, model, loss, data, **options)
    assert advice.norm.value == pytest.approx(truth, rel=1e-5)
    assert advice.learning_rate == pytest.approx(min(1 / truth, first), rel=1e-5)
    assert advice.stable_learning_rate == pytest.approx(min(38 / truth, 2 * first), rel=1e-5)
    assert advice.frozen == int((~moves).sum())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_batches_of_one_size_count_as_mini_batches(reduction: str) -> None:
    loss = nn.CrossEntropyLoss(reduction=reduction)
    pairs = [(inputs(12)[k::3], labels(12)[k::3]) for k in range(3)]
    _, square = second_moments(network(), loss, pairs, times=reduction == "sum")
    matrix = dense_curvature(network(), nn.CrossEntropyLoss(), pairs, "gauss-newton").network
    root = (square.sqrt() + 1e-8) ** -0.5
    top = float(torch.linalg.eigvalsh(root[:, None] * matrix * root).max())
    truth = 12 * top if reduction == "sum" else top
    found = call(advise, network(), loss, pairs, optimizer="adam", **TIGHT)
    assert found.norm.value == pytest.approx(truth, rel=1e-5)


def test_adams_first_step_does_not_lower_a_quadratic_at_the_limit() -> None:
    torch.manual_seed(3)
    model, data = nn.Linear(5, 2, bias=False).double(), torch.randn(20, 5, dtype=torch.float64)
    target = torch.randn(20, 2, dtype=torch.float64)  # a linear model with a squared loss is a quadratic
    advice = advise(model, nn.MSELoss(), (data, target), optimizer="adam")
    assert "first step" in advice.stable_reason
    optimizer = torch.optim.Adam(model.parameters(), lr=advice.stable_learning_rate)
    nn.functional.mse_loss(model(data), target).backward()
    optimizer.step()
    assert nn.functional.mse_loss(model(data), target).item() == pytest.approx(advice.loss, rel=1e-6)


def test_weights_without_gradient_do_not_count_and_what_is_left_out_is_noted() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    advice = advise(model, nn.MSELoss(), (torch.eye(2), torch.zeros(2, 1)), optimizer="adam")
    assert (advice.frozen, advice.learns, advice.stable_learning_rate) == (2, False, math.inf)
    flat = advise(model, nn.MSELoss(), (torch.zeros(3, 2), torch.zeros(3, 1)))
    assert (flat.learns, flat.stable_learning_rate) == (False, math.inf)
    assert "sets no limit" in flat.stable_reason
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    nn.init.constant_(model[0].bias[:2], -100.0)  # two dead units: 8 weights before them, 6 after
    assert advise(model, LOSS, batch(), optimizer="adam").frozen == 8 + 6

    def whole(output: Tensor, target: Tensor) -> Tensor:
        if len(output) != 6:
            raise ValueError("only six at once")
        return LOSS(output, target)

    assert "could not be split" in " ".join(advise(network(), whole, batch(), optimizer="adam").notes)
    parts, decay = (network(), LOSS, batch()), {"weight_decay": 0.1}
    plain = advise(*parts, optimizer="adam", trial_steps=0)
    decayed = advise(*parts, optimizer=Training("adam", settings=decay), trial_steps=0)
    assert decayed.learning_rate == plain.learning_rate
    assert "is not included in the advice" in " ".join(decayed.notes)
    decoupled = advise(*parts, optimizer=Training("adamw", settings=decay), trial_steps=0)
    assert decoupled.learning_rate == pytest.approx(1 / (plain.norm.value + 0.1))


class Renamed(torch.optim.AdamW):
    """Counts as its parent, for it steps as that does."""


NESTEROV = {"momentum": 0.7, "nesterov": True}
ADAM = {"betas": (0.8, 0.99), "eps": 1e-4}


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        (torch.optim.SGD, {"dampening": 0.5}, "sgd"),  # ignored without a momentum
        (torch.optim.SGD, {"weight_decay": 0.2}, Training("sgd", settings={"weight_decay": 0.2})),
        (torch.optim.SGD, NESTEROV, Training("nesterov", settings={"momentum": 0.7})),
        (torch.optim.Adam, ADAM, Training("adam", settings=ADAM)),
        (Renamed, {}, "adamw"),
    ],
)
def test_a_torch_optimizer_is_read_and_nothing_is_changed(kind: Any, settings: Any, named: Any) -> None:
    model = network()
    optimizer = kind(model.parameters(), lr=0.1, **settings)
    state, before = copy.deepcopy(optimizer.state_dict()), snapshot(model, LOSS, batch())
    advice = call(advise, model, LOSS, batch(), optimizer=optimizer, **TIGHT)
    expected = call(advise, model, LOSS, batch(), lr=0.1, optimizer=named, **TIGHT)
    untimed = {"seconds": 0, "gradients": 0}
    assert {**advice.to_dict(), **untimed} == {**expected.to_dict(), **untimed}
    assert not differences(before, snapshot(model, LOSS, batch()))
    assert optimizer.state_dict() == state


@pytest.mark.parametrize("decays", [(0.3, 0.3), (40.0, 0.0), (0.0, 40.0)])
@pytest.mark.parametrize("rates", [(0.01, 0.01), (0.01, 0.04)])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_groups_with_rates_and_decays_of_their_own_have_the_dense_limit(
    kind: Any, rates: tuple[float, float], decays: tuple[float, float]
) -> None:
    """The truth: the largest eigenvalue of the dense matrix in coordinates where all groups move alike."""
    model, data = network(dtype=torch.float64), (inputs(12).double(), labels(12))
    settings = zip((model[0], model[2]), rates, decays, strict=True)
    optimizer = kind([{"params": p.parameters(), "lr": r, "weight_decay": d} for p, r, d in settings])
    advice = advise(model, LOSS, data, optimizer=optimizer, tolerance=1e-8)
    if kind is torch.optim.SGD:
        sizes = torch.tensor([model[0].weight.numel(), model[2].weight.numel()])
        relative = torch.repeat_interleave(torch.tensor(rates).double() / max(rates), sizes)
        decay = torch.diag(torch.repeat_interleave(torch.tensor(decays).double(), sizes))
        matrix = dense_curvature(model, LOSS, data, "gauss-newton").network + decay
        limit = 2 / float(torch.linalg.eigvalsh(relative.sqrt()[:, None] * matrix * relative.sqrt()).max())
    else:
        limit = dense_adamw_limit(model, LOSS, data, optimizer)
    assert advice.stable_learning_rate == pytest.approx(limit, rel=1e-6)
    assert advice.lr == max(rates)
    differ = len(set(rates)) > 1 or len(set(decays)) > 1
    assert differ == any("Parameter groups differ" in note for note in advice.notes)


def test_a_function_that_builds_an_optimizer_is_read_as_what_it_builds() -> None:
    def in_groups(parameters: list[nn.Parameter], lr: float = 0.02) -> torch.optim.Optimizer:
        decayed = {"params": [one for one in parameters if one.ndim > 1], "weight_decay": 0.3}
        return torch.optim.AdamW([decayed, {"params": [one for one in parameters if one.ndim < 2]}], lr)

    model = network()
    made = advise(model, LOSS, batch(), optimizer=in_groups(list(model.parameters())))
    found = advise(model, LOSS, batch(), optimizer=in_groups)
    assert (found.optimizer, found.lr) == (made.optimizer, 0.02)
    assert "weight_decay=0.3" in found.optimizer
    assert found.stable_learning_rate == made.stable_learning_rate
    assert advise(model, LOSS, batch(), optimizer=in_groups, lr=0.5).lr == 0.5
    # One that cannot do without a rate gets one, which nobody meant.
    assert advise(model, LOSS, batch(), optimizer=lambda some, lr: torch.optim.SGD(some, lr)).lr is None


def test_only_the_groups_of_measured_weights_count_with_the_rate_that_a_warmup_leads_to() -> None:
    model = network()
    biases, weights = ([one for one in model.parameters() if one.ndim == n] for n in (1, 2))
    groups = [{"params": biases}, {"params": weights, "decoupled_weight_decay": True, "weight_decay": 0.1}]
    advice = advise(model, LOSS, batch(), optimizer=torch.optim.Adam(groups))
    assert advice.optimizer == "AdamW(betas=(0.9, 0.999), eps=1e-08, weight_decay=0.1)"
    assert not any("groups" in note for note in advice.notes)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=1e3)
    torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1e-6)
    assert advise(model, LOSS, batch(), optimizer=optimizer, lr=7.0).lr == 7.0
    LOSS(model(batch()[0]), batch()[1]).backward()
    advice = call(advise, model, LOSS, batch(), optimizer=optimizer, **TIGHT)
    assert (advice.lr, advice.weights) == (1e3, ("2",))
    norm = call(measure, model, LOSS, batch(), **TIGHT)["2"].norm
    assert advice.norm.value == pytest.approx(norm, rel=1e-6)
    assert "1 of 2 weights" in advice.notes[0]
    stepped = torch.optim.Adam(model.parameters())
    stepped.step()
    assert "has stepped already" in advise(model, LOSS, batch(), optimizer=stepped).notes[0]


def test_above_the_advised_rate_two_trainings_decide_on_a_warmup() -> None:
    model, data = network(), (inputs(32), labels(32))
    rate = advise(model, LOSS, data, optimizer="adam").learning_rate
    below = advise(model, LOSS, data, optimizer="adam", lr=0.9 * rate).warmup
    assert (below.advised, below.steps, below.trials) == (False, 0, ())
    assert "not above the advised rate; a warmup was not tried" in below.reason
    for times in (2, 64):
        warmup = advise(model, LOSS, data, optimizer="adam", lr=times * rate).warmup
        without, warmed = warmup.trials
        assert without.lr == warmed.lr == pytest.approx(times * rate)
        assert warmup.advised == (warmed.survived and not warmed.score >= without.score)
        assert (warmup.steps > 0) == warmup.advised
        assert ("it helps" in warmup.reason) == warmup.advised


def test_a_warmup_that_saves_a_training_is_advised() -> None:
    """½ (w² − 1)² is sharp at the start, at w = 8, and flat near 1: long first steps end it."""

    quartic = Net(lambda net, ones: net.fc(ones).square(), fc=nn.Linear(1, 1, bias=False))
    nn.init.constant_(quartic.fc.weight, 8.0)
    data = torch.ones(4, 1), torch.ones(4, 1)
    warmup = advise(quartic, nn.MSELoss(), data, lr=0.03).warmup
    without, warmed = warmup.trials
    assert (without.survived, warmed.survived, warmup.advised) == (False, True, True)


def test_settings_beside_an_optimizer_and_norms_that_did_not_converge_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ProblemError, match="momentum was given, and the optimizer has its own"):
        Training(optimizer, settings={"momentum": 0.9})
    monkeypatch.setattr("hessinit.training.advise.MAX_ITERATIONS", 2)
    hasty: dict[str, Any] = {"optimizer": "adam", "tolerance": 1e-9}
    with pytest.warns(ConvergenceWarning, match="did not reach tolerance=1e-09"):
        assert not call(advise, model, LOSS, batch(), **hasty).converged
    with pytest.raises(ConvergenceError, match="did not reach tolerance=1e-09"):
        call(advise, model, LOSS, batch(), strict=True, **hasty)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
def test_the_learning_rate_follows_from_trials_that_leave_no_trace(optimizer: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    data = inputs(32), labels(32)
    before, state = snapshot(model, LOSS, data), torch.get_rng_state()
    advice = advise(model, LOSS, data, optimizer=optimizer)
    assert not differences(before, snapshot(model, LOSS, data))
    assert torch.equal(state, torch.get_rng_state())
    again = advise(model, LOSS, data, optimizer=optimizer)
    assert (again.learning_rate, again.trials) == (advice.learning_rate, advice.trials)
    rates = [trial.lr for trial in advice.trials]
    assert len(rates) >= 3
    assert all(high / low == pytest.approx(2) for low, high in itertools.pairwise(rates))
    survivors = [trial for trial in advice.trials if trial.survived]
    best = min(survivors, key=lambda trial: trial.score).lr
    # Between the trials a parabola decides, at most half a step of the grid away.
    assert 0.25 * 2**-0.5 <= advice.learning_rate / best <= 0.6 * 2**0.5
    assert min(rates) <= advice.learning_rate <= max(rates)
    assert not advice.warmup.advised


def test_trials_of_a_quadratic_are_those_of_the_closed_form() -> None:
    """2 XᵀX = I: the loss falls by (1 − lr)² a step, exactly to 0 at lr = 1, and grows above lr = 2."""
    model, data = nn.Linear(4, 1, bias=False).double(), torch.eye(8, dtype=torch.float64)[:, :4]
    targets = torch.zeros(8, 1, dtype=torch.float64)
    advice = advise(model, nn.MSELoss(reduction="sum"), (data / math.sqrt(2), targets))
    assert advice.norm.value == pytest.approx(1.0)
    for trial in advice.trials:
        falls = [after / before for before, after in itertools.pairwise(trial.losses) if after > 1e-20]
        assert falls == pytest.approx([(1 - trial.lr) ** 2] * len(falls))
    assert 0.1 < advice.learning_rate < 1


def test_where_every_trial_diverges_there_is_no_rate_and_the_first_line_says_so() -> None:
    model = network()

    def exploding(output: Tensor, target: Tensor) -> Tensor:
        moved = float((model[0].weight - start).abs().max()) > 0
        return LOSS(output, target) * (1e6 if moved else 1.0)

    start = model[0].weight.detach().clone()
    advice = advise(hessinit.Problem(model, exploding, batch(), check=False))
    assert not any(trial.survived for trial in advice.trials)
    assert math.isnan(advice.learning_rate)
    assert not advice.learns
    assert "the loss diverged every time" in advice.learning_rate_reason
    assert str(advice).startswith("No learning rate: the network did not learn in any trial.")


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
def test_the_first_step_over_the_weights_is_that_of_the_formula(optimizer: str) -> None:
    """One step moves SGD by lr·g with or without momentum, and every weight of AdamW by lr."""
    model, data = network(dtype=torch.float64), (inputs(12).double(), labels(12))
    LOSS(model(data[0]), data[1]).backward()
    weights = torch.cat([one.detach().flatten() for one in model.parameters()])
    step = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])
    if optimizer == "adamw":
        step = step.sign() + 0.01 * weights
    setup = TrainingSetup.of(hessinit.Problem(model, LOSS, data), Training(optimizer))
    with prepare_trials(setup, [one for _, one in read_batches(data)]) as setting:
        assert setting.first_move(0.01) == pytest.approx(float(step.norm() / weights.norm()), rel=1e-5)


def test_weights_that_learn_at_no_rate_are_named_with_the_way_out() -> None:
    torch.manual_seed(0)
    hidden = [part for _ in range(30) for part in (nn.Linear(16, 16), nn.ReLU())]
    model, data = nn.Sequential(*hidden, nn.Linear(16, 3)), (inputs(30, 16), torch.arange(30) % 3)
    advice = advise(model, LOSS, data)
    assert not advice.learns
    assert "other weights: `hessinit initialize --lr auto`" in advice.learning_rate_reason
    easy = inputs(30, 16), inputs(30, 16)[:, :3].argmax(1)
    assert advise(nn.Linear(16, 3), LOSS, easy).learns


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (nn.MultiMarginLoss(), "torch has no second derivative of multi_margin_loss"),
        (lambda z, target: (z[:, 0] - target).abs().mean(), "the loss is linear in the model's output"),
    ],
)
def test_without_a_curvature_trials_alone_tell_the_rate(loss: Any, why: str) -> None:
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)), (inputs(48), labels(48))
    advice = advise(model, loss, data)
    assert advice.learns
    assert math.isnan(advice.stable_learning_rate)
    assert why in advice.stable_reason
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), advice.learning_rate)
    for _ in range(50):
        value = loss(model(data[0]), data[1])
        losses.append(value.item())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    with pytest.raises(ProblemError, match=re.escape(why)):
        advise(model, loss, data, trial_steps=0)


def test_groups_keep_their_proportion_in_trials() -> None:
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.2}]
    optimizer = torch.optim.SGD(groups)
    stepper = Training(optimizer).build(model, 1.0)
    assert [group["lr"] for group in stepper.param_groups] == [0.5, 1.0]
