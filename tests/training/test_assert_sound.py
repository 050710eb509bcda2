"""A test that fails when initial weights are unsound: what it says, and what it lets pass."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from adamw_truth import dense_adamw_limit
from hessinit import ConvergenceWarning, ProblemError, advise, assert_sound, initialize_, measure

SQUARES = nn.MSELoss()
FIT = "it the weights: hessinit.initialize_(model, loss, batch, lr="


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
        assert_sound(*arguments, **options)
    first, _, rest = str(failure.value).partition("\n\n")[0].partition("\n")
    assert first == "not sound:"
    return rest.replace("\n", " ")


def test_a_sound_network_gets_its_report_and_stays_as_it_was() -> None:
    model, loss, batch = quadratic()
    before = model.fc.weight.detach().clone()
    report = assert_sound(model, loss, batch, lr=0.5, seed=3)
    assert report.network.norm == pytest.approx(1.0, rel=1e-9)
    expected = measure(model, loss, batch, seed=3).to_dict()
    assert {**report.to_dict(), "seconds": 0, "gradients": 0} == {**expected, "seconds": 0, "gradients": 0}
    assert torch.equal(model.fc.weight, before)
    assert model.fc.weight.grad is None


def test_a_vanishing_layer_is_named_with_its_norm_the_rule_the_way_out_and_the_table() -> None:
    with pytest.raises(AssertionError) as failure:
        assert_sound(*quadratic(1e-4))
    assert str(failure.value).startswith(
        """\
not sound:
fc: ‖H‖ = 0.0001 is below smallest=0.001. Fit the weights: hessinit.initialize_(model, loss, batch, lr=…).

 layer     weight      ‖H‖   verdict
───────────────────────────────────────
 fc        (1, 2)   0.0001   vanishing
"""
    )


def test_an_exploding_layer_is_named_and_with_a_rate_it_may_be_as_sharp_as_the_rate_allows() -> None:
    explodes = "fc and the network: ‖H‖ = 4000 is above largest=1000. F"
    assert said(*quadratic(4e3)) == f"{explodes}{FIT}…)."
    assert said(*quadratic(4e3), lr=4e-4, largest=1000.0) == f"{explodes}{FIT}0.0004)."
    assert assert_sound(*quadratic(4e3), largest=5000.0).network.norm == pytest.approx(4000)
    assert assert_sound(*quadratic(4e3), lr=4e-4).network.norm == pytest.approx(4000)


def test_a_rate_is_judged_by_the_stability_limit_of_the_optimizer() -> None:
    # H = I: plain descent is stable up to 2, momentum 0.9 up to 3.8 (closed forms).
    model, loss, batch = quadratic()
    assert said(model, loss, batch, lr=6.0) == (
        "lr=6 is above times_stable=2.5 times 2, the stable learning rate of SGD. Lower lr below 5, or "
        f"f{FIT}6)."
    )
    assert assert_sound(model, loss, batch, lr=4.9)
    assert assert_sound(model, loss, batch, lr=6.0, optimizer="momentum")
    assert assert_sound(model, loss, batch, lr=1.99, times_stable=1)
    assert "above times_stable=1 times 2," in said(model, loss, batch, lr=2.01, times_stable=1)
    heavy = torch.optim.SGD(model.parameters(), lr=10.0, momentum=0.9)
    for given in ({"optimizer": heavy}, {"optimizer": "momentum", "lr": 10.0}):
        failure = said(model, loss, batch, **given)
        assert "lr=10 is above times_stable=2.5 times 3.8, the stable learning rate of SGD(mom" in failure
        assert "lr=10" in failure.partition("initialize_")[2]
    assert assert_sound(model, loss, batch, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))


@pytest.mark.parametrize("as_word", [True, False])
def test_an_adaptive_rate_is_judged_by_advise_and_no_new_weights_are_offered(as_word: bool) -> None:
    model, loss, batch = quadratic()
    stable = advise(model, loss, batch, optimizer="adam").stable_learning_rate
    optimizer = "adam" if as_word else torch.optim.Adam(model.parameters(), lr=3 * stable)
    rate = {"lr": 3 * stable} if as_word else {}
    failure = said(model, loss, iter([batch]), optimizer=optimizer, **rate)
    assert re.search(r"the stable learning rate of Adam.*\. Lower lr below \S+\.$", failure)
    assert assert_sound(model, loss, batch, optimizer="adam", lr=0.9 * stable)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("rate", [0.001, 0.1])
def test_the_way_out_leads_out(activation: type[nn.Module], rate: float) -> None:
    sizes = [(16, 32), (32, 32), (32, 32), (32, 32), (32, 32)]
    hidden = [part for size in sizes for part in (nn.Linear(*size), activation())]
    model, loss = nn.Sequential(*hidden, nn.Linear(32, 10)), nn.CrossEntropyLoss()
    batch = (torch.rand(64, 16), torch.arange(64) % 10)
    with torch.no_grad():
        model[0].weight.mul_(100)
        model[-1].weight.mul_(1e-4)
    assert f"lr={rate:g})" in said(model, loss, batch, lr=rate)
    # The result says so where a rate is so small that its target is out of reach.
    initialize_(model, loss, batch, lr=rate, max_sharpening=1e9)
    assert assert_sound(model, loss, batch, lr=rate)


def test_weights_outputs_losses_and_curvature_that_are_not_finite_are_failures() -> None:
    def steep(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 1e300 * (1e5 * (output - target)).pow(2).mean()

    model, loss, batch = quadratic()
    failure = said(model, lambda out, target: (out - target).pow(2).mean() / 0, batch)
    assert failure.startswith("the loss is inf though the model's output is finite")
    for options in ({}, {"lr": 1e-300}, {"largest": 1e308}):
        nn.init.zeros_(model.fc.weight)
        failure = said(model, steep, batch, **options)
        assert re.search(r"fc and the network: ‖H‖ = ~(inf|nan) is ", failure), failure
        assert "tolerance" not in failure
    nn.init.constant_(model.fc.weight, 1e308)
    failure = said(model, SQUARES, (100 * batch[0], batch[1]))
    assert failure.startswith("the model's output holds NaN or inf (fc is the first layer whose")
    nn.init.constant_(model.fc.weight, torch.nan)
    failure = said(model, loss, batch, lr=0.1)
    assert failure.startswith("fc.weight holds NaN or inf (it is the first parameter that does)")
    assert failure.endswith("Draw new weights: hessinit.initialize_(model, loss, batch, lr=0.1).")


def test_a_norm_that_did_not_converge_does_not_pass() -> None:
    model = nn.Linear(12, 4, bias=False)
    problem = (model, nn.CrossEntropyLoss(), (torch.randn(32, 12), torch.arange(32) % 4))
    unfinished = {"max_iterations": 1, "estimator": "lanczos"}
    with pytest.warns(ConvergenceWarning):
        assert not measure(*problem, **unfinished).converged
    assert re.match(
        r"weight and the network: .* did not reach tolerance=0.001: stopped", said(*problem, **unfinished)
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": 0}, "lr=0 must be a finite number above 0"),
        ({"smallest": -1}, "smallest=-1 must be a finite number, 0 or more"),
        ({"smallest": 2.0, "largest": 1.0}, r"largest=1.0 must be a number above smallest=2.0"),
        ({"largest": "x"}, "largest='x' must be a number above smallest=0.001"),
        ({"largest": float("nan")}, "largest=nan must be a number above"),
        ({"times_stable": 0}, "times_stable=0 must be a finite number above 0, such as 1"),
        ({"optimizer": "adm"}, "optimizer='adm' is unknown; .* Did you mean 'adam'"),
        ({"lr": 0.1, "network": False}, "network=False and a learning rate do not go together"),
        ({"curvature": "hessain"}, "curvature='hessain' is unknown"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(options: dict[str, Any], words: str) -> None:
    class Untouchable(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("called")

    with pytest.raises(ProblemError, match=words):
        assert_sound(Untouchable(2, 1), SQUARES, (torch.eye(2), torch.zeros(2, 1)), **options)
    model, loss, (inputs, targets) = quadratic()
    with pytest.raises(ProblemError, match="the inputs hold 4 NaN or inf"):  # an error, not a failure
        assert_sound(model, loss, (inputs * torch.nan, targets))


def classifier(*layers: nn.Module) -> tuple[nn.Module, nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return nn.Sequential(*layers), nn.CrossEntropyLoss(), (torch.randn(32, 5), torch.arange(32) % 3)


def test_a_saturated_loss_and_layers_on_which_it_does_not_depend_are_failures() -> None:
    model, loss, batch = classifier(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
    with torch.no_grad():
        model[2].weight.mul_(1e6)
    assert said(model, loss, batch).startswith("the loss is saturated: it bends at smaller outputs of the")
    nn.init.constant_(model[0].bias, -100)
    assert said(model, loss, batch).startswith(
        "Layer 0 and Layer 2: ‖H‖ = 0: the forward does not use it, its"
    )
    model, loss, batch = classifier(nn.Linear(5, 16), nn.Linear(16, 3))
    nn.init.zeros_(model[1].weight)
    failure = said(model, loss, batch)
    assert failure.startswith("Layer 0: ‖H‖ = 0: ")
    assert "a zero weight follows, as in LoRA (if that is intended, pass smallest=0" in failure
    assert assert_sound(model, loss, batch, smallest=0)
    report = assert_sound(model, loss, batch, layers="1", curvature="hessian", network=False)
    assert (report.names, report.curvature) == (("1",), "hessian")


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
        assert said(model, loss, batch).startswith(f"the buffer 1.{name} holds NaN or inf. Reset it")
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
    options = {"times_stable": 1, "smallest": 0}
    assert assert_sound(model, loss, batch, optimizer=optimizer(0.99 * limit), **options)
    failure = said(model, loss, batch, optimizer=optimizer(1.01 * limit), **options)
    assert "the stable learning rate of AdamW" in failure
