"""A test that fails when initial weights are unsound: what it says, and what it lets pass."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from adamw_truth import dense_adamw_limit
from calls import call
from hessinit import (
    ConvergenceWarning,
    CurvatureReport,
    Problem,
    ProblemError,
    advise,
    apply_scheme_,
    assert_sound,
    initialize_,
    measure,
)
from tiny import Net

SQUARES = nn.MSELoss()


def quadratic(size: float = 1.0) -> tuple[nn.Module, nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """One weight of two numbers with H = size·I, in closed form: 2/2·XᵀX for X = √size·I."""
    model = nn.Sequential()
    model.add_module("fc", nn.Linear(2, 1, bias=False, dtype=torch.float64))
    nn.init.ones_(model.fc.weight)
    inputs = size**0.5 * torch.eye(2, dtype=torch.float64)
    return model, SQUARES, (inputs, torch.zeros(2, 1, dtype=torch.float64))


def said(*arguments: object, **options: object) -> str:
    """What is said before the table, unfolded."""
    with pytest.raises(AssertionError) as failure:
        call(assert_sound, *arguments, **options)
    first, _, rest = str(failure.value).partition("\n\n")[0].partition("\n")
    assert first == "not sound:"
    return rest.replace("\n", " ")


def test_a_sound_network_gets_its_report_and_stays_as_it_was() -> None:
    model, loss, batch = quadratic()
    before = model.fc.weight.detach().clone()
    report = assert_sound(Problem(model, loss, batch, seed=3), lr=0.5)
    assert report.network.norm == pytest.approx(1.0, rel=1e-9)
    expected = measure(Problem(model, loss, batch, seed=3)).to_dict()
    assert {**report.to_dict(), "seconds": 0, "gradients": 0} == {**expected, "seconds": 0, "gradients": 0}
    assert torch.equal(model.fc.weight, before)
    assert model.fc.weight.grad is None


def test_a_rate_is_judged_by_the_stability_limit_of_the_optimizer() -> None:
    # H = I: plain descent is stable up to 2, momentum 0.9 up to 3.8 (closed forms).
    model, loss, batch = quadratic()
    high = "lr = 17 is 8.5 times the stability limit of SGD, which is 2. Lower lr below 2."
    assert said(model, loss, batch, lr=17.0) == high
    assert said(*quadratic(4.0), lr=5.0).endswith(
        "Lower lr below 0.5, or fit the weights to it: hessinit.initialize_(model, loss, batch, lr=5)."
    )
    # Every step multiplies w by 1 − lr, and the loss is w²: 1.5⁶² after 31 steps.
    rose = "In 32 trial steps on this batch at lr = 2.5 the loss rose from 1 to 8.3e+10. Lower lr below 2."
    assert said(model, loss, batch, lr=2.5) == rose
    assert assert_sound(model, loss, batch, lr=1.99)
    assert assert_sound(model, loss, batch, lr=1.0, optimizer="momentum")
    assert assert_sound(model, loss, batch, lr=1.99, times_stable=1)
    assert "times the stability limit" in said(model, loss, batch, lr=2.01, times_stable=1)
    heavy = torch.optim.SGD(model.parameters(), lr=38.0, momentum=0.9)
    built = functools.partial(torch.optim.SGD, lr=38.0, momentum=0.9)
    for given in ({"optimizer": heavy}, {"optimizer": "momentum", "lr": 38.0}, {"optimizer": built}):
        failure = said(model, loss, batch, **given)
        assert "lr = 38 is 10 times the stability limit of SGD(momentum=0.9), which is 3.8." in failure
    assert assert_sound(model, loss, batch, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))


@pytest.mark.parametrize("as_word", [True, False])
def test_an_adaptive_rate_is_judged_by_advise_and_no_new_weights_are_offered(as_word: bool) -> None:
    model, loss, batch = quadratic()
    stable = advise(model, loss, batch, optimizer="adam").stable_learning_rate
    optimizer = "adam" if as_word else torch.optim.Adam(model.parameters(), lr=9 * stable)
    rate = {"lr": 9 * stable} if as_word else {}
    failure = said(model, loss, iter([batch]), optimizer=optimizer, **rate)
    assert re.search(r"9 times the stability limit of Adam.*\. Lower lr below \S+\.$", failure)
    assert assert_sound(model, loss, batch, optimizer="adam", lr=0.9 * stable)


def test_trial_steps_leave_no_trace() -> None:
    model, loss, batch = classifier(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before, source = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert assert_sound(model, loss, batch, optimizer=optimizer)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert all(one.grad is None for one in model.parameters())
    assert torch.equal(torch.get_rng_state(), source)
    assert not optimizer.state


def test_a_gradient_that_is_too_small_for_the_rate_is_found_and_adam_does_not_mind() -> None:
    # loss = size·|w − (1, −1)|²/2 at w = (1, 1): a step along the gradient lowers it by 4·lr·size². The best
    # constant output is 0, with a loss of `size`.
    model, loss, (inputs, _) = quadratic(5e-5)
    batch = inputs, 5e-5**0.5 * torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    assert said(model, loss, batch, lr=0.1).startswith(
        "At lr = 0.1 the gradient is too small: 1,000 steps along it would lower the loss by 2 % of what can "
        "be gained. Raise lr."
    )
    for given in ({"lr": 0.2}, {"lr": 0.1, "optimizer": "momentum"}, {"lr": 0.1, "optimizer": "adam"}, {}):
        assert call(assert_sound, model, loss, batch, **given)


@pytest.mark.parametrize(("start", "sound"), [(8.5, True), (9.5, False)])
def test_a_loss_far_above_that_of_the_best_constant_output_is_found(start: float, sound: bool) -> None:
    """With targets of 0 and 2 the best constant output is 1: its losses are 1, free outputs gain 1."""
    model, loss, (inputs, _) = quadratic()
    model.fc.weight.data.copy_(torch.tensor([[(2 * start) ** 0.5, 2.0]]))
    batch = (inputs, torch.tensor([[0.0], [2.0]], dtype=torch.float64))
    if sound:
        assert assert_sound(model, loss, batch).loss == pytest.approx(start)
    else:
        assert said(model, loss, batch) == (
            "The initial loss of 9.5 is above that of the best constant output by 8.5 times the standard "
            "deviation of that output's losses. Make the last weights smaller: with an output of 0 the loss "
            "is 2."
        )
        model.fc.weight.data *= 0.5
        assert assert_sound(model, loss, batch)


def deep(activation: type[nn.Module], depth: int = 12) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [part for _ in range(depth) for part in (nn.Linear(32, 32), activation())]
    return nn.Sequential(*hidden, nn.Linear(32, 10))


def blobs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    targets = torch.arange(64) % 10
    return torch.randn(10, 32)[targets] + 0.3 * torch.randn(64, 32), targets


def scale(factor: float) -> Callable[[nn.Sequential], object]:
    def change(model: nn.Sequential) -> None:
        apply_scheme_(model, "he", generator=torch.Generator().manual_seed(0))
        for one in model.parameters():
            one.data *= factor

    return change


BROKEN: dict[str, tuple[type[nn.Module], Callable[[nn.Sequential], object], str]] = {
    "dead": (nn.ReLU, lambda net: nn.init.constant_(net[4].bias, -100), "all units of Layer 4 are dead"),
    "zero": (nn.ReLU, lambda net: [nn.init.zeros_(one) for one in net.parameters()], "none after two steps"),
    "default": (nn.ReLU, lambda net: None, "all examples look the same"),
    "shrinking": (nn.Tanh, scale(0.3), "Activations shrink with depth: those of Layer 0"),
    "growing": (nn.ReLU, scale(1.65), "Activations grow with depth: those of Layer 22"),
    "identical": (nn.Tanh, lambda net: [nn.init.constant_(p, 0.1) for p in net.parameters()], "identical"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_every_way_out_leads_out(case: str) -> None:
    """The start fails by its own finding, and passes when the advice is followed."""
    activation, break_, words = BROKEN[case]
    lr = 0.001 if case == "identical" else 0.01  # at 0.01 the trial steps learn all the same
    model, loss, batch = deep(activation), nn.CrossEntropyLoss(), blobs()
    break_(model)
    failure = said(model, loss, batch, lr=lr)
    assert words in failure
    assert 'hessinit.apply_scheme_(model, "lsuv", sample=inputs)' in failure
    apply_scheme_(model, "lsuv", sample=batch[0], generator=torch.Generator().manual_seed(0))
    assert assert_sound(model, loss, batch, lr=lr).findings == ()
    # ... and so does a start from initialize_: its user is not sent back to it.
    initialize_(model, loss, batch, lr=lr)
    assert assert_sound(model, loss, batch, lr=lr)


def test_large_inputs_are_named_as_the_cause() -> None:
    model, loss, (inputs, targets) = deep(nn.ReLU, 2), nn.CrossEntropyLoss(), blobs()
    apply_scheme_(model, "he", generator=torch.Generator().manual_seed(0))
    failure = said(model, loss, (100 * inputs, targets))
    assert "Normalize the inputs, whose root mean square is " in failure
    assert assert_sound(model, loss, (inputs, targets))


def test_measure_and_its_text_end_with_the_same_judgement() -> None:
    model, loss, batch = deep(nn.ReLU), nn.CrossEntropyLoss(), blobs()
    report = measure(model, loss, batch)
    (finding,) = report.findings
    assert finding.kind == "signal lost"
    assert set(finding.layers) < set(report.names)
    assert said(model, loss, batch) == str(finding)
    assert report.verdict.startswith(f"Not sound: {finding}")
    assert "signal lost" in str(report)
    assert CurvatureReport.from_json(report.to_json()).findings == report.findings
    apply_scheme_(model, "lsuv", sample=batch[0])
    assert measure(model, loss, batch).verdict.startswith("Sound: every layer gets a gradient")


def test_weights_outputs_losses_and_curvature_that_are_not_finite_are_failures() -> None:
    def steep(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 1e300 * (1e5 * (output - target)).pow(2).mean()

    model, loss, batch = quadratic()
    failure = said(model, lambda out, target: (out - target).pow(2).mean() / 0, batch)
    assert failure.startswith("the loss is inf though the model's output is finite")
    for options in ({}, {"lr": 1e-300}):
        nn.init.zeros_(model.fc.weight)
        failure = said(model, steep, batch, **options)
        assert failure.startswith("‖H‖ of fc is not finite. Make the loss, the inputs or the weights smaller")
        assert "tolerance" not in failure
    nn.init.constant_(model.fc.weight, 1e308)
    failure = said(model, SQUARES, (100 * batch[0], batch[1]))
    assert failure.startswith("the model's output holds NaN or inf (fc is the first layer whose")
    nn.init.constant_(model.fc.weight, torch.nan)
    failure = said(model, loss, batch, lr=0.1)
    assert failure.startswith("fc.weight holds NaN or inf (it is the first parameter that does)")
    assert failure.endswith('Draw the weights anew: hessinit.apply_scheme_(model, "lsuv", sample=inputs).')


def test_a_norm_that_did_not_converge_does_not_pass() -> None:
    model = nn.Linear(12, 4, bias=False)
    problem = (model, nn.CrossEntropyLoss(), (torch.randn(32, 12), torch.arange(32) % 4))
    unfinished = {"max_iterations": 1, "estimator": "lanczos"}
    with pytest.warns(ConvergenceWarning):
        assert not call(measure, *problem, **unfinished).converged
    words = "weight and the network did not reach tolerance=0.001: stopped"
    assert said(*problem, **unfinished).startswith(words)


def test_inputs_that_are_not_finite_are_an_error_and_no_failure() -> None:
    model, loss, (inputs, targets) = quadratic()
    with pytest.raises(ProblemError, match="the inputs hold 4 NaN or inf"):
        assert_sound(model, loss, (inputs * torch.nan, targets))


def test_identical_units_are_a_note_where_trial_steps_learn() -> None:
    """One unit suffices for the targets: the loss falls below that of a constant output."""
    model, _, (inputs, _) = classifier(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    loss, batch = nn.MSELoss(), (inputs, inputs.sum(1, keepdim=True).tanh())
    for one in model.parameters():
        nn.init.constant_(one, 0.01)
    words = "The units of Layer 0 have the same weights and gradients: they stay identical."
    assert said(model, loss, batch).startswith(words)
    assert said(model, loss, batch, optimizer="adam", lr=1e-4).startswith(words)  # the steps learn nothing
    report = assert_sound(model, loss, batch, optimizer="adam", lr=0.1)
    assert report.findings == ()
    (note,) = [one for one in report.notes if words in one]
    assert note.endswith("Trial steps on this batch learn all the same.")


def test_the_identical_columns_of_an_embedding_are_found() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    for one in model.parameters():
        nn.init.constant_(one, 0.25)
    batch = (torch.arange(32) % 8, torch.arange(32) % 3)
    assert "have the same weights and gradients" in said(model, nn.CrossEntropyLoss(), batch)
    apply_scheme_(model, "lsuv", sample=batch[0])
    assert assert_sound(model, nn.CrossEntropyLoss(), batch)


def classifier(*layers: nn.Module) -> tuple[nn.Module, nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return nn.Sequential(*layers), nn.CrossEntropyLoss(), (torch.randn(32, 5), torch.arange(32) % 3)


def test_a_saturated_loss_and_layers_on_which_it_does_not_depend_are_failures() -> None:
    model, loss, batch = classifier(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
    with torch.no_grad():
        model[2].weight.mul_(1e6)
    assert said(model, loss, batch).startswith("the loss is saturated: it bends at smaller outputs of the")

    _, loss, batch = classifier()
    unused = Net(lambda net, x: net.last(x), first=nn.Linear(5, 16), last=nn.Linear(5, 3))
    words = "first gets no gradient: the forward does not use it, or detaches the result. Use it, freeze it"
    assert said(unused, loss, batch).startswith(words)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_weights_that_are_zero_on_purpose_are_sound(optimizer: str) -> None:
    """The last layer gets a gradient, B of LoRA and the end of a branch a step later, the others then."""

    def run(net: Any, inputs: torch.Tensor) -> torch.Tensor:
        state = torch.relu(net.first(inputs))
        state = state + net.b(net.a(state))
        return net.last(state + net.end(torch.relu(net.inner(state))))

    _, loss, batch = classifier()
    torch.manual_seed(0)
    sizes = {"first": (5, 16), "a": (16, 4), "b": (4, 16), "inner": (16, 16), "end": (16, 16)}
    sizes["last"] = (16, 3)
    model = Net(run, **{name: nn.Linear(*size) for name, size in sizes.items()})
    for one in (model.b, model.end, model.last):
        nn.init.zeros_(one.weight)
    assert assert_sound(model, loss, batch, optimizer=optimizer, lr=0.01)


@pytest.mark.parametrize(
    ("name", "value", "sound"),
    [("running_mean", torch.nan, False), ("running_var", torch.inf, False), ("mask", -torch.inf, True)],
)
def test_buffers_must_be_finite_but_for_masks(name: str, value: float, sound: bool) -> None:
    model, loss, batch = classifier(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
    model[1].register_buffer("mask", torch.zeros(16))  # in train mode the statistics are not used, either
    getattr(model[1], name)[3] = value
    before = model[1].running_var.clone()
    if sound:
        assert assert_sound(model, loss, batch)
    else:
        assert said(model, loss, batch).startswith(f"The buffer 1.{name} holds NaN or inf. Reset it")
    assert torch.equal(model[1].running_var, before)


def test_groups_of_adamw_are_judged_by_the_dense_limit() -> None:
    """The network passes below the dense limit of both groups together, and fails above it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    loss, batch = nn.CrossEntropyLoss(), (torch.randn(16, 5).double(), torch.arange(16) % 3)

    def optimizer(rate: float) -> torch.optim.Optimizer:
        groups = [{"params": model[k].parameters(), "lr": r} for k, r in ((0, rate), (2, rate / 4))]
        return torch.optim.AdamW(groups, weight_decay=40.0)

    limit = dense_adamw_limit(model, loss, batch, optimizer(1.0))
    options = {"times_stable": 1}
    assert call(assert_sound, model, loss, batch, optimizer=optimizer(0.99 * limit), **options)
    failure = said(model, loss, batch, optimizer=optimizer(1.01 * limit), **options)
    assert "times the stability limit of AdamW" in failure
