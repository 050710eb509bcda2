"""Any optimizer: its limit against closed forms, its trials against loops by hand, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hessinit
from dense import dense_curvature
from hessinit import ProblemError, Training, advise, assert_sound, initialize_, track
from hessinit.cli.options import OPTIMIZERS, REFUSED
from hessinit.curvature.preconditioner import OptimizerCopy, measure_response, warm_up
from hessinit.training.optimizers import NAMES
from tiny import LOSS, batch, inputs, labels, network
from zoo.snapshot import differences, snapshot

if not hasattr(torch.optim, "Muon"):
    pytest.skip("this version of torch has no Muon", allow_module_level=True)


def muon(parameters: list[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
    matrices = [weight for weight in parameters if weight.ndim == 2]
    others = [weight for weight in parameters if weight.ndim != 2]
    return [torch.optim.Muon(matrices, lr=lr), torch.optim.AdamW(others, lr=lr)]


def data() -> tuple[Tensor, Tensor]:
    return inputs(64), labels(64)


def in_disguise(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The same optimizer with a step of its own, so that no closed form is read off it."""

    class Disguised(kind):  # type: ignore[misc, valid-type]
        def step(self, closure: Any = None) -> Any:
            return super().step()

    return Disguised


@pytest.mark.parametrize(
    ("settings", "factor"),
    [({}, 2.0), ({"momentum": 0.9}, 3.8), ({"momentum": 0.9, "nesterov": True}, 3.8 / 2.8)],
)
def test_the_limit_of_the_response_is_that_of_the_closed_form(settings: Any, factor: float) -> None:
    model = network(dtype=torch.float64)
    batch = inputs(12).double(), labels(12)
    norm = float(torch.linalg.eigvalsh(dense_curvature(model, LOSS, batch, "gauss-newton").network).max())
    optimizer = in_disguise(torch.optim.SGD)(model.parameters(), lr=1e-3, **settings)
    advice = advise(model, LOSS, batch, optimizer=optimizer, trial_steps=0, tolerance=1e-5)
    assert advice.stable_learning_rate == pytest.approx(factor / norm, rel=0.01)
    assert "the response of Disguised" in advice.stable_reason


@pytest.mark.parametrize("beta1", [0.9, 0.5])
def test_adams_response_is_that_of_heavy_ball_over_the_root_of_its_second_moment(beta1: float) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = list(torch.randn(7, 30, generator=generator, dtype=torch.float64))
    weight = nn.Parameter(torch.randn(30, generator=generator, dtype=torch.float64))
    optimizer = torch.optim.Adam([weight], lr=1e-3, betas=(beta1, 0.999))
    copied = OptimizerCopy([optimizer], [weight])
    warm_up(copied, gradients, 56)
    response = measure_response(copied, gradients, seed=0) / 1e-3
    root = torch.stack(gradients).square().mean(0).sqrt()
    closed_form = (1 - beta1) / (1 + beta1) / root
    factor = torch.randn(60, 30, generator=generator, dtype=torch.float64)
    tops = []
    for scale in (response, closed_form):
        seen = scale.sqrt()[:, None] * (factor.T @ factor) * scale.sqrt()
        tops.append(float(torch.linalg.eigvalsh(seen).max()))
    assert tops[0] == pytest.approx(tops[1], rel=0.03)
    assert response.tolist() == pytest.approx(closed_form.tolist(), rel=0.1)
    assert not optimizer.state


@pytest.mark.parametrize(
    ("optimizer", "cause"),
    [
        (muon, "its steps do not follow small changes of the gradient"),
        ("rprop", "not linear, weight by weight, in a change of the gradient|do not follow"),
        ("adafactor", "depends on the rate or on the steps before"),
        ("radam", "depends on the rate or on the steps before"),
    ],
)
def test_where_no_rate_of_a_quadratic_is_the_limit_trials_decide(optimizer: Any, cause: str) -> None:
    model = network()
    before = snapshot(model, LOSS, data())
    advice = advise(model, LOSS, data(), optimizer=optimizer)
    assert math.isnan(advice.stable_learning_rate)
    assert advice.trials
    assert any(part in advice.stable_reason for part in cause.split("|"))
    assert not differences(before, snapshot(model, LOSS, data()))


NEED_OTHERS = {"lbfgs", "sparseadam", "muon"}


def test_the_command_line_takes_every_name() -> None:
    assert {*OPTIMIZERS, *REFUSED} <= set(NAMES)
    assert set(REFUSED) == NEED_OTHERS


@pytest.mark.parametrize("name", sorted(set(NAMES) - NEED_OTHERS))
def test_every_name_of_torch_builds_and_steps(name: str) -> None:
    model = network()
    before = [weight.detach().clone() for weight in model.parameters()]
    stepper = Training(name.upper()).build(model, 0.01)
    for _ in range(2):
        LOSS(model(batch()[0]), batch()[1]).backward()
        stepper.step()
    moved = [not torch.equal(weight, old) for weight, old in zip(model.parameters(), before, strict=True)]
    assert all(moved)
    assert {group["lr"] for group in stepper.param_groups} == {0.01}


def by_hand(
    model: nn.Module, step: Callable[[list[tuple[Tensor, Tensor]]], None], batches: Any
) -> list[float]:
    """The losses of each step of a loop that a user would write."""
    losses = []
    for parts in batches:
        with torch.no_grad():
            losses.append(sum(LOSS(model(x), y).item() for x, y in parts) / len(parts))
        step(parts)
    return losses


def test_clipping_and_accumulation_in_trials_are_those_of_a_loop_by_hand() -> None:
    pairs = [(inputs(16)[k::2], labels(16)[k::2]) for k in range(2)]
    training = Training("momentum", clip_norm=0.05, accumulate=2)
    advice = advise(network(), LOSS, pairs, optimizer=training)
    trial = advice.trials[0]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), trial.lr, momentum=0.9)

    def step(parts: list[tuple[Tensor, Tensor]]) -> None:
        optimizer.zero_grad()
        for x, y in parts:
            (LOSS(model(x), y) / len(parts)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()

    expected = by_hand(model, step, [pairs] * len(trial.losses))
    # The first is that of the first batch, before any step.
    assert trial.losses[1:] == pytest.approx(expected[1:], rel=1e-5)
    assert "clip_norm=0.05" in advice.stable_reason


def test_of_schedule_free_the_losses_are_those_at_the_averaged_weights() -> None:
    schedulefree = pytest.importorskip("schedulefree")
    pairs = [(inputs(16)[k::2], labels(16)[k::2]) for k in range(2)]
    advice = advise(network(), LOSS, pairs, optimizer=schedulefree.AdamWScheduleFree)
    trial = advice.trials[0]
    model = network()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=trial.lr)
    losses = []
    for number in range(len(trial.losses)):
        x, y = pairs[number % 2]
        optimizer.eval()
        losses.append(LOSS(model(x), y).item())
        optimizer.train()
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        optimizer.step()
    assert trial.losses == pytest.approx(losses, rel=1e-5)


def test_groups_of_several_optimizers_keep_their_proportion_and_the_users_are_not_touched() -> None:
    model = network()
    built = muon(list(model.parameters()), 0.02)
    built[1].param_groups[0]["lr"] = 0.005
    adagrad = torch.optim.Adagrad(model.parameters(), lr=0.1)
    state = adagrad.state[model[0].weight]["sum"].clone()
    assert [group["lr"] for group in Training(built).build(model, 1.0).param_groups] == [1.0, 0.25]
    advice = advise(model, LOSS, data(), optimizer=built)
    assert (advice.optimizer, advice.lr, advice.learns) == ("Muon with AdamW", 0.02, True)
    assert advise(model, LOSS, data(), optimizer=adagrad).learns
    assert torch.equal(adagrad.state[model[0].weight]["sum"], state)
    assert not built[0].state
    tracker = track(model, LOSS, data(), optimizer=built, path=None)
    (point,) = tracker.close().points
    assert "No stability limit of Muon with AdamW" in point.note


def test_one_that_finds_its_rate_is_told_to_keep_it() -> None:
    prodigy = pytest.importorskip("prodigyopt").Prodigy
    advice = advise(network(), LOSS, data(), optimizer=prodigy)
    assert (advice.learning_rate, advice.trials) == (1.0, ())
    assert "finds the rate itself" in advice.learning_rate_reason


@pytest.mark.parametrize(
    ("package", "name"),
    [("lion_pytorch", "Lion"), ("bitsandbytes.optim", "AdamW8bit"), ("pytorch_optimizer", "SOAP")],
)
def test_packages_optimizers_are_advised_on(package: str, name: str) -> None:
    kind = getattr(pytest.importorskip(package), name)
    advice = advise(network(), LOSS, data(), optimizer=kind)
    assert advice.learns
    assert advice.optimizer == name


def normalized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))


def test_weights_are_fitted_to_what_the_optimizer_sees_or_not_at_all() -> None:
    weights = {}
    for optimizer in ("adam", "nadam", "rmsprop", muon):
        model = normalized()
        fit = hessinit.Fit(scheme="keep")  # trials might choose another draw
        result = initialize_(model, LOSS, data(), lr=0.1, optimizer=optimizer, fit=fit)
        weights[optimizer] = model[0].weight.detach().clone()
        if optimizer is muon:
            assert (result.scaling, result.optimizer) == ("none", "Muon with AdamW")
            assert "none is known that suits a rate of Muon with AdamW" in result.reason
        else:
            assert "as Adam sees it" in result.reason
    assert torch.equal(weights["adam"], weights["nadam"])
    assert torch.equal(weights["adam"], weights["rmsprop"])
    assert not torch.allclose(weights["adam"], weights[muon])


def test_an_automatic_rate_of_an_optimizer_that_nothing_is_fitted_for_is_found_by_trials() -> None:
    result = initialize_(network(), LOSS, data(), lr="auto", optimizer=muon)
    assert result.lr is not None
    assert 1e-4 < result.lr < 1
    assert result.survival is not None


class Untuned(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None: ...  # type: ignore[override]


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise KeyError("no such buffer")


class Closing(torch.optim.SGD):
    def step(self, closure: Any) -> Any: ...  # type: ignore[override]


VERBS = {"advise": advise, "assert_sound": assert_sound, "initialize_": initialize_}
STRANGER = nn.Parameter(torch.zeros(2, 2))


def emptied(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.param_groups[0]["params"].clear()
    return optimizer


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: "lbfgs", "is LBFGS, which evaluates the loss several times .* pass another"),
        (lambda model: "SparseAdam", "SparseAdam, which takes sparse gradients only; pass 'adam'"),
        (lambda model: Closing(model.parameters(), 0.1), "Closing, which evaluates the loss several times"),
        (lambda model: "muon", "Muon only supports 2D parameters.*with the rest for another: lambda"),
        (lambda model: torch.optim.SGD([STRANGER], 0.1), "SGD over other parameters than this model"),
        (emptied, "SGD over other parameters than this model's"),
        (lambda model: lambda p: torch.optim.SGD([STRANGER], 0.1), "not train the model: 1 of its 1 param"),
        (lambda model: lambda p: torch.optim.SGD([], 0.1), "empty parameter list. Build it over the param"),
        (lambda model: Untuned, "Untuned, whose groups hold no 'lr', so no rate can be set; add it"),
        (lambda model: lambda p, lr, wd: None, "it must be a name, such as 'adam', a torch"),
        (lambda model: type("Needy", (Untuned,), {"__init__": lambda s, p, k: None}), "cannot be built: .*"),
        (lambda model: "adamm", "optimizer='adamm' is unknown; .* Did you mean 'adam'?"),
        (lambda model: [], "optimizer is of type list; it must be a name"),
        (lambda model: torch.optim.SGD(model.parameters(), 0.1, maximize=True), "with maximize=True, which"),
    ],
)  # fmt: skip
def test_what_cannot_train_is_refused_by_every_verb(verb: str, make: Any, message: str) -> None:
    model = network()
    before = snapshot(model, LOSS, data())
    with pytest.raises(ProblemError, match=message):
        VERBS[verb](model, LOSS, data(), optimizer=make(model), lr=0.1)
    assert not differences(before, snapshot(model, LOSS, data()))


@pytest.mark.parametrize("verb", VERBS)
def test_an_optimizer_that_raises_in_step_is_named_and_the_model_put_back(verb: str) -> None:
    model = network()
    before = snapshot(model, LOSS, data())
    with pytest.raises(ProblemError, match="Failing.step.. raised KeyError: 'no such buffer'. It must step"):
        VERBS[verb](model, LOSS, data(), optimizer=Failing, lr=0.1)
    assert not differences(before, snapshot(model, LOSS, data()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": 0}, "clip_norm=0 must be a finite number above 0"),
        ({"accumulate": 0}, "accumulate=0 must be"),
        ({"settings": 3}, "settings=3 must be a dict of arguments"),
        ({"optimizer": muon, "settings": {"eps": 1}}, "eps was given, and the optimizer has its own"),
        ({"optimizer": "adam", "settings": {"epsilon": 1}}, "cannot be built with settings=.*epsilon"),
    ],
)
def test_bad_trainings_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        Training(**options).build(network(), 0.1)


def test_a_run_of_compare_trains_new_models_so_an_optimizer_of_one_is_refused() -> None:
    optimizer = torch.optim.SGD(network().parameters(), 0.1)
    with pytest.raises(ProblemError, match="optimizer is SGD over the weights of one model, and every run"):
        hessinit.compare(network, LOSS, data(), learning_rates=[0.1], optimizer=optimizer)


@pytest.mark.parametrize("optimizer", ["lbfgs", "sparseadam"])
def test_tracking_and_comparing_refuse_the_same(optimizer: str) -> None:
    with pytest.raises(ProblemError, match="LBFGS, which evaluates|SparseAdam, which takes sparse"):
        track(network(), LOSS, data(), optimizer=optimizer, lr=0.1, path=None)
    with pytest.raises(ProblemError, match="LBFGS, which evaluates|SparseAdam, which takes sparse"):
        hessinit.compare(network, LOSS, data(), learning_rates=[0.1], optimizer=optimizer, batch_size=8)


def test_without_a_limit_the_trial_judges_the_rate() -> None:
    assert assert_sound(network(), LOSS, data(), optimizer=muon, lr=1e-3)
    with pytest.raises(AssertionError, match="trial steps on this batch at lr = 1e\\+06 the loss rose"):
        assert_sound(network(), LOSS, data(), optimizer=muon, lr=1e6)
